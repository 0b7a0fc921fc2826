//! The agent as a process of a pod: from flags to an exit code.
//!
//! ```text
//!  key folder, fleet view, drain file --> agent --> SIGTERM: drain, exit 0
//!                                               --> engines that do not come back: exit 1
//! ```

mod drain_file;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use deepinfer_transport::pod::signals::EndSignals;
use deepinfer_transport::pod::{self, PodError, process};
use thiserror::Error;
use tokio_util::sync::CancellationToken;

use crate::args::AgentArgs;
use crate::error::AgentError;
use crate::handle::AgentHandle;
use crate::start::{AgentOptions, PodOptions, Progress, begin};

/// A model that cannot be loaded is tried again after this.
const RETRY_LOAD: Duration = Duration::from_secs(10);
/// Why the process ends with an error.
#[derive(Debug, Error)]
enum EndError {
    #[error(transparent)]
    Pod(#[from] PodError),
    #[error(transparent)]
    Agent(#[from] AgentError),
    #[error("signals cannot be caught: {0}")]
    Signals(std::io::Error),
    #[error("{0}")]
    Engines(String),
    #[error("ended at once by a second signal")]
    AtOnce,
}

impl process::EndError for EndError {
    fn is_usage(&self) -> bool {
        matches!(self, Self::Pod(error) if error.is_usage())
    }
}

/// Runs until the end of the process.
pub fn run(args: AgentArgs) -> ExitCode {
    process::run(&args.pod.clone(), "agent", serve(args))
}

async fn serve(args: AgentArgs) -> Result<(), EndError> {
    let mut signals = EndSignals::new().map_err(EndError::Signals)?;
    let stop = CancellationToken::new();
    let _stopped = stop.clone().drop_guard();
    let around = pod::surroundings(&args.pod, &stop)?;
    let (grace, drain_file) = (args.pod.termination_grace(), args.drain_file.clone());
    let options = AgentOptions { args, pod: Some(PodOptions { retry: RETRY_LOAD, probe: around.probe }) };
    let handle = Arc::new(begin(options, around.fleet, around.key, say).await?);
    tracing::info!(
        data = %handle.data_addr(),
        control = %handle.control_addr(),
        metrics = handle.metrics_addr().map(tracing::field::display),
        version = env!("CARGO_PKG_VERSION"),
        "listening"
    );
    if let Some(path) = drain_file {
        tokio::spawn(drain_file::follow(path, handle.clone(), stop.clone()));
    }
    tokio::spawn(say_ready(handle.clone()));
    let mut failed = handle.failed();
    tokio::select! {
        () = signals.next() => {}
        reason = failed.wait_for(Option::is_some) => {
            let reason = reason.map_or_else(|_| None, |reason| reason.clone()).unwrap_or_default();
            handle.stop().await;
            return Err(EndError::Engines(reason));
        }
    }
    tracing::info!(seconds = grace.as_secs(), "asked to end: no new work, what runs may finish");
    tokio::select! {
        () = handle.drain_and_stop(grace) => Ok(()),
        () = signals.next() => Err(EndError::AtOnce),
    }
}

async fn say_ready(handle: Arc<AgentHandle>) {
    if handle.ready().await.is_ok() {
        let status = handle.status();
        tracing::info!(engine = status.engine, model = status.model_digest, "the engines are ready");
    }
}

fn say(progress: Progress) {
    match progress {
        // Weights are mapped: this is fast or many lines, so only the end is said.
        Progress::Loading { done, total } if done >= total => {
            tracing::info!(bytes = total, "weights are read")
        }
        Progress::Loading { .. } => {}
        Progress::Warming { sizes } => tracing::info!(sizes, "a first step runs"),
    }
}
