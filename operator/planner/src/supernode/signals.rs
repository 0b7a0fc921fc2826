//! Signs of loss that pods and nodes give (operator.md 7.0).

use k8s_openapi::api::core::v1::Pod;

use super::phase::{Failure, failure, node_of};
use crate::world::World;

/// Taint of a node that somebody declared dead: its pods are gone for good.
pub(crate) const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

/// What the pod's node says: gone, out of service, NotReady for too long.
pub(super) fn node(world: &World, pod: &Pod, name: &str, grace: i64) -> Option<Failure> {
    let node = node_of(pod)?;
    if world.nodes.unreadable || world.nodes.by_name.is_empty() {
        return None;
    }
    let lost = |reason, message: String| {
        let mut failure = failure(name, reason, &message, None);
        failure.node = Some(node.to_owned());
        Some(failure)
    };
    let Some(facts) = world.nodes.by_name.get(node) else {
        return lost("NodeGone", format!("node {node} was deleted"));
    };
    if facts.taints.iter().any(|taint| taint.key == OUT_OF_SERVICE) {
        return lost("NodeOutOfService", format!("node {node} has the taint {OUT_OF_SERVICE}"));
    }
    let since = world.now.saturating_sub(facts.ready_since);
    if !facts.ready && since > grace {
        return lost("NodeNotReady", format!("node {node} has not been ready for {since} s"));
    }
    None
}

/// A device of the pod is not healthy, as its kubelet says.
pub(super) fn device(pod: &Pod, name: &str) -> Option<Failure> {
    let containers = pod.status.as_ref()?.container_statuses.as_deref()?;
    let resources = containers.iter().filter_map(|c| c.allocated_resources_status.as_deref()).flatten();
    for resource in resources {
        for device in resource.resources.as_deref().unwrap_or_default() {
            if device.health.as_deref() == Some("Unhealthy") {
                let message = format!("device {} of {} is unhealthy", device.resource_id, resource.name);
                let mut failure = failure(name, "DeviceUnhealthy", &message, None);
                failure.node = node_of(pod).map(str::to_owned);
                return Some(failure);
            }
        }
    }
    None
}

/// When the last of the pod's containers began to run.
pub(super) fn running_since(pod: &Pod) -> Option<i64> {
    let containers = pod.status.as_ref()?.container_statuses.as_deref()?;
    let started = containers.iter().filter_map(|c| c.state.as_ref()?.running.as_ref()?.started_at.as_ref());
    started.map(|time| time.0.as_second()).max()
}

/// Why a bound pod does not run: one word of its kubelet, as `ImagePullBackOff`.
pub(super) fn waiting(pod: &Pod) -> Option<String> {
    let status = pod.status.as_ref()?;
    let init = status.init_container_statuses.as_deref().unwrap_or_default();
    let main = status.container_statuses.as_deref().unwrap_or_default();
    let reasons = init.iter().chain(main).filter_map(|c| c.state.as_ref()?.waiting.as_ref()?.reason.clone());
    reasons.into_iter().find(|reason| reason != "ContainerCreating" && reason != "PodInitializing")
}
