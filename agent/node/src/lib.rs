//! The agent: runs one prefill worker, or the ranks of one node of a decode supernode.
//!
//! [`start`] binds the ports, loads the checkpoint and gives an [`AgentHandle`]. Inside, one task (`driver/`) feeds
//! the machines of `deepinfer-serving` with what comes from peers (`deepinfer-transport`), engines (`engine/`, each
//! on its own thread), the FleetView and the clock, and carries out what they want done. `control/` answers HTTP.
//! [`pod`] runs it as a process of its own. Flags are in [`args`], sizes that follow from them in [`sizing`].

pub mod args;
mod clock;
mod control;
mod driver;
mod engine;
mod error;
mod handle;
pub mod host;
mod metrics;
mod plan;
pub mod pod;
pub mod sizing;
mod start;

pub use self::args::AgentArgs;
pub use self::driver::{LoadDetail, UndrainTooLate};
pub use self::error::AgentError;
pub use self::handle::AgentHandle;
pub use self::start::{AgentOptions, PodOptions, Progress, begin, start};
