//! How a prefill worker is set up.

use deepinfer_protocol::{AgentId, Span};

use crate::batch::{BLOCK_TOKENS, PackLimits, TimeModel, Truncation, WorkShape};
use crate::kv::KeyDomain;

/// How a worker is set up.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// The agent's name, which ranks and gateways know it by.
    pub name: AgentId,
    /// State slots of the engine: most prompts at once.
    pub slots: u32,
    /// Blocks of the engine.
    pub blocks: u32,
    /// Budget of a step and how prompts are cut.
    pub limits: PackLimits,
    /// What chunks cost.
    pub shape: WorkShape,
    /// Which rows the engine runs.
    pub truncation: Truncation,
    /// How long a step takes, from the profile at start; learns from steps.
    pub time: TimeModel,
    /// Longest sequence, output included.
    pub context_limit: u32,
    /// Tokens that rebuild the state at a position, a multiple of 128 (`Engine::replay_tokens`).
    pub replay_tokens: u32,
    /// Host memory for window checkpoints, in bytes.
    pub checkpoint_bytes: u64,
    /// Host memory for sequences that wait for a rank, in bytes. No prompt is taken while it is full; what had been
    /// taken before may exceed it by at most one sequence per slot.
    pub parked_bytes: u64,
    /// How long things of a lost gateway are kept.
    pub lease: Span,
    /// Who can read its KV.
    pub kv_epoch: String,
    /// What its blocks depend on besides requests.
    pub domain: KeyDomain,
}

impl WorkerOptions {
    /// Limits for the cpu and memory without bounds, for an engine of these sizes.
    pub fn new(name: AgentId, slots: u32, blocks: u32, shape: WorkShape, time: TimeModel) -> Self {
        Self {
            name,
            slots,
            blocks,
            limits: PackLimits { sequences: slots as usize, ..PackLimits::cpu() },
            shape,
            truncation: Truncation::Off,
            time,
            context_limit: blocks.saturating_mul(BLOCK_TOKENS as u32),
            replay_tokens: BLOCK_TOKENS as u32,
            checkpoint_bytes: u64::MAX,
            parked_bytes: u64::MAX,
            lease: Span::secs(30),
            kv_epoch: String::new(),
            domain: KeyDomain::default(),
        }
    }
}
