//! The program `ip`, given several commands at once.

use std::io::Write as _;
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail};

/// Runs commands of `ip` in one process; the first that fails ends it.
pub(super) fn batch(commands: &str) -> anyhow::Result<()> {
    run(&[], commands)
}

/// The same inside a network namespace.
pub(super) fn batch_in(namespace: &str, commands: &str) -> anyhow::Result<()> {
    run(&["-n", namespace], commands)
}

fn run(before: &[&str], commands: &str) -> anyhow::Result<()> {
    let mut child = Command::new("ip")
        .args(before)
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context("the program `ip` (package iproute2) is missing")?;
    child.stdin.take().expect("it was asked for").write_all(commands.as_bytes())?;
    let output = child.wait_with_output()?;
    if !output.status.success() {
        bail!("ip: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(())
}

/// The metric of the route that claims a range. Above every other, so that the bridge's own route wins.
const CLAIM_METRIC: &str = "4278198272";

/// Claims `10.N.0.0/16` that no route of this machine touches. The claim is an `unreachable` route: adding it twice
/// fails, so two runs never get the same range, and nothing sent there after the bridge is gone leaves the machine.
pub(super) fn claim_range() -> anyhow::Result<u8> {
    let routes = Command::new("ip").args(["-4", "route", "show", "table", "all"]).output();
    let routes = routes.context("the program `ip` (package iproute2) is missing")?;
    let routes = String::from_utf8_lossy(&routes.stdout).into_owned();
    let mut seed = [0];
    getrandom::fill(&mut seed)?;
    let mut last = None;
    for offset in 0..=255 {
        let range = 64 + seed[0].wrapping_add(offset) % 160;
        if routes.contains(&format!("10.{range}.")) {
            continue;
        }
        match batch(&format!("route add unreachable 10.{range}.0.0/16 metric {CLAIM_METRIC}\n")) {
            Ok(()) => return Ok(range),
            Err(error) if error.to_string().contains("File exists") => last = Some(error),
            Err(error) => return Err(error),
        }
    }
    Err(last.unwrap_or_else(|| anyhow::anyhow!("every range of 10.0.0.0/8 is in use")))
}

/// Gives a range back.
pub(super) fn release_range(range: u8) {
    batch(&format!("route del unreachable 10.{range}.0.0/16 metric {CLAIM_METRIC}\n")).ok();
}
