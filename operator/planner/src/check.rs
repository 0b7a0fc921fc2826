//! A second opinion on a plan: the invariants of operator.md, checked apart from the code that plans.

use std::collections::BTreeSet;
use std::fmt;

use deepinfer_protocol::agent_status::Role;

use crate::action::Action;
use crate::object::{Key, Kind, Object};
use crate::plan::Plan;
use crate::world::World;

/// Something that must not be. A plan with findings is neither committed nor executed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The invariant.
    pub rule: &'static str,
    /// What breaks it.
    pub what: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.rule, self.what)
    }
}

/// Checks a plan against the world that it was made for.
pub fn check(world: &World, plan: &Plan) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut find = |rule: &'static str, what: String| findings.push(Finding { rule, what });
    let parent = world.blueprint.as_ref();
    if let Some(parent) = parent {
        if plan.blueprint.generation < parent.generation {
            find(
                "generations never go down",
                format!("{} after {}", plan.blueprint.generation, parent.generation),
            );
        }
        if plan.blueprint.fleet.generation < parent.fleet.generation {
            let (next, before) = (plan.blueprint.fleet.generation, parent.fleet.generation);
            find("generations never go down", format!("fleet {next} after {before}"));
        }
        if plan.blueprint != *parent && plan.blueprint.parent != Some(parent.generation) {
            find("a blueprint's parent is the one before", format!("{:?}", plan.blueprint.parent));
        }
        let epochs = [
            (plan.blueprint.prefill_epoch, parent.prefill_epoch),
            (plan.blueprint.decode_epoch, parent.decode_epoch),
        ];
        if epochs.iter().any(|(next, before)| next < before) {
            find("epochs never go down", format!("{epochs:?}"));
        }
    }
    let mut deleted: BTreeSet<&Key> = BTreeSet::new();
    for action in &plan.actions {
        match action {
            Action::Create(object) | Action::Apply(object) | Action::DeriveKey { secret: object, .. } => {
                written(world, object, &mut find);
            }
            Action::Status { key, .. } if !world.objects.contains_key(key) => {
                find("a status is of something that exists", key.to_string());
            }
            Action::Delete { key, .. } => {
                if key.kind == Kind::Cluster {
                    find("the user's object is never deleted by us", key.to_string());
                }
                if !deleted.insert(key) {
                    find("nothing is deleted twice", key.to_string());
                }
            }
            Action::Pod { key, .. } | Action::Replicas { key, .. } => {
                let made = plan.actions.iter().any(|other| match other {
                    Action::Apply(object) | Action::Create(object) => object.key() == *key,
                    _ => false,
                });
                if !made && !world.objects.contains_key(key) {
                    find("what is changed exists", key.to_string());
                }
            }
            Action::Status { .. }
            | Action::Finalizers { .. }
            | Action::CallAgent { .. }
            | Action::Event { .. } => {}
        }
    }
    members(plan, &mut find);
    availability(world, plan, &mut find);
    findings
}

fn written(world: &World, object: &Object, find: &mut impl FnMut(&'static str, String)) {
    let key = object.key();
    if key.kind == Kind::Cluster {
        find("spec and metadata of the user's object are the user's", key.to_string());
    }
    if object.controller_uid().is_none() {
        find("every child has a controller", key.to_string());
    }
    if let Some(live) = world.objects.get(&key)
        && live.controller_uid() != object.controller_uid()
    {
        find("objects of others are not adopted", key.to_string());
    }
    if key.name.len() > 63 {
        find("names fit into a label", key.to_string());
    }
}

fn members(plan: &Plan, find: &mut impl FnMut(&'static str, String)) {
    let fleet = &plan.blueprint.fleet;
    for (leader, role) in [(&fleet.prefill_leader, Role::Prefill), (&fleet.decode_leader, Role::Decode)] {
        let Some(leader) = leader else { continue };
        if fleet.member(&leader.agent).is_none_or(|m| m.role != role) {
            find("a leader is a member of its role", leader.agent.to_string());
        }
    }
}

/// The only supernode that serves is not drained for a rollout.
fn availability(world: &World, plan: &Plan, find: &mut impl FnMut(&'static str, String)) {
    let serving = |name: &str| {
        world.get(Kind::Supernode, name).is_some_and(|object| match object {
            Object::Supernode(sn) => sn.spec.drain.is_none() && !object.is_deleted(),
            _ => false,
        })
    };
    let all =
        world.supernodes().filter_map(|sn| sn.metadata.name.as_deref()).filter(|name| serving(name)).count();
    let drained = plan.actions.iter().filter(|action| match action {
        Action::Apply(object) => matches!(&**object, Object::Supernode(sn)
            if sn.spec.drain.as_ref().is_some_and(|d| d.reason == "RollingOut")),
        _ => false,
    });
    let drained = drained.count();
    if drained > 0 && drained >= all {
        find("a rollout leaves somebody who serves", format!("{drained} of {all} supernodes would drain"));
    }
}
