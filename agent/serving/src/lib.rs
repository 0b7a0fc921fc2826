//! Decisions and state machines of the data plane: no clock, no I/O, no threads.
//!
//! A request is owned by the [`gateway`] that accepted it, assigned by a [`leader`] and run by a [`node`]; its KV
//! goes from one node to the next by a [`handoff`]. What a step runs and how long that takes is decided in
//! [`batch`], who holds which block in [`kv`], and which experts the tokens chose is counted in [`load`].

pub mod batch;
pub mod gateway;
pub mod handoff;
pub mod kv;
pub mod leader;
pub mod load;
pub mod node;
