//! Engines on their own threads, stepping together.
//!
//! ```text
//!  driver ---- RankGroup ---- bounded channel ----> thread of rank r: Engine, catch_unwind
//!         <-------------- Output{generation} ------
//! ```
//!
//! * `thread.rs`: one engine's life on one thread. * `group.rs`: the ranks of an agent, their lockstep, and their
//!   replacement as a whole after a panic or a hang. * `watchdog.rs`: how long a step may take.
//!   * `opening.rs`: how an engine is opened. * `faults.rs`: faults on request, for tests.
//!
//! Invariant: what an abandoned or ended thread still says is never heard: every output carries the generation of
//! the group that it belongs to.

pub mod faults;
pub mod group;
pub mod opening;
pub mod thread;
pub mod watchdog;
