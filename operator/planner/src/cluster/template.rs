//! Pod templates of a revision: what the containers of each role are told. A revision freezes its template; a newer
//! operator with other defaults changes nothing that runs.

use std::collections::BTreeMap;

use deepinfer_crds::cluster::PodShape;
use deepinfer_crds::names::{label, port};
use deepinfer_crds::{DeepInferCluster, DeepInferClusterSpec};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::resolve::{Resolved, Source};
use crate::naming::{self, Component, digest};
use crate::target::Target;

/// Where the key of control and data ports is mounted.
const KEY_DIR: &str = "/etc/deepinfer/key";

/// A pool's pods under one revision.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Template {
    /// `<cluster>-<hash8>`.
    pub revision: String,
    /// Who can read whose KV, as far as a spec can say it.
    pub kv_epoch: String,
    /// Pods of a replica.
    pub nodes: u32,
    /// Ranks of a pod.
    pub ranks_per_node: u32,
    /// Labels and spec of a pod.
    pub pod: Value,
}

impl Template {
    /// The last part of the revision's name.
    pub fn hash(&self) -> &str {
        self.revision.rsplit('-').next().unwrap_or_default()
    }
}

/// The template of the prefill pool.
pub(crate) fn prefill(cluster: &DeepInferCluster, resolved: &Resolved, target: &Target) -> Template {
    let spec = &cluster.spec;
    let own = json!({
        "nodesPerWorker": spec.prefill.nodes_per_worker,
        "chunkBudgetMs": spec.prefill.chunk_budget_ms,
        "overrides": spec.prefill.overrides,
        "pod": spec.prefill.pod,
    });
    let revision = revision(resolved, spec, target, &json!({"prefill": own}));
    let kv_epoch = kv_epoch(spec);
    let mut args =
        vec!["--role=prefill".to_owned(), format!("--chunk-budget-ms={}", resolved.prefill.chunk_budget_ms)];
    args.extend(resolved.engine_args.iter().cloned());
    args.extend(resolved.prefill.args.iter().cloned());
    let engine = EngineShape {
        component: Component::Prefill,
        restart: "Always",
        accelerators: resolved.prefill.accelerators,
        drain_seconds: resolved.prefill.drain_seconds,
        shape: spec.prefill.pod.as_ref(),
    };
    let pod = engine_pod(resolved, spec, target, &engine, (&revision, &kv_epoch), args);
    Template { revision, kv_epoch, nodes: 1, ranks_per_node: 1, pod }
}

/// The template of the decode pool.
pub(crate) fn decode(cluster: &DeepInferCluster, resolved: &Resolved, target: &Target) -> Template {
    let spec = &cluster.spec;
    let own = json!({
        "nodes": spec.decode.supernode.nodes,
        "acceleratorsPerNode": spec.decode.supernode.accelerators_per_node,
        "spareNodes": spec.decode.supernode.spare_nodes,
        "extraSlotsPerRank": spec.decode.experts.as_ref().and_then(|e| e.extra_slots_per_rank),
        "pod": spec.decode.pod,
    });
    let revision = revision(resolved, spec, target, &json!({"decode": own}));
    let kv_epoch = kv_epoch(spec);
    let mut args = vec![
        "--role=decode".to_owned(),
        format!("--ranks={}", resolved.decode.ranks_per_node),
        format!("--extra-slots-per-rank={}", resolved.decode.extra_slots),
    ];
    args.extend(resolved.engine_args.iter().cloned());
    let engine = EngineShape {
        component: Component::Decode,
        restart: "Never",
        accelerators: resolved.decode.ranks_per_node,
        drain_seconds: resolved.decode.drain_seconds,
        shape: spec.decode.pod.as_ref(),
    };
    let pod = engine_pod(resolved, spec, target, &engine, (&revision, &kv_epoch), args);
    let (nodes, ranks_per_node) = (resolved.decode.nodes, resolved.decode.ranks_per_node);
    Template { revision, kv_epoch, nodes, ranks_per_node, pod }
}

/// Labels and spec of a gateway pod. Its flags are not part of a revision: gateways roll by themselves.
pub(crate) fn gateway(resolved: &Resolved) -> Value {
    let gateway = &resolved.gateway;
    let mut args = vec![
        "--name=$(POD_NAME)".to_owned(),
        format!("--listen={}", gateway.listen),
        format!("--model-name={}", resolved.model.name),
        format!("--checkpoint={}", resolved.model.path),
        format!("--default-thinking={}", if gateway.default_thinking { "on" } else { "off" }),
        format!("--key-dir={KEY_DIR}"),
    ];
    args.extend(resolved.model.aliases.iter().map(|alias| format!("--alias={alias}")));
    let mut volumes = vec![key_volume(&resolved.name), model_volume(&resolved.model.source)];
    let mut mounts = vec![key_mount(), model_mount(resolved)];
    for (name, secret, flags) in [
        (
            "tls",
            &gateway.tls_secret,
            ["--tls-cert=/etc/deepinfer/tls/tls.crt", "--tls-key=/etc/deepinfer/tls/tls.key"],
        ),
        ("api-keys", &gateway.api_keys_secret, ["--api-keys=/etc/deepinfer/api-keys/keys", ""]),
    ] {
        let Some(secret) = secret else { continue };
        volumes.push(json!({"name": name, "secret": {"secretName": secret}}));
        mounts.push(json!({"name": name, "mountPath": format!("/etc/deepinfer/{name}"), "readOnly": true}));
        args.extend(flags.iter().filter(|flag| !flag.is_empty()).map(|flag| (*flag).to_owned()));
    }
    let spec = json!({
        "serviceAccountName": format!("{}-engine", resolved.name),
        "automountServiceAccountToken": false,
        "terminationGracePeriodSeconds": resolved.decode.drain_seconds + 60,
        "securityContext": pod_security(),
        "containers": [{
            "name": "gateway",
            "image": gateway.image,
            "args": args,
            "env": [pod_name_env()],
            "ports": [{"name": "http", "containerPort": port::GATEWAY}],
            "readinessProbe": probe("/readyz", i32::from(port::GATEWAY), 2),
            "livenessProbe": probe("/healthz", i32::from(port::GATEWAY), 10),
            "securityContext": container_security(),
            "volumeMounts": mounts,
        }],
        "volumes": volumes,
    });
    json!({"metadata": {"labels": naming::labels(&resolved.name, Some(Component::Gateway))}, "spec": spec})
}

struct EngineShape<'a> {
    component: Component,
    restart: &'static str,
    accelerators: u32,
    drain_seconds: u32,
    shape: Option<&'a PodShape>,
}

fn engine_pod(
    resolved: &Resolved,
    spec: &DeepInferClusterSpec,
    target: &Target,
    engine: &EngineShape<'_>,
    (revision, kv_epoch): (&str, &str),
    mut args: Vec<String>,
) -> Value {
    args.insert(0, "--name=$(POD_NAME)".to_owned());
    args.insert(1, format!("--checkpoint={}", resolved.model.path));
    let mut labels = naming::labels(&resolved.name, Some(engine.component));
    labels.insert(label::REVISION.to_owned(), revision.to_owned());
    labels.insert(label::KV_EPOCH.to_owned(), kv_epoch.to_owned());
    let mut annotations = BTreeMap::new();
    let mut env = vec![pod_name_env()];
    let mut volumes = vec![key_volume(&resolved.name), model_volume(&resolved.model.source)];
    let mut mounts = vec![key_mount(), model_mount(resolved)];
    let mut limits = BTreeMap::new();
    let mut pod = json!({});
    if target.local().is_none() {
        env.extend(spec.engine.env.iter().map(|var| json!(var)));
        if let Some(resource) = &resolved.resource {
            limits.insert(resource.clone(), json!(engine.accelerators.to_string()));
        }
        if let Some(shape) = engine.shape {
            labels.extend(shape.labels.clone());
            annotations = shape.annotations.clone();
            volumes.extend(shape.volumes.iter().map(volume));
            mounts.extend(shape.mounts.iter().map(|mount| json!(mount)));
            pod["nodeSelector"] = json!(shape.node_selector);
            pod["tolerations"] = json!(shape.tolerations);
            pod["priorityClassName"] = json!(shape.priority_class_name);
            pod["runtimeClassName"] = json!(shape.runtime_class_name);
        }
    }
    let account = engine.shape.and_then(|shape| shape.service_account_name.clone());
    pod["restartPolicy"] = json!(engine.restart);
    pod["serviceAccountName"] = json!(account.unwrap_or_else(|| format!("{}-engine", resolved.name)));
    pod["automountServiceAccountToken"] = json!(false);
    pod["terminationGracePeriodSeconds"] = json!(engine.drain_seconds + 60);
    pod["securityContext"] = pod_security();
    pod["imagePullSecrets"] =
        spec.engine.image_pull_secrets.iter().map(|name| json!({"name": name})).collect();
    pod["volumes"] = json!(volumes);
    pod["containers"] = json!([{
        "name": "engine",
        "image": resolved.image,
        "imagePullPolicy": spec.engine.image_pull_policy,
        "args": args,
        "env": env,
        "ports": [
            {"name": "control", "containerPort": port::CONTROL},
            {"name": "metrics", "containerPort": port::METRICS},
            {"name": "data", "containerPort": port::DATA},
        ],
        "startupProbe": {
            "httpGet": {"path": "/healthz", "port": port::CONTROL},
            "periodSeconds": 2,
            "failureThreshold": (resolved.decode.startup_deadline / 2).max(1),
        },
        "readinessProbe": probe("/readyz", i32::from(port::CONTROL), 2),
        "livenessProbe": probe("/healthz", i32::from(port::CONTROL), 10),
        "resources": {"limits": limits},
        "securityContext": container_security(),
        "volumeMounts": mounts,
    }]);
    json!({"metadata": {"labels": labels, "annotations": annotations}, "spec": pod})
}

/// Hash of what the user set and what shapes pods; not of defaults (operator.md 8.1).
fn revision(resolved: &Resolved, spec: &DeepInferClusterSpec, target: &Target, own: &Value) -> String {
    let local = target.local().map(|local| json!({"ranks": local.ranks, "model": local.model_path}));
    let key = json!({
        "accelerator": spec.accelerator,
        "engine": spec.engine,
        "local": local,
        "model": {"name": spec.model.name, "source": spec.model.source},
        "network": spec.network,
        "own": own,
        "restartToken": spec.operation.as_ref().and_then(|o| o.restart_token.clone()),
    });
    format!("{}-{}", resolved.name, digest(&key, 8))
}

/// Hash of what decides whether prefill and decode understand each other's KV (operator.md 8.4).
fn kv_epoch(spec: &DeepInferClusterSpec) -> String {
    let numerics = spec.engine.extra_args.iter().filter(|arg| arg.starts_with("--numerics"));
    let numerics: Vec<&String> = numerics.collect();
    let abi = spec.engine.kv_abi.as_ref().unwrap_or(&spec.engine.image);
    digest(&json!({"source": spec.model.source, "abi": abi, "numerics": numerics}), 6)
}

fn volume(volume: &deepinfer_crds::cluster::Volume) -> Value {
    let mut value = json!({"name": volume.name});
    if let Some(claim) = &volume.claim {
        value["persistentVolumeClaim"] = json!(claim);
    } else if let Some(map) = &volume.config_map {
        value["configMap"] = json!(map);
    } else if let Some(secret) = &volume.secret {
        value["secret"] = json!(secret);
    } else if let Some(empty) = &volume.empty_dir {
        value["emptyDir"] = json!(empty);
    } else if let Some(host) = &volume.host_path {
        value["hostPath"] = json!(host);
    }
    value
}

fn model_volume(source: &Source) -> Value {
    match source {
        Source::Host(path) => json!({"name": "model", "hostPath": {"path": path, "type": "Directory"}}),
        Source::Claim(claim) => {
            json!({"name": "model", "persistentVolumeClaim": {"claimName": claim, "readOnly": true}})
        }
    }
}

fn model_mount(resolved: &Resolved) -> Value {
    let path = match &resolved.model.source {
        Source::Host(path) => path.as_str(),
        Source::Claim(_) => "/models",
    };
    json!({"name": "model", "mountPath": path, "readOnly": true})
}

fn key_volume(cluster: &str) -> Value {
    json!({"name": "agent-key", "secret": {"secretName": naming::key_secret(cluster, 1)}})
}

fn key_mount() -> Value {
    json!({"name": "agent-key", "mountPath": KEY_DIR, "readOnly": true})
}

fn pod_name_env() -> Value {
    json!({"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}})
}

fn probe(path: &str, port: i32, period: u32) -> Value {
    json!({"httpGet": {"path": path, "port": port}, "periodSeconds": period, "failureThreshold": 3})
}

fn pod_security() -> Value {
    json!({"runAsNonRoot": true, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}})
}

fn container_security() -> Value {
    json!({
        "allowPrivilegeEscalation": false,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": true,
    })
}
