//! Where a supernode stands, from the world alone.
//!
//! ```text
//! Pending -> Placing -> Starting -> Warming -> Serving -> Draining -> Drained -> Terminating
//!     \________\___________\___________\__________\______-> Failed
//! ```

use deepinfer_crds::{Supernode, SupernodePhase};
use deepinfer_protocol::agent_status::AgentPhase;
use k8s_openapi::api::core::v1::Pod;

use crate::emulate::has_ended;
use crate::naming::supernode_pod;
use crate::object::{Kind, Object};
use crate::world::World;

/// Seconds without a word of an agent whose pod runs, after which its supernode counts as lost (operator.md 7.0).
pub(crate) const AGENT_LOST_SECONDS: i64 = 30;

/// A supernode as it is seen now.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Seen {
    pub phase: SupernodePhase,
    /// Pods whose agents serve (or drain).
    pub ready: u32,
    /// Requests that run there.
    pub inflight: u32,
    /// Why it failed.
    pub failure: Option<Failure>,
    /// By index: the pod's name and what it does.
    pub nodes: Vec<(u32, String, String)>,
}

/// What a supernode died of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub pod: String,
    pub reason: String,
    pub message: String,
    pub exit_code: Option<i32>,
}

impl Seen {
    /// Takes traffic.
    pub fn serves(&self) -> bool {
        matches!(self.phase, SupernodePhase::Serving | SupernodePhase::Degraded)
    }
}

/// Looks at a supernode. `startup_deadline` is in seconds from its creation.
pub(crate) fn see(world: &World, supernode: &Supernode, startup_deadline: i64) -> Seen {
    let name = supernode.metadata.name.as_deref().unwrap_or_default();
    let nodes = supernode.spec.nodes;
    let created = supernode.metadata.creation_timestamp.as_ref().map_or(world.now, |t| t.0.as_second());
    let had_pods = supernode.status.as_ref().is_some_and(|s| !s.nodes.is_empty());
    let mut seen =
        Seen { phase: SupernodePhase::Pending, ready: 0, inflight: 0, failure: None, nodes: Vec::new() };
    let mut slowest = SupernodePhase::Serving;
    let mut drained = 0;
    for index in 0..nodes {
        let pod_name = supernode_pod(name, index as u16);
        let (phase, failure) = match world.get(Kind::Pod, &pod_name) {
            Some(Object::Pod(pod)) => see_pod(world, pod, &pod_name),
            _ if had_pods => {
                (SupernodePhase::Failed, Some(failure(&pod_name, "PodLost", "the pod is gone", None)))
            }
            _ => (SupernodePhase::Pending, None),
        };
        let status = world.word(&pod_name);
        seen.inflight += status.map_or(0, |s| s.inflight);
        drained += u32::from(status.is_some_and(|s| s.phase == AgentPhase::Drained));
        seen.ready += u32::from(phase == SupernodePhase::Serving);
        seen.nodes.push((index, pod_name, format!("{phase:?}")));
        seen.failure = seen.failure.or(failure);
        slowest = slowest.min(phase);
    }
    let starts = slowest < SupernodePhase::Serving;
    if starts && seen.failure.is_none() && world.now - created > startup_deadline {
        let waits = seen.nodes.iter().find(|(_, _, state)| *state != "Serving");
        let pod = waits.map_or(name, |(_, pod, _)| pod);
        let message = format!("not ready {startup_deadline} s after its creation");
        seen.failure = Some(failure(pod, "StartupDeadlineExceeded", &message, None));
    }
    seen.phase = if supernode.metadata.deletion_timestamp.is_some() && supernode.spec.drain.is_none() {
        SupernodePhase::Terminating
    } else if seen.failure.is_some() {
        SupernodePhase::Failed
    } else if supernode.spec.drain.is_some() {
        if drained == nodes { SupernodePhase::Drained } else { SupernodePhase::Draining }
    } else {
        slowest
    };
    seen
}

fn see_pod(world: &World, pod: &Pod, name: &str) -> (SupernodePhase, Option<Failure>) {
    if has_ended(pod) || pod.metadata.deletion_timestamp.is_some() {
        return (SupernodePhase::Failed, Some(ended(pod, name)));
    }
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    if phase != Some("Running") {
        return (SupernodePhase::Placing, None);
    }
    let Some(word) = world.agents.get(&name.into()) else {
        return (SupernodePhase::Starting, None);
    };
    let Some(status) = &word.status else {
        let silent = world.now - word.heard > AGENT_LOST_SECONDS;
        let lost = silent.then(|| failure(name, "AgentLost", "the agent does not answer", None));
        return (if silent { SupernodePhase::Failed } else { SupernodePhase::Starting }, lost);
    };
    match status.phase {
        AgentPhase::Starting => (SupernodePhase::Starting, None),
        AgentPhase::Warming => (SupernodePhase::Warming, None),
        AgentPhase::Serving | AgentPhase::Draining | AgentPhase::Drained => (SupernodePhase::Serving, None),
        AgentPhase::Failed => {
            (SupernodePhase::Failed, Some(failure(name, "AgentFailed", &status.reason, None)))
        }
    }
}

fn ended(pod: &Pod, name: &str) -> Failure {
    let status = pod.status.as_ref();
    let containers = status.and_then(|s| s.container_statuses.as_deref()).unwrap_or_default();
    let terminated = containers.iter().find_map(|c| c.state.as_ref()?.terminated.as_ref());
    let message = terminated
        .and_then(|t| t.message.clone())
        .or_else(|| status.and_then(|s| s.message.clone()))
        .unwrap_or_else(|| "its containers ended".to_owned());
    let reason = terminated
        .and_then(|t| t.reason.clone())
        .or_else(|| status.and_then(|s| s.reason.clone()))
        .unwrap_or_else(|| if has_ended(pod) { "PodFailed" } else { "PodDeleted" }.to_owned());
    failure(name, &reason, &message, terminated.map(|t| t.exit_code))
}

fn failure(pod: &str, reason: &str, message: &str, exit_code: Option<i32>) -> Failure {
    Failure { pod: pod.to_owned(), reason: reason.to_owned(), message: message.to_owned(), exit_code }
}
