//! The gateway as a process of a pod: from flags to an exit code.

use std::process::ExitCode;

use deepinfer_transport::pod::signals::EndSignals;
use deepinfer_transport::pod::{self, PodError, process};
use thiserror::Error;
use tokio_util::sync::CancellationToken;

use crate::args::{GatewayArgs, ModelFilesError};
use crate::server::{GatewayError, start};

/// Why the process ends with an error.
#[derive(Debug, Error)]
enum EndError {
    #[error(transparent)]
    Pod(#[from] PodError),
    #[error("--checkpoint: {0}")]
    Model(#[from] ModelFilesError),
    #[error(transparent)]
    Gateway(#[from] GatewayError),
    #[error("signals cannot be caught: {0}")]
    Signals(std::io::Error),
    #[error("the model's files were not read: {0}")]
    Thread(tokio::task::JoinError),
    #[error("ended at once by a second signal")]
    AtOnce,
}

impl process::EndError for EndError {
    fn is_usage(&self) -> bool {
        matches!(self, Self::Pod(error) if error.is_usage())
    }
}

/// Runs until the end of the process.
pub fn run(args: GatewayArgs) -> ExitCode {
    process::run(&args.pod.clone(), "gateway", serve(args))
}

async fn serve(args: GatewayArgs) -> Result<(), EndError> {
    let mut signals = EndSignals::new().map_err(EndError::Signals)?;
    let stop = CancellationToken::new();
    let _stopped = stop.clone().drop_guard();
    let around = pod::surroundings(&args.pod, &stop)?;
    let grace = args.pod.termination_grace();
    let key = around.key.clone();
    let options = tokio::task::spawn_blocking(move || args.options(key)).await.map_err(EndError::Thread)?;
    let mut options = options?;
    options.fleet_probe = Some(around.probe);
    let handle = start(options, around.fleet).await?;
    tracing::info!(api = %handle.addr(), version = env!("CARGO_PKG_VERSION"), "listening");
    signals.next().await;
    tokio::select! {
        _ = handle.shutdown(grace) => Ok(()),
        () = signals.next() => Err(EndError::AtOnce),
    }
}
