//! Why an engine does not open, and why a step is refused. A refused step changes nothing.

use deepinfer_serving::batch::BLOCK_TOKENS;
use thiserror::Error;

use crate::cache::{BlockError, WindowStateError};
use crate::engram::TokenMapError;
use crate::exchange::ExchangeError;

/// Why an engine does not open.
#[derive(Debug, Error)]
pub enum OpenError {
    /// An option is out of its range.
    #[error("{field} is {value}, expected 1 to {max}")]
    Size {
        /// Name of the option.
        field: &'static str,
        /// Its value.
        value: usize,
        /// The highest possible one.
        max: usize,
    },
    /// The model cannot run with the chosen numerics or truncation.
    #[error("not supported: {}", .0.join("; "))]
    Unsupported(Vec<String>),
    /// The place in a supernode does not fit the model or the exchange.
    #[error("slot map: {0}")]
    SlotMap(String),
    /// Caches and buffers would not fit.
    #[error(
        "memory does not suffice: {} MiB needed beside the weights, {} MiB available; lower blocks ({blocks}), \
         slots ({slots}) or max_rows ({max_rows})",
        needed.div_ceil(1 << 20), available >> 20
    )]
    Memory {
        /// Bytes of caches and buffers.
        needed: u64,
        /// Bytes that can be had.
        available: u64,
        /// Option `blocks`.
        blocks: usize,
        /// Option `slots`.
        slots: usize,
        /// Option `max_rows`.
        max_rows: usize,
    },
    /// The n-gram vocabulary cannot be derived.
    #[error(transparent)]
    TokenMap(#[from] TokenMapError),
}

/// Why a step, a draft or a change of a slot is refused. Nothing has changed then, but for
/// [`StepError::Exchange`].
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum StepError {
    /// No such slot.
    #[error("slot {slot} does not exist, the engine has {slots}")]
    NoSlot {
        /// The slot.
        slot: u32,
        /// Slots of the engine.
        slots: usize,
    },
    /// Two sequences in one slot.
    #[error("slot {slot} appears twice in the step")]
    SlotTwice {
        /// The slot.
        slot: u32,
    },
    /// A sequence without new tokens.
    #[error("slot {slot}: no tokens")]
    NoTokens {
        /// The slot.
        slot: u32,
    },
    /// A token that the model does not have.
    #[error("slot {slot}: token {token} at position {position}, the vocabulary has {vocab_size}")]
    BadToken {
        /// The slot.
        slot: u32,
        /// The token.
        token: u32,
        /// Its position.
        position: usize,
        /// Tokens of the model.
        vocab_size: usize,
    },
    /// More rows than the engine was opened for.
    #[error("{rows} rows in the step, max_rows is {max_rows}")]
    TooManyRows {
        /// Rows of the step.
        rows: usize,
        /// The limit.
        max_rows: usize,
    },
    /// Positions between what is held and what comes are missing.
    #[error("slot {slot}: step starts at position {start}, but only {held} positions are held")]
    Gap {
        /// The slot.
        slot: u32,
        /// First position of the step.
        start: usize,
        /// Positions held.
        held: usize,
    },
    /// Rows that would be needed again are overwritten.
    #[error("slot {slot}: cannot go back to {tokens} tokens, the lowest possible is {lowest} (or 0)")]
    RollbackTooDeep {
        /// The slot.
        slot: u32,
        /// Tokens asked for.
        tokens: usize,
        /// Lowest number of tokens that can be gone back to.
        lowest: usize,
    },
    /// Not all positions have a block.
    #[error("slot {slot}: {given} blocks, {needed} are needed for {end} positions")]
    MissingBlocks {
        /// The slot.
        slot: u32,
        /// Blocks given.
        given: usize,
        /// Blocks needed.
        needed: usize,
        /// Positions after the step.
        end: usize,
    },
    /// No such block.
    #[error("slot {slot}: block {block} does not exist, the engine has {blocks}")]
    NoBlock {
        /// The slot.
        slot: u32,
        /// The block.
        block: u32,
        /// Blocks of the engine.
        blocks: usize,
    },
    /// No such block.
    #[error("block {block} does not exist, the engine has {blocks}")]
    NoSuchBlock {
        /// The block.
        block: u32,
        /// Blocks of the engine.
        blocks: usize,
    },
    /// Longer than the model's context.
    #[error("slot {slot}: {end} positions, max_position_embeddings is {limit}")]
    ContextLimit {
        /// The slot.
        slot: u32,
        /// Positions after the step.
        end: usize,
        /// The model's limit.
        limit: usize,
    },
    /// An image span that does not fit the tokens, or its embeddings the model.
    #[error("slot {slot}: image span at row {first}: {detail}")]
    BadImage {
        /// The slot.
        slot: u32,
        /// First row of the span.
        first: usize,
        /// What is wrong.
        detail: &'static str,
    },
    /// More rows than the prompt has.
    #[error("slot {slot}: step ends at position {end}, but prompt_tokens is {prompt_tokens}")]
    BeyondPrompt {
        /// The slot.
        slot: u32,
        /// Positions after the step.
        end: usize,
        /// Length of the whole prompt.
        prompt_tokens: usize,
    },
    /// Window states and replays begin and end at block boundaries only.
    #[error("slot {slot}: position {position} is not a multiple of {BLOCK_TOKENS}")]
    NotAligned {
        /// The slot.
        slot: u32,
        /// The position.
        position: usize,
    },
    /// The slot holds fewer positions.
    #[error("slot {slot}: position {position} is not reached, {held} positions are held")]
    NotHeld {
        /// The slot.
        slot: u32,
        /// The position.
        position: usize,
        /// Positions held.
        held: usize,
    },
    /// A replay without the tokens before it.
    #[error("slot {slot}: {given} tokens of history, {needed} are needed before position {start}")]
    ShortHistory {
        /// The slot.
        slot: u32,
        /// Tokens given.
        given: usize,
        /// Tokens needed.
        needed: usize,
        /// First position of the replay.
        start: usize,
    },
    /// The model has no draft layers.
    #[error("the model has no draft layers (num_nextn_predict_layers is 0)")]
    NoDraftLayers,
    /// A sequence or window state that cannot be imported.
    #[error(transparent)]
    WindowState(#[from] WindowStateError),
    /// A block's bytes that cannot be imported.
    #[error(transparent)]
    Block(#[from] BlockError),
    /// Pieces of a sequence that are not one whole sequence for these blocks.
    #[error("slot {slot}: pieces of a sequence: {detail}")]
    Pieces {
        /// The slot.
        slot: u32,
        /// What is wrong.
        detail: String,
    },
    /// A warm-up needs a slot that holds nothing.
    #[error("warm-up: all {slots} slots are in use")]
    NoFreeSlot {
        /// Slots of the engine.
        slots: usize,
    },
    /// The exchange with the other ranks ended in the middle of the step: its sequences are reset (nothing is
    /// in their slots), and no further step can run.
    #[error(transparent)]
    Exchange(#[from] ExchangeError),
}
