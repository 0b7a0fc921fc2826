//! The readiness gate of engine pods: traffic may come while the agent says that it serves and nothing drains it.

use deepinfer_crds::names::{ROUTABLE_GATE, label};
use deepinfer_protocol::agent_status::AgentPhase;
use k8s_openapi::api::core::v1::Pod;

use crate::action::{Action, PodChange};
use crate::object::{Key, Kind, Object};
use crate::step::Step;

/// Plans the gates of all engine pods that have one.
pub(crate) fn plan(step: &mut Step<'_>) {
    let mut changes = Vec::new();
    for object in step.world.of(Kind::Pod) {
        let Object::Pod(pod) = object else { continue };
        if !has_gate(pod) || object.is_deleted() {
            continue;
        }
        let Some((holds, reason)) = wanted(step, object) else { continue };
        if current(pod) != Some(holds) && (holds || current(pod).is_some()) {
            let key = Key::new(Kind::Pod, object.name());
            let change = PodChange::Routable { holds, reason };
            changes.push(Action::Pod { key, uid: pod.metadata.uid.clone(), change });
        }
    }
    step.actions.extend(changes);
}

/// Whether traffic may come, and why; `None` while nobody knows.
fn wanted(step: &Step<'_>, pod: &Object) -> Option<(bool, String)> {
    let supernode = pod.label(label::SUPERNODE);
    let draining = step.world.supernodes().any(|sn| {
        sn.metadata.name.as_deref() == supernode
            && (sn.spec.drain.is_some() || sn.metadata.deletion_timestamp.is_some())
    });
    if supernode.is_some() && draining {
        return Some((false, "Draining".to_owned()));
    }
    let word = step.world.word(pod.name())?;
    let holds = word.accepting && word.phase == AgentPhase::Serving;
    let reason =
        if word.reason_code.is_empty() { format!("{:?}", word.phase) } else { word.reason_code.clone() };
    Some((holds, reason))
}

fn has_gate(pod: &Pod) -> bool {
    let gates = pod.spec.as_ref().and_then(|spec| spec.readiness_gates.as_deref()).unwrap_or_default();
    gates.iter().any(|gate| gate.condition_type == ROUTABLE_GATE)
}

/// What the gate says now.
fn current(pod: &Pod) -> Option<bool> {
    let conditions = pod.status.as_ref()?.conditions.as_deref()?;
    let gate = conditions.iter().find(|c| c.type_ == ROUTABLE_GATE)?;
    Some(gate.status == "True")
}
