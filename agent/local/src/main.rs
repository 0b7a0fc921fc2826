//! `deepinfer`: the command line of one machine.

mod args;
mod bench;
mod client;
mod cluster;
mod generate;
mod inspect;
mod load;
mod machine;
mod make_random;
mod report;
mod runner;
mod up;
mod verify;

use std::process::ExitCode;

use clap::Parser;

use crate::args::{Cli, Command};

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Generate(args) => generate::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::MakeRandom(args) => make_random::run(args),
        Command::Up(args) => up::run(args),
        Command::Status(args) => client::status::run(args),
        Command::Plan(args) => cluster::plan::run(args),
        Command::Validate(args) => cluster::validate::run(args),
        Command::Apply(args) => client::apply::run(args),
        Command::Experts(args) => client::experts::run(args),
        Command::Load(args) => load::run(args),
        Command::Script(args) => cluster::script::run(args),
    };
    match outcome {
        Ok(code) => code,
        // A reader that went away (`| head`) is not an error worth a message.
        Err(error) if report::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", report::chain(&error));
            ExitCode::FAILURE
        }
    }
}
