//! The gateway as a process of a pod: from flags to an exit code.

use std::process::ExitCode;

use deepinfer_transport::pod::signals::EndSignals;
use deepinfer_transport::pod::{self, PodError, logs};
use thiserror::Error;
use tokio_util::sync::CancellationToken;

use crate::args::{GatewayArgs, ModelFilesError};
use crate::server::{GatewayError, start};

/// Exit code for wrong flags, as clap has it.
const USAGE: u8 = 2;

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

/// Runs until the end of the process.
pub fn run(args: GatewayArgs) -> ExitCode {
    if let Err(error) = logs::begin(&args.pod) {
        eprintln!("error: {error}");
        return USAGE.into();
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(%error, "the gateway does not start: no threads");
            return ExitCode::FAILURE;
        }
    };
    let ended = runtime.block_on(serve(args));
    runtime.shutdown_background();
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = error.to_string(), "the gateway has failed");
            match error {
                EndError::Pod(error) if error.is_usage() => USAGE.into(),
                _ => ExitCode::FAILURE,
            }
        }
    }
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
