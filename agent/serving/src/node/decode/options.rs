//! How a decode rank is set up.

use deepinfer_protocol::{AgentId, Rank, Span};

use crate::batch::BLOCK_TOKENS;

/// How a rank is set up.
#[derive(Clone, Debug, PartialEq)]
pub struct RankOptions {
    /// The agent's name, which holders and gateways know it by.
    pub name: AgentId,
    /// The rank, counted over the whole supernode.
    pub rank: Rank,
    /// State slots of the engine.
    pub slots: u32,
    /// Blocks of the engine.
    pub blocks: u32,
    /// Most requests at once; slots and rows of a step bound it too.
    pub max_requests: u32,
    /// Most rows of a step.
    pub max_rows: u32,
    /// Longest sequence, output included. No sequence grows beyond what all blocks together hold, either.
    pub context_limit: u32,
    /// Growth that is reserved for a request that may grow further, in tokens (DR-1).
    pub reserve: u32,
    /// How long things of a lost gateway are kept.
    pub lease: Span,
    /// Silence of a holder after which its pieces are asked for again, and after the second of which they are lost.
    pub load_timeout: Span,
    /// Whose KV it can read.
    pub kv_epoch: String,
}

impl RankOptions {
    /// Reserve, lease and time-out of the specification, for an engine of these sizes.
    pub fn new(name: AgentId, rank: Rank, slots: u32, blocks: u32) -> Self {
        Self {
            name,
            rank,
            slots,
            blocks,
            max_requests: slots,
            max_rows: slots,
            context_limit: blocks.saturating_mul(BLOCK_TOKENS as u32),
            reserve: 512,
            lease: Span::secs(30),
            load_timeout: Span::secs(5),
            kv_epoch: String::new(),
        }
    }
}
