//! `controlplane`: a cluster on this machine for a person who wants to try the operator.

use std::process::ExitCode;

use anyhow::{Context as _, bail};
use clap::Parser as _;
use deepinfer_controlplane::args::{BuildArgs, Cli, Command, KubectlArgs};
use deepinfer_controlplane::binaries::{self, Need};
use deepinfer_controlplane::up;

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Build(args) => build(&args).map(|()| ExitCode::SUCCESS),
        Command::Up(args) => up::run(&args).map(|()| ExitCode::SUCCESS),
        Command::Kubectl(args) => kubectl(&args),
    };
    result.unwrap_or_else(|error| {
        eprintln!("controlplane: {error:#}");
        ExitCode::FAILURE
    })
}

fn build(args: &BuildArgs) -> anyhow::Result<()> {
    let unknown = args.only.iter().find(|name| !Need::ALL.iter().any(|need| need.name() == *name));
    if let Some(name) = unknown {
        bail!("--only {name}: there are kubernetes, kwok and helm");
    }
    for need in Need::ALL {
        if args.only.is_empty() || args.only.iter().any(|name| name == need.name()) {
            println!("{}", binaries::ensure(need)?.display());
        }
    }
    Ok(())
}

fn kubectl(args: &KubectlArgs) -> anyhow::Result<ExitCode> {
    let kubeconfig = up::current_kubeconfig()?;
    let binary = binaries::kubectl_folder()?.join("kubectl");
    let mut command = std::process::Command::new(&binary);
    command.args(&args.args).env("KUBECONFIG", kubeconfig);
    let status = command.status().with_context(|| format!("starting {}", binary.display()))?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from))
}
