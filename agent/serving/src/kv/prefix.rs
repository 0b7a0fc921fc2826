//! How much of a sequence need not be computed again, and from which state it goes on (BR-4).
//!
//! Blocks hold compressed entries only; the layers' windows are state, which is loaded from a checkpoint or
//! rebuilt by replaying the tokens before the hit's end.
//!
//! ```text
//!   0 ............... c ............... p ......... tokens
//!   |  adopted blocks |                 |
//!   |<-- a checkpoint near p: resume_from = c, the rows after c run
//!   |        adopted blocks             |
//!   |           |<---- replay --------->|  no checkpoint: resume_from = p after the replay
//! ```

use std::sync::Arc;

use super::{BlockKey, BlockPool, CheckpointStore};
use crate::batch::{BLOCK_TOKENS, BlockId};

/// A checkpoint at most this many tokens before the hit's end is preferred to any replay (BR-4). Beyond it the
/// cheaper of the two is taken.
pub const RECOMPUTE_LIMIT: usize = 4 * BLOCK_TOKENS;

/// From which state a sequence goes on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// An empty one, at position 0.
    Fresh,
    /// This one.
    Checkpoint {
        /// Tokens that it covers, a multiple of 128; all their blocks are adopted.
        position: usize,
        /// Name of the checkpoint: the block that ends there.
        key: BlockKey,
        /// Bytes for the engine.
        state: Arc<[u8]>,
    },
    /// Rows from here to `resume_from` run as a replay first, reading the adopted blocks and not writing them.
    Replay {
        /// A multiple of 128, above 0.
        from: usize,
    },
}

/// What is reused. The adopted blocks are held by the caller from now on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixPlan {
    /// Blocks of the positions `0 .. resume_from`, in order.
    pub adopt: Vec<BlockId>,
    /// First position whose entries are computed, a multiple of 128 and below the sequence's length.
    pub resume_from: usize,
    /// State at that position, or how to get it.
    pub start: Start,
}

impl PrefixPlan {
    /// Nothing is reused.
    pub fn fresh() -> Self {
        Self { adopt: Vec::new(), resume_from: 0, start: Start::Fresh }
    }

    /// Tokens of adopted blocks, replayed or not: what usage reports as cached.
    pub fn cached_tokens(&self) -> usize {
        self.adopt.len() * BLOCK_TOKENS
    }
}

/// Position of the checkpoint that a prompt leaves behind: the last multiple of 128 after which at least one row
/// runs, so that the same prompt sent again starts right there. `None` for prompts of one block and less.
pub fn checkpoint_position(tokens: usize) -> Option<usize> {
    let position = tokens.saturating_sub(1) / BLOCK_TOKENS * BLOCK_TOKENS;
    (position > 0).then_some(position)
}

/// Decides what a sequence of `tokens` tokens reuses and takes hold of its blocks. `keys` are those of its full
/// blocks; empty if it must not reuse anything. `replay_tokens` rebuild the state, a multiple of 128.
pub fn plan_prefix(
    pool: &mut BlockPool,
    checkpoints: &mut CheckpointStore,
    keys: &[BlockKey],
    tokens: usize,
    replay_tokens: usize,
) -> PrefixPlan {
    // At least one row must run, or there is nothing to draw the next token from.
    let usable = keys.len().min(tokens.saturating_sub(1) / BLOCK_TOKENS);
    let hit = keys[..usable].iter().take_while(|key| pool.find(key).is_some()).count();
    let at = keys[..hit].iter().rposition(|key| checkpoints.contains(key)).map(|block| block + 1);
    let (blocks, choice) = choose(hit, at, replay_tokens);
    if hit > 0 {
        checkpoints.count_lookup(at == Some(hit));
    }
    let start = match choice {
        Choice::Fresh => Start::Fresh,
        Choice::Checkpoint => {
            let key = keys[blocks - 1];
            let state = checkpoints.get(&key).expect("it was there a moment ago");
            Start::Checkpoint { position: blocks * BLOCK_TOKENS, key, state }
        }
        Choice::Replay => Start::Replay { from: blocks * BLOCK_TOKENS - replay_tokens },
    };
    let adopt: Vec<BlockId> = keys[..blocks].iter().map_while(|key| pool.hold(key)).collect();
    debug_assert_eq!(adopt.len(), blocks, "blocks of the hit are there");
    PrefixPlan { resume_from: blocks * BLOCK_TOKENS, adopt, start }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Choice {
    Fresh,
    Checkpoint,
    Replay,
}

/// Blocks to adopt and where the state comes from, for `hit` known blocks and the last checkpoint at the end of
/// block `at`.
fn choose(hit: usize, at: Option<usize>, replay_tokens: usize) -> (usize, Choice) {
    if let Some(at) = at {
        let recomputed = (hit - at) * BLOCK_TOKENS;
        if recomputed <= RECOMPUTE_LIMIT.max(replay_tokens) {
            return (at, Choice::Checkpoint);
        }
    }
    // A replay that begins at 0 is the prefill itself.
    if hit * BLOCK_TOKENS > replay_tokens { (hit, Choice::Replay) } else { (0, Choice::Fresh) }
}
