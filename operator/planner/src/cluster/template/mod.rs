//! Pod templates of a revision: what the containers of each role are told. A revision freezes its template; a newer
//! operator with other defaults changes nothing that runs.

mod overlay;

use deepinfer_crds::cluster::PodShape;
use deepinfer_crds::names::{ROUTABLE_GATE, annotation, label, port};
use deepinfer_crds::{DeepInferCluster, DeepInferClusterSpec};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::resolve::{Life, Resolved, Source};
use crate::naming::{self, Component, digest};
use crate::object::{Kind, Object};
use crate::supernode::gang;
use crate::target::Target;
use crate::world::World;

/// Where the key of control and data ports is mounted.
const KEY_DIR: &str = "/etc/deepinfer/key";
/// Where the pod's own annotations are seen as files.
const POD_DIR: &str = "/etc/deepinfer/pod";
/// Where agents and gateways keep what they need after a restart of the container.
const STATE_DIR: &str = "/var/lib/deepinfer";
/// The container of the engine, also in the user's PodTemplate.
const ENGINE: &str = "engine";

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
    /// Image of the gateway under this revision, where the spec names none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway_image: Option<String>,
}

impl Template {
    /// The last part of the revision's name.
    pub fn hash(&self) -> &str {
        self.revision.rsplit('-').next().unwrap_or_default()
    }
}

/// The template of the prefill pool.
pub(crate) fn prefill(
    world: &World,
    cluster: &DeepInferCluster,
    resolved: &Resolved,
    target: &Target,
) -> Template {
    let spec = &cluster.spec;
    let own = json!({
        "nodesPerWorker": spec.prefill.nodes_per_worker,
        "chunkBudgetMs": spec.prefill.chunk_budget_ms,
        "overrides": spec.prefill.overrides,
        "pod": spec.prefill.pod,
        "template": base(world, spec.prefill.pod.as_ref()),
    });
    let life = &resolved.prefill.life;
    let mut args =
        vec!["--role=prefill".to_owned(), format!("--chunk-budget-ms={}", resolved.prefill.chunk_budget_ms)];
    if life.nodes > 1 {
        args.push(format!("--nodes-per-worker={}", life.nodes));
    }
    args.extend(resolved.engine_args.iter().cloned());
    args.extend(resolved.prefill.args.iter().cloned());
    let restart = if life.nodes > 1 { "Never" } else { "Always" };
    make(
        world,
        cluster,
        resolved,
        target,
        (Component::Prefill, restart, life),
        (&json!({"prefill": own}), args),
    )
}

/// The template of the decode pool.
pub(crate) fn decode(
    world: &World,
    cluster: &DeepInferCluster,
    resolved: &Resolved,
    target: &Target,
) -> Template {
    let spec = &cluster.spec;
    let own = json!({
        "nodes": spec.decode.supernode.nodes,
        "acceleratorsPerNode": spec.decode.supernode.accelerators_per_node,
        "spareNodes": spec.decode.supernode.spare_nodes,
        "extraSlotsPerRank": spec.decode.experts.as_ref().and_then(|e| e.extra_slots_per_rank),
        "pod": spec.decode.pod,
        "template": base(world, spec.decode.pod.as_ref()),
    });
    let life = &resolved.decode.life;
    let mut args = vec![
        "--role=decode".to_owned(),
        format!("--ranks={}", life.ranks_per_node),
        format!("--extra-slots-per-rank={}", resolved.decode.extra_slots),
    ];
    if life.nodes > 1 && resolved.placing.is_some() {
        args.push(format!("--supernode-nodes={}", life.nodes));
    }
    args.extend(resolved.engine_args.iter().cloned());
    make(
        world,
        cluster,
        resolved,
        target,
        (Component::Decode, "Never", life),
        (&json!({"decode": own}), args),
    )
}

fn make(
    world: &World,
    cluster: &DeepInferCluster,
    resolved: &Resolved,
    target: &Target,
    (component, restart, life): (Component, &'static str, &Life),
    (own, mut args): (&Value, Vec<String>),
) -> Template {
    let spec = &cluster.spec;
    args.splice(0..0, pod_flags(resolved, &world.namespace, life.drain_seconds));
    let revision = revision(resolved, spec, target, own);
    let kv_epoch = kv_epoch(spec);
    let shape =
        if component == Component::Decode { spec.decode.pod.as_ref() } else { spec.prefill.pod.as_ref() };
    let engine = EngineShape { component, restart, life, shape };
    let mut pod = engine_pod(resolved, spec, target, &engine, (&revision, &kv_epoch), args);
    if let Some(mut below) = base(world, shape).filter(|_| target.local().is_none()) {
        overlay::lay(&mut below, &pod);
        pod = below;
    }
    Template {
        revision,
        kv_epoch,
        nodes: life.nodes,
        ranks_per_node: life.ranks_per_node,
        pod,
        gateway_image: target.kubernetes().map(|target| target.gateway_image.clone()),
    }
}

/// The user's PodTemplate that a pool names, as far as it shapes pods.
fn base(world: &World, shape: Option<&PodShape>) -> Option<Value> {
    let name = &shape?.template_ref.as_ref()?.name;
    let Some(Object::PodTemplate(template)) = world.get(Kind::PodTemplate, name) else {
        return None;
    };
    let inner = template.template.as_ref()?;
    let meta = inner.metadata.as_ref();
    Some(json!({
        "metadata": {"labels": meta.and_then(|m| m.labels.clone()), "annotations": meta.and_then(|m| m.annotations.clone())},
        "spec": inner.spec,
    }))
}

/// Labels and spec of a gateway pod. Its flags are not part of a revision: gateways roll by themselves.
pub(crate) fn gateway(resolved: &Resolved, namespace: &str) -> Value {
    let gateway = &resolved.gateway;
    let mut args = vec![
        "--name=$(POD_NAME)".to_owned(),
        format!("--listen={}", gateway.listen),
        format!("--model-name={}", resolved.model.name),
        format!("--checkpoint={}", resolved.model.path),
        format!("--default-thinking={}", if gateway.default_thinking { "on" } else { "off" }),
    ];
    if resolved.placing.is_none() {
        args.push(format!("--key-dir={KEY_DIR}"));
    }
    args.extend(resolved.model.aliases.iter().map(|alias| format!("--alias={alias}")));
    let mut volumes = vec![key_volume(&resolved.name), model_volume(&resolved.model.source)];
    let mut mounts = vec![key_mount(), model_mount(resolved)];
    if resolved.placing.is_some() {
        args.extend(fleet_flags(resolved, namespace));
        volumes.push(json!({"name": "state", "emptyDir": {}}));
        mounts.push(json!({"name": "state", "mountPath": STATE_DIR}));
    }
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
        "terminationGracePeriodSeconds": resolved.decode.life.drain_seconds + 60,
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
    life: &'a Life,
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
    let account = engine.shape.and_then(|shape| shape.service_account_name.clone());
    let mut pod = json!({
        "metadata": {"labels": labels, "annotations": {}},
        "spec": {
            "restartPolicy": engine.restart,
            "serviceAccountName": account.unwrap_or_else(|| format!("{}-engine", resolved.name)),
            "automountServiceAccountToken": false,
            "terminationGracePeriodSeconds": engine.life.drain_seconds + 60,
            "securityContext": pod_security(),
            "volumes": [key_volume(&resolved.name), model_volume(&resolved.model.source)],
            "containers": [engine_container(resolved, spec, engine, args)],
        },
    });
    if target.local().is_none() {
        in_kubernetes(&mut pod, resolved, spec, engine);
    }
    pod
}

fn engine_container(
    resolved: &Resolved,
    spec: &DeepInferClusterSpec,
    engine: &EngineShape<'_>,
    args: Vec<String>,
) -> Value {
    json!({
        "name": ENGINE,
        "image": resolved.image,
        "imagePullPolicy": spec.engine.image_pull_policy,
        "args": args,
        "env": [pod_name_env()],
        "ports": [
            {"name": "control", "containerPort": port::CONTROL},
            {"name": "metrics", "containerPort": port::METRICS},
            {"name": "data", "containerPort": port::DATA},
        ],
        "startupProbe": {
            "httpGet": {"path": "/healthz", "port": port::CONTROL},
            "periodSeconds": 2,
            "failureThreshold": (engine.life.startup_deadline / 2).max(1),
        },
        "readinessProbe": probe("/readyz", i32::from(port::CONTROL), 2),
        "livenessProbe": probe("/healthz", i32::from(port::CONTROL), 10),
        "resources": {},
        "securityContext": container_security(),
        "volumeMounts": [key_mount(), model_mount(resolved)],
    })
}

/// What only a real pod has: the fleet's address, the drain's file, devices, and the user's shape.
fn in_kubernetes(
    pod: &mut Value,
    resolved: &Resolved,
    spec: &DeepInferClusterSpec,
    engine: &EngineShape<'_>,
) {
    let mut above = json!({
        "spec": {
            "imagePullSecrets": spec.engine.image_pull_secrets.iter().map(|name| json!({"name": name})).collect::<Vec<_>>(),
            "readinessGates": [{"conditionType": ROUTABLE_GATE}],
            "volumes": [
                {"name": "state", "emptyDir": {}},
                {"name": "pod", "downwardAPI": {"items": [{
                    "path": "drain",
                    "fieldRef": {"fieldPath": format!("metadata.annotations['{}']", annotation::DRAIN)},
                }]}},
            ],
        },
    });
    let mut container = json!({
        "name": ENGINE,
        "env": spec.engine.env,
        "volumeMounts": [
            {"name": "state", "mountPath": STATE_DIR},
            {"name": "pod", "mountPath": POD_DIR, "readOnly": true},
        ],
    });
    if let Some(resource) = &resolved.resource {
        container["resources"]["limits"][resource] = json!(engine.life.accelerators.to_string());
    }
    network(&mut above, &mut container, spec);
    above["spec"]["containers"] = json!([container]);
    overlay::lay(pod, &above);
    if let Some(shape) = engine.shape {
        overlay::lay(pod, &shaped(shape));
        for (field, user) in [("labels", &shape.labels), ("annotations", &shape.annotations)] {
            for (key, value) in user {
                // The operator's own win.
                if pod["metadata"][field][key].is_null() {
                    pod["metadata"][field][key] = json!(value);
                }
            }
        }
    }
    if let Some(placing) = &resolved.placing {
        if pod["spec"]["priorityClassName"].is_null() {
            pod["spec"]["priorityClassName"] = json!(placing.priority_class);
        }
        gang::host_mounts(&placing.profile, pod);
    }
}

/// RDMA devices and further interfaces.
fn network(above: &mut Value, container: &mut Value, spec: &DeepInferClusterSpec) {
    let Some(network) = &spec.network else { return };
    if network.host_network == Some(true) {
        above["spec"]["hostNetwork"] = json!(true);
        above["spec"]["dnsPolicy"] = json!("ClusterFirstWithHostNet");
    }
    if !network.attachments.is_empty() {
        above["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"] =
            json!(network.attachments.join(","));
    }
    let Some(rdma) = &network.rdma else { return };
    if let Some(resource) = &rdma.resource_name {
        container["resources"]["limits"][resource] = json!(rdma.count.unwrap_or(1).to_string());
    }
    if let Some(claim) = &rdma.resource_claim_template_name {
        above["spec"]["resourceClaims"] = json!([{"name": "rdma", "resourceClaimTemplateName": claim}]);
        container["resources"]["claims"] = json!([{"name": "rdma"}]);
    }
}

/// The user's shape of a pool's pods, as a pod.
fn shaped(shape: &PodShape) -> Value {
    let sidecars = shape.sidecars.iter().map(|sidecar| json!(sidecar));
    let mut containers = vec![json!({
        "name": ENGINE,
        "resources": shape.resources,
        "volumeMounts": shape.mounts,
    })];
    containers.extend(sidecars);
    json!({
        "spec": {
            "nodeSelector": shape.node_selector,
            "tolerations": shape.tolerations,
            "priorityClassName": shape.priority_class_name,
            "runtimeClassName": shape.runtime_class_name,
            "volumes": shape.volumes.iter().map(volume).collect::<Vec<_>>(),
            "containers": containers,
        },
    })
}

/// Flags that only a pod has: where the fleet is, where its own state is. They are frozen with the template, but not
/// part of the revision's key: another address of the operator restarts nobody.
fn pod_flags(resolved: &Resolved, namespace: &str, drain_seconds: u32) -> Vec<String> {
    let mut flags = fleet_flags(resolved, namespace);
    if !flags.is_empty() {
        flags.push(format!("--drain-file={POD_DIR}/drain"));
        // Less than the pod's own grace: what is left is cut by the agent, not by the kubelet.
        flags.push(format!("--termination-grace-seconds={drain_seconds}"));
        flags.extend(resolved.model.digest.iter().map(|digest| format!("--model-digest={digest}")));
    }
    flags
}

fn fleet_flags(resolved: &Resolved, namespace: &str) -> Vec<String> {
    let Some(placing) = &resolved.placing else {
        return Vec::new();
    };
    vec![
        format!("--key-dir={KEY_DIR}"),
        format!("--fleet-url={}", placing.fleet_urls),
        format!("--fleet-path=/v1/fleet/{namespace}/{}", resolved.name),
        format!("--ledger={STATE_DIR}/fleet.json"),
    ]
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
        // No type: a missing folder is told by the agent, with its path, and not by an event that nobody sees.
        Source::Host(path) => json!({"name": "model", "hostPath": {"path": path}}),
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
