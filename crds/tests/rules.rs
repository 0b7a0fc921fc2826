//! Every CEL rule accepts what it should and refuses the rest.

use std::collections::BTreeSet;

use deepinfer_crds::cel::{self, Rule};
use deepinfer_crds::crd::{Kind, definition};
use serde_json::{Value, json};

/// A cluster that breaks no rule.
fn cluster() -> Value {
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

fn supernode() -> Value {
    json!({
        "apiVersion": "deepinfer.io/v1alpha1", "kind": "Supernode", "metadata": {"name": "v41-decode-bcdfg"},
        "spec": {
            "clusterName": "v41", "poolName": "v41-decode", "role": "decode", "revision": "v41-1",
            "kvEpoch": "a81f03",
            "nodes": 8, "acceleratorsPerNode": 8, "backend": "Builtin", "spareNodes": 1,
        }
    })
}

fn placement() -> Value {
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
fn with(mut object: Value, changes: &Value) -> Value {
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
struct Case {
    rule: Rule,
    accepts: Vec<Value>,
    refuses: Vec<Value>,
    blames: &'static str,
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
            json!([
                {"/spec/decode/scaling/planner/prefillPerDecode": {"min": 1.5, "max": 2.0}},
                {"/spec/decode/scaling/planner/prefillPerDecode": {"min": 1}}
            ]),
            json!([{"/spec/decode/scaling/planner/prefillPerDecode": {"min": 2.5, "max": 2.0}}]),
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

fn all_cases() -> Vec<Case> {
    pool_cases().into_iter().chain(shape_cases()).chain(part_cases()).collect()
}

#[test]
fn a_sound_cluster_breaks_no_rule() {
    assert_eq!(cel::validate(&cluster(), None), []);
}

#[test]
fn each_rule_accepts_and_refuses_and_blames_its_field() {
    for case in all_cases() {
        let of_rule = |changes: &Value| {
            let found = cel::validate(&with(cluster(), changes), None);
            found.into_iter().filter(|v| v.rule == case.rule.rule && !v.unevaluated).collect::<Vec<_>>()
        };
        for changes in &case.accepts {
            let found = of_rule(changes)
                .into_iter()
                .filter(|v| v.path.to_string() == case.blames)
                .collect::<Vec<_>>();
            assert!(found.is_empty(), "{changes}: {found:?}");
        }
        for changes in &case.refuses {
            let found = of_rule(changes);
            let blamed: Vec<String> = found.iter().map(|v| v.path.to_string()).collect();
            assert_eq!(blamed, [case.blames], "{changes} against {}", case.rule.rule);
            assert_eq!(found[0].message, case.rule.message);
        }
    }
}

/// Rules about changes: what an update may not do.
fn transitions() -> Vec<(Kind, Rule, Value, Value, &'static str)> {
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

#[test]
fn rules_about_changes_speak_only_of_updates() {
    for (kind, rule, old, new, blamed) in transitions() {
        assert_eq!(cel::validate_kind(kind, &new, None), [], "at creation there is nothing to compare with");
        assert_eq!(cel::validate_kind(kind, &old, Some(&old)), [], "nothing changed");
        let found = cel::validate_kind(kind, &new, Some(&old));
        let ours: Vec<String> = found
            .iter()
            .filter(|v| v.rule == rule.rule && v.message == rule.message)
            .map(|v| v.path.to_string())
            .collect();
        assert_eq!(ours, [blamed], "{found:?}");
    }
}

#[test]
fn everything_else_of_a_spec_can_be_changed() {
    let other = json!({
        "/spec/accelerator/acceleratorsPerNode": 4, "/spec/engine/image": "registry.example/deepinfer:2",
        "/spec/model/name": "n", "/spec/prefill/replicas": 3, "/spec/decode/supernode/nodes": 16,
        "/spec/kvCache": {"mode": "External", "external": {"endpoint": "https://kv:1"}},
    });
    assert_eq!(cel::validate(&with(cluster(), &other), Some(&cluster())), []);
    let drained = json!({
        "requestedAt": "2026-05-01T10:00:00Z", "deadline": "2026-05-01T10:10:00Z",
        "reason": "ScaleDown", "handoff": "Peer"
    });
    let draining =
        with(supernode(), &json!({"/spec/drain": drained, "/spec/rankMap": [{"rank": 0, "pod": "p"}]}));
    assert_eq!(cel::validate_kind(Kind::Supernode, &draining, Some(&supernode())), []);
}

#[test]
fn no_rule_of_a_crd_is_untested() {
    fn rules(schema: &Value, into: &mut BTreeSet<(String, String)>) {
        for entry in schema["x-kubernetes-validations"].as_array().into_iter().flatten() {
            into.insert((entry["rule"].as_str().unwrap().into(), entry["message"].as_str().unwrap().into()));
        }
        let below = schema["properties"].as_object().into_iter().flat_map(|p| p.values());
        below
            .chain(["items", "additionalProperties"].iter().filter_map(|k| schema.get(*k)))
            .for_each(|s| rules(s, into));
    }
    let mut in_schemas = BTreeSet::new();
    Kind::ALL.iter().for_each(|k| rules(definition(*k).schema(), &mut in_schemas));
    let tested = all_cases().into_iter().map(|c| c.rule).chain(transitions().into_iter().map(|t| t.1));
    let tested: BTreeSet<(String, String)> = tested.map(|r| (r.rule.into(), r.message.into())).collect();
    let untested: Vec<_> = in_schemas.difference(&tested).collect();
    assert!(untested.is_empty(), "{untested:?}");
    let unused: Vec<_> = tested.difference(&in_schemas).collect();
    assert!(unused.is_empty(), "in no schema: {unused:?}");
}

#[test]
fn a_rule_that_meets_a_wrong_type_says_so_instead_of_passing() {
    let broken = with(cluster(), &json!({"/spec/decode/supernode/nodes": "eight"}));
    let found = cel::validate(&broken, None);
    assert!(found.iter().any(|v| v.unevaluated), "{found:?}");
}
