//! `deepinfer-agent`: one prefill worker, or the ranks of one node of a decode supernode, as a process.

use std::process::ExitCode;

use clap::Parser;
use deepinfer_agent::{AgentArgs, pod};

fn main() -> ExitCode {
    pod::run(AgentArgs::parse())
}
