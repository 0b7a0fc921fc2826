//! A cluster as an operator would have left it.

use deepinfer_controlplane::ControlPlane;
use serde_json::{Value, json};

use super::kit::make;

const AT: &str = "2026-05-01T10:00:00Z";

fn meta(name: &str) -> Value {
    json!({"name": name, "labels": {"deepinfer.io/cluster": "v41", "app.kubernetes.io/name": "deepinfer"}})
}

pub fn cluster() -> Value {
    json!({
        "apiVersion": "deepinfer.io/v1alpha1", "kind": "DeepInferCluster", "metadata": {"name": "v41"},
        "spec": {
            "accelerator": {"vendor": "nvidia"},
            "engine": {"image": "i", "env": [{"name": "A", "value": "hunter2"}], "config": {"k": "hunter2"}},
            "model": {"name": "m", "source": {"uri": "file:///m"}},
            "prefill": {"replicas": 1}, "decode": {"replicas": 2, "supernode": {"nodes": 8}},
        },
        "status": {
            "observedGeneration": 1, "phase": "Creating", "revision": "v41-7c9d1e42",
            "summary": {"prefill": "0/1", "decode": "1/2", "gateway": "2/2"},
            "waiting": [{"object": "Supernode/v41-decode-x4k2b", "reason": "NotEnoughFree", "since": AT,
                "message": "rack-b has 5 of 8 nodes free"}],
            "conditions": [{"type": "Ready", "status": "False", "reason": "CapacityBelowDesired",
                "message": "1 of 2 supernodes serves", "lastTransitionTime": AT}],
        },
    })
}

pub fn supernode(name: &str, status: Value) -> Value {
    let mut metadata = meta(name);
    metadata["finalizers"] = json!(["deepinfer.io/drain"]);
    json!({
        "apiVersion": "deepinfer.io/v1alpha1", "kind": "Supernode", "metadata": metadata,
        "spec": {
            "clusterName": "v41", "poolName": "v41-decode", "role": "decode", "revision": "v41-7c9d1e42",
            "kvEpoch": "a81f03", "nodes": 8, "acceleratorsPerNode": 8, "backend": "Builtin",
        },
        "status": status,
    })
}

pub fn placing() -> Value {
    let candidates = json!([{
        "domain": "rack-b", "nodes": 9, "free": 5, "blockedBy": [{"reason": "Cordoned", "count": 4}],
    }]);
    supernode("v41-decode-x4k2b", json!({"phase": "Placing", "placement": {"candidates": candidates}}))
}

/// Everything, in a namespace.
pub async fn all(plane: &ControlPlane, namespace: &str) {
    make(plane, namespace, cluster()).await;
    make(plane, namespace, pool()).await;
    let serving = json!({"phase": "Serving", "domain": "rack-a", "ready": "8/8", "inflight": 12});
    make(plane, namespace, supernode("v41-decode-bcdfg", serving)).await;
    make(plane, namespace, placing()).await;
    make(plane, namespace, placement()).await;
    make(plane, namespace, pod()).await;
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": meta("v41-agent-1"), "stringData": {"1": "hunter2"},
    });
    make(plane, namespace, secret).await;
}

fn pool() -> Value {
    json!({
        "apiVersion": "deepinfer.io/v1alpha1", "kind": "DeepInferPool", "metadata": meta("v41-decode"),
        "spec": {
            "clusterName": "v41", "role": "decode", "replicas": 2, "mode": "Fixed", "minReplicas": 2,
            "maxReplicas": 2, "nodesPerReplica": 8, "revision": "v41-7c9d1e42", "kvEpoch": "a81f03",
            "templateHash": "0f", "rollout": {}, "drain": {},
        },
        "status": {"readyReplicas": 1, "quarantine": [
            {"scope": "Node", "name": "node-17", "reason": "DeviceUnhealthy", "failures": 3, "until": AT}]},
    })
}

fn placement() -> Value {
    json!({
        "apiVersion": "deepinfer.io/v1alpha1", "kind": "ExpertPlacement", "metadata": meta("v41-decode-bcdfg"),
        "spec": {
            "clusterName": "v41", "poolName": "v41-decode", "supernodeName": "v41-decode-bcdfg", "mode": "Auto",
            "shape": {"layers": 40, "experts": 384, "slotsPerRank": 7, "ranks": 64},
        },
        "status": {
            "imbalance": {"current": "1.31"}, "hot": [{"layer": 7, "expert": 12, "share": "0.08"}],
            "applied": {"hash": "0123456789abcdef", "generation": 3, "state": "Staging"},
        },
    })
}

fn pod() -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": meta("v41-prefill-a81f03-1"),
        "spec": {"schedulerName": "nobody", "containers": [{
            "name": "engine", "image": "i", "env": [{"name": "A", "value": "hunter2"}], "args": ["--token=hunter2"]}]},
    })
}
