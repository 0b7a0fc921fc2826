//! What runs in the next step of an engine.

mod step;
mod verification;

pub use step::{
    BLOCK_TOKENS, BlockId, DraftOutput, DraftRequest, ImageSpan, Logits, RowRange, SequenceStep, StateSlot,
    StepBatch, StepOutput,
};
pub use verification::{
    Verdict, accept_greedy, accept_probability, drafts_to_verify, residual, rows_per_sequence, survivals,
};
