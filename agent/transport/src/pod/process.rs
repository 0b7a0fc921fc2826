//! A process of a pod from its flags to its exit code.

use std::error::Error;
use std::process::ExitCode;

use super::args::PodArgs;
use super::logs;

/// Exit code for wrong flags, as clap has it.
const USAGE: u8 = 2;

/// Why a process of a pod ends with an error.
pub trait EndError: Error {
    /// Whether other flags would help; nothing else will.
    fn is_usage(&self) -> bool;
}

/// Begins the log, serves until that ends, and gives the exit code: 0, 1 if it has failed, 2 for wrong flags. Threads
/// that hang do not hold up the end. `who` is said in the log.
pub fn run<E: EndError>(
    args: &PodArgs,
    who: &'static str,
    serve: impl Future<Output = Result<(), E>>,
) -> ExitCode {
    if let Err(error) = logs::begin(args) {
        eprintln!("error: {error}");
        return USAGE.into();
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(%error, who, "it does not start: no threads");
            return ExitCode::FAILURE;
        }
    };
    let ended = runtime.block_on(serve);
    runtime.shutdown_background();
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = error.to_string(), who, "it has failed");
            if error.is_usage() { USAGE.into() } else { ExitCode::FAILURE }
        }
    }
}
