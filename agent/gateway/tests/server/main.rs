//! The gateway over real sockets: clients of every temper in front, agents that cost nothing behind.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

#[path = "../common/mod.rs"]
mod common;

mod access;
mod fleet;
mod http;
mod leaving;
mod limits;
mod logs;
mod overload;
mod setup;
mod shutdown;
mod streams;
