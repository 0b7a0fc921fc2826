//! `plan`: calls the steps in order. The only file that knows the order.

use deepinfer_crds::cluster::Pause;
use deepinfer_crds::names::finalizer;

use crate::action::{Action, EventKind};
use crate::blueprint::Blueprint;
use crate::cluster::{children, resolve, status, teardown, template};
use crate::fleet;
use crate::naming::Component;
use crate::pool::{decode, objects, prefill};
use crate::report::Report;
use crate::step::Step;
use crate::target::Target;
use crate::world::{ModelState, World};

/// Seconds until the next look when everything rests: lost events heal.
const RESYNC_SECONDS: u32 = 60;
/// Seconds until the next look while something is under way.
const BUSY_SECONDS: u32 = 1;

/// Actions to take, memory to commit before they are taken, and what there is to say.
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct Plan {
    /// To be committed first; equal to the parent if nothing is to be remembered.
    pub blueprint: Blueprint,
    /// In order.
    pub actions: Vec<Action>,
    /// What is not done, and why.
    pub report: Report,
    /// Look again after this many seconds at the latest.
    pub wakeup_seconds: u32,
}

/// Plans what the world needs next. Cannot fail: a spec that cannot be followed gives a status that says so. With
/// nothing to change there are no actions.
pub fn plan(world: &World, target: &Target) -> Plan {
    let memory = world.blueprint.clone().unwrap_or_default();
    let Some(cluster) = world.cluster() else {
        let report = Report::default();
        return Plan { blueprint: memory, actions: Vec::new(), report, wakeup_seconds: RESYNC_SECONDS };
    };
    let mut step = Step::new(world, cluster, &memory);
    let closing = cluster.metadata.deletion_timestamp.is_some();
    if closing {
        teardown::plan(&mut step);
    } else {
        follow(&mut step, target);
    }
    let suspended = cluster.spec.operation.as_ref().and_then(|o| o.suspend) == Some(true);
    let mut next = step.next.clone();
    fleet::next(world, &memory, &mut next, closing || suspended);
    let blueprint = Blueprint::succeed(world.blueprint.as_ref(), next);
    let busy = !step.actions.is_empty() || !step.report.waiting.is_empty() || closing;
    let wakeup_seconds = if busy { BUSY_SECONDS } else { RESYNC_SECONDS };
    Plan { blueprint, actions: step.actions, report: step.report, wakeup_seconds }
}

/// A cluster that is to be there.
fn follow(step: &mut Step<'_>, target: &Target) {
    let mut report = std::mem::take(&mut step.report);
    let resolved = resolve::resolve(step.cluster, target, &mut report);
    step.report = report;
    let Some(resolved) = resolved else {
        let problems = step.report.refused.clone();
        return status::refuse(step, &problems);
    };
    let held = step.cluster.metadata.finalizers.as_ref();
    if !held.is_some_and(|f| f.iter().any(|f| f == finalizer::TEARDOWN)) {
        let ours = vec![finalizer::TEARDOWN.to_owned()];
        step.actions.push(Action::Finalizers { key: step.cluster_key(), ours });
    }
    if let ModelState::Failed { reason, message } = &step.world.model {
        let key = step.cluster_key();
        step.wait(&key, reason, 0, message.clone());
    }
    let pause = step.cluster.spec.operation.as_ref().and_then(|o| o.pause);
    let mut prefill_template = template::prefill(step.cluster, &resolved, target);
    let mut decode_template = template::decode(step.cluster, &resolved, target);
    let mut facts = status::Facts {
        resolved: &resolved,
        prefill: (&prefill_template.clone(), objects::Counts::default()),
        decode: (&decode_template.clone(), objects::Counts::default()),
        exhausted: None,
    };
    if pause == Some(Pause::All) {
        return status::write(step, &facts, target);
    }
    let unusable = matches!(step.world.model, ModelState::Failed { .. });
    if !unusable {
        children::foundation(step, &resolved);
        prefill_template = children::revision(step, prefill_template);
        decode_template = children::revision(step, decode_template);
        if let Some(pool) = objects::ensure(step, &resolved, Component::Prefill, &prefill_template) {
            facts.prefill = (&prefill_template, prefill::plan(step, &pool, &resolved, &prefill_template));
        }
        if let Some(pool) = objects::ensure(step, &resolved, Component::Decode, &decode_template) {
            let outcome = decode::plan(step, &pool, &resolved, &decode_template);
            if let Some(why) = &outcome.exhausted {
                let key = step.cluster_key();
                announce(step, &key, why);
            }
            facts.decode = (&decode_template, outcome.counts);
            facts.exhausted = outcome.exhausted;
        }
        children::gateway(step, &resolved);
    }
    facts.prefill.1.desired = resolved.prefill.replicas;
    facts.decode.1.desired = resolved.decode.replicas;
    status::write(step, &facts, target);
}

/// Says once that retries are used up.
fn announce(step: &mut Step<'_>, key: &crate::object::Key, why: &str) {
    use deepinfer_crds::condition::{self, kind};
    let known =
        step.cluster.status.as_ref().is_some_and(|s| condition::is_true(&s.conditions, kind::STALLED));
    if !known {
        step.event(key.clone(), EventKind::Warning, "RetriesExhausted", why);
    }
}
