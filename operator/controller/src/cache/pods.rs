//! What is kept of pods and nodes: there are many, and most of what they say is nobody's business here.

use std::collections::BTreeMap;
use std::sync::Arc;

use deepinfer_crds::Quantity;
use deepinfer_crds::names::label;
use deepinfer_planner::{NodeFacts, Object, has_ended};
use k8s_openapi::api::core::v1::{Node, Pod};

use super::store::Cached;

/// What a pod of others takes from its node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodUse {
    /// The node that it is bound to.
    pub node: String,
    /// Accelerators and other counted devices, by resource.
    pub used: BTreeMap<String, i64>,
}

/// A pod reduced to what plans look at; `None` if it is nobody's business.
pub fn reduce_pod(mut pod: Pod) -> Option<Cached> {
    let ours = pod.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(label::CLUSTER));
    if !ours {
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).filter(|_| !has_ended(&pod))?;
        let used = requests(&pod);
        return (!used.is_empty()).then(|| Cached::Use(Arc::new(PodUse { node, used })));
    }
    pod.metadata.managed_fields = None;
    if let Some(spec) = &mut pod.spec {
        spec.volumes = None;
        spec.security_context = None;
        spec.dns_config = None;
        for container in spec.containers.iter_mut().chain(spec.init_containers.iter_mut().flatten()) {
            container.env = None;
            container.env_from = None;
            container.volume_mounts = None;
            container.liveness_probe = None;
            container.readiness_probe = None;
            container.startup_probe = None;
            container.lifecycle = None;
            container.security_context = None;
        }
    }
    Some(Cached::Object(Arc::new(Object::Pod(pod))))
}

/// Devices that all containers of a pod ask for.
pub fn requests(pod: &Pod) -> BTreeMap<String, i64> {
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
        labels: node.metadata.labels.unwrap_or_default(),
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
