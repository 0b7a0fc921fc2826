//! Status of a supernode, from what is seen; nothing in it moves by itself.

use deepinfer_crds::condition::{self, Truth, kind, reason};
use deepinfer_crds::supernode::{LastFailure, PlacementStatus, SupernodeNode};
use deepinfer_crds::{Supernode, SupernodePhase};
use serde_json::json;

use super::fabric;
use super::phase::{Seen, SeenPod};
use crate::apply::time;
use crate::object::{Kind, Object};
use crate::step::Step;

/// What a status says beside what is seen.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Said {
    pub placement: Option<PlacementStatus>,
    /// Why it has no place yet.
    pub waits: Option<String>,
    /// Domain that all pods sit in.
    pub domain: Option<String>,
    /// Failures of this one and those before it.
    pub restarts: u32,
    /// It failed too often and is kept as evidence.
    pub exhausted: bool,
}

/// Plans the status.
pub(crate) fn write(step: &mut Step<'_>, supernode: &Supernode, seen: &Seen, said: Said) {
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
    status.nodes = if made { nodes(seen) } else { Vec::new() };
    status.leader = status.nodes.first().map(|node| node.pod.clone());
    status.plan = before.plan.clone();
    status.placement = said.placement;
    status.domain = said.domain.or(before.domain);
    status.restart_count = (said.restarts > 0).then_some(said.restarts);
    status.fabric = fabric_test(step, supernode, seen);
    if let Some(failure) = &seen.failure
        && before.last_failure.is_none()
    {
        status.last_failure = Some(LastFailure {
            time: now.clone(),
            pod: Some(failure.pod.clone()),
            node: failure.node.clone(),
            reason: failure.reason.clone(),
            exit_code: failure.exit_code,
            message: Some(failure.message.clone()),
        });
    }
    let placed = seen.phase > SupernodePhase::Placing && seen.phase != SupernodePhase::Failed;
    let started = seen.phase > SupernodePhase::Warming && seen.failure.is_none();
    let truth = |list: &mut Vec<_>, kind: &str, holds: bool, reason: &str| {
        condition::set(list, (kind, Truth::from(holds)), (reason, ""), generation, &now);
    };
    let phase = format!("{:?}", seen.phase);
    truth(
        &mut status.conditions,
        kind::supernode::PLACED,
        placed,
        if placed { reason::FOUND } else { said.waits.as_ref().unwrap_or(&phase) },
    );
    truth(&mut status.conditions, kind::supernode::STARTED, started, &phase);
    truth(&mut status.conditions, kind::supernode::ROUTABLE, seen.serves(), &phase);
    let degraded = seen.phase == SupernodePhase::Degraded || said.exhausted;
    if degraded || condition::get(&status.conditions, kind::DEGRADED).is_some() {
        let why = match (said.exhausted, degraded) {
            (true, _) => reason::RETRIES_EXHAUSTED,
            (false, true) => reason::CAPACITY_LOST,
            (false, false) => reason::NOMINAL,
        };
        truth(&mut status.conditions, kind::DEGRADED, degraded, why);
    }
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

fn nodes(seen: &Seen) -> Vec<SupernodeNode> {
    let node = |pod: &SeenPod| SupernodeNode {
        index: pod.index,
        pod: pod.pod.clone(),
        uid: pod.uid.clone(),
        node: pod.node.clone(),
        state: pod.state.clone(),
        device_health: pod.device_health.clone(),
    };
    seen.nodes.iter().map(node).collect()
}

/// Outcome of the fabric self-test: the first that is not good, else `ok` once all have said so.
fn fabric_test(step: &Step<'_>, supernode: &Supernode, seen: &Seen) -> Option<String> {
    let mut said = seen.nodes.iter().map(|pod| step.world.word(&pod.pod).map(|word| word.fabric.clone()));
    let bad = said.clone().flatten().find(|fabric| !fabric.is_empty() && fabric != "ok");
    let all = said.all(|fabric| fabric.as_deref() == Some("ok"));
    bad.or_else(|| all.then(|| "ok".to_owned())).or_else(|| {
        // Before the agents speak, what the driver says of the ComputeDomain.
        let waits = supernode.spec.compute_domain == Some(true) && !seen.serves();
        let live = match step.world.get(Kind::ComputeDomain, supernode.metadata.name.as_deref()?) {
            Some(Object::ComputeDomain(live)) => Some(live),
            _ => None,
        };
        waits.then(|| fabric::state(live).to_string())
    })
}
