//! Draft head (model.md section 10): three layers over a block of unknown tokens, fed by features of the
//! backbone.

use deepinfer_kernels::Backend;
use deepinfer_serving::batch::DraftOutput;

use super::forward::{Keys, Pass};
use super::plan::{PlanContext, StepPlan};
use super::rows::{Row, RowSet};
use super::weights::{DraftWeights, Weights};
use super::windows::{WindowPart, WindowPlan};
use crate::cache::Slot;
use crate::sampler::greedy;

/// What the backbone leaves for the drafts.
impl<B: Backend> Pass<'_, B> {
    /// On target layers: `feature = mean_i s[i]`, beside those of the other targets.
    pub fn draft_feature(&mut self, layer: usize) {
        let shape = &self.constants.shape;
        let Some(draft) = &shape.draft else { return };
        let Some(target) = draft.target_layer_ids.iter().position(|&l| l == layer) else {
            return;
        };
        let (hidden, stride) = (shape.hidden_size, shape.draft_features());
        let ws = &mut *self.ws;
        let out = &mut ws.features.plain;
        self.backend.mean_copies(&ws.stream, self.rows, shape.hc_mult, hidden, out, stride, target * hidden);
    }

    /// Keeps only the given rows of the features.
    pub fn take_features(&mut self, ids: &[u32]) {
        let width = self.constants.shape.draft_features();
        if width == 0 {
            return;
        }
        let ws = &mut *self.ws;
        self.backend.take_rows(&ws.features.plain, width, ids, &mut ws.features_taken);
        std::mem::swap(&mut ws.features.plain, &mut ws.features_taken);
    }

    /// Stores each draft layer's context keys of the rows that later drafts can see: `x = rms(main_proj f,
    /// main_norm)`, then as any window key. Ends the step: its rows and rotations are used up.
    pub fn write_draft_context(&mut self, weights: &Weights<B>, plan: &StepPlan) {
        let Some(draft) = &weights.draft else { return };
        if plan.draft_rows.len() < self.rows {
            self.take_features(&plan.draft_rows);
            let ws = &mut *self.ws;
            let rotated = self.constants.shape.qk_rope_head_dim;
            self.backend.take_rows(&ws.plain_rope, rotated, &plan.draft_rows, &mut ws.compressed_rope);
            std::mem::swap(&mut ws.plain_rope, &mut ws.compressed_rope);
            self.rows = plan.draft_rows.len();
        }
        if self.rows == 0 {
            return;
        }
        self.draft_input(draft);
        for layer in &draft.layers {
            self.window_keys(&layer.attention, false);
            let store = &mut self.caches.window[layer.number];
            self.backend.store_rows(&self.ws.key, store, &plan.draft_store);
        }
    }

    /// `x = rms(main_proj features, main_norm)`.
    fn draft_input(&mut self, draft: &DraftWeights<B>) {
        let shape = &self.constants.shape;
        let (rows, hidden) = (self.rows, shape.hidden_size);
        let rounds = self.rounds(&draft.main_proj);
        let keys_round = draft.layers.iter().any(|l| self.rounds(&l.attention.wkv));
        let ws = &mut *self.ws;
        let identity = &ws.identity[..rows];
        if rounds {
            ws.features.round(self.backend, shape.draft_features(), identity);
        }
        self.backend.matmul(&draft.main_proj, ws.features.form(rounds), rows, &mut ws.narrow);
        let eps = shape.rms_norm_eps;
        self.backend.rmsnorm(&ws.narrow, rows, hidden, &draft.main_norm, eps, &mut ws.x.plain);
        if keys_round {
            ws.x.round(self.backend, hidden, identity);
        }
    }
}

/// Rows of a group of draft blocks.
#[derive(Clone, Debug, Default)]
pub(crate) struct DraftPlan {
    /// Known token and noise of each block, `[requests * block]`.
    tokens: Vec<u32>,
    rows: RowSet,
    windows: WindowPlan,
    /// The token before each draft: what the Markov head sees, `[requests * block]`.
    before: Vec<u32>,
    /// Markov input of one step, `[requests]`.
    latest: Vec<u32>,
    logits: Vec<f32>,
    bias: Vec<f32>,
    confidence: Vec<f32>,
    arrivals: Vec<u32>,
}

/// One block to be drafted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftBlock {
    /// State slot.
    pub slot: usize,
    /// What the slot holds.
    pub state: Slot,
    /// The token at the slot's next position.
    pub token: u32,
}

impl DraftPlan {
    /// Plans blocks of `block` rows: the known token, then noise.
    pub fn build(&mut self, context: &PlanContext, block: usize, noise: u32, blocks: &[DraftBlock]) {
        self.tokens.clear();
        self.rows.clear();
        for (ordinal, request) in blocks.iter().enumerate() {
            for offset in 0..block {
                self.tokens.push(if offset == 0 { request.token } else { noise });
                let row = Row {
                    id: self.rows.len(),
                    sequence: ordinal,
                    position: request.state.held + offset,
                    image: false,
                };
                self.rows.push(row, &context.frequencies, &[]);
            }
        }
        let parts = blocks.iter().map(|request| WindowPart {
            slot: request.slot,
            from: request.state.consumer_from,
            first_key: request.state.held,
            first_query: request.state.held,
            end: request.state.held + block,
        });
        self.windows.build_blocks(context.geometry.window, context.geometry.ring, parts);
    }
}

/// Drafting: reads the rings, writes only scratch and buffers.
impl<B: Backend> Pass<'_, B> {
    /// Runs the planned blocks, one for each element of `out`.
    pub fn draft(&mut self, weights: &Weights<B>, plan: &mut DraftPlan, out: &mut [DraftOutput]) {
        let draft = weights.draft.as_ref().expect("the model has draft layers");
        self.load_rotations(&plan.rows);
        self.embed(&weights.embed, &plan.tokens);
        self.open_stream();
        for layer in &draft.layers {
            plan.arrivals.clear();
            plan.arrivals.resize(layer.moe.experts.slots.len(), 0);
            self.attention_input(layer);
            self.write_window(layer, &plan.windows);
            let keys = Keys { rows: &plan.rows, windows: &plan.windows, blocks: (&[], &[]) };
            self.block(layer, keys, &mut plan.arrivals).expect("draft layers exchange nothing");
        }
        plan.logits.clear();
        let identity = std::mem::take(&mut self.ws.identity);
        self.logits(&draft.norm, &weights.head, &identity[..self.rows], &mut plan.logits);
        self.ws.identity = identity;
        self.choose(draft, plan, out);
        self.confidence(draft, plan, out);
    }

    /// Greedy drafts, one after the other: each token's logits get a bias from the token before.
    fn choose(&mut self, draft: &DraftWeights<B>, plan: &mut DraftPlan, out: &mut [DraftOutput]) {
        let vocab = self.constants.shape.vocab_size;
        let block = self.rows / out.len();
        for (request, output) in out.iter_mut().enumerate() {
            output.tokens.clear();
            output.logits.clear();
            let rows = request * block * vocab..(request + 1) * block * vocab;
            output.logits.extend_from_slice(&plan.logits[rows]);
        }
        plan.before.clear();
        plan.before.resize(self.rows, 0);
        for step in 0..block {
            plan.latest.clear();
            for (request, output) in out.iter().enumerate() {
                let token = output.tokens.last().copied().unwrap_or(plan.tokens[request * block]);
                plan.before[request * block + step] = token;
                plan.latest.push(token);
            }
            self.markov_bias(draft, plan);
            for (output, bias) in out.iter_mut().zip(plan.bias.chunks_exact(vocab)) {
                let logits = &mut output.logits[step * vocab..(step + 1) * vocab];
                logits.iter_mut().zip(bias).for_each(|(logit, bias)| *logit += bias);
                output.tokens.push(greedy(logits));
            }
        }
    }

    /// `bias = markov_head markov_embed[latest]`, `[requests, vocab]`.
    fn markov_bias(&mut self, draft: &DraftWeights<B>, plan: &mut DraftPlan) {
        let vocab = self.constants.shape.vocab_size;
        let ws = &mut *self.ws;
        plan.bias.resize(plan.latest.len() * vocab, 0.0);
        let pieces = plan.latest.chunks(ws.head_rows).zip(plan.bias.chunks_mut(ws.head_rows * vocab));
        for (tokens, bias) in pieces {
            self.backend.gather(&draft.markov_embed, tokens, &mut ws.markov);
            self.backend.matmul(&draft.markov_head, &ws.markov, tokens.len(), &mut ws.logits);
            self.backend.read(&ws.logits, 0, bias);
        }
    }

    /// `confidence = proj [h, markov_embed[token before]]` of every row, with h before its norm.
    fn confidence(&mut self, draft: &DraftWeights<B>, plan: &mut DraftPlan, out: &mut [DraftOutput]) {
        let shape = &self.constants.shape;
        let (rows, hidden) = (self.rows, shape.hidden_size);
        let rank = shape.draft.as_ref().map_or(0, |d| d.markov_rank);
        let ws = &mut *self.ws;
        let backend = self.backend;
        backend.hc_collapse(&ws.stream, rows, shape.hc_mult, hidden, &ws.pre, &mut ws.y);
        backend.gather(&draft.markov_embed, &plan.before, &mut ws.markov);
        // The mean of one copy is the copy: this puts two matrices side by side.
        let joined = &mut ws.confidence_in;
        backend.mean_copies(&ws.y, rows, 1, hidden, joined, hidden + rank, 0);
        backend.mean_copies(&ws.markov, rows, 1, rank, joined, hidden + rank, hidden);
        backend.matmul(&draft.confidence, joined, rows, &mut ws.confidence);
        plan.confidence.resize(rows, 0.0);
        backend.read(&ws.confidence, 0, &mut plan.confidence);
        let block = rows / out.len();
        for (output, values) in out.iter_mut().zip(plan.confidence.chunks_exact(block)) {
            output.confidence.clear();
            output.confidence.extend_from_slice(values);
        }
    }
}
