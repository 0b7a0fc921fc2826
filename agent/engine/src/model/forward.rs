//! The forward pass (model.md section 5), top to bottom.

use deepinfer_kernels::Backend;
use deepinfer_serving::batch::StepBatch;

use super::Constants;
use super::plan::StepPlan;
use super::rows::RowSet;
use super::spread::Spread;
use super::weights::{LayerWeights, Weights};
use super::windows::WindowPlan;
use super::workspace::Workspace;
use crate::cache::Caches;
use crate::exchange::ExchangeError;
use crate::record::Probe;

/// A step in progress: what it computes with, and how many rows run through the current layer.
pub(crate) struct Pass<'a, B: Backend> {
    pub backend: &'a B,
    pub constants: &'a Constants,
    pub caches: &'a mut Caches<B>,
    pub ws: &'a mut Workspace<B>,
    pub rows: usize,
    /// The experts' exchange with other ranks, if there are any.
    pub spread: Option<&'a mut Spread<B>>,
    pub probe: Option<&'a mut Probe>,
}

/// Keys of a layer: which entries and window rows the current rows see.
#[derive(Clone, Copy)]
pub(crate) struct Keys<'a> {
    /// Rows that run through the layer.
    pub rows: &'a RowSet,
    /// Their window keys.
    pub windows: &'a WindowPlan,
    /// Block ids of all sequences, and the end of each sequence's part.
    pub blocks: (&'a [u32], &'a [u32]),
}

impl<B: Backend> Pass<'_, B> {
    /// Runs the rows of a step through all backbone layers and keeps what later steps need. Returns `false`
    /// if no row came through: then there are no logits. Layers without rows still serve those of other
    /// ranks.
    ///
    /// `arrivals` counts rows by layer and local expert slot, `[layers, slots]`.
    ///
    /// # Errors
    /// If the exchange of the experts ended.
    pub fn backbone(
        &mut self,
        weights: &Weights<B>,
        plan: &StepPlan,
        batch: &StepBatch,
        arrivals: &mut [u32],
    ) -> Result<bool, ExchangeError> {
        let slots = arrivals.len() / weights.layers.len();
        let mut rows = &plan.all;
        if self.rows > 0 {
            self.load_rotations(rows);
            self.embed(&weights.embed, &plan.tokens);
            self.place_images(batch);
            self.open_stream();
        }
        for (layer, arrivals) in weights.layers.iter().zip(arrivals.chunks_exact_mut(slots)) {
            if self.rows == 0 {
                self.spread_experts(layer, self.expert_params(layer), arrivals)?;
                continue;
            }
            let windows = plan.windows(self.constants.zone(layer.number));
            self.force_input(layer.number);
            self.engram(layer, rows);
            self.draft_feature(layer.number);
            self.attention_input(layer);
            self.write_keys(layer, plan, windows);
            if plan.shrinks && Some(layer.number) == self.constants.boundary {
                rows = plan.last();
                if rows.len() == 0 {
                    self.rows = 0;
                    self.spread_experts(layer, self.expert_params(layer), arrivals)?;
                    continue;
                }
                self.keep_rows(layer, rows);
            }
            let blocks = (plan.blocks.as_slice(), plan.block_ends.as_slice());
            self.block(layer, Keys { rows, windows, blocks }, arrivals)?;
        }
        if self.rows == 0 {
            return Ok(false);
        }
        self.record_result();
        self.write_draft_context(weights, plan);
        Ok(true)
    }

    /// The rest of a layer, backbone or draft: attention over keys that are already stored, then the experts.
    /// Each merge is followed by the mixes of the next sublayer; a sublayer's own `pre` is used one sublayer
    /// later.
    pub fn block(
        &mut self,
        layer: &LayerWeights<B>,
        keys: Keys<'_>,
        arrivals: &mut [u32],
    ) -> Result<(), ExchangeError> {
        self.attention_mixes(&layer.hc_attn);
        self.attention(layer, keys);
        self.merge();
        self.ffn_mixes(&layer.hc_ffn);
        self.ffn_input(layer);
        self.experts(layer, &keys.rows.image, arrivals)?;
        self.merge();
        self.record_output(layer.number);
        Ok(())
    }

    /// Keys of the layer's rows: its own window rows, and on sources the entries that these rows complete.
    fn write_keys(&mut self, layer: &LayerWeights<B>, plan: &StepPlan, windows: &WindowPlan) {
        self.write_window(layer, windows);
        if let Some(compressor) = &layer.compressor {
            self.compress(layer.number, compressor, plan);
        }
    }

    /// Reduces the step to the rows that the layers after the boundary keep.
    fn keep_rows(&mut self, layer: &LayerWeights<B>, rows: &RowSet) {
        self.take_stream(&rows.ids);
        self.take_attention_input(&rows.ids);
        self.take_features(&rows.ids);
        self.rows = rows.len();
        self.load_rotations(rows);
        self.round_attention_input(layer);
    }

    /// Copies the cosines and sines of the rows to the device.
    pub fn load_rotations(&mut self, rows: &RowSet) {
        self.backend.write(&mut self.ws.plain_rope, 0, &rows.plain_rope);
        self.backend.write(&mut self.ws.compressed_rope, 0, &rows.compressed_rope);
    }
}

/// Records of a probed step; nothing without a probe.
impl<B: Backend> Pass<'_, B> {
    /// Replaces the layer's input if the probe says so, and records it.
    fn force_input(&mut self, layer: usize) {
        let Some(probe) = self.probe.as_deref_mut() else {
            return;
        };
        let shape = &self.constants.shape;
        if let Some(forced) = probe.forced(layer) {
            self.backend.write(&mut self.ws.stream, 0, &forced.stream);
            self.backend.write(&mut self.ws.pre, 0, &forced.pre);
        }
        let (rows, copies) = (self.rows, shape.hc_mult);
        let stream = [rows, copies, shape.hidden_size];
        probe.floats(self.backend, format!("layers.{layer}.stream_in"), &stream, &self.ws.stream);
        probe.floats(self.backend, format!("layers.{layer}.pre_in"), &[rows, copies], &self.ws.pre);
    }

    fn record_output(&mut self, layer: usize) {
        let Some(probe) = self.probe.as_deref_mut() else {
            return;
        };
        let shape = &self.constants.shape;
        let stream = [self.rows, shape.hc_mult, shape.hidden_size];
        probe.floats(self.backend, format!("layers.{layer}.stream_out"), &stream, &self.ws.stream);
    }

    fn record_result(&mut self) {
        let Some(probe) = self.probe.as_deref_mut() else {
            return;
        };
        let shape = &self.constants.shape;
        probe.floats(self.backend, "final_pre".to_string(), &[self.rows, shape.hc_mult], &self.ws.pre);
        let features = shape.draft_features();
        if features > 0 {
            let size = [self.rows, features];
            probe.floats(self.backend, "draft_features".to_string(), &size, &self.ws.features.plain);
        }
    }
}
