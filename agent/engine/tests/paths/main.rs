//! Every path through the engine to the same place gives the same bits: chunks, company, threads, instruction sets,
//! rollbacks, reused slots, imported windows, replays.
//!
//! The comparisons are bitwise, on the cpu backend, on both golden checkpoints in both numerics.

#[path = "../support/mod.rs"]
mod support;

mod batches;
mod chunks;
mod counts;
mod limits;
mod rollback;
mod truncation;
mod windows;
