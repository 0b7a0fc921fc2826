//! How much arithmetic a chunk or a decode step is: exact integers, in FP8-equivalent operations (A.1).
//!
//! One multiply-add counts 1 in FP4, 2 in FP8, 4 in BF16, 8 in FP32. A [`WorkShape`] has the sums over layers that
//! do not depend on a chunk; it is made once from the sizes of a model. What is counted is work, not time: a
//! [`super::TimeModel`] that was fitted to measurements turns one into the other.
//!
//! Invariant: sizes and positions are bounded when they enter, so no sum overflows 128 bits.

use std::collections::BTreeMap;

use thiserror::Error;

/// Largest size of a model that is accepted, far above any that exists.
pub const MAX_SIZE: u64 = 1 << 24;
/// Most copies of the stream: their number enters with its third power.
pub const MAX_COPIES: u64 = 1 << 10;
/// Most layers.
pub const MAX_LAYERS: usize = 1 << 12;

const FP4: u128 = 1;
const FP8: u128 = 2;
const BF16: u128 = 4;
const FP32: u128 = 8;

/// One backbone layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkLayer {
    /// Tokens per compressed entry that it attends to; 0: window only.
    pub ratio: u64,
    /// It produces compressed entries and index keys.
    pub kv_source: bool,
    /// It selects entries.
    pub index_source: bool,
    /// Its selection looks only inside candidate blocks of an earlier layer.
    pub restricted: bool,
    /// Channels gathered from its n-gram table; 0: it has none.
    pub engram_width: u64,
}

/// The sizes that decide how much work a row is, named as in `config.json`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WorkModel {
    /// Channels of one copy of the stream.
    pub hidden_size: u64,
    /// Query heads.
    pub num_attention_heads: u64,
    /// Channels of a head.
    pub head_dim: u64,
    /// Width of the query latent.
    pub q_lora_rank: u64,
    /// Groups of the output projection.
    pub o_groups: u64,
    /// Width of each of these groups.
    pub o_lora_rank: u64,
    /// Window, the query's own position included.
    pub sliding_window: u64,
    /// Index heads.
    pub index_n_heads: u64,
    /// Channels of an index head and key.
    pub index_head_dim: u64,
    /// Entries selected per row.
    pub index_topk: u64,
    /// Candidate blocks kept per row; 0: selection has one level.
    pub candidate_blocks: u64,
    /// Entries of such a block; 0 if there are none.
    pub candidate_block_size: u64,
    /// Routed experts of a layer.
    pub n_routed_experts: u64,
    /// Experts that a row passes through, shared ones included.
    pub experts_per_row: u64,
    /// Hidden channels of an expert.
    pub moe_intermediate_size: u64,
    /// Copies of the stream.
    pub hc_mult: u64,
    /// Rows of the head.
    pub vocab_size: u64,
    /// Backbone layers in order.
    pub layers: Vec<WorkLayer>,
}

/// Sizes that cannot be counted with.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum WorkModelError {
    /// Out of bounds.
    #[error("{field} is {value}, it must be between {least} and {most}")]
    Size {
        /// Name of the field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// Smallest allowed value.
        least: u64,
        /// Largest allowed value.
        most: u64,
    },
    /// Too many layers, or none.
    #[error("layers: there are {0}, it must be between 1 and {MAX_LAYERS}")]
    Layers(usize),
}

/// Costs of the layers that read entries of one compression ratio.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RatioWork {
    /// Index-key projections, per compressed entry.
    pub key_entry: u128,
    /// Attention over selected entries, per pair of row and entry.
    pub core_pair: u128,
    /// Index scores over all entries, per pair.
    pub index_pair: u128,
}

/// Costs of a set of layers that run the same rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PartWork {
    /// Projections of attention, index and compressor, per row.
    pub attention_row: u128,
    /// Experts, router, hyper-connections and n-gram tables, per row.
    pub other_row: u128,
    /// Attention over the window, per pair of row and position.
    pub window_pair: u128,
    /// Index scores of restricted layers, per candidate block that a row looks into.
    pub candidate_block: u128,
    /// By ratio.
    pub ratios: BTreeMap<u64, RatioWork>,
}

/// All constants of the estimate for one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkShape {
    /// Every layer.
    pub all: PartWork,
    /// What runs all rows under consumer truncation: the layers before the first with ratio 1, and that one's
    /// compressed entries.
    pub producers: PartWork,
    /// The rest.
    pub consumers: PartWork,
    /// The head, per row that returns logits.
    pub logit_row: u128,
    window: u128,
    topk: u128,
    candidate_blocks: u128,
    candidate_block_size: u128,
}

/// Which rows the consumer layers run in prefill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Truncation {
    /// All: exact.
    #[default]
    Off,
    /// The last `keep` rows of the prompt only (BR-1).
    Compact {
        /// Rows; at least one runs in any case.
        keep: usize,
    },
}

/// Rows `end - rows .. end` of a prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChunkRows {
    /// New rows, at least one for any work.
    pub rows: usize,
    /// Position after the last one.
    pub end: usize,
    /// Length of the whole prompt; `end` if this is its last chunk.
    pub prompt: usize,
    /// First position whose window state is valid: 0, or where a replay began.
    pub window_start: usize,
}

impl ChunkRows {
    /// The last chunk of a prompt that was not replayed.
    pub fn last(rows: usize, end: usize) -> Self {
        Self { rows, end, prompt: end, window_start: 0 }
    }
}

/// Operations of a step's part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Attention with its projections.
    pub attention: u128,
    /// Everything.
    pub total: u128,
}

impl WorkShape {
    /// The constants of a model.
    ///
    /// # Errors
    /// [`WorkModelError`] names the size that is out of bounds.
    pub fn new(model: &WorkModel) -> Result<Self, WorkModelError> {
        check(model)?;
        let boundary = model.layers.iter().position(|l| l.ratio == 1).unwrap_or(model.layers.len());
        let costs = Costs::of(model);
        let mut shape = Self {
            all: PartWork::default(),
            producers: PartWork::default(),
            consumers: PartWork::default(),
            logit_row: BF16 * costs.hidden * u128::from(model.vocab_size),
            window: u128::from(model.sliding_window),
            topk: u128::from(model.index_topk),
            candidate_blocks: u128::from(model.candidate_blocks),
            candidate_block_size: u128::from(model.candidate_block_size),
        };
        for (i, layer) in model.layers.iter().enumerate() {
            costs.add_rows(&mut shape.all, layer);
            costs.add_entries(&mut shape.all, layer);
            let part = if i < boundary { &mut shape.producers } else { &mut shape.consumers };
            costs.add_rows(part, layer);
            if i <= boundary {
                costs.add_entries(&mut shape.producers, layer);
            } else {
                costs.add_entries(&mut shape.consumers, layer);
            }
        }
        if boundary < model.layers.len() {
            // The boundary between the halves is prepared for all rows.
            shape.producers.other_row += costs.hyper_mix;
            shape.consumers.other_row -= costs.hyper_mix;
        }
        Ok(shape)
    }
}

/// Work of a chunk of a prompt; one row of it returns logits.
///
/// # Panics
/// If the chunk has more rows than positions before its end.
pub fn prefill_work(shape: &WorkShape, chunk: ChunkRows, truncation: Truncation) -> Work {
    let rows = Rows::of(chunk);
    let (mut attention, mut other);
    match truncation {
        Truncation::Compact { keep } if !shape.consumers.is_empty() && rows.count() > 0 => {
            let kept = chunk.prompt.saturating_sub(keep);
            let first = clip(kept).max(rows.first).min(rows.end - 1);
            let late = Rows { first, window_start: rows.window_start.max(clip(kept)), ..rows };
            attention = shape.attention(&shape.producers, rows) + shape.attention(&shape.consumers, late);
            attention += shape.keys(&shape.producers, rows, None);
            other = shape.producers.other_row * rows.count() + shape.consumers.other_row * late.count();
        }
        _ => {
            attention = shape.attention(&shape.all, rows) + shape.keys(&shape.all, rows, None);
            other = shape.all.other_row * rows.count();
        }
    }
    if rows.count() == 0 {
        attention = 0;
    } else {
        other += shape.logit_row;
    }
    Work { attention, total: attention + other }
}

/// Work of a decode step of one sequence: `rows` tokens that end at position `end`, each with logits.
///
/// # Panics
/// If there are more rows than positions.
pub fn decode_work(shape: &WorkShape, rows: usize, end: usize) -> Work {
    let rows = Rows::of(ChunkRows::last(rows, end));
    let attention = shape.attention(&shape.all, rows) + shape.keys(&shape.all, rows, Some(rows.count()));
    let other = (shape.all.other_row + shape.logit_row) * rows.count();
    Work { attention, total: attention + other }
}

impl PartWork {
    fn is_empty(&self) -> bool {
        self.other_row == 0 && self.attention_row == 0
    }
}

/// Rows `first .. end`, bounded.
#[derive(Clone, Copy)]
struct Rows {
    first: u128,
    end: u128,
    window_start: u128,
}

impl Rows {
    fn of(chunk: ChunkRows) -> Self {
        assert!(chunk.rows <= chunk.end, "{} rows end at position {}", chunk.rows, chunk.end);
        let end = clip(chunk.end);
        Self { first: end.saturating_sub(clip(chunk.rows)), end, window_start: clip(chunk.window_start) }
    }

    fn count(self) -> u128 {
        self.end - self.first
    }

    /// Entries that the rows see: `min(floor(t / ratio), cap)` summed over t in `first + 1 ..= end`.
    fn pairs(self, ratio: u128, cap: Option<u128>) -> u128 {
        capped(self.end, ratio, cap) - capped(self.first, ratio, cap)
    }

    fn shifted(self, by: u128) -> Self {
        Self { first: self.first + by, end: self.end + by, ..self }
    }

    fn since(self, start: u128) -> Self {
        Self { first: self.first.saturating_sub(start), end: self.end.saturating_sub(start), ..self }
    }
}

impl WorkShape {
    fn attention(&self, part: &PartWork, rows: Rows) -> u128 {
        let mut work = part.attention_row * rows.count();
        work += part.window_pair * rows.since(rows.window_start).pairs(1, Some(self.window));
        for (&ratio, costs) in &part.ratios {
            let ratio = u128::from(ratio);
            work += costs.core_pair * rows.pairs(ratio, Some(self.topk));
            work += costs.index_pair * rows.pairs(ratio, None);
        }
        if part.candidate_block > 0 {
            // Blocks begun at position t: the ceiling is a floor of positions shifted by one block less one.
            let size = self.candidate_block_size;
            work += part.candidate_block * rows.shifted(size - 1).pairs(size, Some(self.candidate_blocks));
        }
        work
    }

    /// Index keys; in prefill one per entry that the chunk completes, and at least one.
    fn keys(&self, part: &PartWork, rows: Rows, entries: Option<u128>) -> u128 {
        let per_ratio = part.ratios.iter().map(|(&ratio, costs)| {
            let ratio = u128::from(ratio);
            let completed = (rows.end / ratio - rows.first / ratio).max(1);
            costs.key_entry * entries.unwrap_or(completed)
        });
        per_ratio.sum()
    }
}

/// Positions beyond 32 bits count as the last one; no context is that long.
fn clip(position: usize) -> u128 {
    u128::from(u32::try_from(position).unwrap_or(u32::MAX))
}

/// Sum over t in `1 ..= n` of `floor(t / r)`.
fn staircase(n: u128, r: u128) -> u128 {
    let b = n / r;
    b * (n + 1) - r * (b * (b + 1) / 2)
}

/// Sum over t in `1 ..= n` of `min(floor(t / r), cap)`.
fn capped(n: u128, r: u128, cap: Option<u128>) -> u128 {
    let Some(cap) = cap else {
        return staircase(n, r);
    };
    let below = n.min(r * cap);
    staircase(below, r) + (n - below) * cap
}

/// Costs that are equal in every layer that has them.
struct Costs {
    hidden: u128,
    query: u128,
    index_query: u128,
    compressor: u128,
    key_entry: u128,
    core_pair: u128,
    index_pair: u128,
    candidate_block: u128,
    mlp: u128,
    hyper: u128,
    /// The part of a hyper-connection's preparation that is not the head mix.
    hyper_mix: u128,
    hc_mult: u128,
}

impl Costs {
    fn of(model: &WorkModel) -> Self {
        let n = |size: u64| u128::from(size);
        let (hidden, head, heads) = (n(model.hidden_size), n(model.head_dim), n(model.num_attention_heads));
        let (rank, index_heads) = (n(model.q_lora_rank), n(model.index_n_heads));
        let (groups, o_rank, m) = (n(model.o_groups), n(model.o_lora_rank), n(model.hc_mult));
        let index_width = index_heads * n(model.index_head_dim);
        let expert = FP8 * 3 * hidden * n(model.moe_intermediate_size);
        let hyper_mix = FP32 * m * hidden * m * (2 + m);
        let hyper_post = FP32 * m * (m + 1) * hidden;
        Self {
            hidden,
            query: FP8 * hidden * (rank + head)
                + FP8 * rank * heads * head
                + FP8 * heads * head * o_rank
                + FP8 * groups * o_rank * hidden,
            index_query: FP8 * rank * index_width + BF16 * hidden * index_heads,
            compressor: BF16 * hidden * head,
            key_entry: BF16 * head * n(model.index_head_dim),
            core_pair: BF16 * heads * 2 * head,
            index_pair: FP4 * index_width,
            candidate_block: FP4 * index_width * n(model.candidate_block_size),
            mlp: expert * n(model.experts_per_row) + BF16 * hidden * n(model.n_routed_experts),
            hyper: hyper_mix + FP32 * m * hidden + hyper_post,
            hyper_mix,
            hc_mult: m,
        }
    }

    /// What depends on the rows that a layer runs.
    fn add_rows(&self, part: &mut PartWork, layer: &WorkLayer) {
        part.attention_row += self.query;
        part.window_pair += self.core_pair;
        // Two sublayers.
        part.other_row += self.mlp + 2 * self.hyper;
        if layer.engram_width > 0 {
            let keys_and_value = FP8 * u128::from(layer.engram_width) * (self.hc_mult + 1) * self.hidden;
            part.other_row += keys_and_value + FP32 * self.hc_mult * self.hidden;
        }
        if layer.index_source {
            part.attention_row += self.index_query;
        }
        if layer.index_source && layer.restricted {
            part.candidate_block += self.candidate_block;
        }
        if layer.ratio > 0 {
            let ratio = part.ratios.entry(layer.ratio).or_default();
            ratio.core_pair += self.core_pair;
            if layer.index_source && !layer.restricted {
                ratio.index_pair += self.index_pair;
            }
        }
    }

    /// What a layer's compressed entries cost, for all rows even under truncation.
    fn add_entries(&self, part: &mut PartWork, layer: &WorkLayer) {
        if layer.kv_source && layer.ratio > 0 {
            // Above ratio 1 a gate is projected beside the value.
            part.attention_row += self.compressor * if layer.ratio == 1 { 1 } else { 2 };
            part.ratios.entry(layer.ratio).or_default().key_entry += self.key_entry;
        }
    }
}

fn check(model: &WorkModel) -> Result<(), WorkModelError> {
    if !(1..=MAX_LAYERS).contains(&model.layers.len()) {
        return Err(WorkModelError::Layers(model.layers.len()));
    }
    let within = |field, value, least, most| {
        let fits = (least..=most).contains(&value);
        if fits { Ok(()) } else { Err(WorkModelError::Size { field, value, least, most }) }
    };
    let size = |field, value, least| within(field, value, least, MAX_SIZE);
    size("hidden_size", model.hidden_size, 1)?;
    size("num_attention_heads", model.num_attention_heads, 1)?;
    size("head_dim", model.head_dim, 1)?;
    size("q_lora_rank", model.q_lora_rank, 1)?;
    size("o_groups", model.o_groups, 1)?;
    size("o_lora_rank", model.o_lora_rank, 1)?;
    size("sliding_window", model.sliding_window, 1)?;
    size("index_n_heads", model.index_n_heads, 0)?;
    size("index_head_dim", model.index_head_dim, 0)?;
    size("index_topk", model.index_topk, 0)?;
    size("candidate_blocks", model.candidate_blocks, 0)?;
    let restricted = model.layers.iter().any(|l| l.index_source && l.restricted);
    size("candidate_block_size", model.candidate_block_size, u64::from(restricted))?;
    size("n_routed_experts", model.n_routed_experts, 0)?;
    size("experts_per_row", model.experts_per_row, 0)?;
    size("moe_intermediate_size", model.moe_intermediate_size, 0)?;
    within("hc_mult", model.hc_mult, 1, MAX_COPIES)?;
    size("vocab_size", model.vocab_size, 1)?;
    for layer in &model.layers {
        size("layers.ratio", layer.ratio, 0)?;
        size("layers.engram_width", layer.engram_width, 0)?;
    }
    Ok(())
}
