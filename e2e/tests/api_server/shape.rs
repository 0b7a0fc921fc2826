//! The definitions: names, columns, subresources, selectable fields.

use std::collections::BTreeSet;
use std::path::Path;

use deepinfer_crds::crd::{Kind, definition};
use deepinfer_crds::names::{GROUP, SCHEMA_REVISION, annotation};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::Api;
use kube::api::{ListParams, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::cases::{cluster, placement, supernode, with};
use crate::kit::{Server, object, server};

/// Largest YAML of one CRD, in bytes.
const YAML_MAX_BYTES: usize = 200 * 1024;

fn pool() -> Value {
    json!({
        "apiVersion": "deepinfer.io/v1alpha1", "kind": "DeepInferPool", "metadata": {"name": "v41-decode"},
        "spec": {
            "clusterName": "v41", "role": "decode", "replicas": 2, "mode": "External", "minReplicas": 1,
            "maxReplicas": 4, "nodesPerReplica": 8, "revision": "v41-1", "kvEpoch": "a81f03", "templateHash": "0f",
            "rollout": {"maxSurge": 1}, "drain": {"timeoutSeconds": 600},
        },
    })
}

/// Makes an object and gives it a status.
async fn make(server: &Server, kind: Kind, namespace: &str, spec: Value, status: Value) {
    let api = server.api(kind, namespace).await;
    let live = api.create(&PostParams::default(), &object(spec)).await.expect("a sound object");
    let name = live.metadata.name.expect("a name");
    let patch = json!({"apiVersion": "deepinfer.io/v1alpha1", "kind": kind.name(), "status": status});
    api.patch_status(&name, &PatchParams::apply("test").force(), &Patch::Apply(patch))
        .await
        .expect("a sound status");
}

/// OP-107, OP-109: every CRD is applied to a real API server, which finds nothing to complain about.
#[tokio::test]
async fn every_definition_is_accepted_established_and_small() {
    let Some(server) = server().await else { return };
    let api: Api<CustomResourceDefinition> = Api::all(server.plane.client());
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crds/yaml");
    for kind in Kind::ALL {
        let path = folder.join(format!("{}.yaml", kind.plural()));
        let yaml = std::fs::read_to_string(&path).expect("a checked-in definition");
        assert!(yaml.len() < YAML_MAX_BYTES, "{}: {} bytes", kind.name(), yaml.len());
        let name = format!("{}.{GROUP}", kind.plural());
        // As a chart, an Argo CD or a person applies it; plain apply keeps a copy in an annotation of limited size.
        let applied = server.kubectl_any(&["apply", "--dry-run=server", "-f", "-"], &yaml).await;
        assert!(applied.good, "{}", applied.err);
        let args = ["apply", "--server-side", "--force-conflicts", "-f", "-"];
        assert!(server.kubectl_any(&args, &yaml).await.good);
        let before = api.get(&name).await.expect("installed").metadata.resource_version;
        assert!(server.kubectl_any(&args, &yaml).await.good);
        let live = api.get(&name).await.expect("installed");
        assert_eq!(live.metadata.resource_version, before, "a second apply changes nothing");
        let conditions = live.status.expect("a status").conditions.unwrap_or_default();
        let state: BTreeSet<(String, String)> = conditions.into_iter().map(|c| (c.type_, c.status)).collect();
        let wanted = ["Established", "NamesAccepted"].map(|kind| (kind.to_owned(), "True".to_owned()));
        assert_eq!(state, BTreeSet::from(wanted), "{name}");
        let annotations = live.metadata.annotations.unwrap_or_default();
        assert_eq!(annotations.get(annotation::SCHEMA_REVISION), Some(&SCHEMA_REVISION.to_string()));
    }
}

/// A schema with its numbers in one form: bounds are floating point for the server.
fn plain(schema: &Value) -> Value {
    match schema {
        Value::Number(n) => json!(n.as_f64()),
        Value::Array(list) => list.iter().map(plain).collect(),
        Value::Object(map) => map.iter().map(|(name, below)| (name.clone(), plain(below))).collect(),
        other => other.clone(),
    }
}

/// OP-094: where a schema keeps unknown fields, differences are not seen.
#[tokio::test]
async fn no_definition_on_the_server_keeps_unknown_fields_or_has_defaults() {
    fn walk(path: &str, schema: &Value) {
        for word in ["x-kubernetes-preserve-unknown-fields", "default", "x-kubernetes-embedded-resource"] {
            assert!(schema.get(word).is_none(), "{path} has {word}");
        }
        for (name, below) in schema["properties"].as_object().into_iter().flatten() {
            walk(&format!("{path}.{name}"), below);
        }
        for inner in ["items", "additionalProperties"] {
            if let Some(below) = schema.get(inner).filter(|s| s.is_object()) {
                walk(&format!("{path}[]"), below);
            }
        }
    }
    let Some(server) = server().await else { return };
    let api: Api<CustomResourceDefinition> = Api::all(server.plane.client());
    for kind in Kind::ALL {
        let live = api.get(&format!("{}.{GROUP}", kind.plural())).await.expect("installed");
        let live = serde_json::to_value(live).expect("JSON");
        let schema = &live["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        walk(kind.name(), schema);
        let same = plain(schema) == plain(definition(kind).schema());
        assert!(same, "the server has changed the schema of {}", kind.name());
    }
}

#[tokio::test]
async fn all_kinds_are_listed_with_their_columns_short_names_and_category() {
    let Some(server) = server().await else { return };
    let ns = server.namespace("columns").await;
    let at = "2026-05-01T10:00:00Z";
    let ready = json!([{"type": "Ready", "status": "False", "reason": "Creating", "message": "", "lastTransitionTime": at}]);
    let status = json!({
        "conditions": ready, "summary": {"prefill": "1/2", "decode": "0/1"}, "revision": "v41-flash-7c9d1e42",
        "url": "http://v41-flash-gateway.serving", "backend": "Builtin", "experts": {"worstImbalance": "1.08"},
    });
    make(server, Kind::Cluster, &ns, cluster(), status).await;
    let status = json!({"replicas": 2, "readyReplicas": 1, "availableReplicas": 1, "updatedReplicas": 2});
    make(server, Kind::Pool, &ns, pool(), status).await;
    let status = json!({
        "phase": "Placing", "ready": "0/8", "domain": "rack-a", "plan": {"hash": "abc"}, "restartCount": 3,
        "leader": "v41-decode-bcdfg-00", "inflight": 7, "lastFailure": {"time": at, "reason": "NodeLost"},
    });
    make(server, Kind::Supernode, &ns, supernode(), status).await;
    let status = json!({
        "imbalance": {"current": "1.31"},
        "applied": {"hash": "def", "generation": 3, "state": "Staging", "layersFlipped": "12/40"},
    });
    make(server, Kind::Placement, &ns, placement(), status).await;
    let wanted = [
        (
            "dic",
            "NAME READY PREFILL DECODE REASON REVISION AGE URL BACKEND IMBALANCE",
            "v41-flash False 1/2 0/1 Creating v41-flash-7c9d1e42 AGE http://v41-flash-gateway.serving Builtin 1.08",
        ),
        (
            "dip",
            "NAME ROLE DESIRED READY AVAILABLE UPDATED SCALING AGE",
            "v41-decode decode 2 1 1 2 External AGE",
        ),
        (
            "sn",
            "NAME PHASE NODES DOMAIN REVISION PLAN RESTARTS AGE LEADER INFLIGHT REASON",
            "v41-decode-bcdfg Placing 0/8 rack-a v41-1 abc 3 AGE v41-decode-bcdfg-00 7 NodeLost",
        ),
        (
            "xp",
            "NAME MODE HASH IMBALANCE STATE LAYERS AGE",
            "v41-decode-bcdfg Auto def 1.31 Staging 12/40 AGE",
        ),
    ];
    for (short, head, row) in wanted {
        let text = server.kubectl(&["get", short, "-n", &ns, "-o", "wide"]).await;
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[0].join(" "), head, "{text}");
        let age = lines[0].iter().position(|c| *c == "AGE").expect("an age");
        let mut cells = lines[1].clone();
        cells[age] = "AGE";
        assert_eq!(cells.join(" "), row, "{text}");
    }
    let listed = server.kubectl(&["get", "deepinfer", "-n", &ns, "-o", "name"]).await;
    let kinds: BTreeSet<&str> = listed.lines().filter_map(|line| line.split('.').next()).collect();
    assert_eq!(kinds, BTreeSet::from(["deepinfercluster", "deepinferpool", "supernode", "expertplacement"]));
}

#[tokio::test]
async fn spec_and_status_are_written_apart() {
    let Some(server) = server().await else { return };
    let ns = server.namespace("status").await;
    let api = server.api(Kind::Cluster, &ns).await;
    let first = with(cluster(), &json!({"/status": {"phase": "Serving"}}));
    let made = api.create(&PostParams::default(), &object(first)).await.expect("made");
    assert!(made.data.get("status").is_none(), "a status does not come with the spec: {:?}", made.data);
    let both = json!({"spec": {"model": {"name": "other"}}, "status": {"phase": "Serving"}});
    let name = made.metadata.name.clone().expect("a name");
    let seen =
        api.patch_status(&name, &PatchParams::default(), &Patch::Merge(&both)).await.expect("a status");
    assert_eq!(seen.data["status"]["phase"], "Serving");
    assert_eq!(seen.data["spec"]["model"]["name"], "m", "a spec does not come with the status");
    assert_eq!(seen.metadata.generation, made.metadata.generation);
    let seen = api.patch(&name, &PatchParams::default(), &Patch::Merge(&both)).await.expect("a spec");
    assert_eq!(seen.metadata.generation, Some(2), "a change of the spec is a generation");
}

/// OP-067: an autoscaler needs replicas and a selector at the scale subresource.
#[tokio::test]
async fn a_pool_is_scaled_through_its_scale_subresource() {
    let Some(server) = server().await else { return };
    let ns = server.namespace("scale").await;
    let selector = "deepinfer.io/pool=v41-decode,deepinfer.io/lead=true";
    make(server, Kind::Pool, &ns, pool(), json!({"replicas": 2, "selector": selector})).await;
    let path = format!("/apis/{GROUP}/v1alpha1/namespaces/{ns}/deepinferpools/v41-decode/scale");
    let raw = async || -> Value {
        serde_json::from_str(&server.kubectl(&["get", "--raw", &path]).await).expect("a Scale")
    };
    let scale = raw().await;
    assert_eq!((&scale["kind"], &scale["apiVersion"]), (&json!("Scale"), &json!("autoscaling/v1")));
    assert_eq!((&scale["spec"]["replicas"], &scale["status"]["replicas"]), (&json!(2), &json!(2)));
    assert_eq!(scale["status"]["selector"], selector);
    server.kubectl(&["scale", "dip", "v41-decode", "-n", &ns, "--replicas=3"]).await;
    assert_eq!(raw().await["spec"]["replicas"], 3);
    // A pool whose replicas are not set yet can be scaled too.
    let bare = with(pool(), &json!({"/spec/replicas": null, "/metadata/name": "v41-prefill"}));
    make(server, Kind::Pool, &ns, bare, json!({"replicas": 0, "selector": selector})).await;
    server.kubectl(&["scale", "dip", "v41-prefill", "-n", &ns, "--replicas=0"]).await;
}

#[tokio::test]
async fn children_are_found_by_cluster_pool_role_and_phase() {
    let Some(server) = server().await else { return };
    let ns = server.namespace("fields").await;
    make(server, Kind::Supernode, &ns, supernode(), json!({"phase": "Serving"})).await;
    let other =
        json!({"/metadata/name": "other", "/spec/clusterName": "v42", "/spec/poolName": "v42-decode"});
    make(server, Kind::Supernode, &ns, with(supernode(), &other), json!({"phase": "Failed"})).await;
    make(server, Kind::Pool, &ns, pool(), json!({})).await;
    let cases = [
        (Kind::Supernode, "spec.clusterName=v41", 1),
        (Kind::Supernode, "spec.poolName=v42-decode", 1),
        (Kind::Supernode, "status.phase=Failed", 1),
        (Kind::Supernode, "spec.clusterName!=v43", 2),
        (Kind::Supernode, "spec.clusterName=v41,status.phase=Failed", 0),
        (Kind::Pool, "spec.clusterName=v41,spec.role=decode", 1),
        (Kind::Pool, "spec.role=prefill", 0),
    ];
    for (kind, selector, wanted) in cases {
        let found = server.api(kind, &ns).await.list(&ListParams::default().fields(selector)).await;
        assert_eq!(found.expect("selectable").items.len(), wanted, "{selector}");
    }
    let text = server
        .kubectl(&["get", "sn", "-n", &ns, "--field-selector", "spec.clusterName=v41", "-o", "name"])
        .await;
    assert_eq!(text.trim(), "supernode.deepinfer.io/v41-decode-bcdfg");
}

#[tokio::test]
async fn every_field_of_a_status_is_kept_by_the_server() {
    let Some(server) = server().await else { return };
    let ns = server.namespace("whole").await;
    let at = "2026-05-01T10:00:00Z";
    let status = json!({
        "phase": "Placing", "fabric": "ok", "inflight": 1, "restartCount": 2, "ready": "1/8", "leader": "p",
        "nodes": [{"index": 0, "pod": "p", "uid": "u", "node": "n", "state": "Serving", "deviceHealth": "ok"}],
        "placement": {
            "domain": "rack-a", "attempts": 3, "retryAt": at, "schedulerMessage": "0/9", "queuePosition": 1,
            "candidates": [{"domain": "rack-a", "nodes": 9, "free": 8, "blockedBy": [{"reason": "Cordoned", "count": 1}]}],
        },
        "lastFailure": {"time": at, "pod": "p", "node": "n", "reason": "NodeLost", "exitCode": 1, "message": "m"},
    });
    make(server, Kind::Supernode, &ns, supernode(), status.clone()).await;
    let live = server.api(Kind::Supernode, &ns).await.get("v41-decode-bcdfg").await.expect("there");
    assert_eq!(live.data["status"], status);
    let status = json!({"quarantine": [
        {"scope": "Node", "name": "n", "reason": "DeviceUnhealthy", "failures": 3, "until": at},
        {"scope": "Domain", "name": "n", "reason": "FabricFault", "failures": 3, "until": at},
    ]});
    make(server, Kind::Pool, &ns, pool(), status.clone()).await;
    let live = server.api(Kind::Pool, &ns).await.get("v41-decode").await.expect("there");
    assert_eq!(live.data["status"], status);
}
