//! Leaving in good order (operator.md 9.2): no new work, what runs finishes, then everything goes at once.

use deepinfer_crds::Supernode;
use deepinfer_crds::cluster::HandoffMode;
use deepinfer_crds::names::finalizer;
use deepinfer_crds::supernode::DrainRequest;
use deepinfer_protocol::AgentId;
use deepinfer_protocol::agent_status::AgentPhase;

use serde_json::json;

use super::phase::{Seen, drain_note};
use crate::action::{Action, AgentCall, EventKind, PodChange};
use crate::apply::time;
use crate::naming::supernode_pod;
use crate::object::{Key, Kind, Object};
use crate::step::Step;

/// Seconds for pods to end once nothing runs in them (operator.md 9.2).
const GRACE_SECONDS: i64 = 30;

/// Asks a supernode to drain.
pub(crate) fn begin(step: &mut Step<'_>, supernode: &Supernode, seconds: u32, reason: &str) {
    let mut wanted =
        Supernode::new(supernode.metadata.name.as_deref().unwrap_or_default(), supernode.spec.clone());
    wanted.metadata.labels = supernode.metadata.labels.clone();
    wanted.metadata.annotations = supernode.metadata.annotations.clone();
    wanted.metadata.finalizers = supernode.metadata.finalizers.clone();
    wanted.metadata.owner_references = supernode.metadata.owner_references.clone();
    wanted.spec.drain = Some(DrainRequest {
        requested_at: time(step.world.now),
        deadline: time(step.world.now + i64::from(seconds)),
        reason: reason.to_owned(),
        handoff: HandoffMode::None,
    });
    let object = Object::from(wanted);
    let note = format!("{reason}: no new requests, running ones finish within {seconds} s");
    step.event(object.key(), EventKind::Normal, "DrainStarted", note);
    step.actions.push(Action::Apply(Box::new(object)));
}

/// Follows a drain that was asked for: tells agents, and lets go when nothing runs or time is up.
pub(crate) fn follow(step: &mut Step<'_>, supernode: &Supernode, seen: &Seen) {
    let Some(drain) = &supernode.spec.drain else { return };
    note(step, supernode);
    let object = Object::from(supernode.clone());
    let left = drain.deadline.0.as_second() - step.world.now;
    let running = agents(step, supernode).into_iter().filter(|(_, phase)| *phase != AgentPhase::Drained);
    let running: Vec<(AgentId, AgentPhase)> = running.collect();
    if !running.is_empty() && left > 0 && seen.inflight_can_end() {
        for (agent, phase) in &running {
            if *phase != AgentPhase::Draining {
                let call = AgentCall::Drain {
                    deadline_seconds: u32::try_from(left).unwrap_or(0),
                    reason: drain.reason.clone(),
                };
                step.actions.push(Action::CallAgent { agent: agent.clone(), call });
            }
        }
        let message =
            format!("{} requests still run; what is left at {} is cut", seen.inflight, drain.deadline.0);
        step.wait(&object.key(), "Draining", drain.requested_at.0.as_second(), message);
        return;
    }
    if !object.is_deleted() {
        let (kind, reason, note) = if left > 0 {
            (EventKind::Normal, "DrainCompleted", "nothing runs any more".to_owned())
        } else {
            (EventKind::Warning, "DrainDeadlineExceeded", format!("{} requests were cut", seen.inflight))
        };
        step.event(object.key(), kind, reason, note);
        step.delete(&object, "drained");
    }
    release(step, supernode);
}

/// Lets a supernode go that is being deleted: its pods end together, then our finalizer leaves. A pod that hangs on a
/// dead node is not waited for.
pub(crate) fn release(step: &mut Step<'_>, supernode: &Supernode) {
    if supernode.metadata.deletion_timestamp.is_none() {
        return;
    }
    let held =
        supernode.metadata.finalizers.as_ref().is_some_and(|f| f.iter().any(|f| f == finalizer::DRAIN));
    let name = supernode.metadata.name.as_deref().unwrap_or_default();
    let pods = (0..supernode.spec.nodes).map(|index| supernode_pod(name, index as u16));
    let pods: Vec<Object> = pods.filter_map(|pod| step.world.get(Kind::Pod, &pod).cloned()).collect();
    for pod in pods.iter().filter(|pod| !pod.is_deleted()) {
        let (key, uid) = (pod.key(), pod.meta().uid.clone());
        let why = "its supernode leaves".to_owned();
        step.actions.push(Action::Delete { key, uid, grace_seconds: Some(GRACE_SECONDS), why });
    }
    if held {
        let key = Object::from(supernode.clone()).key();
        step.actions.push(Action::Finalizers { key, ours: Vec::new() });
    }
}

/// Plans the annotation by which agents drain while the operator cannot reach them.
pub(crate) fn note(step: &mut Step<'_>, supernode: &Supernode) {
    let Some(drain) = &supernode.spec.drain else { return };
    let wanted = json!({"deadline": drain.deadline.0.as_second(), "reason": drain.reason}).to_string();
    let name = supernode.metadata.name.as_deref().unwrap_or_default();
    for index in 0..supernode.spec.nodes {
        let Some(Object::Pod(pod)) = step.world.get(Kind::Pod, &supernode_pod(name, index as u16)) else {
            continue;
        };
        let reads = pod.spec.as_ref().is_some_and(|spec| spec.readiness_gates.is_some());
        if reads && pod.metadata.deletion_timestamp.is_none() && drain_note(pod) != Some(wanted.as_str()) {
            let key = Key::new(Kind::Pod, pod.metadata.name.clone().unwrap_or_default());
            let change = PodChange::Drain(Some(wanted.clone()));
            step.actions.push(Action::Pod { key, uid: pod.metadata.uid.clone(), change });
        }
    }
}

fn agents(step: &Step<'_>, supernode: &Supernode) -> Vec<(AgentId, AgentPhase)> {
    let name = supernode.metadata.name.as_deref().unwrap_or_default();
    let word = |index: u32| {
        let pod = supernode_pod(name, index as u16);
        step.world.word(&pod).map(|status| (AgentId::from(pod.as_str()), status.phase))
    };
    (0..supernode.spec.nodes).filter_map(word).collect()
}
