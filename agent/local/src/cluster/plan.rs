//! `deepinfer plan`: what `up` would make of a file, or what `apply` would change.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::process::ExitCode;

use anyhow::{Context, Result};
use deepinfer_crds::DeepInferCluster;
use deepinfer_crds::yaml::to_yaml;
use deepinfer_planner::{Report, World};

use super::args::{PlanArgs, PlanOutput};
use super::file::ClusterFile;
use super::pod_args::Extras;
use super::rehearsal::{Rehearsal, rehearse};
use super::target::{LocalModel, local_target};
use crate::client;
use crate::report;
use crate::up::control::{Answer, Question};

/// Plans a file. Exit code 1 if the spec cannot be followed.
pub fn run(args: PlanArgs) -> Result<ExitCode> {
    let (file, manifest) = ClusterFile::open(&args.file)?;
    let cluster = manifest.cluster;
    if args.ranks.is_none()
        && args.output.is_none()
        && !args.explain
        && let Some(text) = beside_running(&args, &file, &cluster)?
    {
        report::print(&text)?;
        return Ok(ExitCode::SUCCESS);
    }
    let model = LocalModel::look(&cluster, &file.base);
    let mut world = World::new("local", 0);
    world.model = model.state.clone();
    world.user_applies(cluster);
    let target = local_target(&model, SocketAddr::from(([127, 0, 0, 1], 8000)), args.ranks);
    let play = rehearse(&world, &target, &Extras::default(), model.sizes.as_ref());
    let good = play.report.refused.is_empty() && play.problems.is_empty();
    report::print(&match args.output {
        Some(PlanOutput::Yaml) => documents(&play)?,
        None => text(&play, args.explain),
    })?;
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What a running cluster of the same name says; `None` without one.
fn beside_running(args: &PlanArgs, file: &ClusterFile, cluster: &DeepInferCluster) -> Result<Option<String>> {
    let Some(root) = args.state.root() else { return Ok(None) };
    let name = cluster.metadata.name.as_deref().unwrap_or_default();
    let question = Question::Apply {
        yaml: String::from_utf8_lossy(&file.bytes).into_owned(),
        file: file.name.clone(),
        base: file.base.clone(),
        dry_run: true,
    };
    match client::ask_if_running(&root, name, &question)? {
        Some(Answer::Applied { text, .. }) => Ok(Some(format!("beside the running cluster {name}:\n{text}"))),
        Some(Answer::Refused(message)) => Err(anyhow::anyhow!(message)),
        _ => Ok(None),
    }
}

fn text(play: &Rehearsal, explain: bool) -> String {
    let mut text = play.text.clone();
    if text.is_empty() {
        text.push_str("nothing to do\n");
    }
    text += &notes(&play.report);
    for problem in &play.problems {
        let _ = writeln!(text, "problem   {problem}");
    }
    if explain {
        text.push('\n');
        for line in &play.report.explained {
            let _ = writeln!(text, "{line}");
        }
    }
    text
}

/// What a report says beside what waits: nothing runs yet, so everything waits.
pub fn notes(report: &Report) -> String {
    Report { waiting: Vec::new(), ..report.clone() }.to_string()
}

/// All objects as YAML documents, those that the API server owns fields of without them.
fn documents(play: &Rehearsal) -> Result<String> {
    let mut text = String::new();
    for object in play.world.objects.values() {
        let mut value = object.to_value();
        let (api, kind) = object.type_meta();
        value["apiVersion"] = api.into();
        value["kind"] = kind.into();
        if let Some(map) = value.as_object_mut() {
            map.remove("status");
        }
        if let Some(meta) = value["metadata"].as_object_mut() {
            for field in ["uid", "resourceVersion", "creationTimestamp", "generation", "namespace"] {
                meta.remove(field);
            }
        }
        let _ = write!(text, "---\n{}", to_yaml(&value).context("an object as YAML")?);
    }
    Ok(text)
}
