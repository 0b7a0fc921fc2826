//! `deepinfer status`: what `kubectl get deepinferclusters` and its children would show.

use std::fmt::Write as _;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use deepinfer_crds::condition::{self, kind};
use deepinfer_crds::table::{age, columns};
use deepinfer_crds::yaml::to_yaml;
use deepinfer_crds::{Condition, DeepInferCluster, ObjectMeta};

use super::{ask_if_running, choose, root, show};
use crate::cluster::args::{StatusArgs, StatusOutput};
use crate::report;
use crate::up::control::{Answer, ClusterView, Question};
use crate::up::state::{self, STATUS, folder};

/// Shows the status; exit code 1 if the cluster does not run.
pub fn run(args: StatusArgs) -> Result<ExitCode> {
    let root = root(&args.state)?;
    let name = choose(&root, args.name.as_deref())?;
    let mut runs = true;
    show(args.watch, || match ask_if_running(&root, &name, &Question::Status)? {
        Some(Answer::Status(view)) => text(&view, args.output),
        Some(Answer::Refused(reason)) => bail!("{reason}"),
        Some(_) => bail!("the running cluster is of another release"),
        None => {
            runs = false;
            last(&folder(&root, &name).join(STATUS), &name)
        }
    })?;
    Ok(if runs { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The last status of a cluster that does not run.
fn last(path: &std::path::Path, name: &str) -> Result<String> {
    let text = state::read(path).with_context(|| path.display().to_string())?;
    let Some(text) = text else {
        bail!("no cluster {name} has run here: {} does not exist", path.display());
    };
    let cluster: DeepInferCluster =
        serde_json::from_str(&text).with_context(|| path.display().to_string())?;
    let status = cluster.status.clone().unwrap_or_default();
    let phase = status.phase.map_or_else(|| "unknown".to_owned(), |phase| format!("{phase:?}"));
    Ok(format!("{name} does not run; when it last did, its phase was {phase}\n"))
}

fn text(view: &ClusterView, output: Option<StatusOutput>) -> Result<String> {
    match output {
        Some(StatusOutput::Json) => Ok(serde_json::to_string_pretty(view)? + "\n"),
        Some(StatusOutput::Yaml) => Ok(to_yaml(view)?),
        Some(StatusOutput::Wide) => Ok(table(view, true)),
        None => Ok(table(view, false)),
    }
}

/// The tables, as kubectl prints them.
fn table(view: &ClusterView, wide: bool) -> String {
    let mut text = cluster_rows(view, wide);
    text.push('\n');
    text += &pool_rows(view);
    text.push('\n');
    text += &supernode_rows(view, wide);
    if wide {
        text.push('\n');
        text += &pod_rows(view);
    }
    text + &remarks(view)
}

fn cluster_rows(view: &ClusterView, wide: bool) -> String {
    let cluster = &view.cluster;
    let status = cluster.status.clone().unwrap_or_default();
    let summary = status.summary.unwrap_or_default();
    let ready = condition::get(&status.conditions, kind::READY);
    let mut head = vec!["NAME", "READY", "PREFILL", "DECODE", "REASON", "REVISION", "AGE"];
    let mut row = vec![
        name(&cluster.metadata),
        ready.map(|c| c.status.clone()).unwrap_or_default(),
        summary.prefill.unwrap_or_default(),
        summary.decode.unwrap_or_default(),
        ready.map(|c| c.reason.clone()).unwrap_or_default(),
        status.revision.unwrap_or_default(),
        age(&cluster.metadata, view.now),
    ];
    if wide {
        head.extend(["URL", "BACKEND", "IMBALANCE"]);
        let imbalance = status.experts.and_then(|experts| experts.worst_imbalance).unwrap_or_default();
        row.extend([view.url.clone().unwrap_or_default(), status.backend.unwrap_or_default(), imbalance]);
    }
    columns(&head, &[row])
}

fn pool_rows(view: &ClusterView) -> String {
    let rows: Vec<Vec<String>> = view
        .pools
        .iter()
        .map(|pool| {
            let status = pool.status.clone().unwrap_or_default();
            vec![
                name(&pool.metadata),
                format!("{:?}", pool.spec.role).to_lowercase(),
                pool.spec.replicas.unwrap_or(0).to_string(),
                status.ready_replicas.unwrap_or(0).to_string(),
                status.available_replicas.unwrap_or(0).to_string(),
                status.updated_replicas.unwrap_or(0).to_string(),
                format!("{:?}", pool.spec.mode),
                age(&pool.metadata, view.now),
            ]
        })
        .collect();
    columns(&["POOL", "ROLE", "DESIRED", "READY", "AVAILABLE", "UPDATED", "SCALING", "AGE"], &rows)
}

fn supernode_rows(view: &ClusterView, wide: bool) -> String {
    let mut head = vec!["SUPERNODE", "PHASE", "NODES", "RANKS", "REVISION", "AGE"];
    if wide {
        head.extend(["LEADER", "INFLIGHT", "REASON"]);
    }
    let row = |supernode: &deepinfer_crds::Supernode| {
        let status = supernode.status.clone().unwrap_or_default();
        let ranks = supernode.spec.nodes * supernode.spec.accelerators_per_node;
        let mut row = vec![
            name(&supernode.metadata),
            status.phase.map_or_else(|| "Pending".to_owned(), |phase| format!("{phase:?}")),
            status.ready.unwrap_or_default(),
            ranks.to_string(),
            supernode.spec.revision.clone(),
            age(&supernode.metadata, view.now),
        ];
        if wide {
            let agent = view.pods.iter().filter_map(|pod| pod.agent.as_ref());
            let of_this = |id: &deepinfer_protocol::SupernodeId| {
                Some(id.as_str()) == supernode.metadata.name.as_deref()
            };
            let inflight: u32 =
                agent.filter(|a| a.supernode.as_ref().is_some_and(of_this)).map(|a| a.inflight).sum();
            let reason = status.last_failure.map(|failure| failure.reason).unwrap_or_default();
            row.extend([status.leader.unwrap_or_default(), inflight.to_string(), reason]);
        }
        row
    };
    columns(&head, &view.supernodes.iter().map(row).collect::<Vec<_>>())
}

fn pod_rows(view: &ClusterView) -> String {
    let row = |pod: &crate::up::control::PodView| {
        let agent = pod.agent.as_ref();
        let blocks = agent.map(|a| format!("{}/{}", a.kv_blocks_used, a.kv_blocks_total));
        let ports = pod.ports.map(|(data, control)| format!("{}, {}", data.port(), control.port()));
        vec![
            pod.name.clone(),
            if pod.ready { "1/1" } else { "0/1" }.to_owned(),
            agent.map_or_else(|| pod.phase.clone(), |a| format!("{} {:?}", pod.phase, a.phase)),
            blocks.unwrap_or_default(),
            ports.unwrap_or_default(),
            agent.map(|a| a.engine.clone()).unwrap_or_else(|| pod.message.clone()),
        ]
    };
    let rows: Vec<Vec<String>> = view.pods.iter().map(row).collect();
    columns(&["POD", "READY", "STATUS", "KV BLOCKS", "PORTS", "ENGINE"], &rows)
}

/// What is worth a sentence.
fn remarks(view: &ClusterView) -> String {
    let status = view.cluster.status.clone().unwrap_or_default();
    let mut text = String::new();
    for waiting in &status.waiting {
        let _ = writeln!(text, "\nwaiting  {}: {}: {}", waiting.object, waiting.reason, waiting.message);
    }
    let on = |kind: &str| condition::get(&status.conditions, kind).filter(|c| c.status == "True");
    for (kind, word) in
        [(kind::STALLED, "stalled"), (kind::DEGRADED, "degraded"), (kind::FIELDS_IGNORED, "ignored")]
    {
        if let Some(Condition { reason, message, .. }) = on(kind) {
            let _ = writeln!(text, "\n{word}  {reason}: {message}");
        }
    }
    for scaled in &view.scaled_down {
        let _ = writeln!(text, "\nscaled   {scaled}");
    }
    if let Some(problem) = &view.storage_problem {
        let _ = writeln!(text, "\nstorage  {problem}; serving goes on and it is tried again");
    }
    if let Some(gateway) = view.gateway.as_ref().filter(|gateway| !gateway.ready) {
        let _ = writeln!(text, "\ngateway  not ready: {}", gateway.reason);
    }
    if let Some(gateway) = &view.gateway {
        let _ = writeln!(
            text,
            "\n{} requests run, {} wait; {} tokens/s; first token after {:.0} ms (median of the last minute)",
            gateway.running,
            gateway.waiting,
            report::three_digits(gateway.tokens_per_second),
            gateway.ttft.p50_ms
        );
    }
    text
}

fn name(meta: &ObjectMeta) -> String {
    meta.name.clone().unwrap_or_default()
}
