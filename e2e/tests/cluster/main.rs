//! The whole system on a real control plane: the operator, real agents and gateways as processes on nodes of their own.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod apply_serve_delete;
mod bed;
mod client;
mod failures;
mod rollout;
