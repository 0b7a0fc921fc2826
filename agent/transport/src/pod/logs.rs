//! The log of a process: stderr, where `kubectl logs` finds it.

use tracing_subscriber::EnvFilter;

use super::args::{LogFormat, PodArgs};

/// Begins to log as the flags say.
///
/// # Errors
/// What is wrong with `--log-level`.
pub fn begin(args: &PodArgs) -> Result<(), String> {
    let filter = EnvFilter::try_new(&args.log_level)
        .map_err(|error| format!("--log-level {:?}: {error}; try info, debug or warn", args.log_level))?;
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let begun = match args.log_format {
        LogFormat::Json => log.json().flatten_event(true).with_current_span(false).try_init(),
        LogFormat::Text => log.with_ansi(false).try_init(),
    };
    begun.map_err(|error| format!("the log cannot begin: {error}"))
}
