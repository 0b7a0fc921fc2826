//! Compressor (model.md section 6.3): groups of consecutive tokens become one entry, a rotated latent for the
//! attention and an index key for the indexer.

use deepinfer_kernels::Backend;

use super::forward::Pass;
use super::groups::GroupPlan;
use super::plan::StepPlan;
use super::weights::CompressorWeights;

impl<B: Backend> Pass<'_, B> {
    /// Stores the entries that the current rows complete, and keeps the tokens of groups that stay open.
    pub fn compress(&mut self, layer: usize, weights: &CompressorWeights<B>, plan: &StepPlan) {
        let ordinal = self.constants.ratio_ordinals[weights.source];
        let groups = &plan.groups[ordinal];
        match &weights.wgate {
            None => self.pool_single(weights, groups),
            Some(wgate) => self.pool_groups(weights, wgate, groups),
        }
        if groups.len() > 0 {
            self.write_entries(layer, weights, groups, ordinal);
        }
    }

    /// Ratio 1: `pooled = wkv x` of every row that makes an entry.
    fn pool_single(&mut self, weights: &CompressorWeights<B>, groups: &GroupPlan) {
        let count = groups.len();
        let ws = &mut *self.ws;
        if count == self.rows {
            self.backend.matmul(&weights.wkv, &ws.x.plain, count, &mut ws.pooled);
        } else if count > 0 {
            let hidden = self.constants.shape.hidden_size;
            self.backend.take_rows(&ws.x.plain, hidden, &groups.members, &mut ws.y);
            self.backend.matmul(&weights.wkv, &ws.y, count, &mut ws.pooled);
        }
    }

    /// Ratio r: `pooled = sum_i softmax_i(wgate x_i) wkv x_i` over the r tokens of a group, channel by
    /// channel.
    fn pool_groups(&mut self, weights: &CompressorWeights<B>, wgate: &B::Weight, groups: &GroupPlan) {
        let ws = &mut *self.ws;
        self.backend.matmul(&weights.wkv, &ws.x.plain, self.rows, &mut ws.value);
        self.backend.matmul(wgate, &ws.x.plain, self.rows, &mut ws.gate);
        self.caches.complete_groups(
            self.backend,
            weights.source,
            groups,
            (&ws.value, &ws.gate),
            (&mut ws.member_value, &mut ws.member_gate),
        );
        if groups.len() > 0 {
            let width = self.constants.shape.head_dim;
            self.backend.compress_pool(
                &ws.member_value,
                &ws.member_gate,
                groups.len(),
                groups.ratio,
                width,
                &mut ws.pooled,
            );
        }
    }

    /// `latent = rms(pooled, norm)`; entry = rope(latent), index key = rope(rms(wk latent, k_norm)), both at
    /// the group's first token.
    fn write_entries(
        &mut self,
        layer: usize,
        weights: &CompressorWeights<B>,
        groups: &GroupPlan,
        ordinal: usize,
    ) {
        let shape = &self.constants.shape;
        let (count, width, index_width) = (groups.len(), shape.head_dim, shape.index_head_dim);
        let (rotated, eps) = (shape.qk_rope_head_dim, shape.rms_norm_eps);
        let ws = &mut *self.ws;
        let stores = &mut self.caches.sources[weights.source];
        let backend = self.backend;
        backend.write(&mut ws.group_rope[ordinal], 0, &groups.rope);
        let rope = &ws.group_rope[ordinal];
        backend.rmsnorm(&ws.pooled, count, width, &weights.norm, eps, &mut ws.entry);
        backend.matmul(&weights.wk, &ws.entry, count, &mut ws.narrow);
        backend.rmsnorm(&ws.narrow, count, index_width, &weights.k_norm, eps, &mut ws.index_key);
        backend.rope(&mut ws.index_key, count, 1, index_width, rotated, rope, false);
        backend.store_rows(&ws.index_key, &mut stores.index, &groups.store);
        backend.rope(&mut ws.entry, count, 1, width, rotated, rope, false);
        backend.store_rows(&ws.entry, &mut stores.main, &groups.store);
        if let Some(probe) = self.probe.as_deref_mut() {
            backend.load_rows(&stores.main, &groups.store, &mut ws.entry);
            probe.floats(backend, format!("layers.{layer}.compressed_kv"), &[count, width], &ws.entry);
            backend.load_rows(&stores.index, &groups.store, &mut ws.index_key);
            probe.floats(backend, format!("layers.{layer}.index_k"), &[count, index_width], &ws.index_key);
        }
    }
}
