//! A cluster's file on this machine: reading it, what it means here, and the commands that start nothing.
//!
//! Invariant: a file passes the same checks in every command, and all its errors are shown at once.

pub mod args;
pub mod file;
pub mod plan;
pub mod pod_args;
pub mod rehearsal;
pub mod script;
pub mod target;
pub mod validate;
