//! What runs in the next step of an engine, and how long it will take.

mod estimate;
mod pack;
mod preempt;
mod step;
mod time_model;
mod verification;

pub use estimate::{
    ChunkRows, MAX_COPIES, MAX_LAYERS, MAX_SIZE, PartWork, RatioWork, Truncation, Work, WorkLayer, WorkModel,
    WorkModelError, WorkShape, decode_work, prefill_work,
};
pub use pack::{
    Aged, Chunk, Cost, Estimated, MAX_PASSES, MAX_PASSING, Pack, PackItem, PackLimits, Room, aged_srpt, pack,
};
pub use preempt::{MAX_PREEMPTIONS, Running, choose_victim};
pub use step::{
    BLOCK_TOKENS, BlockId, DraftOutput, DraftRequest, ImageSpan, Logits, RowRange, SequenceStep, StateSlot,
    StepBatch, StepOutput,
};
pub use time_model::{FIT_STEPS, Fit, StepLoad, TimeModel, profile_ladder};
pub use verification::{
    Verdict, accept_greedy, accept_probability, drafts_to_verify, residual, rows_per_sequence, survivals,
};
