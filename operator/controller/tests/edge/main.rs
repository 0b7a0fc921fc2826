//! The operator's edge over real sockets: FleetView, agents, probes, metrics.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod agents;
mod fleet;
mod observed;
mod support;
