//! `deepinfer-gateway`: the OpenAI API in front of a cluster's agents, as a process.

use std::process::ExitCode;

use clap::Parser;
use deepinfer_gateway::{args::GatewayArgs, pod};

fn main() -> ExitCode {
    pod::run(GatewayArgs::parse())
}
