//! Status of a supernode, from what is seen; nothing in it moves by itself.

use deepinfer_crds::condition::{self, Truth, kind, reason};
use deepinfer_crds::supernode::{LastFailure, SupernodeNode};
use deepinfer_crds::{Supernode, SupernodePhase};
use serde_json::json;

use super::phase::Seen;
use crate::apply::time;
use crate::object::Object;
use crate::step::Step;

/// Plans the status.
pub(crate) fn write(step: &mut Step<'_>, supernode: &Supernode, seen: &Seen) {
    let before = supernode.status.clone().unwrap_or_default();
    let generation = supernode.metadata.generation;
    let now = time(step.world.now);
    let mut status = before.clone();
    status.observed_generation = generation;
    status.phase = Some(seen.phase);
    status.ready = Some(format!("{}/{}", seen.ready, supernode.spec.nodes));
    let draining = matches!(seen.phase, SupernodePhase::Draining | SupernodePhase::Drained);
    status.inflight = draining.then_some(seen.inflight);
    let made = seen.phase != SupernodePhase::Pending;
    status.nodes = if made { nodes(step, seen) } else { Vec::new() };
    status.leader = status.nodes.first().map(|node| node.pod.clone());
    status.plan = before.plan.clone();
    if let Some(failure) = &seen.failure
        && before.last_failure.is_none()
    {
        status.last_failure = Some(LastFailure {
            time: now.clone(),
            pod: Some(failure.pod.clone()),
            node: None,
            reason: failure.reason.clone(),
            exit_code: failure.exit_code,
            message: Some(failure.message.clone()),
        });
    }
    let placed = seen.phase > SupernodePhase::Placing;
    let started = seen.phase > SupernodePhase::Warming && seen.failure.is_none();
    let truth = |list: &mut Vec<_>, kind: &str, holds: bool, reason: &str| {
        condition::set(list, (kind, Truth::from(holds)), (reason, ""), generation, &now);
    };
    let phase = format!("{:?}", seen.phase);
    truth(
        &mut status.conditions,
        kind::supernode::PLACED,
        placed,
        if placed { reason::FOUND } else { &phase },
    );
    truth(&mut status.conditions, kind::supernode::STARTED, started, &phase);
    truth(&mut status.conditions, kind::supernode::ROUTABLE, seen.serves(), &phase);
    if draining {
        let drained = seen.phase == SupernodePhase::Drained;
        truth(&mut status.conditions, kind::supernode::DRAINED, drained, &phase);
    }
    step.status(Object::from(supernode.clone()).key(), json!(status));
}

/// Seconds that a supernode has been routable without a break; `None` if it is not.
pub(crate) fn routable_for(supernode: &Supernode, now: i64) -> Option<i64> {
    let conditions = &supernode.status.as_ref()?.conditions;
    let routable = condition::get(conditions, kind::supernode::ROUTABLE)?;
    (routable.status == "True").then(|| now - routable.last_transition_time.0.as_second())
}

fn nodes(step: &Step<'_>, seen: &Seen) -> Vec<SupernodeNode> {
    let node = |(index, pod, state): &(u32, String, String)| SupernodeNode {
        index: *index,
        pod: pod.clone(),
        node: step
            .world
            .pods()
            .find(|p| p.metadata.name.as_ref() == Some(pod))
            .and_then(|p| p.spec.as_ref()?.node_name.clone()),
        state: state.clone(),
        device_health: None,
    };
    seen.nodes.iter().map(node).collect()
}
