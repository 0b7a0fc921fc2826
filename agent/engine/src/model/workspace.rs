//! Memory of a step: every buffer is allocated once, for the longest step, and reused by every layer.

use deepinfer_kernels::{Backend, Candidates, Selection};

use crate::cache::Geometry;
use crate::memory::Allocator;
use crate::numerics::Numerics;
use crate::shape::ModelShape;

/// Values of logits computed at a time; limits the buffer when many rows are asked for.
const HEAD_VALUES: usize = 1 << 24;

/// Buffers of a step. Comments give the used shape; rows are those of the step, H the hidden size, m the
/// copies.
pub(crate) struct Workspace<B: Backend> {
    /// Longest step.
    pub rows: usize,
    /// Rows that go through the head at a time.
    pub head_rows: usize,
    /// 0, 1, 2, .. `[rows]`.
    pub identity: Vec<u32>,
    /// One-hot mixes on copy 0, `[rows, m]`.
    pub first_mix: Vec<f32>,

    /// Residual stream `[rows, m, H]`.
    pub stream: B::Buf<f32>,
    /// Selected rows of the stream.
    pub stream_taken: B::Buf<f32>,
    /// Mix handed to the next attention, `[rows, m]`.
    pub pre: B::Buf<f32>,
    /// Selected rows of `pre`.
    pub pre_taken: B::Buf<f32>,
    /// The attention's own mix, used by the experts, `[rows, m]`.
    pub pre_attn: B::Buf<f32>,
    /// `[rows, m]`.
    pub post: B::Buf<f32>,
    /// `[rows, m, m]`.
    pub comb: B::Buf<f32>,
    /// Input of a sublayer, `[rows, H]`.
    pub x: Input<B>,
    /// Output of a sublayer, `[rows, H]`.
    pub y: B::Buf<f32>,
    /// Result of a projection before its norm, `[rows, max(H, ..)]`.
    pub narrow: B::Buf<f32>,

    /// Rotation of window-only layers, `[rows, rd]`.
    pub plain_rope: B::Buf<f32>,
    /// Rotation of layers with compressed KV, `[rows, rd]`.
    pub compressed_rope: B::Buf<f32>,
    /// Rotation of new entries by ratio, `[entries, rd]`.
    pub group_rope: Vec<B::Buf<f32>>,

    /// Query latent `[rows, q_lora_rank]`.
    pub latent: Input<B>,
    /// Queries `[rows, heads * head_dim]`.
    pub query: B::Buf<f32>,
    /// Window keys `[rows, head_dim]`.
    pub key: B::Buf<f32>,
    /// Attention result `[rows, heads * head_dim]`.
    pub core: B::Buf<f32>,
    /// Output latent `[rows, o_groups * o_lora_rank]`.
    pub out_latent: B::Buf<f32>,

    /// Values and gates of tokens, `[rows, head_dim]`.
    pub value: B::Buf<f32>,
    pub gate: B::Buf<f32>,
    /// The same of the tokens of completed groups.
    pub member_value: B::Buf<f32>,
    pub member_gate: B::Buf<f32>,
    /// Pooled groups, `[entries, head_dim]`.
    pub pooled: B::Buf<f32>,
    /// Entries: latent, then rotated, `[entries, head_dim]`.
    pub entry: B::Buf<f32>,
    /// `[entries, index_head_dim]`.
    pub index_key: B::Buf<f32>,
    /// `[rows, index_n_heads * index_head_dim]`.
    pub index_query: B::Buf<f32>,
    /// `[rows, index_n_heads]`.
    pub index_weights: B::Buf<f32>,
    /// Entries chosen by the latest index source.
    pub selection: Selection<B::Buf<u32>>,
    /// Blocks chosen by the candidate source.
    pub candidates: Option<Candidates<B::Buf<u32>>>,

    /// `[rows, top_k]`.
    pub route_ids: B::Buf<u32>,
    pub route_weights: B::Buf<f32>,
    /// Shared expert, `[rows, I]`.
    pub shared_gate: B::Buf<f32>,
    pub shared_up: B::Buf<f32>,
    /// `[rows, H]`.
    pub shared_out: B::Buf<f32>,

    /// Table rows `[rows, columns * head_dim]`.
    pub engram_rows: B::Buf<f32>,
    /// `[rows, (m + 1) * H]`.
    pub engram_kv: B::Buf<f32>,
    /// `[rows, m]`.
    pub engram_gates: B::Buf<f32>,

    /// Draft features `[rows, targets * H]`.
    pub features: Input<B>,
    /// Selected rows of the features.
    pub features_taken: B::Buf<f32>,
    /// Markov embeddings of draft tokens, `[rows, rank]`.
    pub markov: B::Buf<f32>,
    /// `[rows, H + rank]`.
    pub confidence_in: B::Buf<f32>,
    /// `[rows]`.
    pub confidence: B::Buf<f32>,

    /// `[head_rows, vocab]`.
    pub logits: B::Buf<f32>,
}

/// An activation, and the same rounded as inputs of FP8 and FP4 weights are.
pub(crate) struct Input<B: Backend> {
    /// As computed.
    pub plain: B::Buf<f32>,
    /// Rounded; empty in f32 numerics.
    pub rounded: B::Buf<f32>,
}

/// How large the buffers are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkspaceSize {
    /// Longest step, and at least one draft block.
    pub rows: usize,
    /// Sequences in a step, at most.
    pub sequences: usize,
}

impl<B: Backend> Workspace<B> {
    /// Allocates all buffers.
    pub fn new(
        memory: &mut Allocator<'_, B>,
        shape: &ModelShape,
        geometry: &Geometry,
        numerics: Numerics,
        size: WorkspaceSize,
    ) -> Self {
        let WorkspaceSize { rows, sequences } = size;
        let (hidden, copies, width) = (shape.hidden_size, shape.hc_mult, shape.head_dim);
        let (heads, rotated) = (shape.num_attention_heads * width, shape.qk_rope_head_dim);
        let inner = shape.moe_intermediate_size;
        let top_k = (0..shape.total_layers()).map(|l| shape.top_k(l)).max().unwrap_or(0);
        // A group that began in an earlier step is completed with its older tokens.
        let members = |ratio: usize| rows + sequences * (ratio - 1);
        let gated = geometry.ratios.iter().copied().max().filter(|&r| r > 1).map_or(0, members);
        let sourced = if geometry.ratios.is_empty() { 0 } else { rows };
        let index_width = shape.index_head_dim;
        let (engram_width, engram_out) =
            shape.engram.as_ref().map_or((0, 0), |e| (e.width(), (copies + 1) * hidden));
        let features = shape.draft_features();
        let rank = shape.draft.as_ref().map_or(0, |d| d.markov_rank);
        let drafted = if shape.draft.is_some() { rows } else { 0 };
        let head_rows = (HEAD_VALUES / shape.vocab_size).clamp(1, rows);
        let narrow = hidden.max(shape.q_lora_rank).max(width).max(index_width);
        let mut buffer = |width: usize| memory.buffer::<f32>(rows, width);
        Self {
            rows,
            head_rows,
            identity: (0..rows as u32).collect(),
            first_mix: (0..rows * copies).map(|i| if i % copies == 0 { 1.0 } else { 0.0 }).collect(),
            stream: buffer(copies * hidden),
            stream_taken: buffer(copies * hidden),
            pre: buffer(copies),
            pre_taken: buffer(copies),
            pre_attn: buffer(copies),
            post: buffer(copies),
            comb: buffer(copies * copies),
            y: buffer(hidden),
            narrow: buffer(narrow),
            plain_rope: buffer(rotated),
            compressed_rope: buffer(rotated),
            query: buffer(heads),
            key: buffer(width),
            core: buffer(heads),
            out_latent: buffer(shape.o_groups * shape.o_lora_rank),
            index_query: buffer(if sourced > 0 { shape.index_n_heads * index_width } else { 0 }),
            index_weights: buffer(if sourced > 0 { shape.index_n_heads } else { 0 }),
            route_weights: buffer(top_k),
            shared_gate: buffer(inner),
            shared_up: buffer(inner),
            shared_out: buffer(hidden),
            engram_rows: buffer(engram_width),
            engram_kv: buffer(engram_out),
            engram_gates: buffer(copies),
            features_taken: buffer(features),
            markov: buffer(rank),
            value: memory.buffer(sourced, width),
            gate: memory.buffer(if gated > 0 { rows } else { 0 }, width),
            member_value: memory.buffer(gated, width),
            member_gate: memory.buffer(gated, width),
            pooled: memory.buffer(sourced, width),
            entry: memory.buffer(sourced, width),
            index_key: memory.buffer(sourced, index_width),
            group_rope: geometry.ratios.iter().map(|&r| memory.buffer(members(r) / r, rotated)).collect(),
            x: Input::new(memory, numerics, rows, hidden),
            latent: Input::new(memory, numerics, rows, shape.q_lora_rank),
            features: Input::new(memory, numerics, rows, features),
            route_ids: memory.buffer(rows, top_k),
            selection: Selection {
                indices: memory.buffer(sourced, shape.index_topk),
                counts: memory.buffer(sourced, 1),
                top_k: shape.index_topk,
            },
            candidates: shape.candidate.map(|c| Candidates {
                indices: memory.buffer(rows, c.topk_blocks),
                counts: memory.buffer(rows, 1),
                max_blocks: c.topk_blocks,
                block_size: c.block_size,
            }),
            confidence_in: memory.buffer(drafted, hidden + rank),
            confidence: memory.buffer(drafted, 1),
            logits: memory.buffer(head_rows, shape.vocab_size),
        }
    }
}

impl<B: Backend> Input<B> {
    fn new(memory: &mut Allocator<'_, B>, numerics: Numerics, rows: usize, width: usize) -> Self {
        let rounded = if numerics == Numerics::Quantized { rows } else { 0 };
        Self { plain: memory.buffer(rows, width), rounded: memory.buffer(rounded, width) }
    }
}
