//! A cluster that is being deleted (operator.md 3.13): stop admitting, drain, let everything go, release the object.

use deepinfer_crds::Supernode;
use deepinfer_crds::cluster::DeletionPolicy;
use deepinfer_crds::names::{annotation, finalizer};
use deepinfer_protocol::AgentId;
use deepinfer_protocol::agent_status::AgentPhase;

use super::status;
use crate::action::{Action, AgentCall};
use crate::object::{Kind, Object};
use crate::step::Step;
use crate::supernode::drain;
use crate::supernode::phase::{Patience, see};
use crate::target::Target;

/// Plans the way down.
pub(crate) fn plan(step: &mut Step<'_>, target: &Target) {
    let meta = &step.cluster.metadata;
    if !meta.finalizers.as_ref().is_some_and(|f| f.iter().any(|f| f == finalizer::TEARDOWN)) {
        return;
    }
    let operation = step.cluster.spec.operation.clone().unwrap_or_default();
    let forced =
        meta.annotations.as_ref().and_then(|a| a.get(annotation::FORCE_DELETE)).is_some_and(|v| v == "true");
    // In a namespace that goes nothing can be waited for: its pods are being deleted already.
    let forced = forced || step.world.namespace_terminating;
    let immediate = forced || operation.deletion_policy == Some(DeletionPolicy::Immediate);
    let timeout = operation.deletion_timeout_seconds.unwrap_or(target.defaults().deletion_timeout.value);
    let asked = meta.deletion_timestamp.as_ref().map_or(step.world.now, |t| t.0.as_second());
    let left = (asked + i64::from(timeout) - step.world.now).clamp(0, i64::from(timeout));
    let seconds = if immediate { 0 } else { u32::try_from(left).unwrap_or(0) };

    let supernodes: Vec<Supernode> = step.world.supernodes().cloned().collect();
    for supernode in &supernodes {
        let seen = see(step.world, supernode, Patience::ENDLESS);
        if supernode.spec.drain.is_some() && !forced {
            drain::follow(step, supernode, &seen);
        } else if seconds > 0 && seen.serves() {
            drain::begin(step, supernode, seconds, "ClusterDeleted");
        } else {
            step.delete(&Object::from(supernode.clone()), "the cluster is being deleted");
            drain::release(step, supernode);
        }
    }
    let busy = drain_workers(step, seconds);
    if busy == 0 && supernodes.is_empty() {
        let key = step.cluster_key();
        step.actions.push(Action::Finalizers { key, ours: Vec::new() });
        return;
    }
    status::deleting(
        step,
        &format!("{} supernodes and {busy} workers drain, at most {left} s more", supernodes.len()),
    );
}

/// Tells prefill workers to drain; gives how many still have work.
fn drain_workers(step: &mut Step<'_>, seconds: u32) -> usize {
    let agents: Vec<AgentId> = step
        .world
        .of(Kind::Pod)
        .filter(|pod| pod.label(deepinfer_crds::names::label::ROLE) == Some("prefill"))
        .map(|pod| AgentId::from(pod.name()))
        .collect();
    let mut busy = 0;
    for agent in agents {
        let Some(word) = step.world.word(agent.as_str()) else { continue };
        if seconds > 0 && word.inflight > 0 {
            busy += 1;
        }
        if matches!(word.phase, AgentPhase::Serving | AgentPhase::Warming) {
            let reason = "the cluster is being deleted".to_owned();
            let call = AgentCall::Drain { deadline_seconds: seconds, reason };
            step.actions.push(Action::CallAgent { agent, call });
        }
    }
    busy
}
