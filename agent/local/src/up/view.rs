//! A running cluster as `deepinfer status` shows it, from the world and what runs.

use deepinfer_crds::names::label;
use deepinfer_planner::{Report, World, has_ended, is_ready};
use deepinfer_protocol::AgentId;

use super::control::{ClusterView, PodView};
use super::pods::Pods;
use super::storage::Storage;
use crate::cluster::pod_args::{pod_label, pod_name};

/// Makes the view; `None` without a cluster.
pub fn view(world: &World, pods: &Pods, storage: &Storage, report: &Report) -> Option<ClusterView> {
    let mut cluster = world.cluster()?.clone();
    let url = pods.url().map(str::to_owned);
    if let Some(status) = &mut cluster.status
        && url.is_some()
    {
        // The flag may have said port 0.
        status.url.clone_from(&url);
    }
    Some(ClusterView {
        cluster,
        pools: world.pools().cloned().collect(),
        supernodes: world.supernodes().cloned().collect(),
        pods: world.pods().map(|pod| pod_view(world, pods, pod)).collect(),
        gateway: pods.gateway().map(deepinfer_gateway::GatewayHandle::stats),
        url,
        scaled_down: report.scaled_down.iter().map(ToString::to_string).collect(),
        storage_problem: storage.problem().map(str::to_owned),
        state_dir: storage.state().folder().to_path_buf(),
        pid: std::process::id(),
        now: world.now,
    })
}

fn pod_view(world: &World, pods: &Pods, pod: &k8s_openapi::api::core::v1::Pod) -> PodView {
    let name = pod_name(pod);
    let status = pod.status.as_ref();
    let phase = if pods.is_ending(name) {
        "Ending"
    } else if has_ended(pod) {
        "Failed"
    } else {
        status.and_then(|status| status.phase.as_deref()).unwrap_or("Pending")
    };
    let word = world.agents.get(&AgentId::from(name));
    PodView {
        name: name.to_owned(),
        role: pod_label(pod, label::ROLE).unwrap_or_default().to_owned(),
        phase: phase.to_owned(),
        ready: is_ready(pod),
        message: status.and_then(|status| status.message.clone()).unwrap_or_default(),
        ports: word.map(|word| (word.data, word.control)),
        agent: word.and_then(|word| word.status.clone()),
    }
}
