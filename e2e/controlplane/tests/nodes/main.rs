//! Process nodes under the real control plane: what a pod may expect, and what a test may break.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod bed;
mod faults;
mod network;
mod pods;
mod probes;
