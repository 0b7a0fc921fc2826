//! Everything that a cluster consists of, without what differs from run to run: random parts of names, times, addresses.

use std::collections::BTreeMap;

use anyhow::Result;
use kube::Api;
use kube::api::{ApiResource, DynamicObject, ListParams};
use kube::core::GroupVersionKind;
use serde_json::Value;

use super::rig::Rig;

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
    // Pods of a Deployment have names of Kubernetes' own making.
    let name = match object.metadata.generate_name.as_deref() {
        Some(prefix) if kind == "Pod" => prefix.rsplit_once('-').map_or(prefix, |(start, _)| start),
        _ => name,
    };
    let mut name = without_hash(name);
    for supernode in supernodes {
        name = name.replace(supernode, "SUPERNODE");
    }
    let status = &object.data["status"];
    let labels: BTreeMap<_, _> = object.metadata.labels.clone().unwrap_or_default();
    let role = labels.get("app.kubernetes.io/component").cloned().unwrap_or_default();
    let going = if object.metadata.deletion_timestamp.is_some() { " going" } else { "" };
    let phase = status["phase"].as_str().unwrap_or_default();
    let restarts = status["restarts"].as_i64().or_else(|| status["restartCount"].as_i64()).unwrap_or(0);
    Some(format!("{kind} {name} {role} {phase} ready={} restarts={restarts}{going}", ready(status)))
}

/// Deployments of prefill pools carry the kv-epoch, which is the same in each run; the hash of a ReplicaSet is not.
fn without_hash(name: &str) -> String {
    match name.rsplit_once('-') {
        Some((start, hash))
            if hash.len() >= 8
                && hash.bytes().all(|b| b.is_ascii_alphanumeric())
                && start.contains("gateway") =>
        {
            start.to_owned()
        }
        _ => name.to_owned(),
    }
}

fn ready(status: &Value) -> &str {
    let conditions = status["conditions"].as_array().into_iter().flatten();
    let ready = conditions.into_iter().find(|condition| condition["type"] == "Ready");
    ready.and_then(|condition| condition["status"].as_str()).unwrap_or("-")
}
