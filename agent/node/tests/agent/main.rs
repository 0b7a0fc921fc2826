//! Whole agents with real sockets and the small trained model: requests, faults, drains, the control port.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod control;
mod edge;
mod faults;
mod fleet;
mod flow;
mod oracle;
mod start;
