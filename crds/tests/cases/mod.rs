//! Cases for every rule of the CRDs: what it accepts and what it refuses. The rules in process and a real API server
//! are held to the same table.

use deepinfer_crds::cel::{self, Rule};
use deepinfer_crds::crd::Kind;
use serde_json::{Value, json};

/// A cluster that breaks no rule.
pub fn cluster() -> Value {
    json!({
        "apiVersion": "deepinfer.io/v1alpha1",
        "kind": "DeepInferCluster",
        "metadata": {"name": "v41-flash"},
        "spec": {
            "accelerator": {"vendor": "nvidia"},
            "engine": {"image": "registry.example/deepinfer:1"},
            "model": {"name": "m", "source": {"uri": "file:///models/m"}},
            "prefill": {"replicas": 1},
            "decode": {"replicas": 1, "supernode": {"nodes": 8}},
        }
    })
}

pub fn supernode() -> Value {
    json!({
        "apiVersion": "deepinfer.io/v1alpha1", "kind": "Supernode", "metadata": {"name": "v41-decode-bcdfg"},
        "spec": {
            "clusterName": "v41", "poolName": "v41-decode", "role": "decode", "revision": "v41-1",
            "kvEpoch": "a81f03",
            "nodes": 8, "acceleratorsPerNode": 8, "backend": "Builtin", "spareNodes": 1,
        }
    })
}

pub fn placement() -> Value {
    json!({
        "apiVersion": "deepinfer.io/v1alpha1", "kind": "ExpertPlacement", "metadata": {
            "name": "v41-decode-bcdfg"
        },
        "spec": {
            "clusterName": "v41", "poolName": "v41-decode", "supernodeName": "v41-decode-bcdfg",
            "mode": "Auto",
            "shape": {"layers": 40, "experts": 384, "slotsPerRank": 7, "ranks": 64},
        }
    })
}

/// The object with values put at JSON pointers; a null takes the field away.
pub fn with(mut object: Value, changes: &Value) -> Value {
    for (pointer, value) in changes.as_object().expect("changes by pointer") {
        let mut at = &mut object;
        let (before, last) = pointer.rsplit_once('/').expect("a pointer");
        for step in before.split('/').filter(|s| !s.is_empty()) {
            if at.get(step).is_none() {
                at[step] = json!({});
            }
            at = &mut at[step];
        }
        match value {
            Value::Null => drop(at.as_object_mut().expect("a parent").remove(last)),
            value => at[last] = value.clone(),
        }
    }
    object
}

/// One rule with changes that it accepts and changes that it refuses.
pub struct Case {
    pub rule: Rule,
    pub accepts: Vec<Value>,
    pub refuses: Vec<Value>,
    pub blames: &'static str,
}

fn case(rule: Rule, blames: &'static str, accepts: Value, refuses: Value) -> Case {
    let list = |v: Value| v.as_array().expect("a list of changes").clone();
    Case { rule, accepts: list(accepts), refuses: list(refuses), blames }
}

fn pool_cases() -> Vec<Case> {
    let scaling = json!({"mode": "Planner", "minReplicas": 1, "maxReplicas": 2});
    let zero = |pool: &str, activator: bool| {
        json!({
            format!("/spec/{pool}/replicas"): null,
            format!("/spec/{pool}/scaling"): {"mode": "External", "minReplicas": 0, "maxReplicas": 2},
            "/spec/gateway": {"activator": {"enabled": activator}},
        })
    };
    let ratio = |ratio: Value| {
        json!({
            "/spec/decode/replicas": null,
            "/spec/decode/scaling": {
                "mode": "Planner", "minReplicas": 1, "maxReplicas": 2, "planner": {"prefillPerDecode": ratio}
            },
        })
    };
    vec![
        case(
            cel::CLUSTER_NAME,
            "metadata.name",
            json!([{"/metadata/name": "a"}, {"/metadata/name": "a23456789-123456789-12345"}]),
            json!([
                {"/metadata/name": "a23456789-123456789-123456"}, {"/metadata/name": "1a"}, {
                    "/metadata/name": "a-"
                },
                {"/metadata/name": "A"}, {"/metadata/name": "a.b"}
            ]),
        ),
        case(
            cel::REPLICAS_XOR_SCALING,
            "spec.prefill",
            json!([{"/spec/prefill/replicas": null, "/spec/prefill/scaling": scaling}]),
            json!([{"/spec/prefill/replicas": null}, {"/spec/prefill/scaling": scaling}]),
        ),
        case(
            cel::REPLICAS_XOR_SCALING,
            "spec.decode",
            json!([{"/spec/decode/replicas": null, "/spec/decode/scaling": scaling}]),
            json!([{"/spec/decode/replicas": null}, {"/spec/decode/scaling": scaling}]),
        ),
        case(
            cel::REPLICAS_XOR_SCALING,
            "spec.vision",
            json!([{"/spec/vision": {"replicas": 1}}]),
            json!([{"/spec/vision": {}}]),
        ),
        case(
            cel::GATEWAY_REPLICAS_OR_SCALING,
            "spec.gateway",
            json!([{"/spec/gateway": {}}, {"/spec/gateway": {"scaling": {"mode": "External"}}}]),
            json!([{"/spec/gateway": {"replicas": 1, "scaling": {"mode": "External"}}}]),
        ),
        case(
            cel::SCALING_MIN_MAX,
            "spec.prefill.scaling.minReplicas",
            json!([
                {
                    "/spec/prefill/replicas": null,
                    "/spec/prefill/scaling": {"mode": "External", "minReplicas": 3, "maxReplicas": 3}
                }
            ]),
            json!([
                {
                    "/spec/prefill/replicas": null,
                    "/spec/prefill/scaling": {"mode": "External", "minReplicas": 3, "maxReplicas": 2}
                }
            ]),
        ),
        case(
            cel::PLANNER_TARGETS_NEED_PLANNER,
            "spec.decode.scaling.planner",
            json!([
                {
                    "/spec/decode/scaling": {
                        "mode": "Planner",
                        "minReplicas": 1,
                        "maxReplicas": 2,
                        "planner": {}
                    }
                }
            ]),
            json!([
                {
                    "/spec/decode/scaling": {
                        "mode": "External",
                        "minReplicas": 1,
                        "maxReplicas": 2,
                        "planner": {}
                    }
                }
            ]),
        ),
        case(
            cel::RATIO_MIN_MAX,
            "spec.decode.scaling.planner.prefillPerDecode.min",
            json!([ratio(json!({"min": 1.5, "max": 2.0})), ratio(json!({"min": 1}))]),
            json!([ratio(json!({"min": 2.5, "max": 2.0}))]),
        ),
        case(
            cel::ZERO_DECODE_NEEDS_ACTIVATOR,
            "spec.decode.scaling.minReplicas",
            json!([zero("decode", true), {"/spec/gateway": {"activator": {"enabled": false}}}]),
            json!([zero("decode", false)]),
        ),
        case(
            cel::ZERO_PREFILL_NEEDS_ACTIVATOR,
            "spec.prefill.scaling.minReplicas",
            json!([zero("prefill", true)]),
            json!([zero("prefill", false)]),
        ),
    ]
}

fn shape_cases() -> Vec<Case> {
    vec![
        case(
            cel::SUPERNODE_NOT_TOO_SMALL,
            "spec.decode.supernode.nodes",
            json!([
                {"/spec/decode/supernode/nodes": 1},
                {"/spec/decode/supernode/nodes": 2, "/spec/accelerator/acceleratorsPerNode": 4},
                {"/spec/decode/supernode/nodes": 1, "/spec/accelerator/vendor": "cpu"}
            ]),
            json!([
                {"/spec/decode/supernode/nodes": 1, "/spec/accelerator/acceleratorsPerNode": 4},
                {"/spec/decode/supernode/nodes": 3, "/spec/decode/supernode/acceleratorsPerNode": 2}
            ]),
        ),
        case(
            cel::SUPERNODE_NOT_TOO_LARGE,
            "spec.decode.supernode.nodes",
            json!([
                {"/spec/decode/supernode/nodes": 128},
                {"/spec/decode/supernode": {"nodes": 64, "acceleratorsPerNode": 16}},
                {"/spec/decode/supernode/nodes": 128, "/spec/accelerator/vendor": "cpu"}
            ]),
            json!([
                {"/spec/decode/supernode": {"nodes": 65, "acceleratorsPerNode": 16}},
                {
                    "/spec/decode/supernode/nodes": 65,
                    "/spec/accelerator": {"vendor": "cpu", "acceleratorsPerNode": 16}
                }
            ]),
        ),
        case(
            cel::SPARES_AT_MOST_NODES,
            "spec.decode.supernode.spareNodes",
            json!([{"/spec/decode/supernode/spareNodes": 8}]),
            json!([{"/spec/decode/supernode": {"nodes": 2, "spareNodes": 3}}]),
        ),
        case(
            cel::COMPUTE_DOMAIN_NEEDS_NVIDIA,
            "spec.accelerator.computeDomain",
            json!([
                {"/spec/accelerator/computeDomain": "Required"},
                {"/spec/accelerator": {"vendor": "cpu", "computeDomain": "Off"}}
            ]),
            json!([{"/spec/accelerator": {"vendor": "ascend", "computeDomain": "Auto"}}]),
        ),
        case(
            cel::RDMA_ONE_SOURCE,
            "spec.network.rdma",
            json!([
                {"/spec/network/rdma": {"resourceName": "rdma/hca"}},
                {"/spec/network/rdma": {"resourceClaimTemplateName": "t"}}
            ]),
            json!([
                {"/spec/network/rdma": {}},
                {"/spec/network/rdma": {"resourceName": "r", "resourceClaimTemplateName": "t"}}
            ]),
        ),
        case(
            cel::ROLLOUT_CAN_MOVE,
            "spec.decode.rollout",
            json!([
                {"/spec/decode/rollout": {"maxSurge": 0}},
                {"/spec/decode/rollout": {"maxSurge": 0, "maxUnavailable": 1}}
            ]),
            json!([{"/spec/decode/rollout": {"maxSurge": 0, "maxUnavailable": 0}}]),
        ),
        case(
            cel::PREFER_SURGE_NEEDS_SURGE,
            "spec.prefill.rollout.preferSurge",
            json!([
                {"/spec/prefill/rollout": {"preferSurge": true}},
                {"/spec/prefill/rollout": {"preferSurge": false, "maxSurge": 0}}
            ]),
            json!([{"/spec/prefill/rollout": {"preferSurge": true, "maxSurge": 0}}]),
        ),
        case(
            cel::DRAIN_TIMEOUT,
            "spec.decode.drain.timeoutSeconds",
            json!([{"/spec/decode/drain": {"timeoutSeconds": 7200}}]),
            json!([{"/spec/decode/drain": {"timeoutSeconds": 7201}}]),
        ),
        case(
            cel::PINNED_NEEDS_PLAN,
            "spec.decode.experts.pinnedPlan",
            json!([
                {"/spec/decode/experts": {}},
                {"/spec/decode/experts": {"mode": "Pinned", "pinnedPlan": {"configMapName": "p"}}}
            ]),
            json!([{"/spec/decode/experts": {"mode": "Pinned"}}]),
        ),
    ]
}

fn part_cases() -> Vec<Case> {
    let external = json!({"endpoint": "https://kv:1"});
    let managed = json!({"storage": {"size": "1Ti"}});
    let volume = |v: Value| json!({"/spec/prefill/pod/volumes": [v]});
    let env = |v: Value| json!({"/spec/engine/env": [v]});
    vec![
        case(
            cel::MODEL_URI_SCHEME,
            "spec.model.source.uri",
            json!([
                {"/spec/model/source/uri": "file://../models/tiny"}, {
                    "/spec/model/source/uri": "pvc://claim/path"
                },
                {"/spec/model/source/uri": "oci://r/m:1"}, {"/spec/model/source/uri": "hf://a/b"}, {
                    "/spec/model/source/uri": "s3://b/p"
                }
            ]),
            json!([
                {"/spec/model/source/uri": "/models/m"},
                {"/spec/model/source/uri": "http://x"},
                {"/spec/model/source/uri": "file://"}
            ]),
        ),
        case(
            cel::KV_EXTERNAL_UNION,
            "spec.kvCache.external",
            json!([
                {"/spec/kvCache": {}},
                {"/spec/kvCache": {"mode": "External", "external": external}},
                {"/spec/kvCache": {"mode": "None"}}
            ]),
            json!([{"/spec/kvCache": {"mode": "External"}}, {"/spec/kvCache": {"external": external}}]),
        ),
        case(
            cel::KV_MANAGED_UNION,
            "spec.kvCache.managed",
            json!([{"/spec/kvCache": {"mode": "Managed", "managed": managed}}]),
            json!([
                {"/spec/kvCache": {"mode": "Managed"}},
                {"/spec/kvCache": {"mode": "External", "external": external, "managed": managed}}
            ]),
        ),
        case(
            cel::SIDECAR_NAME,
            "spec.prefill.pod.sidecars[0].name",
            json!([{"/spec/prefill/pod/sidecars": [{"name": "logs", "image": "i"}]}]),
            json!([
                {"/spec/prefill/pod/sidecars": [{"name": "engine", "image": "i"}]},
                {"/spec/prefill/pod/sidecars": [{"name": "agent", "image": "i"}]}
            ]),
        ),
        case(
            cel::ENV_ONE_SOURCE,
            "spec.engine.env[0]",
            json!([env(json!({"name": "A"})), env(json!({"name": "A", "value": "1"}))]),
            json!([env(
                json!({"name": "A", "value": "1", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}})
            )]),
        ),
        case(
            cel::ENV_SOURCE_ONE_REF,
            "spec.engine.env[0].valueFrom",
            json!([env(json!({"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}))]),
            json!([env(json!({"name": "A", "valueFrom": {}}))]),
        ),
        case(
            cel::VOLUME_ONE_SOURCE,
            "spec.prefill.pod.volumes[0]",
            json!([
                volume(json!({"name": "v", "emptyDir": {}})),
                volume(json!({"name": "v", "hostPath": {"path": "/x"}}))
            ]),
            json!([
                volume(json!({"name": "v"})),
                volume(json!({"name": "v", "emptyDir": {}, "configMap": {"name": "c"}}))
            ]),
        ),
    ]
}

pub fn all_cases() -> Vec<Case> {
    pool_cases().into_iter().chain(shape_cases()).chain(part_cases()).collect()
}

/// Rules about changes: what an update may not do.
pub fn transitions() -> Vec<(Kind, Rule, Value, Value, &'static str)> {
    let managed = |storage: Value| {
        with(cluster(), &json!({"/spec/kvCache": {"mode": "Managed", "managed": {"storage": storage}}}))
    };
    let fast = managed(json!({"className": "fast", "size": "1Ti"}));
    vec![
        (
            Kind::Cluster,
            cel::VENDOR_IMMUTABLE,
            cluster(),
            with(cluster(), &json!({"/spec/accelerator/vendor": "cpu"})),
            "spec.accelerator.vendor",
        ),
        (
            Kind::Cluster,
            cel::STORAGE_CLASS_IMMUTABLE,
            fast.clone(),
            managed(json!({"className": "slow", "size": "1Ti"})),
            "spec.kvCache.managed.storage.className",
        ),
        (
            Kind::Cluster,
            cel::STORAGE_CLASS_STAYS,
            fast,
            managed(json!({"size": "1Ti"})),
            "spec.kvCache.managed.storage.className",
        ),
        (
            Kind::Supernode,
            cel::SUPERNODE_IMMUTABLE,
            supernode(),
            with(supernode(), &json!({"/spec/nodes": 9})),
            "spec",
        ),
        (
            Kind::Supernode,
            cel::SUPERNODE_IMMUTABLE,
            supernode(),
            with(supernode(), &json!({"/spec/spareNodes": null})),
            "spec",
        ),
        (
            Kind::Placement,
            cel::PLACEMENT_SHAPE_IMMUTABLE,
            placement(),
            with(placement(), &json!({"/spec/shape/ranks": 32})),
            "spec.shape",
        ),
    ]
}
