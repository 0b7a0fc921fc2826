//! The objects of a node on the API server: Node, Lease, status.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::{Node as NodeObject, NodeSpec as NodeObjectSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta, OwnerReference};
use k8s_openapi::jiff::Timestamp;
use kube::api::{DeleteParams, Patch, PatchParams, PostParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};

use super::node::Node;
use super::shared::Shared;

/// Where leases of nodes are.
const LEASES: &str = "kube-node-lease";

/// The version that the nodes say they have.
const VERSION: &str = "v1.36.3";

/// Creates the Node object, unless it is there from before.
pub(crate) async fn register(node: &Node, shared: &Shared) -> kube::Result<()> {
    let api = Api::<NodeObject>::all(shared.client.clone());
    let mut labels = BTreeMap::from([
        ("kubernetes.io/hostname".to_owned(), node.spec.name.clone()),
        ("kubernetes.io/os".to_owned(), "linux".to_owned()),
        ("kubernetes.io/arch".to_owned(), "amd64".to_owned()),
    ]);
    labels.extend(node.spec.labels.clone());
    let taints = (!node.spec.taints.is_empty()).then(|| node.spec.taints.clone());
    let object = NodeObject {
        metadata: ObjectMeta {
            name: Some(node.spec.name.clone()),
            labels: Some(labels),
            ..ObjectMeta::default()
        },
        spec: Some(NodeObjectSpec { taints, ..NodeObjectSpec::default() }),
        status: None,
    };
    match api.create(&PostParams::default(), &object).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        Err(error) => Err(error),
    }
}

/// Says that the node lives, by its lease.
pub(crate) async fn renew_lease(node: &Node, shared: &Shared) -> kube::Result<()> {
    let api = Api::<Lease>::namespaced(shared.client.clone(), LEASES);
    let now = MicroTime(Timestamp::now());
    let name = &node.spec.name;
    let spec = LeaseSpec {
        holder_identity: Some(name.clone()),
        lease_duration_seconds: Some(40),
        renew_time: Some(now),
        ..LeaseSpec::default()
    };
    let renewal = json!({ "spec": spec });
    match api.patch(name, &PatchParams::default(), &Patch::Merge(&renewal)).await {
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        other => return other.map(drop),
    }
    let owner = Api::<NodeObject>::all(shared.client.clone()).get(name).await?;
    let owner = OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: name.clone(),
        uid: owner.uid().unwrap_or_default(),
        ..OwnerReference::default()
    };
    let metadata =
        ObjectMeta { name: Some(name.clone()), owner_references: Some(vec![owner]), ..ObjectMeta::default() };
    api.create(&PostParams::default(), &Lease { metadata, spec: Some(spec) }).await.map(drop)
}

/// Writes the status of a node: ready, with what it offers now.
pub(crate) async fn post_status(node: &Node, shared: &Shared) -> kube::Result<()> {
    let api = Api::<NodeObject>::all(shared.client.clone());
    let old = api.get_status(&node.spec.name).await?;
    let body = json!({ "status": status(node, shared.port, &old, Timestamp::now()) });
    api.patch_status(&node.spec.name, &PatchParams::default(), &Patch::Strategic(&body)).await.map(drop)
}

fn status(node: &Node, port: u16, old: &NodeObject, now: Timestamp) -> Value {
    let allocatable: BTreeMap<_, _> = {
        let devices = node.devices();
        let offer = node.spec.allocatable.iter();
        offer
            .map(|(name, all)| (name, devices.healthy(name).map_or_else(|| all.clone(), |n| n.to_string())))
            .collect()
    };
    let boot = *node.boot.lock().unwrap_or_else(PoisonError::into_inner);
    json!({
        "capacity": node.spec.allocatable,
        "allocatable": allocatable,
        "conditions": conditions(old, now),
        "addresses": [
            { "type": "InternalIP", "address": "127.0.0.1" },
            { "type": "Hostname", "address": node.spec.name },
        ],
        "daemonEndpoints": { "kubeletEndpoint": { "Port": port } },
        "nodeInfo": {
            "architecture": "amd64",
            "bootID": format!("{}-{boot}", node.spec.name),
            "containerRuntimeVersion": "process://1",
            "kernelVersion": "processes",
            "kubeProxyVersion": "",
            "kubeletVersion": VERSION,
            "machineID": node.spec.name,
            "operatingSystem": "linux",
            "osImage": "processes of this machine",
            "systemUUID": node.spec.name,
        },
    })
}

fn conditions(old: &NodeObject, now: Timestamp) -> Vec<Value> {
    let known = old.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let mut conditions = Vec::new();
    for (kind, status, reason) in [
        ("MemoryPressure", "False", "KubeletHasSufficientMemory"),
        ("DiskPressure", "False", "KubeletHasNoDiskPressure"),
        ("PIDPressure", "False", "KubeletHasSufficientPID"),
        ("Ready", "True", "KubeletReady"),
    ] {
        let same = known.clone().find(|c| c.type_ == kind && c.status == status);
        let since = same.and_then(|c| c.last_transition_time.as_ref()).map_or(now, |time| time.0);
        conditions.push(json!({
            "type": kind, "status": status, "reason": reason, "message": "process node",
            "lastHeartbeatTime": format!("{now:.0}"), "lastTransitionTime": format!("{since:.0}"),
        }));
    }
    conditions
}

/// Removes a node from the API server, with its lease and the pods that are bound to it.
pub(crate) async fn unregister(client: &Client, name: &str) -> kube::Result<()> {
    use k8s_openapi::api::core::v1::Pod;
    let now = DeleteParams::default().grace_period(0);
    let bound = kube::api::ListParams::default().fields(&format!("spec.nodeName={name}"));
    for pod in Api::<Pod>::all(client.clone()).list(&bound).await? {
        let pods = Api::<Pod>::namespaced(client.clone(), &pod.namespace().unwrap_or_default());
        absent(pods.delete(&pod.name_any(), &now).await)?;
    }
    absent(Api::<NodeObject>::all(client.clone()).delete(name, &now).await)?;
    absent(Api::<Lease>::namespaced(client.clone(), LEASES).delete(name, &now).await)
}

fn absent<T>(result: kube::Result<T>) -> kube::Result<()> {
    match result {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        other => other.map(drop),
    }
}
