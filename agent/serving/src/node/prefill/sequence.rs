//! A prompt on its way through a worker.

use deepinfer_protocol::generate::TokenEvent;
use deepinfer_protocol::message::{Message, PrefillWork};
use deepinfer_protocol::{Attempt, RequestId, Time};

use crate::batch::{BlockId, PackItem, StateSlot};
use crate::kv::{BlockKey, PrefixPlan, Start, checkpoint_position};
use crate::node::Ticket;
use crate::node::desk::Subject;

/// What a sequence is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Not in the engine yet: its prefix may still be exchanged for a better one.
    Waiting,
    /// Its checkpoint is on the way into the engine.
    Restoring(Ticket),
    /// In steps.
    Running,
}

/// A sequence with blocks and a slot.
#[derive(Clone, Debug)]
pub(super) struct Sequence {
    pub subject: Subject,
    pub work: PrefillWork,
    pub arrived: Time,
    pub slot: StateSlot,
    pub blocks: Vec<BlockId>,
    /// Keys of its full blocks; empty if it shares nothing.
    pub keys: Vec<BlockKey>,
    /// State at `resume_from`, or how to get it.
    pub start: Start,
    /// Tokens of adopted blocks; rows before this are replayed, those after it fill blocks.
    pub resume_from: usize,
    /// Next row.
    pub next: usize,
    /// Blocks whose content has a name: adopted or sealed.
    pub sealed: usize,
    /// Its first chunk was given, and the gateway told.
    pub started: bool,
    /// Its last chunk was given, and the gateway told.
    pub told_last: bool,
    pub stage: Stage,
}

impl Sequence {
    pub(super) fn length(&self) -> usize {
        self.work.tokens.len()
    }

    /// First position whose window state is valid.
    pub(super) fn window_start(&self) -> usize {
        match self.start {
            Start::Replay { from } => from,
            Start::Fresh | Start::Checkpoint { .. } => 0,
        }
    }

    /// Where a chunk must end: at the end of a replay, and where the checkpoint is taken.
    pub(super) fn cuts(&self) -> Vec<usize> {
        let checkpoint = self.checkpoint_at();
        [Some(self.resume_from), checkpoint].into_iter().flatten().collect()
    }

    /// Position of the checkpoint that it leaves behind.
    pub(super) fn checkpoint_at(&self) -> Option<usize> {
        checkpoint_position(self.length()).filter(|_| !self.keys.is_empty())
    }

    /// Goes by this plan; its blocks are in `blocks` already.
    pub(super) fn adopt(&mut self, plan: PrefixPlan) {
        self.sealed = plan.adopt.len();
        self.resume_from = plan.resume_from;
        self.start = plan.start;
        self.next = match self.start {
            Start::Replay { from } => from,
            _ => self.resume_from,
        };
    }

    pub(super) fn item(&self) -> PackItem {
        PackItem {
            start: self.next,
            end: self.length(),
            window_start: self.window_start(),
            cuts: self.cuts(),
            ..PackItem::default()
        }
    }

    /// Prompt tokens that need not be computed.
    pub(super) fn cached_tokens(&self) -> u32 {
        // After a resume the emitted tokens are prefilled too; they are no prompt tokens that were saved (SV-067).
        (self.resume_from as u32).min(self.work.prompt_tokens)
    }

    /// What the gateway is told while it runs.
    pub(super) fn progress(&self) -> Message {
        Message::PrefillProgress {
            request: self.subject.request,
            attempt: self.subject.attempt,
            cached_tokens: self.cached_tokens(),
            last_chunk: self.told_last,
        }
    }
}

/// A sequence that is being copied out.
#[derive(Clone, Debug)]
pub(super) struct Leaving {
    pub subject: Subject,
    pub tokens: u32,
    pub first: TokenEvent,
}

/// A chunk in the step that runs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Running {
    pub request: RequestId,
    pub attempt: Attempt,
    pub end: usize,
    pub replay: bool,
}
