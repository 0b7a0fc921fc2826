//! Why an agent does not start.

use std::net::SocketAddr;

use deepinfer_engine::CheckpointError;
use deepinfer_protocol::agent_status::reason_code;
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
    /// The checkpoint is not the one that was asked for.
    #[error(
        "--checkpoint: {path} has the digest {found}, --model-digest is {expected}: another model, or damaged"
    )]
    Digest {
        /// The folder.
        path: String,
        /// What it has, hex.
        found: String,
        /// What was asked for, hex.
        expected: String,
    },
    /// What is not built.
    #[error("{0}")]
    NotSupported(&'static str),
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

impl AgentError {
    /// One word for programs, if a restart does not heal it: a pod then stays and tries again. Empty otherwise.
    pub fn code(&self) -> &'static str {
        match self {
            // Missing or incomplete, perhaps because it is still being copied.
            Self::Checkpoint(_) => reason_code::SOURCE_UNREACHABLE,
            Self::Digest { .. } => reason_code::CHECKSUM_MISMATCH,
            Self::NotSupported(_) => reason_code::NOT_SUPPORTED,
            _ => "",
        }
    }
}
