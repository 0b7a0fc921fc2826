//! What is kept of pods and nodes: there are many, and most of what they say is nobody's business here.

use std::collections::BTreeMap;
use std::sync::Arc;

use deepinfer_crds::Quantity;
use deepinfer_crds::names::{ROUTABLE_GATE, label};
use deepinfer_planner::{NodeFacts, Object, has_ended};
use k8s_openapi::api::core::v1::{
    ContainerState, ContainerStateRunning, ContainerStateTerminated, ContainerStatus, Node, Pod,
    PodResourceClaim, PodSpec, PodStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::store::Cached;

/// Accelerators and other counted devices, by resource.
pub type Devices = BTreeMap<String, i64>;

/// What a pod of others takes from its node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodUse {
    /// The node that it is bound to.
    pub node: String,
    /// What it asks for.
    pub used: Devices,
}

/// Prefix of the labels and annotations that plans look at.
const OURS: &str = "deepinfer.io/";
/// Conditions of pods that plans look at.
const CONDITIONS: [&str; 3] = ["PodScheduled", "Ready", ROUTABLE_GATE];

/// A pod reduced to what plans look at; `None` if it is nobody's business. Two versions that are the same afterwards are
/// the same to every plan, so the version is left out, too.
pub fn reduce_pod(pod: Pod) -> Option<Cached> {
    let ours = pod.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(label::CLUSTER));
    if !ours {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).filter(|_| !has_ended(&pod))?;
        let used = requests(&pod);
        return (!used.is_empty()).then(|| Cached::Use(Arc::new(PodUse { node, used })));
    }
    let used = Arc::new(requests(&pod));
    let pod = Pod {
        metadata: slim_meta(pod.metadata),
        spec: pod.spec.map(slim_spec),
        status: pod.status.map(slim_status),
    };
    Some(Cached::Pod(Arc::new(Object::Pod(pod)), used))
}

fn slim_meta(meta: ObjectMeta) -> ObjectMeta {
    let ours = |words: Option<BTreeMap<String, String>>| {
        let ours: BTreeMap<_, _> =
            words.into_iter().flatten().filter(|(key, _)| key.starts_with(OURS)).collect();
        (!ours.is_empty()).then_some(ours)
    };
    ObjectMeta {
        name: meta.name,
        namespace: meta.namespace,
        uid: meta.uid,
        creation_timestamp: meta.creation_timestamp,
        deletion_timestamp: meta.deletion_timestamp,
        owner_references: meta.owner_references,
        labels: ours(meta.labels),
        annotations: ours(meta.annotations),
        ..ObjectMeta::default()
    }
}

fn slim_spec(spec: PodSpec) -> PodSpec {
    let claim =
        |claim: PodResourceClaim| PodResourceClaim { name: claim.name, ..PodResourceClaim::default() };
    PodSpec {
        node_name: spec.node_name,
        scheduling_gates: spec.scheduling_gates,
        readiness_gates: spec.readiness_gates,
        resource_claims: spec.resource_claims.map(|claims| claims.into_iter().map(claim).collect()),
        ..PodSpec::default()
    }
}

fn slim_status(status: PodStatus) -> PodStatus {
    let containers = |list: Option<Vec<ContainerStatus>>| {
        list.map(|list| {
            let mut slim: Vec<_> = list.into_iter().map(slim_container).collect();
            slim.shrink_to_fit();
            slim
        })
    };
    let conditions = status.conditions.map(|mut conditions| {
        conditions.retain(|condition| CONDITIONS.contains(&condition.type_.as_str()));
        for condition in &mut conditions {
            condition.last_probe_time = None;
        }
        conditions.shrink_to_fit();
        conditions
    });
    PodStatus {
        phase: status.phase,
        reason: status.reason,
        message: status.message,
        pod_ip: status.pod_ip,
        conditions,
        init_container_statuses: containers(status.init_container_statuses),
        container_statuses: containers(status.container_statuses),
        ..PodStatus::default()
    }
}

fn slim_container(status: ContainerStatus) -> ContainerStatus {
    let state = status.state.map(|state| ContainerState {
        waiting: state.waiting,
        running: state.running.map(|running| ContainerStateRunning { started_at: running.started_at }),
        terminated: state.terminated.map(|ended| ContainerStateTerminated {
            exit_code: ended.exit_code,
            reason: ended.reason,
            message: ended.message,
            ..ContainerStateTerminated::default()
        }),
    });
    ContainerStatus {
        name: status.name,
        state,
        allocated_resources_status: status.allocated_resources_status,
        ..ContainerStatus::default()
    }
}

/// Devices that all containers of a pod ask for.
pub fn requests(pod: &Pod) -> Devices {
    let mut total = BTreeMap::new();
    let Some(spec) = &pod.spec else { return total };
    for container in &spec.containers {
        let Some(resources) = &container.resources else { continue };
        // For extended resources the API server sets the requests from the limits.
        let asked = resources.requests.iter().chain(&resources.limits).flatten();
        let mut own: BTreeMap<&String, i64> = BTreeMap::new();
        for (resource, quantity) in asked.filter(|(resource, _)| is_device(resource)) {
            own.entry(resource).or_insert_with(|| count(quantity));
        }
        for (resource, count) in own {
            *total.entry(resource.clone()).or_insert(0) += count;
        }
    }
    total.retain(|_, count| *count > 0);
    total
}

/// Whether a resource is a counted device: an extended resource has the name of a vendor before a slash.
fn is_device(resource: &str) -> bool {
    resource.split_once('/').is_some_and(|(vendor, _)| !vendor.ends_with("kubernetes.io"))
}

/// The whole number of a quantity of devices; they have no fractions.
fn count(quantity: &Quantity) -> i64 {
    let text = quantity.0.trim();
    let (digits, factor) = match text.strip_suffix('k') {
        Some(digits) => (digits, 1000),
        None => (text, 1),
    };
    digits.parse::<i64>().map_or(0, |number| number.saturating_mul(factor))
}

/// A node reduced to what placement looks at: no images, no addresses, no heartbeat times.
pub fn reduce_node(node: Node) -> NodeFacts {
    let status = node.status.unwrap_or_default();
    let spec = node.spec.unwrap_or_default();
    let ready = status.conditions.iter().flatten().find(|condition| condition.type_ == "Ready");
    let since = ready.and_then(|ready| ready.last_transition_time.as_ref());
    NodeFacts {
        name: node.metadata.name.unwrap_or_default(),
        labels: node.metadata.labels.unwrap_or_default().into_iter().collect(),
        taints: spec.taints.unwrap_or_default(),
        ready: ready.is_some_and(|ready| ready.status == "True"),
        ready_since: since.map_or(0, |time| time.0.as_second()),
        unschedulable: spec.unschedulable == Some(true),
        deleted: node.metadata.deletion_timestamp.is_some(),
        allocatable: status
            .allocatable
            .unwrap_or_default()
            .into_iter()
            .filter(|(resource, _)| is_device(resource))
            .map(|(resource, quantity)| (resource, count(&quantity)))
            .collect(),
        ..NodeFacts::default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(value: serde_json::Value) -> Pod {
        serde_json::from_value(value).expect("a pod")
    }

    #[test]
    fn pods_of_others_are_their_devices_on_a_node_or_nothing() {
        let bound = |resources: serde_json::Value| {
            pod(json!({
                "metadata": {"name": "a"},
                "spec": {"nodeName": "n1", "containers": [
                    {"name": "x", "resources": resources},
                    {"name": "y", "resources": {"limits": {"nvidia.com/gpu": "1"}}},
                ]},
            }))
        };
        let gpus = bound(
            json!({"requests": {"nvidia.com/gpu": "2", "cpu": "4", "memory": "1Gi"}, "limits": {"nvidia.com/gpu": "2"}}),
        );
        let expected = PodUse { node: "n1".into(), used: BTreeMap::from([("nvidia.com/gpu".into(), 3)]) };
        assert_eq!(reduce_pod(gpus), Some(Cached::Use(Arc::new(expected))));
        let plain = pod(
            json!({"metadata": {"name": "a"}, "spec": {"nodeName": "n1", "containers": [{"name": "x"}]}}),
        );
        assert_eq!(reduce_pod(plain), None);
        let mut ended = bound(json!({}));
        ended.status = serde_json::from_value(json!({"phase": "Succeeded"})).expect("a status");
        assert_eq!(reduce_pod(ended), None);
    }

    /// A pod as a kubelet leaves it, and the same after it wrote things that no plan looks at.
    #[test]
    fn a_pod_of_ours_keeps_what_plans_look_at_and_nothing_else() {
        let seen = |version: &str, image: &str, message: &str| {
            pod(json!({
                "metadata": {
                    "name": "c-decode-x-0", "namespace": "ns", "uid": "u", "resourceVersion": version,
                    "labels": {"deepinfer.io/cluster": "c", "app.kubernetes.io/name": "deepinfer"},
                    "annotations": {"deepinfer.io/domain": "k=v", "cni.example.com/status": "[...]"},
                    "managedFields": [{"manager": "kubelet"}],
                },
                "spec": {
                    "nodeName": "n1",
                    "schedulingGates": [{"name": "deepinfer.io/gang"}],
                    "readinessGates": [{"conditionType": "deepinfer.io/routable"}],
                    "resourceClaims": [{"name": "imex", "resourceClaimTemplateName": "t"}],
                    "containers": [{"name": "engine", "image": image, "resources": {"limits": {"nvidia.com/gpu": "4"}}}],
                },
                "status": {
                    "phase": "Running", "podIP": "10.0.0.1", "hostIP": "10.1.0.1",
                    "conditions": [
                        {"type": "PodScheduled", "status": "True", "lastTransitionTime": "1970-01-01T00:16:40Z"},
                        {"type": "ContainersReady", "status": "True", "message": message},
                    ],
                    "containerStatuses": [{
                        "name": "engine", "image": image, "imageID": image, "ready": true, "restartCount": 0,
                        "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled", "containerID": image}},
                    }],
                },
            }))
        };
        let kept = reduce_pod(seen("1", "a", "b")).expect("it is ours");
        assert_eq!(Some(&kept), reduce_pod(seen("2", "c", "d")).as_ref());
        let Cached::Pod(object, used) = &kept else { panic!("{kept:?}") };
        assert_eq!(**used, BTreeMap::from([("nvidia.com/gpu".to_owned(), 4)]));
        let value = object.to_value();
        assert_eq!(value["metadata"]["annotations"], json!({"deepinfer.io/domain": "k=v"}));
        assert_eq!(value["metadata"]["labels"], json!({"deepinfer.io/cluster": "c"}));
        let spec = json!({
            "containers": [],
            "nodeName": "n1",
            "schedulingGates": [{"name": "deepinfer.io/gang"}],
            "readinessGates": [{"conditionType": "deepinfer.io/routable"}],
            "resourceClaims": [{"name": "imex"}],
        });
        assert_eq!(value["spec"], spec);
        let status = &value["status"];
        assert_eq!((&status["phase"], &status["podIP"]), (&json!("Running"), &json!("10.0.0.1")));
        assert_eq!(status["conditions"].as_array().map(Vec::len), Some(1));
        assert_eq!(
            status["containerStatuses"][0]["state"],
            json!({"terminated": {"exitCode": 137, "reason": "OOMKilled"}})
        );
    }

    #[test]
    fn a_node_keeps_devices_labels_and_health_only() {
        let node: Node = serde_json::from_value(json!({
            "metadata": {"name": "n1", "labels": {"nvidia.com/gpu.clique": "a"}},
            "spec": {"unschedulable": true},
            "status": {
                "allocatable": {"cpu": "64", "nvidia.com/gpu": "4", "hugepages-2Mi": "0", "rdma/hca": "1k"},
                "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "1970-01-01T00:01:40Z"}],
            },
        }))
        .expect("a node");
        let facts = reduce_node(node);
        assert!(facts.ready && facts.unschedulable && facts.ready_since == 100);
        let expected = [("nvidia.com/gpu".to_owned(), 4), ("rdma/hca".to_owned(), 1000)];
        assert_eq!(facts.allocatable, BTreeMap::from(expected));
    }
}
