//! Everything that a cluster consists of, without what differs from run to run: random parts of names, times, addresses.

use std::time::Duration;

use anyhow::{Context as _, Result};
use kube::Api;
use kube::api::{ApiResource, DynamicObject, ListParams};
use kube::core::GroupVersionKind;
use serde_json::Value;
use tokio::time::Instant;

use super::rig::{PATIENCE, Rig, until};

/// Kinds that a cluster's children have; `kubectl get all` with ours.
const KINDS: &[(&str, &str, &str)] = &[
    ("", "v1", "ConfigMap"),
    ("", "v1", "Pod"),
    ("", "v1", "Secret"),
    ("", "v1", "Service"),
    ("", "v1", "ServiceAccount"),
    ("apps", "v1", "ControllerRevision"),
    ("apps", "v1", "Deployment"),
    ("deepinfer.io", "v1alpha1", "DeepInferPool"),
    ("deepinfer.io", "v1alpha1", "ExpertPlacement"),
    ("deepinfer.io", "v1alpha1", "Supernode"),
    ("networking.k8s.io", "v1", "NetworkPolicy"),
    ("policy", "v1", "PodDisruptionBudget"),
];

/// What is there once it has not changed for a while.
pub async fn settled(rig: &Rig) -> Result<Vec<String>> {
    const STILL: Duration = Duration::from_secs(2);
    let (mut last, mut since) = (take(rig).await?, Instant::now());
    until(PATIENCE, async || {
        let now = take(rig).await?;
        if now != last {
            (last, since) = (now, Instant::now());
        }
        Ok((since.elapsed() >= STILL).then(|| last.clone()))
    })
    .await
}

/// Waits until everything is as `expected`.
pub async fn reaches(rig: &Rig, station: &str, expected: &[String]) -> Result<()> {
    let mut last = Vec::new();
    let reached = until(PATIENCE, async || {
        last = take(rig).await?;
        Ok((last == expected).then_some(()))
    });
    reached.await.with_context(|| {
        let only = |a: &[String], b: &[String]| -> Vec<String> {
            a.iter().filter(|line| !b.contains(line)).cloned().collect()
        };
        let (more, less) = (only(&last, expected), only(expected, &last));
        format!("{station}: there is {more:#?}, without faults there was {less:#?}")
    })
}

/// One line for each object, in order. What Kubernetes itself puts into every namespace is left out.
pub async fn take(rig: &Rig) -> Result<Vec<String>> {
    let mut objects = Vec::new();
    for (group, version, kind) in KINDS {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        let api: Api<DynamicObject> = Api::namespaced_with(rig.client.clone(), &rig.namespace, &resource);
        let list = api.list(&ListParams::default()).await?.items;
        objects.extend(list.into_iter().map(|object| (*kind, object)));
    }
    let supernodes: Vec<String> = objects
        .iter()
        .filter(|(kind, _)| *kind == "Supernode")
        .filter_map(|(_, object)| object.metadata.name.clone())
        .collect();
    let mut lines: Vec<String> =
        objects.iter().filter_map(|(kind, object)| line(kind, object, &supernodes)).collect();
    lines.sort_unstable();
    Ok(lines)
}

fn line(kind: &str, object: &DynamicObject, supernodes: &[String]) -> Option<String> {
    let name = object.metadata.name.as_deref().unwrap_or_default();
    if matches!((kind, name), ("ConfigMap", "kube-root-ca.crt") | ("ServiceAccount", "default")) {
        return None;
    }
    let labels = object.metadata.labels.clone().unwrap_or_default();
    // Pods of a Deployment have names of Kubernetes' own making: deployment, hash of the template, five letters.
    let mut name = match labels.get("pod-template-hash") {
        Some(hash) => name.split(&format!("-{hash}")).next().unwrap_or_default().to_owned(),
        None => name.to_owned(),
    };
    for supernode in supernodes {
        name = name.replace(supernode, "SUPERNODE");
    }
    let status = &object.data["status"];
    let role = labels.get("app.kubernetes.io/component").cloned().unwrap_or_default();
    let going = if object.metadata.deletion_timestamp.is_some() { " going" } else { "" };
    let phase = status["phase"].as_str().unwrap_or_default();
    let restarts = status["restarts"].as_i64().or_else(|| status["restartCount"].as_i64()).unwrap_or(0);
    Some(format!("{kind} {name} {role} {phase} ready={} restarts={restarts}{going}", ready(status)))
}

fn ready(status: &Value) -> &str {
    let conditions = status["conditions"].as_array().into_iter().flatten();
    let ready = conditions.into_iter().find(|condition| condition["type"] == "Ready");
    ready.and_then(|condition| condition["status"].as_str()).unwrap_or("-")
}
