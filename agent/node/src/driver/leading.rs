//! The leader's part: active while the FleetView names this agent.

use std::sync::Arc;

use deepinfer_protocol::agent_status::Role;
use deepinfer_protocol::fleet::{FleetView, Leader};
use deepinfer_protocol::{AgentId, Epoch, Span, Time};
use deepinfer_serving::leader::{
    DecodeLeader, DecodeLeaderOptions, LeaderAction, LeaderEvent, PrefillLeader, PrefillLeaderOptions,
};

/// A leader of this agent's role, leading or not.
pub enum Leading {
    /// Of the prefill pool.
    Prefill(Box<PrefillLeader>),
    /// Of the decode supernodes.
    Decode(Box<DecodeLeader>),
}

impl Leading {
    /// Not leading yet. `chunk`: time budget of a worker's step; a worker gets twice that ahead.
    pub fn new(role: Role, chunk: Span) -> Self {
        match role {
            Role::Prefill => {
                let options =
                    PrefillLeaderOptions { backlog_limit: chunk.times(2), ..PrefillLeaderOptions::default() };
                Self::Prefill(Box::new(PrefillLeader::new(options)))
            }
            Role::Decode => Self::Decode(Box::new(DecodeLeader::new(DecodeLeaderOptions::default()))),
        }
    }

    /// Under which epoch it leads.
    pub fn epoch(&self) -> Option<Epoch> {
        match self {
            Self::Prefill(leader) => leader.epoch(),
            Self::Decode(leader) => leader.epoch(),
        }
    }

    /// Requests that wait for a decision.
    pub fn queued(&self) -> usize {
        match self {
            Self::Prefill(leader) => leader.queued(),
            Self::Decode(leader) => leader.queued(),
        }
    }

    /// Tells it something.
    pub fn on_event(&mut self, now: Time, event: LeaderEvent, out: &mut Vec<LeaderAction>) {
        match self {
            Self::Prefill(leader) => leader.on_event(now, event, out),
            Self::Decode(leader) => leader.on_event(now, event, out),
        }
    }

    /// A newer view of the fleet: leads, goes on, or resigns.
    pub fn follow(&mut self, now: Time, name: &AgentId, view: &Arc<FleetView>, out: &mut Vec<LeaderAction>) {
        self.on_event(now, LeaderEvent::Fleet(view.clone()), out);
        let named = self.leader_of(view).filter(|leader| leader.agent == *name);
        match (named, self.epoch()) {
            (Some(leader), epoch) if epoch != Some(leader.epoch) => {
                let lead = LeaderEvent::Lead(leader.epoch);
                self.on_event(now, lead, out);
            }
            (None, Some(_)) => self.on_event(now, LeaderEvent::Resign, out),
            _ => {}
        }
    }

    /// Who leads this agent's role.
    pub fn leader_of<'v>(&self, view: &'v FleetView) -> Option<&'v Leader> {
        match self {
            Self::Prefill(_) => view.prefill_leader.as_ref(),
            Self::Decode(_) => view.decode_leader.as_ref(),
        }
    }
}
