//! Whom the gateway can talk to, who leads, and what it still owes to whom.
//!
//! Invariant: a cancel is said to its peer at least once while the peer could still hold something. A connection
//! that breaks may swallow a cancel, and the heartbeats of the next one renew the leases of what was to be
//! dropped; so cancels are kept until the lease would have ended, and said again on every new connection.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use deepinfer_protocol::agent_status::Role;
use deepinfer_protocol::fleet::{FleetMember, FleetView, Leader};
use deepinfer_protocol::message::{Message, Refusal};
use deepinfer_protocol::{AgentId, Attempt, RequestId, Span, Time};

use super::GatewayAction;

/// Most cancels kept for one peer: a peer that is gone for good must not fill the memory.
const MAX_OWED: usize = 16_384;

/// Which leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Which {
    Prefill,
    Decode,
}

#[derive(Default)]
pub(super) struct Peers {
    up: BTreeSet<AgentId>,
    fleet: Option<Arc<FleetView>>,
    owed: BTreeMap<AgentId, BTreeMap<RequestId, (Attempt, Time)>>,
    prefill_vacant: Option<Time>,
    decode_vacant: Option<Time>,
    /// Since when nobody serves, by role: prefill, decode.
    deserted: [Option<Time>; 2],
}

impl Peers {
    pub(super) fn fleet(&self) -> Option<&FleetView> {
        self.fleet.as_deref()
    }

    pub(super) fn is_up(&self, agent: &AgentId) -> bool {
        self.up.contains(agent)
    }

    /// Takes a newer view; says `false` of an older one.
    pub(super) fn follow(&mut self, now: Time, fleet: Arc<FleetView>) -> bool {
        if self.fleet.as_ref().is_some_and(|f| f.generation >= fleet.generation) {
            return false;
        }
        self.fleet = Some(fleet);
        self.note_vacancy(now);
        self.note_deserted(now);
        true
    }

    /// A connection is open: what is still owed to the peer is said.
    pub(super) fn up(&mut self, now: Time, agent: AgentId, out: &mut Vec<GatewayAction>) {
        for (request, (attempt, _)) in self.owed.get(&agent).into_iter().flatten() {
            let message = Message::Cancel { request: *request, attempt: *attempt };
            out.push(GatewayAction::Send { to: agent.clone(), message });
        }
        self.up.insert(agent);
        self.note_vacancy(now);
        self.note_deserted(now);
    }

    pub(super) fn lost(&mut self, now: Time, agent: &AgentId) {
        self.up.remove(agent);
        self.note_vacancy(now);
        self.note_deserted(now);
    }

    /// The named leader, if it can be reached.
    pub(super) fn leader(&self, which: Which) -> Option<&Leader> {
        let fleet = self.fleet.as_ref()?;
        let leader = match which {
            Which::Prefill => fleet.prefill_leader.as_ref(),
            Which::Decode => fleet.decode_leader.as_ref(),
        };
        leader.filter(|l| self.is_up(&l.agent))
    }

    /// Whether there has been no leader to talk to for `grace`.
    pub(super) fn vacant(&self, now: Time, which: Which, grace: Span) -> bool {
        let since = match which {
            Which::Prefill => self.prefill_vacant,
            Which::Decode => self.decode_vacant,
        };
        since.is_some_and(|since| now.since(since) >= grace)
    }

    /// Members that may take work and can be reached.
    pub(super) fn serving(&self) -> impl Iterator<Item = &FleetMember> {
        let members = self.fleet.as_ref().map(|f| f.members.as_slice()).unwrap_or_default();
        members.iter().filter(|m| m.serving && self.up.contains(&m.name))
    }

    /// Tells a peer to drop this attempt and older ones, now or when it is back.
    pub(super) fn cancel(
        &mut self,
        now: Time,
        to: &AgentId,
        request: RequestId,
        attempt: Attempt,
        out: &mut Vec<GatewayAction>,
    ) {
        let owed = self.owed.entry(to.clone()).or_default();
        if owed.len() >= MAX_OWED && !owed.contains_key(&request) {
            owed.pop_first();
        }
        owed.insert(request, (attempt, now));
        if self.up.contains(to) {
            let message = Message::Cancel { request, attempt };
            out.push(GatewayAction::Send { to: to.clone(), message });
        }
    }

    /// Tells a leader that its decision was not used. Not a cancel: the agent that leads may hold the request
    /// in its other roles.
    pub(super) fn unused(
        &self,
        leader: &AgentId,
        request: RequestId,
        attempt: Attempt,
        out: &mut Vec<GatewayAction>,
    ) {
        if self.up.contains(leader) {
            let message =
                Message::Refuse { request, attempt, reason: Refusal::NoRoom, retry_after: Span::ZERO };
            out.push(GatewayAction::Send { to: leader.clone(), message });
        }
    }

    /// Forgets cancels whose leases have ended by now.
    pub(super) fn prune(&mut self, now: Time, lease: Span) {
        self.owed.retain(|_, owed| {
            owed.retain(|_, (_, at)| now.since(*at) < lease);
            !owed.is_empty()
        });
    }

    /// Since when no member of this role could take work.
    pub(super) fn deserted(&self, which: Which) -> Option<Time> {
        self.deserted[which as usize]
    }

    fn note_deserted(&mut self, now: Time) {
        for (which, role) in [(Which::Prefill, Role::Prefill), (Which::Decode, Role::Decode)] {
            let served = self.serving().any(|member| member.role == role);
            let since = &mut self.deserted[which as usize];
            *since = if served { None } else { since.or(Some(now)) };
        }
    }

    fn note_vacancy(&mut self, now: Time) {
        for which in [Which::Prefill, Which::Decode] {
            let vacant = self.leader(which).is_none();
            let since = match which {
                Which::Prefill => &mut self.prefill_vacant,
                Which::Decode => &mut self.decode_vacant,
            };
            *since = if vacant { since.or(Some(now)) } else { None };
        }
    }
}
