//! Why an agent does not start.

use std::net::SocketAddr;

use deepinfer_engine::CheckpointError;
use thiserror::Error;

use crate::engine::opening::EngineOpenError;
use crate::sizing::SizingError;

/// Why an agent does not start. Messages name the flag and the fix.
#[derive(Debug, Error)]
pub enum AgentError {
    /// A port cannot be had.
    #[error("{flag} {address}: {source}; choose another address")]
    Port {
        /// The flag.
        flag: &'static str,
        /// Its value.
        address: SocketAddr,
        /// What the system said.
        source: std::io::Error,
    },
    /// The checkpoint was refused.
    #[error("--checkpoint: {0}")]
    Checkpoint(#[from] CheckpointError),
    /// Sizes do not fit.
    #[error(transparent)]
    Sizing(#[from] SizingError),
    /// The machine or the model cannot do it.
    #[error(transparent)]
    Engine(#[from] EngineOpenError),
    /// Experts cannot be spread as asked.
    #[error("--ranks, --extra-slots-per-rank: {0}")]
    Spread(String),
    /// The engines did not open, or do not come back.
    #[error("{0}")]
    Failed(String),
    /// It was stopped before it served.
    #[error("stopped before it served")]
    Stopped,
}
