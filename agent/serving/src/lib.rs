//! Decisions and state machines of the data plane: no clock, no I/O, no threads.
//!
//! Today: the words in which a scheduler tells an engine what to run next, and hears what came of it ([`batch`]).

pub mod batch;
