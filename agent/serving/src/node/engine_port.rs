//! What a node's machines say to an engine and hear back. A step is asked for by the driver (`poll_step`) when the
//! engine, or every rank of a supernode, is idle.
//!
//! Invariant: commands and steps run in the order in which they were given, and answers come in that order. Machines
//! rest on it: they give blocks and slots away in the moment in which the last command that reads them is issued.

use std::sync::Arc;

use deepinfer_protocol::Span;
use deepinfer_protocol::generate::Token;
use deepinfer_protocol::message::{Failure, PieceKind};

use crate::batch::{BlockId, StateSlot, StepBatch};

/// How the token after a row is drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Below 1e-5: greedy.
    pub temperature: f32,
    /// 1 keeps all.
    pub top_p: f32,
    /// Of the request.
    pub seed: u64,
    /// Position of the drawn token in its sequence.
    pub position: u64,
    /// Alternatives to report; `None`: no log-probability at all.
    pub logprobs: Option<u8>,
    /// Tokens that may not be drawn: stop tokens before `min_tokens`. Log-probabilities do not see this.
    pub forbidden: Vec<u32>,
}

/// A step and what to draw from it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepWork {
    /// What runs. May be empty on a rank without work whose supernode steps.
    pub batch: StepBatch,
    /// By sequence of the batch: how its last row's token is drawn; `None` for chunks that do not end a prompt.
    pub samples: Vec<Option<Sample>>,
}

/// What a step gave.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepResult {
    /// By sequence of the batch: the drawn token.
    pub tokens: Vec<Option<Token>>,
    /// Arrivals by layer and local slot, `[layers][slots_per_layer]`.
    pub arrivals: Vec<u32>,
    /// Columns of `arrivals`.
    pub slots_per_layer: usize,
    /// How long it took.
    pub elapsed: Span,
}

/// Names the answer to a command; counts within a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// Parts of a sequence outside an engine: its blocks in order, then its state.
pub type Pieces = Vec<(PieceKind, Arc<[u8]>)>;

/// Something an engine does between two steps.
#[derive(Clone, Debug, PartialEq)]
pub enum EngineCommand {
    /// Copy a whole sequence out, at whatever position it stands: its blocks and its state.
    Export {
        /// Answered by [`EngineEvent::Exported`].
        ticket: Ticket,
        /// State.
        slot: StateSlot,
        /// Blocks of the sequence, in order.
        blocks: Vec<BlockId>,
    },
    /// Put a sequence in: the pieces of an export, into these blocks and this slot.
    Import {
        /// Answered by [`EngineEvent::Imported`].
        ticket: Ticket,
        /// State.
        slot: StateSlot,
        /// As many as the pieces have blocks.
        blocks: Vec<BlockId>,
        /// Of the export.
        pieces: Pieces,
    },
    /// Copy a window checkpoint out: the state as it was at `position`, a multiple of 128.
    Checkpoint {
        /// Answered by [`EngineEvent::Checkpointed`].
        ticket: Ticket,
        /// Of the sequence.
        slot: StateSlot,
        /// Not further back than the engine's slack.
        position: u32,
    },
    /// Put a window checkpoint in. Later steps of the slot start at its position.
    Restore {
        /// Answered by [`EngineEvent::Restored`]; a step may be asked for before the answer comes.
        ticket: Ticket,
        /// Where.
        slot: StateSlot,
        /// The checkpoint.
        state: Arc<[u8]>,
    },
    /// Prepare a slot for replay steps from `start`, a multiple of 128 (see `Engine::begin_replay`).
    BeginReplay {
        /// Where.
        slot: StateSlot,
        /// First position that is replayed.
        start: u32,
        /// Tokens before it.
        history: Vec<u32>,
    },
    /// Forget a slot.
    Reset(StateSlot),
}

/// What an engine says.
#[derive(Clone, Debug, PartialEq)]
pub enum EngineEvent {
    /// The step that was polled last has run.
    StepDone(StepResult),
    /// Answer to [`EngineCommand::Export`].
    Exported {
        /// Of the command.
        ticket: Ticket,
        /// Blocks in order, then the state.
        pieces: Pieces,
    },
    /// Answer to [`EngineCommand::Import`].
    Imported {
        /// Of the command.
        ticket: Ticket,
        /// `false`: the pieces do not fit this engine; nothing is in the slot.
        fits: bool,
    },
    /// Answer to [`EngineCommand::Checkpoint`].
    Checkpointed {
        /// Of the command.
        ticket: Ticket,
        /// `None` if the position could not be cut out any more.
        state: Option<Arc<[u8]>>,
    },
    /// Answer to [`EngineCommand::Restore`].
    Restored {
        /// Of the command.
        ticket: Ticket,
        /// `false`: damaged or of another model; nothing is in the slot.
        fits: bool,
    },
    /// The engine is gone with everything in its slots and blocks; commands without an answer get none. No step
    /// is polled until [`EngineEvent::Ready`].
    Lost(Failure),
    /// An empty engine of the same sizes is there.
    Ready,
}
