//! `DeepInferPool`: the resolved role, and its status.

use deepinfer_crds::cluster::{Drain, HandoffMode, Recovery, Rollout};
use deepinfer_crds::condition::{self, Truth, kind, reason};
use deepinfer_crds::names::label;
use deepinfer_crds::pool::{DeepInferPoolSpec, Quarantined};
use deepinfer_crds::{DeepInferPool, PoolMode, PoolRole, PoolStatus};
use serde_json::json;

use crate::action::{Action, EventKind};
use crate::apply::time;
use crate::cluster::children::meta;
use crate::cluster::resolve::Resolved;
use crate::cluster::template::Template;
use crate::naming::{self, Component, pool_name};
use crate::object::{Key, Kind, Object};
use crate::step::Step;

/// Replicas of a pool by what they do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub desired: u32,
    pub replicas: u32,
    pub ready: u32,
    pub available: u32,
    pub updated: u32,
    pub draining: u32,
}

/// Plans a pool; gives it once it exists.
pub(crate) fn ensure(
    step: &mut Step<'_>,
    resolved: &Resolved,
    component: Component,
    template: &Template,
) -> Option<DeepInferPool> {
    let decode = component == Component::Decode;
    let d = if decode { &resolved.decode.life } else { &resolved.prefill.life };
    let (replicas, drain) = (d.replicas, d.drain_seconds);
    let name = pool_name(&resolved.name, component);
    let spec = DeepInferPoolSpec {
        cluster_name: resolved.name.clone(),
        role: if decode { PoolRole::Decode } else { PoolRole::Prefill },
        // Written by the one who decides it, under another field manager.
        replicas: None,
        mode: PoolMode::Fixed,
        min_replicas: replicas,
        max_replicas: replicas,
        nodes_per_replica: template.nodes,
        revision: template.revision.clone(),
        kv_epoch: template.kv_epoch.clone(),
        template_hash: template.hash().to_owned(),
        rollout: Rollout {
            max_surge: Some(d.max_surge),
            max_unavailable: Some(d.max_unavailable),
            ..Rollout::default()
        },
        drain: Drain { timeout_seconds: Some(drain), handoff: Some(HandoffMode::None) },
        recovery: decode.then(|| Recovery {
            max_restarts: Some(d.max_restarts),
            backoff_seconds: Some(d.backoff as u32),
            max_backoff_seconds: Some(d.max_backoff as u32),
            reset_after_seconds: Some(d.reset_after as u32),
            ..Recovery::default()
        }),
    };
    let mut pool = DeepInferPool::new(&name, spec);
    pool.metadata = meta(&name, Some(naming::labels(&resolved.name, Some(component))));
    let owner = step.owner();
    step.ensure(pool, &owner);
    let Some(Object::Pool(pool)) = step.world.get(Kind::Pool, &name) else {
        // It is filled in the plan after the one that makes it.
        step.actions.push(Action::Replicas { key: Key::new(Kind::Pool, name), replicas });
        return None;
    };
    if pool.controller_owner().is_none_or(|uid| uid != owner.uid) {
        return None;
    }
    if pool.spec.replicas != Some(replicas) {
        let key = Key::new(Kind::Pool, name);
        // The bounds are ours alone: if they already say the number, the spec did not change.
        if pool.spec.replicas.is_some() && pool.spec.max_replicas == replicas {
            let note =
                format!("replicas were changed on the pool and are set back to {replicas}: edit the cluster");
            step.event(key.clone(), EventKind::Warning, "DriftCorrected", note);
        }
        step.actions.push(Action::Replicas { key, replicas });
    }
    Some(pool.clone())
}

/// UID of an object's controller.
trait ControllerOwner {
    fn controller_owner(&self) -> Option<&str>;
}

impl ControllerOwner for DeepInferPool {
    fn controller_owner(&self) -> Option<&str> {
        let owners = self.metadata.owner_references.as_deref().unwrap_or_default();
        owners.iter().find(|owner| owner.controller == Some(true)).map(|owner| owner.uid.as_str())
    }
}

/// Plans a pool's status.
pub(crate) fn status(
    step: &mut Step<'_>,
    pool: &DeepInferPool,
    counts: Counts,
    why: &str,
    quarantine: Vec<Quarantined>,
) {
    let name = pool.metadata.name.clone().unwrap_or_default();
    let generation = pool.metadata.generation;
    let now = time(step.world.now);
    let mut status: PoolStatus = pool.status.clone().unwrap_or_default();
    status.observed_generation = generation;
    status.replicas = Some(counts.replicas);
    status.ready_replicas = Some(counts.ready);
    status.available_replicas = Some(counts.available);
    status.updated_replicas = Some(counts.updated);
    status.draining_replicas = Some(counts.draining);
    status.effective_replicas = Some(counts.desired);
    status.selector = Some(format!("{}={name},{}=true", label::POOL, label::LEAD));
    status.quarantine = quarantine;
    let ready = counts.available >= counts.desired && counts.updated >= counts.desired;
    let word = if ready { reason::READY } else { reason::NOT_READY };
    condition::set(&mut status.conditions, (kind::READY, Truth::from(ready)), (word, why), generation, &now);
    let fixed = "the number in the cluster's spec";
    let active = (kind::pool::SCALING_ACTIVE, Truth::False);
    condition::set(&mut status.conditions, active, ("Fixed", fixed), generation, &now);
    step.status(Object::from(pool.clone()).key(), json!(status));
}
