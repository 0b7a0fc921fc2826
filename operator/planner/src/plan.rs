//! `plan`: calls the steps in order. The only file that knows the order.

use deepinfer_crds::cluster::Pause;
use deepinfer_crds::condition::reason;
use deepinfer_crds::names::finalizer;

use deepinfer_protocol::agent_status::Role;

use crate::action::{Action, EventKind};
use crate::blueprint::Blueprint;
use crate::cluster::resolve::{Life, Resolved};
use crate::cluster::template::Template;
use crate::cluster::{children, model, references, resolve, status, teardown, template};
use crate::fleet;
use crate::naming::{Component, pool_name};
use crate::object::Kind;
use crate::pool::supernodes::Outcome;
use crate::pool::{objects, prefill, supernodes};
use crate::report::{Problem, Report};
use crate::step::Step;
use crate::supernode::{routable, stuck};
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
        teardown::plan(&mut step, target);
    } else {
        follow(&mut step, target);
    }
    let suspended = cluster.spec.operation.as_ref().and_then(|o| o.suspend) == Some(true);
    let mut next = step.next.clone();
    fleet::next(
        world,
        &memory,
        &mut next,
        &fleet::Intent { closed: closing || suspended, kept_up: &step.kept_up },
    );
    let blueprint = Blueprint::succeed(world.blueprint.as_ref(), next);
    let busy = !step.actions.is_empty() || !step.report.waiting.is_empty() || closing;
    let wakeup_seconds = if busy { BUSY_SECONDS } else { RESYNC_SECONDS };
    Plan { blueprint, actions: step.actions, report: step.report, wakeup_seconds }
}

/// A cluster that is to be there.
fn follow(step: &mut Step<'_>, target: &Target) {
    if let Some(skew) = &step.world.skew {
        let problem = Problem { path: "crds".to_owned(), reason: reason::CRD_SKEW, message: skew.clone() };
        return status::refuse(step, &[problem]);
    }
    let mut report = std::mem::take(&mut step.report);
    let resolved = resolve::resolve(step.cluster, target, &mut report);
    step.report = report;
    let Some(resolved) = resolved else {
        let problems = step.report.refused.clone();
        return status::refuse(step, &problems);
    };
    let missing = references::missing(step, &resolved);
    let known = step.world.get(Kind::Pool, &pool_name(&resolved.name, Component::Decode)).is_some();
    if !missing.is_empty() && !known {
        step.report.refused.extend(missing.iter().cloned());
        return status::refuse(step, &missing);
    }
    let held = step.cluster.metadata.finalizers.as_ref();
    if !held.is_some_and(|f| f.iter().any(|f| f == finalizer::TEARDOWN)) {
        let ours = vec![finalizer::TEARDOWN.to_owned()];
        step.actions.push(Action::Finalizers { key: step.cluster_key(), ours });
    }
    if let ModelState::Failed { reason, message } = model::state(step.world) {
        let key = step.cluster_key();
        step.wait(&key, &reason, 0, message);
    }
    build(step, &resolved, target, &missing);
}

/// Plans everything that a resolved cluster consists of.
fn build(step: &mut Step<'_>, resolved: &Resolved, target: &Target, missing: &[Problem]) {
    let pause = step.cluster.spec.operation.as_ref().and_then(|o| o.pause);
    let mut prefill_template = template::prefill(step.world, step.cluster, resolved, target);
    let mut decode_template = template::decode(step.world, step.cluster, resolved, target);
    let mut facts = status::Facts::new(resolved, target);
    facts.missing = missing.to_vec();
    // Local mode looks at the files itself and starts nothing without them.
    let unusable = matches!(step.world.model, ModelState::Failed { .. });
    if pause != Some(Pause::All) && !unusable {
        children::foundation(step, resolved);
        // While something that the spec names is missing, what runs is kept as it was made.
        let frozen = !missing.is_empty();
        prefill_template = children::revision(step, prefill_template, frozen.then_some(Component::Prefill));
        decode_template = children::revision(step, decode_template, frozen.then_some(Component::Decode));
        facts.prefill = pool(step, resolved, (Component::Prefill, &resolved.prefill.life), &prefill_template);
        facts.decode = pool(step, resolved, (Component::Decode, &resolved.decode.life), &decode_template);
        children::gateway(step, resolved, decode_template.gateway_image.as_deref());
        children::forget_revisions(step, resolved, [&prefill_template, &decode_template]);
        routable::plan(step);
        stuck::plan(step, resolved);
    }
    for (role, outcome, life) in [
        (Role::Prefill, &facts.prefill, &resolved.prefill.life),
        (Role::Decode, &facts.decode, &resolved.decode.life),
    ] {
        let given_up = outcome.stalled.as_ref().is_some_and(|(why, _)| *why == reason::RETRIES_EXHAUSTED);
        if pause != Some(Pause::All) && !unusable && life.replicas > 0 && !given_up {
            step.kept_up.push(role);
        }
    }
    facts.prefill.counts.desired = resolved.prefill.life.replicas;
    facts.decode.counts.desired = resolved.decode.life.replicas;
    facts.revision = decode_template.revision;
    facts.kv_epoch = decode_template.kv_epoch;
    for stalled in [&facts.decode.stalled, &facts.prefill.stalled].into_iter().flatten() {
        let (why, message) = stalled.clone();
        if why == reason::RETRIES_EXHAUSTED {
            let key = step.cluster_key();
            announce(step, &key, &message);
        }
    }
    status::write(step, &facts);
}

fn pool(
    step: &mut Step<'_>,
    resolved: &Resolved,
    (component, life): (Component, &Life),
    template: &Template,
) -> Outcome {
    let Some(pool) = objects::ensure(step, resolved, component, template) else {
        return Outcome::default();
    };
    if supernodes::is_gang(component, life) {
        prefill::remove(step, &pool);
        supernodes::plan(step, &pool, resolved, (component, life), template)
    } else {
        Outcome { counts: prefill::plan(step, &pool, resolved, template), ..Outcome::default() }
    }
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
