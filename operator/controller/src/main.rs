//! `deepinfer-operator`: flags, logs, and then the library.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use deepinfer_operator::args::{Cli, Command, CrdsAction, RunArgs};
use deepinfer_operator::{manifests, run, telemetry};

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Run(args) => serve(*args),
        Command::Manifests(args) if args.rbac_only => print(&manifests::rbac_only(&args.options())),
        Command::Manifests(args) => print(&manifests::install(&args.options())),
        Command::Crds { action: CrdsAction::Print } => print(&manifests::crds()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("deepinfer-operator: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn serve(args: RunArgs) -> anyhow::Result<()> {
    telemetry::start(&args.log_level, args.log_format)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let outcome = runtime.block_on(run::run(args));
    // A call that hangs must not hold the process after the Lease is gone.
    runtime.shutdown_background();
    if let Err(error) = &outcome {
        tracing::error!(err = format!("{error:#}"), "the operator ends");
    }
    outcome
}

fn print(text: &str) -> anyhow::Result<()> {
    Ok(std::io::stdout().lock().write_all(text.as_bytes())?)
}
