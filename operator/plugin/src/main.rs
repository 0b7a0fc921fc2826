//! `kubectl deepinfer`: what a person asks about clusters, in prose and tables.
//! Invariants: it reads only, but for `release`; what is printed is a pure function of what was read, so that golden
//! texts test it; exit code 0 is good, 1 a problem, 2 wrong usage.

mod args;
mod bundle;
mod client;
mod crds;
mod events;
mod experts;
mod output;
mod release;
mod status;
mod topology;
mod trace;
mod validate;
mod view;
mod why;

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;

use crate::args::{Args, Command, CrdsCommand, ExpertsCommand};
use crate::client::Session;
use crate::output::Outcome;

fn main() -> ExitCode {
    let args = Args::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let outcome = runtime.context("no runtime for the connection").and_then(|r| r.block_on(run(args)));
    match outcome {
        Ok(Outcome::Good) => ExitCode::SUCCESS,
        Ok(Outcome::Problem) => ExitCode::FAILURE,
        // A reader that went away (`| head`) is not an error worth a message.
        Err(error) if output::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

async fn run(args: Args) -> Result<Outcome> {
    let Args { connection, command } = args;
    // What needs no API server works without a kubeconfig.
    let command = match command {
        Command::Validate(args) => return validate::run(&args),
        Command::Crds { command: CrdsCommand::Print(args) } => return crds::print(&args),
        other => other,
    };
    let session = Session::open(&connection).await?;
    match command {
        Command::Status(args) => status::run(&session, &args).await,
        Command::Why(args) => why::run(&session, &args).await,
        Command::Topology(args) => topology::run(&session, &args).await,
        Command::Experts { command: ExpertsCommand::Show(args) } => experts::run(&session, &args).await,
        Command::Trace(args) => trace::run(&session, &args).await,
        Command::SupportBundle(args) => bundle::run(&session, &args).await,
        Command::Release(args) => release::run(&session, &args).await,
        Command::Crds { command: CrdsCommand::Check } => crds::check(&session).await,
        Command::Validate(_) | Command::Crds { command: CrdsCommand::Print(_) } => {
            unreachable!("answered above without a session")
        }
    }
}
