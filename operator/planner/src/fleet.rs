//! World -> FleetView: who serves, where, and who leads.

use std::collections::BTreeSet;

use deepinfer_crds::names::label;
use deepinfer_protocol::agent_status::{AgentPhase, Role};
use deepinfer_protocol::fleet::{FleetMember, FleetView, Leader};
use deepinfer_protocol::{AgentId, Epoch, SupernodeId};

use crate::blueprint::Blueprint;

use crate::object::{Kind, Object};
use crate::world::World;

/// Seconds without a word after which a leader is replaced (decisions.md, failure times).
pub const LEADER_SILENT_SECONDS: i64 = 2;
/// Seconds without a word after which an agent is no candidate: those that do not lead are asked every five seconds.
const CANDIDATE_SILENT_SECONDS: i64 = 12;

/// What the plan means to do with the pools.
pub(crate) struct Intent<'a> {
    /// No more requests are taken.
    pub closed: bool,
    /// Roles whose pools get what they lack.
    pub kept_up: &'a [Role],
}

/// What the next blueprint says about the fleet. The generation grows only if something changed.
pub(crate) fn next(world: &World, memory: &Blueprint, next: &mut Blueprint, intent: &Intent<'_>) {
    let members = members(world, memory);
    let prefill =
        lead(world, &members, Role::Prefill, memory.fleet.prefill_leader.as_ref(), memory.prefill_epoch);
    let decode =
        lead(world, &members, Role::Decode, memory.fleet.decode_leader.as_ref(), memory.decode_epoch);
    let epoch =
        |leader: &Option<Leader>, before: Epoch| leader.as_ref().map_or(before, |l| l.epoch.max(before));
    next.prefill_epoch = epoch(&prefill, memory.prefill_epoch);
    next.decode_epoch = epoch(&decode, memory.decode_epoch);
    // A pool that never had a leader has never served: before the first start there is nothing to wait for.
    let missing = |role: Role, led: Epoch| {
        led > Epoch(0)
            && intent.kept_up.contains(&role)
            && !members.iter().any(|m| m.role == role && m.serving)
    };
    let roles = [(Role::Prefill, next.prefill_epoch), (Role::Decode, next.decode_epoch)];
    let rebuilding =
        roles.into_iter().filter(|(role, led)| missing(*role, *led)).map(|(role, _)| role).collect();
    let mut view = FleetView {
        generation: memory.fleet.generation,
        cluster: world.cluster().and_then(|c| c.metadata.name.clone()).unwrap_or_default(),
        members,
        prefill_leader: prefill,
        decode_leader: decode,
        closed: intent.closed,
        rebuilding,
    };
    if view != memory.fleet {
        view.generation = view.generation.next();
    }
    next.fleet = view;
}

/// Every agent whose ports are known, by name.
fn members(world: &World, memory: &Blueprint) -> Vec<FleetMember> {
    let draining: BTreeSet<&str> = world
        .supernodes()
        .filter(|sn| sn.spec.drain.is_some() || sn.metadata.deletion_timestamp.is_some())
        .filter_map(|sn| sn.metadata.name.as_deref())
        .collect();
    let mut members = Vec::new();
    for object in world.of(Kind::Pod) {
        let Object::Pod(pod) = object else { continue };
        let role = match object.label(label::ROLE) {
            Some("prefill") => Role::Prefill,
            Some("decode") => Role::Decode,
            _ => continue,
        };
        let Some(word) = world.agents.get(&AgentId::from(object.name())) else {
            continue;
        };
        let Some(status) = &word.status else {
            // Not heard of just now: whoever shares a network with it knows better than we do.
            let kept = memory.fleet.member(&AgentId::from(object.name())).cloned();
            let here = !object.is_deleted() && !crate::emulate::has_ended(pod);
            members.extend(kept.filter(|_| here));
            continue;
        };
        let supernode = object.label(label::SUPERNODE);
        let index = object.label(label::NODE_INDEX).and_then(|i| i.parse().ok()).unwrap_or(0);
        let going = object.is_deleted()
            || crate::emulate::has_ended(pod)
            || supernode.is_some_and(|name| draining.contains(name));
        members.push(FleetMember {
            name: AgentId::from(object.name()),
            role,
            supernode: supernode.map(SupernodeId::from),
            index,
            first_rank: index * status.ranks,
            ranks: status.ranks,
            data: word.data,
            control: word.control,
            serving: !going && status.accepting && status.phase == AgentPhase::Serving,
            kv_epoch: status.kv_epoch.clone(),
        });
    }
    members
}

/// The leader of a role: the present one as long as it is heard of, else the first member that serves.
fn lead(
    world: &World,
    members: &[FleetMember],
    role: Role,
    present: Option<&Leader>,
    epoch: Epoch,
) -> Option<Leader> {
    let heard = |name: &AgentId, within: i64| {
        world.agents.get(name).is_some_and(|w| w.status.is_some() && world.now - w.heard <= within)
    };
    let of_role = || members.iter().filter(|m| m.role == role);
    let leads = present.filter(|present| of_role().any(|m| m.name == present.agent));
    // A draining leader goes on deciding for the others until it is gone.
    if let Some(present) = leads.filter(|present| heard(&present.agent, LEADER_SILENT_SECONDS)) {
        return Some(present.clone());
    }
    let other = |member: &&FleetMember| leads.is_none_or(|present| present.agent != member.name);
    let candidate = of_role().filter(other).find(|m| m.serving && heard(&m.name, CANDIDATE_SILENT_SECONDS));
    match candidate {
        Some(member) => Some(Leader { agent: member.name.clone(), epoch: epoch.next() }),
        // Nobody else is heard of: it is we who are cut off, and they go on as they were.
        None => leads.cloned(),
    }
}
