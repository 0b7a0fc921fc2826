//! What the agent and the gateway have in common as processes of a pod: flags, logs, signals, and how they reach keys
//! and fleet. No Kubernetes token and no API: everything comes by flags and mounted files.

pub mod args;
pub mod logs;
pub mod process;
pub mod signals;

use std::sync::Arc;
use std::time::Duration;

use deepinfer_protocol::fleet::FleetView;
use thiserror::Error;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub use self::args::PodArgs;
use crate::fleet_client::{self, FleetClientError, FleetClientOptions, FleetProbe};
use crate::key::ClusterKey;
use crate::key_dir::{self, KeyDirError};

/// How often the folder of keys is looked at.
const KEYS_EVERY: Duration = Duration::from_secs(2);

/// Keys and fleet of a process.
#[derive(Clone, Debug)]
pub struct Surroundings {
    /// The cluster's keys; follow the folder.
    pub key: ClusterKey,
    /// Who exists.
    pub fleet: watch::Receiver<Arc<FleetView>>,
    /// How the following goes.
    pub probe: FleetProbe,
}

/// Why a process of a pod does not start.
#[derive(Debug, Error)]
pub enum PodError {
    /// A flag that a pod needs is missing.
    #[error("{0} is missing: a pod needs --key-dir, --fleet-url and --fleet-path")]
    MissingFlag(&'static str),
    /// No keys.
    #[error(transparent)]
    Keys(#[from] KeyDirError),
    /// Nobody to follow.
    #[error(transparent)]
    Fleet(#[from] FleetClientError),
}

impl PodError {
    /// Whether other flags would help; nothing else will.
    pub fn is_usage(&self) -> bool {
        !matches!(self, Self::Keys(_))
    }
}

/// Reads the keys and begins to follow keys and fleet, until `stop`.
///
/// # Errors
/// [`PodError`].
pub fn surroundings(args: &PodArgs, stop: &CancellationToken) -> Result<Surroundings, PodError> {
    let missing = |flag| PodError::MissingFlag(flag);
    let key_dir = args.key_dir.clone().ok_or(missing("--key-dir"))?;
    let path = args.fleet_path.clone().ok_or(missing("--fleet-path"))?;
    let key = key_dir::open(&key_dir)?;
    tracing::info!(generations = ?key.numbers(), "the cluster's keys are read");
    let options = FleetClientOptions {
        urls: args.fleet_url.clone(),
        path,
        key: key.clone(),
        ledger: args.ledger.clone(),
    };
    let (fleet, probe) = fleet_client::start(options, stop.clone())?;
    tokio::spawn(key_dir::follow(key_dir, key.clone(), KEYS_EVERY, stop.clone()));
    Ok(Surroundings { key, fleet, probe })
}
