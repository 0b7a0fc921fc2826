//! Names, sizes and prompts of the tests.

use deepinfer_protocol::generate::GenerateSpec;
use deepinfer_protocol::{AgentId, Rank};
use deepinfer_serving::batch::{TimeModel, WorkLayer, WorkModel, WorkShape};
use deepinfer_serving::node::{RankOptions, WorkerOptions};

use crate::engine::REPLAY;

pub fn gateway() -> AgentId {
    AgentId::from("g-0")
}

pub fn worker_name() -> AgentId {
    AgentId::from("p-0")
}

pub fn rank_name(n: usize) -> AgentId {
    AgentId::from(format!("d-{n}").as_str())
}

pub fn spec(seed: u64, max_tokens: u32) -> GenerateSpec {
    let stop_tokens = vec![3, 77];
    GenerateSpec {
        temperature: 0.7,
        top_p: 1.0,
        seed,
        max_tokens,
        min_tokens: 0,
        stop_tokens,
        logprobs: None,
    }
}

/// A prompt of `len` tokens that begins with `shared` tokens which depend on `family` only.
pub fn prompt(family: u32, own: u32, shared: usize, len: usize) -> Vec<u32> {
    (0..len as u32)
        .map(|i| if (i as usize) < shared { 10 + family * 131 + i * 7 } else { 20_000 + own * 977 + i * 3 })
        .collect()
}

pub fn shape() -> WorkShape {
    let layer =
        WorkLayer { ratio: 1, kv_source: true, index_source: true, restricted: false, engram_width: 0 };
    let model = WorkModel {
        hidden_size: 8,
        num_attention_heads: 1,
        head_dim: 4,
        q_lora_rank: 4,
        o_groups: 1,
        o_lora_rank: 4,
        sliding_window: 8,
        index_n_heads: 1,
        index_head_dim: 4,
        index_topk: 16,
        candidate_blocks: 0,
        candidate_block_size: 0,
        n_routed_experts: 2,
        experts_per_row: 1,
        moe_intermediate_size: 8,
        hc_mult: 1,
        vocab_size: 100,
        layers: vec![layer],
    };
    WorkShape::new(&model).expect("sizes within bounds")
}

pub fn worker_options(slots: u32, blocks: u32) -> WorkerOptions {
    let mut options =
        WorkerOptions::new(worker_name(), slots, blocks, shape(), TimeModel::new(1_000_000_000, &[]));
    options.replay_tokens = REPLAY;
    options.limits.tokens = 512;
    options.checkpoint_bytes = 1 << 20;
    options.parked_bytes = 1 << 20;
    options.context_limit = 4_096;
    options
}

pub fn rank_options(n: usize, slots: u32, blocks: u32) -> RankOptions {
    let options = RankOptions::new(rank_name(n), Rank(0), slots, blocks);
    RankOptions { context_limit: 4_096, reserve: 128, ..options }
}
