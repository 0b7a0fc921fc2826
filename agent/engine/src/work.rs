//! The sizes of a model in the words of the work estimate.

use deepinfer_serving::batch::{WorkLayer, WorkModel};

use crate::shape::ModelShape;

/// Experts that every row passes through beside the routed ones.
const SHARED_EXPERTS: usize = 1;

impl ModelShape {
    /// What a scheduler counts work with ([`deepinfer_serving::batch::WorkShape`]).
    pub fn work_model(&self) -> WorkModel {
        let layers = (0..self.num_hidden_layers).map(|layer| WorkLayer {
            ratio: self.ratio(layer) as u64,
            kv_source: self.is_kv_source(layer),
            index_source: self.is_index_source(layer),
            restricted: self.is_restricted(layer),
            engram_width: match &self.engram {
                Some(engram) if self.engram_ordinal(layer).is_some() => engram.width() as u64,
                _ => 0,
            },
        });
        WorkModel {
            hidden_size: self.hidden_size as u64,
            num_attention_heads: self.num_attention_heads as u64,
            head_dim: self.head_dim as u64,
            q_lora_rank: self.q_lora_rank as u64,
            o_groups: self.o_groups as u64,
            o_lora_rank: self.o_lora_rank as u64,
            sliding_window: self.sliding_window as u64,
            index_n_heads: self.index_n_heads as u64,
            index_head_dim: self.index_head_dim as u64,
            index_topk: self.index_topk as u64,
            candidate_blocks: self.candidate.map_or(0, |c| c.topk_blocks as u64),
            candidate_block_size: self.candidate.map_or(0, |c| c.block_size as u64),
            n_routed_experts: self.n_routed_experts as u64,
            experts_per_row: (self.num_experts_per_tok + SHARED_EXPERTS) as u64,
            moe_intermediate_size: self.moe_intermediate_size as u64,
            hc_mult: self.hc_mult as u64,
            vocab_size: self.vocab_size as u64,
            layers: layers.collect(),
        }
    }
}
