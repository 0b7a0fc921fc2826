//! A sequence on its way through a rank.

use deepinfer_protocol::AgentId;
use deepinfer_protocol::generate::GenerateSpec;
use deepinfer_protocol::message::Assignment;

use super::room::Need;
use crate::batch::{BlockId, StateSlot};
use crate::handoff::Fetch;
use crate::node::desk::Subject;
use crate::node::{Pieces, Ticket};

/// What a sequence is doing.
#[derive(Clone, Debug)]
pub(super) enum Stage {
    Fetching(Fetch),
    /// All here, while there is no engine to put it into.
    Fetched(Pieces),
    Importing(Ticket),
    Running,
}

/// A sequence with blocks and a slot.
#[derive(Clone, Debug)]
pub(super) struct Sequence {
    pub subject: Subject,
    pub assignment: Assignment,
    pub spec: GenerateSpec,
    pub tokens: Vec<u32>,
    pub prompt_tokens: u32,
    pub preemptions: u32,
    pub holder: AgentId,
    /// Counts acceptances: the newest give way first.
    pub order: u64,
    pub slot: StateSlot,
    pub blocks: Vec<BlockId>,
    pub stage: Stage,
}

impl Sequence {
    pub(super) fn length(&self) -> u32 {
        self.tokens.len() as u32
    }

    pub(super) fn need(&self, limit: u32) -> Need {
        let emitted = self.length() - self.prompt_tokens;
        let left = self.spec.max_tokens.saturating_sub(emitted).min(limit.saturating_sub(self.length()));
        Need { tokens: self.length(), left, preemptions: self.preemptions }
    }

    pub(super) fn running(&self) -> bool {
        matches!(self.stage, Stage::Running)
    }
}

/// A sequence that is being copied out.
#[derive(Clone, Debug)]
pub(super) struct Leaving {
    pub subject: Subject,
    pub tokens: u32,
}
