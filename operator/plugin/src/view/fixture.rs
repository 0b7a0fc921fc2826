//! A cluster in trouble, for the tests of what is printed: one supernode serves, one waits for nodes, a prefill worker
//! crashes.

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::View;

/// "Now" of the fixture.
const NOW: &str = "2026-05-01T10:20:00Z";

/// The view.
pub fn view() -> View {
    let now: Timestamp = NOW.parse().expect("a time");
    View {
        now: now.as_second(),
        cluster: from(cluster()),
        pools: vec![from(pool("decode", 2, 1)), from(pool("prefill", 1, 0))],
        supernodes: vec![from(serving()), from(placing())],
        placements: Vec::new(),
        pods: vec![from(crashing()), from(pending())],
    }
}

fn from<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("an object of the fixture")
}

fn condition(kind: &str, status: &str, reason: &str, message: &str) -> Value {
    json!({
        "type": kind, "status": status, "reason": reason, "message": message,
        "lastTransitionTime": "2026-05-01T10:00:00Z", "observedGeneration": 2,
    })
}

fn cluster() -> Value {
    json!({
        "apiVersion": "deepinfer.io/v1alpha1", "kind": "DeepInferCluster",
        "metadata": {"name": "v41", "generation": 2, "creationTimestamp": "2026-05-01T10:00:00Z"},
        "spec": {
            "accelerator": {"vendor": "nvidia"}, "engine": {"image": "i"},
            "model": {"name": "m", "source": {"uri": "file:///m"}},
            "prefill": {"replicas": 1}, "decode": {"replicas": 2, "supernode": {"nodes": 8}},
        },
        "status": {
            "observedGeneration": 2, "phase": "Creating", "revision": "v41-7c9d1e42",
            "url": "http://v41-gateway.serving",
            "summary": {"prefill": "0/1", "decode": "1/2", "gateway": "2/2"},
            "waiting": [{
                "object": "Supernode/v41-decode-x4k2b", "reason": "NotEnoughFree", "since": "2026-05-01T10:05:00Z",
                "message": "rack-b has 5 of 8 nodes free",
            }],
            "conditions": [
                condition("Ready", "False", "CapacityBelowDesired", "1 of 2 supernodes serves"),
                condition("Available", "False", "BelowMinimum", "no prefill worker is ready"),
                condition("Stalled", "False", "Progressing", ""),
            ],
        },
    })
}

fn pool(role: &str, replicas: u32, ready: u32) -> Value {
    json!({
        "apiVersion": "deepinfer.io/v1alpha1", "kind": "DeepInferPool",
        "metadata": {"name": format!("v41-{role}"), "creationTimestamp": "2026-05-01T10:00:00Z"},
        "spec": {
            "clusterName": "v41", "role": role, "replicas": replicas, "mode": "Fixed", "minReplicas": replicas,
            "maxReplicas": replicas, "nodesPerReplica": 8, "revision": "v41-7c9d1e42", "kvEpoch": "a81f03",
            "templateHash": "0f", "rollout": {}, "drain": {},
        },
        "status": {
            "readyReplicas": ready, "availableReplicas": ready, "updatedReplicas": replicas,
            "quarantine": if role == "decode" { json!([{
                "scope": "Node", "name": "node-17", "reason": "DeviceUnhealthy", "failures": 3,
                "until": "2026-05-01T16:00:00Z",
            }]) } else { json!([]) },
        },
    })
}

fn supernode(name: &str, status: Value) -> Value {
    json!({
        "apiVersion": "deepinfer.io/v1alpha1", "kind": "Supernode",
        "metadata": {"name": name, "creationTimestamp": "2026-05-01T10:05:00Z"},
        "spec": {
            "clusterName": "v41", "poolName": "v41-decode", "role": "decode", "revision": "v41-7c9d1e42",
            "kvEpoch": "a81f03", "nodes": 8, "acceleratorsPerNode": 8, "backend": "Builtin",
        },
        "status": status,
    })
}

fn serving() -> Value {
    supernode(
        "v41-decode-bcdfg",
        json!({"phase": "Serving", "domain": "rack-a", "ready": "8/8", "inflight": 12, "restartCount": 0, "fabric": "ok"}),
    )
}

fn placing() -> Value {
    supernode(
        "v41-decode-x4k2b",
        json!({
            "phase": "Placing", "ready": "0/8", "restartCount": 1,
            "lastFailure": {
                "time": "2026-05-01T10:04:00Z", "pod": "v41-decode-99999-03", "node": "node-17", "reason": "NodeLost",
                "message": "NotReady for 30 s",
            },
            "placement": {
                "attempts": 3, "retryAt": "2026-05-01T10:20:40Z",
                "candidates": [
                    {"domain": "rack-b", "nodes": 9, "free": 5, "blockedBy": [
                        {"reason": "Cordoned", "count": 1}, {"reason": "NotEnoughFree", "count": 3}]},
                    {"domain": "rack-a", "nodes": 9, "free": 1, "blockedBy": [{"reason": "NotEnoughFree", "count": 8}]},
                ],
            },
        }),
    )
}

fn crashing() -> Value {
    json!({
        "metadata": {"name": "v41-prefill-a81f03-1", "labels": {"deepinfer.io/cluster": "v41"}},
        "spec": {"nodeName": "node-3", "containers": []},
        "status": {"phase": "Running", "containerStatuses": [{
            "name": "engine", "image": "i", "imageID": "", "ready": false, "restartCount": 4,
            "state": {"waiting": {"reason": "CrashLoopBackOff"}},
            "lastState": {"terminated": {"exitCode": 2, "message": "error: --checkpoint /m: no config.json"}},
        }]},
    })
}

fn pending() -> Value {
    json!({
        "metadata": {"name": "v41-decode-x4k2b-00", "labels": {
            "deepinfer.io/cluster": "v41", "deepinfer.io/supernode": "v41-decode-x4k2b"}},
        "spec": {"containers": []},
        "status": {"phase": "Pending", "conditions": [{
            "type": "PodScheduled", "status": "False", "reason": "SchedulingGated",
            "message": "Scheduling is blocked due to non-empty scheduling gates"}]},
    })
}
