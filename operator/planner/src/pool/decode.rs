//! Decode supernodes: made, replaced, drained and recovered within the budget.

use deepinfer_crds::cluster::{Pause, SchedulingBackend};
use deepinfer_crds::condition::reason;
use deepinfer_crds::names::{finalizer, label};
use deepinfer_crds::{DeepInferPool, PoolRole, Supernode, SupernodeSpec};

use super::objects::{self, Counts};
use super::retries::{self, Limits, Retry};
use super::rollout::{self, Budget, Member};
use crate::action::EventKind;
use crate::blueprint::FailureRecord;
use crate::cluster::children::meta;
use crate::cluster::resolve::Resolved;
use crate::cluster::template::Template;
use crate::naming::{self, Component};
use crate::object::{Kind, Object};
use crate::step::Step;
use crate::supernode::phase::{Seen, see};
use crate::supernode::{drain, pods, status};

/// What the pool came to.
pub(crate) struct Outcome {
    pub counts: Counts,
    /// Failures came too often: a person must look.
    pub exhausted: Option<String>,
}

/// Plans the supernodes.
pub(crate) fn plan(
    step: &mut Step<'_>,
    pool: &DeepInferPool,
    resolved: &Resolved,
    template: &Template,
) -> Outcome {
    let name = pool.metadata.name.clone().unwrap_or_default();
    let decode = &resolved.decode;
    let mut counts = Counts { desired: decode.replicas, ..Counts::default() };
    let mut members = Vec::new();
    let all: Vec<Supernode> =
        step.world.supernodes().filter(|sn| sn.spec.pool_name == name).cloned().collect();
    for supernode in &all {
        let seen = see(step.world, supernode, decode.startup_deadline);
        status::write(step, supernode, &seen);
        let current = supernode.spec.revision == template.revision;
        let draining = supernode.spec.drain.is_some() || supernode.metadata.deletion_timestamp.is_some();
        if draining {
            counts.draining += 1;
            leave(step, supernode, &seen, decode.drain_seconds);
        } else if let Some(failure) = &seen.failure {
            fail(step, &name, supernode, failure);
            continue;
        } else {
            counts.replicas += 1;
            counts.updated += u32::from(current);
            let stored = step.world.get(Kind::ControllerRevision, &supernode.spec.revision);
            let own = stored.and_then(stored_template).unwrap_or_else(|| template.clone());
            pods::ensure(step, supernode, &own);
        }
        let routable = status::routable_for(supernode, step.world.now);
        let available = seen.serves() && routable.is_some_and(|seconds| seconds >= decode.min_ready);
        counts.ready += u32::from(seen.serves() && !draining);
        counts.available += u32::from(available && !draining);
        members.push(Member {
            name: supernode.metadata.name.clone().unwrap_or_default(),
            current,
            available,
            draining,
            inflight: seen.inflight,
            created: supernode.metadata.creation_timestamp.as_ref().map_or(0, |t| t.0.as_second()),
        });
        if !seen.serves() && !draining {
            let key = Object::from(supernode.clone()).key();
            let waits = seen.nodes.iter().filter(|(_, _, state)| state != "Serving").take(3);
            let pods: Vec<String> = waits.map(|(_, pod, state)| format!("{pod} is {state}")).collect();
            step.wait(&key, &format!("{:?}", seen.phase), 0, pods.join(", "));
        }
    }
    let exhausted = act(step, pool, resolved, template, (&all, &members));
    let why = exhausted
        .clone()
        .unwrap_or_else(|| format!("{}/{} supernodes serve", counts.available, counts.desired));
    objects::status(step, pool, counts, &why);
    Outcome { counts, exhausted }
}

/// Carries out what the budget allows.
fn act(
    step: &mut Step<'_>,
    pool: &DeepInferPool,
    resolved: &Resolved,
    template: &Template,
    (all, members): (&[Supernode], &[Member]),
) -> Option<String> {
    let name = pool.metadata.name.clone().unwrap_or_default();
    let decode = &resolved.decode;
    let key = Object::from(pool.clone()).key();
    let limits = Limits {
        max_restarts: decode.max_restarts,
        backoff: decode.backoff,
        max_backoff: decode.max_backoff,
        reset_after: decode.reset_after,
    };
    let failures = step.next.failures.get(&name).cloned().unwrap_or_default();
    let retry = retries::retry(&failures, &template.revision, limits, step.world.now);
    let pause = step.cluster.spec.operation.as_ref().and_then(|o| o.pause);
    let budget = Budget {
        desired: decode.replicas,
        surge: decode.max_surge.max(1),
        paused: pause == Some(Pause::Rollouts),
        hold: retry != Retry::Now,
    };
    let moves = rollout::moves(members, budget);
    let by_name = |name: &str| all.iter().find(|sn| sn.metadata.name.as_deref() == Some(name));
    for supernode in moves.delete.iter().filter_map(|name| by_name(name)) {
        step.delete(&Object::from(supernode.clone()), "serves nobody and is not wanted any more");
    }
    for (name, why) in &moves.drain {
        if let Some(supernode) = by_name(name) {
            drain::begin(step, supernode, decode.drain_seconds, why);
        }
    }
    for _ in 0..moves.create {
        create(step, pool, template);
    }
    let last = failures.last();
    match retry {
        Retry::Now => None,
        Retry::At(at) => {
            let since = last.map_or(0, |f| f.at);
            let message = format!("the next supernode is made {} s after the last failure", at - since);
            step.wait(&key, "BackOff", since, message);
            None
        }
        Retry::Exhausted { failures } => {
            let last = last.map(|f| format!("{}: {}", f.reason, f.message)).unwrap_or_default();
            let message = format!("{failures} supernodes failed; the last: {last}");
            step.wait(&key, reason::RETRIES_EXHAUSTED, 0, message.clone());
            Some(message)
        }
    }
}

fn create(step: &mut Step<'_>, pool: &DeepInferPool, template: &Template) {
    let pool_name = pool.metadata.name.clone().unwrap_or_default();
    let name = step.fresh_name(Kind::Supernode, &pool_name);
    let mut labels = naming::labels(step.cluster_name(), Some(Component::Decode));
    labels.insert(label::REVISION.to_owned(), template.revision.clone());
    labels.insert(label::KV_EPOCH.to_owned(), template.kv_epoch.clone());
    let mut supernode = Supernode::new(
        &name,
        SupernodeSpec {
            cluster_name: step.cluster_name().to_owned(),
            pool_name,
            role: PoolRole::Decode,
            revision: template.revision.clone(),
            kv_epoch: template.kv_epoch.clone(),
            nodes: template.nodes,
            accelerators_per_node: template.ranks_per_node,
            spare_nodes: None,
            backend: SchedulingBackend::Builtin,
            compute_domain: None,
            domain_preference: Vec::new(),
            plan_hash: None,
            replaces: None,
            drain: None,
            rank_map: Vec::new(),
        },
    );
    supernode.metadata = meta(&name, Some(labels));
    supernode.metadata.finalizers = Some(vec![finalizer::DRAIN.to_owned()]);
    let owner = Object::from(pool.clone()).owner_reference();
    step.ensure_created(supernode.clone(), &owner);
    let note = format!("{} pods with {} ranks each", template.nodes, template.ranks_per_node);
    step.event(Object::from(supernode).key(), EventKind::Normal, "SupernodeCreated", note);
}

/// A supernode that is on its way out.
fn leave(step: &mut Step<'_>, supernode: &Supernode, seen: &Seen, drain_seconds: u32) {
    if supernode.spec.drain.is_none() {
        // Deleted by hand, or serving nobody: drain what runs, then let go.
        if seen.inflight > 0 && seen.failure.is_none() {
            drain::begin(step, supernode, drain_seconds, "Deleted");
        } else {
            drain::release(step, supernode);
        }
        return;
    }
    drain::follow(step, supernode, seen);
}

/// A supernode that failed goes at once: its requests resume elsewhere, its pods may hold accelerators.
fn fail(step: &mut Step<'_>, pool: &str, supernode: &Supernode, failure: &crate::supernode::phase::Failure) {
    let object = Object::from(supernode.clone());
    let record = FailureRecord {
        at: step.world.now,
        supernode: object.name().to_owned(),
        revision: supernode.spec.revision.clone(),
        reason: failure.reason.clone(),
        message: format!("{}: {}", failure.pod, failure.message),
    };
    let note = format!("{}: {}", record.reason, record.message);
    let failures = step.next.failures.entry(pool.to_owned()).or_default();
    if retries::remember(failures, record) {
        step.event(object.key(), EventKind::Warning, "SupernodeFailed", note.clone());
    }
    step.delete(&object, note);
}

fn stored_template(object: &Object) -> Option<Template> {
    match object {
        Object::ControllerRevision(stored) => serde_json::from_value(stored.data.as_ref()?.0.clone()).ok(),
        _ => None,
    }
}
