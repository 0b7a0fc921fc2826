//! Deciding for a pool of prefill workers or a group of supernodes. A leader runs in the agent that the FleetView
//! names; it sees lengths, never tokens, and forgets a request once it is assigned and seen.
//!
//! * [`PrefillLeader`]: one queue of prompts, pulled by workers with room ([`prefill_queue`], [`assign`]).
//! * [`DecodeLeader`]: one queue of prefilled sequences, placed on ranks in two phases ([`choose`]).
//! * [`view`]: what both know of workers and ranks: the last report plus what was assigned since (PF-9). Without
//!   that sum, every decision between two reports would pick the same target.

pub mod assign;
pub mod choose;
mod decode;
mod prefill;
pub mod prefill_queue;
pub mod view;

use std::sync::Arc;

use deepinfer_protocol::fleet::FleetView;
use deepinfer_protocol::message::Message;
use deepinfer_protocol::{AgentId, Epoch, Span};

pub use self::decode::{DecodeLeader, DecodeLeaderOptions};
pub use self::prefill::{PrefillLeader, PrefillLeaderOptions};

/// A report older than this says nothing about now: its sender gets no work until it speaks again. Reports come
/// at least every 250 ms; four may be late before a busy sender is taken for a silent one.
pub const STALE_REPORT: Span = Span::secs(1);
/// An assignment that no report has acknowledged for this long never arrived (PD-5): it is forgotten.
pub const UNSEEN_ASSIGNMENT: Span = Span::secs(5);
/// Reports of every target have come by then: before, a new leader refuses nothing for good.
pub const SETTLE: Span = Span::secs(2);

/// Something a leader is told.
#[derive(Clone, Debug, PartialEq)]
pub enum LeaderEvent {
    /// The FleetView named this agent: lead under this epoch, with an empty view.
    Lead(Epoch),
    /// It named another: entries are dropped, gateways ask the new one.
    Resign,
    /// A newer view of the fleet: who may get work, and which agents form a supernode. Without any view, whoever
    /// reports may get work, and each agent is a supernode of its own.
    Fleet(Arc<FleetView>),
    /// A message that is for a leader.
    Message {
        /// Who sent it.
        from: AgentId,
        /// What.
        message: Message,
    },
    /// A gateway or an agent is gone.
    PeerLost(AgentId),
    /// Time passes: at least every 20 ms while something waits.
    Tick,
}

/// Something a leader wants said.
#[derive(Clone, Debug, PartialEq)]
pub struct LeaderAction {
    /// To whom.
    pub to: AgentId,
    /// What.
    pub message: Message,
}

/// Whether the fleet lets this agent take new work. An agent that the view does not name does not serve.
fn may_serve(fleet: Option<&FleetView>, agent: &AgentId) -> bool {
    fleet.is_none_or(|fleet| fleet.member(agent).is_some_and(|m| m.serving))
}

/// When to come back after a refusal: the wait ahead, but at least a second (a client that retries at once only
/// adds load) and at most a minute (a longer guess is worth nothing).
fn retry_after(wait: Span) -> Span {
    wait.clamp(Span::secs(1), Span::secs(60))
}
