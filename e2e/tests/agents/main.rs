//! Agents and gateways as processes: the binaries of a pod with their flags and mounted files, and a small operator of
//! the test that serves the fleet view. Kills, stops, an operator that is away, keys that roll, drains.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod away;
mod cluster;
mod drain;
mod http;
mod keys;
mod load;
mod loss;
mod operator;
mod pods;
mod refusals;
mod serve;
