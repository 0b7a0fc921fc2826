//! `deepinfer apply`: gives a running cluster another file.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use deepinfer_crds::condition::{self, kind};

use super::{ask, root};
use crate::cluster::args::ApplyArgs;
use crate::cluster::file::ClusterFile;
use crate::report;
use crate::up::control::{Answer, ClusterView, Question};

/// Between two looks while waiting.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Applies a file, and waits if asked to.
pub fn run(args: ApplyArgs) -> Result<ExitCode> {
    let (file, manifest) = ClusterFile::open(&args.file)?;
    let name = manifest.cluster.metadata.name.clone().unwrap_or_default();
    let root = root(&args.state)?;
    let yaml = String::from_utf8_lossy(&file.bytes).into_owned();
    let question = Question::Apply { yaml, file: file.name.clone(), base: file.base.clone(), dry_run: false };
    let generation = match ask(&root, &name, &question)? {
        Answer::Applied { text, generation } => {
            report::print(&text)?;
            generation
        }
        Answer::Refused(reason) => bail!("{}", reason.trim_end()),
        _ => bail!("the running cluster is of another release"),
    };
    if !args.wait {
        return Ok(ExitCode::SUCCESS);
    }
    let until = Instant::now() + Duration::from_secs(args.timeout);
    loop {
        let view = match ask(&root, &name, &Question::Status)? {
            Answer::Status(view) => view,
            Answer::Refused(reason) => bail!("{}", reason.trim_end()),
            _ => bail!("the running cluster is of another release"),
        };
        match outcome(&view, generation) {
            Outcome::Ready => {
                report::print(&format!("{name} serves as the file says\n"))?;
                return Ok(ExitCode::SUCCESS);
            }
            Outcome::Stalled(why) => bail!("{why}"),
            Outcome::Waits(why) if Instant::now() > until => {
                bail!("--timeout: not ready after {} s: {why}", args.timeout);
            }
            Outcome::Waits(_) => std::thread::sleep(LOOK_EVERY),
        }
    }
}

enum Outcome {
    Ready,
    Stalled(String),
    Waits(String),
}

/// Where a generation stands.
fn outcome(view: &ClusterView, generation: i64) -> Outcome {
    let status = view.cluster.status.clone().unwrap_or_default();
    if status.observed_generation.is_none_or(|observed| observed < generation) {
        return Outcome::Waits("the planner has not looked yet".to_owned());
    }
    let get = |kind: &str| condition::get(&status.conditions, kind);
    if let Some(stalled) = get(kind::STALLED).filter(|condition| condition.status == "True") {
        return Outcome::Stalled(format!("{}: {}", stalled.reason, stalled.message));
    }
    match get(kind::READY) {
        // What leaves still drains.
        Some(ready) if ready.status == "True" && view.supernodes.iter().all(|sn| sn.spec.drain.is_none()) => {
            Outcome::Ready
        }
        Some(ready) => Outcome::Waits(format!("{}: {}", ready.reason, ready.message)),
        None => Outcome::Waits("no status yet".to_owned()),
    }
}
