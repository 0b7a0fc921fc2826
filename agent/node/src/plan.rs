//! From flags, sizes and open engines to machines.

use std::sync::Arc;

use deepinfer_engine::Checkpoint;
use deepinfer_protocol::agent_status::Role;
use deepinfer_protocol::{AgentId, Rank, Span, SupernodeId};
use deepinfer_serving::batch::{
    BLOCK_TOKENS, ChunkRows, PackLimits, StepLoad, TimeModel, Truncation, WorkShape, prefill_work,
};
use deepinfer_serving::kv::{KeyDomain, ReplayMode};
use deepinfer_serving::node::{DecodeRank, PrefillWorker, RankOptions, WorkerOptions};

use crate::driver::{Book, Machines};
use crate::engine::thread::Opened;
use crate::sizing::Sizing;

/// Operations a second that a worker believes in before it has timed a step: a slow core.
const GUESSED_WORK_PER_SECOND: u64 = 2_000_000_000;

/// Everything that machines need beside their engines.
#[derive(Clone, Debug)]
pub struct MachinePlan {
    /// Name in the fleet.
    pub name: AgentId,
    /// What they do.
    pub role: Role,
    /// Of decode.
    pub supernode: Option<SupernodeId>,
    /// Number of the first rank in the supernode.
    pub first_rank: u16,
    /// Sizes of each rank.
    pub sizing: Sizing,
    /// Time budget of a prefill step.
    pub chunk: Span,
    /// Smallest chunk, in tokens.
    pub min_chunk: u32,
    /// How long things of a lost gateway are kept.
    pub lease: Span,
    /// The model.
    pub checkpoint: Arc<Checkpoint>,
    /// Of the checkpoint.
    pub weights_digest: [u8; 32],
    /// Of its tokenizer.json.
    pub tokenizer_digest: [u8; 32],
}

impl MachinePlan {
    /// Machines with empty engines, and the book of their expert counts.
    ///
    /// # Errors
    /// What does not fit together: a bug, or a model whose sizes cannot be counted.
    pub fn build(self, opened: &[Opened]) -> Result<(Machines, Book), String> {
        let first = opened.first().ok_or("no engine was opened")?;
        let maps: Vec<Vec<Vec<u32>>> = opened.iter().map(|o| o.slot_experts.clone()).collect();
        let shape = &self.checkpoint.shape;
        let book =
            Book::new(self.name.clone(), self.role, self.supernode.clone(), self.first_rank, shape, &maps)
                .map_err(|error| error.to_string())?;
        let machines = match self.role {
            Role::Prefill => Machines::Prefill(Box::new(PrefillWorker::new(self.worker(first)?))),
            Role::Decode => {
                let ranks = (0..opened.len() as u16).map(|rank| Rank(self.first_rank + rank));
                Machines::Decode(ranks.map(|rank| DecodeRank::new(self.rank(rank, first))).collect())
            }
        };
        Ok((machines, book))
    }

    fn worker(&self, opened: &Opened) -> Result<WorkerOptions, String> {
        let model = self.checkpoint.shape.work_model();
        let shape = WorkShape::new(&model).map_err(|error| error.to_string())?;
        let load = |&(rows, span): &(usize, Span)| {
            let work = prefill_work(&shape, ChunkRows::last(rows, rows), Truncation::Off).total;
            (StepLoad { work, rows, sequences: 1 }, span)
        };
        let profile: Vec<(StepLoad, Span)> = opened.profile.iter().map(load).collect();
        let time = TimeModel::new(GUESSED_WORK_PER_SECOND, &profile);
        let Sizing { requests, blocks, max_rows, context_limit, checkpoint_bytes, parked_bytes } =
            self.sizing;
        let options = WorkerOptions::new(self.name.clone(), requests, blocks, shape, time);
        Ok(WorkerOptions {
            limits: PackLimits {
                budget: self.chunk,
                tokens: max_rows as usize,
                min_chunk: (self.min_chunk as usize).min(round_down(max_rows)),
                ..options.limits
            },
            context_limit,
            replay_tokens: opened.replay_tokens,
            checkpoint_bytes,
            parked_bytes,
            lease: self.lease,
            kv_epoch: opened.kv_epoch.clone(),
            domain: KeyDomain {
                weights_digest: self.weights_digest,
                kv_format: opened.kv_format.clone(),
                tokenizer_digest: self.tokenizer_digest,
                replay: ReplayMode::Exact,
                numeric_class: opened.numerics.clone(),
            },
            ..options
        })
    }

    fn rank(&self, rank: Rank, opened: &Opened) -> RankOptions {
        let Sizing { requests, blocks, max_rows, context_limit, .. } = self.sizing;
        RankOptions {
            max_rows,
            context_limit,
            lease: self.lease,
            kv_epoch: opened.kv_epoch.clone(),
            ..RankOptions::new(self.name.clone(), rank, requests, blocks)
        }
    }
}

fn round_down(rows: u32) -> usize {
    (rows as usize / BLOCK_TOKENS * BLOCK_TOKENS).max(1)
}
