//! Hyper-connections (model.md section 5): what a sublayer reads from the copies of the stream, and how its
//! result is merged back.

use deepinfer_kernels::{Backend, RowFormat, WeightFormat, WeightInfo};

use super::forward::Pass;
use super::weights::{HcWeights, LayerWeights};
use super::workspace::Input;
use crate::numerics::Numerics;

impl<B: Backend> Pass<'_, B> {
    /// `x = rms(sum_i pre[i] s[i], attn_norm)`, with the mix that the sublayer before handed over.
    pub fn attention_input(&mut self, layer: &LayerWeights<B>) {
        let shape = &self.constants.shape;
        let (rows, copies, hidden) = (self.rows, shape.hc_mult, shape.hidden_size);
        let ws = &mut *self.ws;
        self.backend.hc_collapse(&ws.stream, rows, copies, hidden, &ws.pre, &mut ws.y);
        let eps = shape.rms_norm_eps;
        self.backend.rmsnorm(&ws.y, rows, hidden, &layer.attn_norm, eps, &mut ws.x.plain);
        self.record_row("attn_in", layer.number);
        self.round_attention_input(layer);
    }

    /// `x = rms(sum_i pre[i] s[i], ffn_norm)`, with the attention's mix, not the experts' own.
    pub fn ffn_input(&mut self, layer: &LayerWeights<B>) {
        let shape = &self.constants.shape;
        let (rows, copies, hidden) = (self.rows, shape.hc_mult, shape.hidden_size);
        let ws = &mut *self.ws;
        self.backend.hc_collapse(&ws.stream, rows, copies, hidden, &ws.pre_attn, &mut ws.y);
        let eps = shape.rms_norm_eps;
        self.backend.rmsnorm(&ws.y, rows, hidden, &layer.ffn_norm, eps, &mut ws.x.plain);
        self.record_row("ffn_in", layer.number);
    }

    /// Mixes of the attention; its `pre` is used by the experts.
    pub fn attention_mixes(&mut self, weights: &HcWeights<B>) {
        let ws = &mut *self.ws;
        self.backend.hc_mixes(
            &ws.stream,
            self.rows,
            &weights.f,
            &weights.scale,
            &weights.base,
            self.constants.hc,
            &mut ws.pre_attn,
            &mut ws.post,
            &mut ws.comb,
        );
    }

    /// Mixes of the experts; their `pre` is used by the next layer's attention.
    pub fn ffn_mixes(&mut self, weights: &HcWeights<B>) {
        let ws = &mut *self.ws;
        self.backend.hc_mixes(
            &ws.stream,
            self.rows,
            &weights.f,
            &weights.scale,
            &weights.base,
            self.constants.hc,
            &mut ws.pre,
            &mut ws.post,
            &mut ws.comb,
        );
    }

    /// `s[j] = post[j] y + sum_i comb[i, j] s[i]`.
    pub fn merge(&mut self) {
        let shape = &self.constants.shape;
        let ws = &mut *self.ws;
        self.backend.hc_merge(
            &mut ws.stream,
            self.rows,
            shape.hc_mult,
            shape.hidden_size,
            &ws.y,
            &ws.post,
            &ws.comb,
        );
    }

    /// Keeps only the given rows of the stream and of the mix for the next sublayer.
    pub fn take_stream(&mut self, ids: &[u32]) {
        let shape = &self.constants.shape;
        let (copies, hidden) = (shape.hc_mult, shape.hidden_size);
        let ws = &mut *self.ws;
        self.backend.take_rows(&ws.stream, copies * hidden, ids, &mut ws.stream_taken);
        self.backend.take_rows(&ws.pre, copies, ids, &mut ws.pre_taken);
        std::mem::swap(&mut ws.stream, &mut ws.stream_taken);
        std::mem::swap(&mut ws.pre, &mut ws.pre_taken);
    }

    /// Keeps only the given rows of the sublayer's input; its rounded form must be made again.
    pub fn take_attention_input(&mut self, ids: &[u32]) {
        let ws = &mut *self.ws;
        self.backend.take_rows(&ws.x.plain, self.constants.shape.hidden_size, ids, &mut ws.y);
        std::mem::swap(&mut ws.x.plain, &mut ws.y);
    }

    /// Rounds the attention's input once for all projections that need it so.
    pub fn round_attention_input(&mut self, layer: &LayerWeights<B>) {
        let attention = &layer.attention;
        if self.rounds(&attention.wq_a) || self.rounds(&attention.wkv) {
            let ws = &mut *self.ws;
            let identity = &ws.identity[..self.rows];
            ws.x.round(self.backend, self.constants.shape.hidden_size, identity);
        }
    }

    /// Whether inputs of a weight are rounded: its stored format decides.
    pub fn rounds(&self, weight: &B::Weight) -> bool {
        self.constants.numerics == Numerics::Quantized
            && matches!(weight.format(), WeightFormat::Fp8 | WeightFormat::Fp4)
    }

    /// Records the sublayer's input.
    fn record_row(&mut self, what: &str, layer: usize) {
        if let Some(probe) = self.probe.as_deref_mut() {
            let size = [self.rows, self.constants.shape.hidden_size];
            probe.floats(self.backend, format!("layers.{layer}.{what}"), &size, &self.ws.x.plain);
        }
    }
}

impl<B: Backend> Input<B> {
    /// Makes the rounded form of the rows `identity`.
    pub fn round(&mut self, backend: &B, width: usize, identity: &[u32]) {
        backend.take_rows(&self.plain, width, identity, &mut self.rounded);
        backend.fake_quantize(&mut self.rounded, identity.len(), width, RowFormat::Fp8);
    }

    /// The form that a weight takes.
    pub fn form(&self, rounded: bool) -> &B::Buf<f32> {
        if rounded { &self.rounded } else { &self.plain }
    }
}
