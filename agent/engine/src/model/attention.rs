//! Attention (model.md sections 6.1 and 6.2): one key/value vector per position for all heads, a window of
//! raw keys, selected compressed entries, and a sink.

use deepinfer_kernels::{AttentionArgs, Backend, BlockTables, GlobalKeys, RowFormat};
use deepinfer_serving::batch::BLOCK_TOKENS;

use super::forward::{Keys, Pass};
use super::weights::{AttentionWeights, LayerWeights};
use super::windows::WindowPlan;

impl<B: Backend> Pass<'_, B> {
    /// Stores `kv = rope(rms(wkv x, kv_norm))` of the current rows in the layer's window.
    pub fn write_window(&mut self, layer: &LayerWeights<B>, windows: &WindowPlan) {
        self.window_keys(&layer.attention, self.constants.shape.ratio(layer.number) > 0);
        self.caches.store_keys(self.backend, layer.number, &self.ws.key, &windows.moves);
    }

    /// `key = rope(rms(wkv x, kv_norm))`.
    pub fn window_keys(&mut self, weights: &AttentionWeights<B>, compressed: bool) {
        let shape = &self.constants.shape;
        let (rows, width, rotated) = (self.rows, shape.head_dim, shape.qk_rope_head_dim);
        let rounds = self.rounds(&weights.wkv);
        let ws = &mut *self.ws;
        self.backend.matmul(&weights.wkv, ws.x.form(rounds), rows, &mut ws.narrow);
        let eps = shape.rms_norm_eps;
        self.backend.rmsnorm(&ws.narrow, rows, width, &weights.kv_norm, eps, &mut ws.key);
        let rope = if compressed { &ws.compressed_rope } else { &ws.plain_rope };
        self.backend.rope(&mut ws.key, rows, 1, width, rotated, rope, false);
    }

    /// `y = attention(x)`; the layer's own keys are already stored.
    pub fn attention(&mut self, layer: &LayerWeights<B>, keys: Keys<'_>) {
        let compressed = self.constants.shape.ratio(layer.number) > 0;
        self.queries(layer, compressed);
        if layer.indexer.is_some() {
            self.select_entries(layer, keys);
        }
        self.attend(layer, keys);
        self.project_output(layer, compressed);
    }

    /// `latent = rms(wq_a x, q_norm)`, `query = rope(wq_b latent)` of every head.
    fn queries(&mut self, layer: &LayerWeights<B>, compressed: bool) {
        let shape = &self.constants.shape;
        let weights = &layer.attention;
        let (rows, rank, eps) = (self.rows, shape.q_lora_rank, shape.rms_norm_eps);
        let rounds = [self.rounds(&weights.wq_a), self.rounds(&weights.wq_b)];
        let index_rounds = layer.indexer.as_ref().is_some_and(|i| self.rounds(&i.wq_b));
        let ws = &mut *self.ws;
        self.backend.matmul(&weights.wq_a, ws.x.form(rounds[0]), rows, &mut ws.narrow);
        self.backend.rmsnorm(&ws.narrow, rows, rank, &weights.q_norm, eps, &mut ws.latent.plain);
        if rounds[1] || index_rounds {
            ws.latent.round(self.backend, rank, &ws.identity[..rows]);
        }
        self.backend.matmul(&weights.wq_b, ws.latent.form(rounds[1]), rows, &mut ws.query);
        let rope = if compressed { &ws.compressed_rope } else { &ws.plain_rope };
        let (heads, width, rotated) = (shape.num_attention_heads, shape.head_dim, shape.qk_rope_head_dim);
        self.backend.rope(&mut ws.query, rows, heads, width, rotated, rope, false);
    }

    /// `core = softmax([q . k * scale, sink]) . k` over window and selected entries.
    fn attend(&mut self, layer: &LayerWeights<B>, keys: Keys<'_>) {
        let shape = &self.constants.shape;
        let ws = &mut *self.ws;
        let global = self.constants.source(layer.number).map(|(source, ratio)| GlobalKeys {
            store: &self.caches.sources[source].main,
            selection: &ws.selection,
            tables: keys.tables(ratio),
        });
        let args = AttentionArgs {
            rows: self.rows,
            heads: shape.num_attention_heads,
            width: shape.head_dim,
            scale: self.constants.attention_scale,
            query: &ws.query,
            sink: &layer.attention.sink,
            window: self.caches.keys(layer.number, &keys.windows.moves),
            window_rows: &keys.windows.rows,
            window_ends: &keys.windows.ends,
            global,
        };
        self.backend.attention(&args, &mut ws.core);
        if let Some(probe) = self.probe.as_deref_mut() {
            let size = [self.rows, shape.num_attention_heads, shape.head_dim];
            probe.floats(self.backend, format!("layers.{}.attn_core", layer.number), &size, &ws.core);
        }
    }

    /// `y = wo_b concat_g(wo_a[g] rope^-1(core)_g)`: values carry the rotation of their keys.
    fn project_output(&mut self, layer: &LayerWeights<B>, compressed: bool) {
        let shape = &self.constants.shape;
        let weights = &layer.attention;
        let rows = self.rows;
        let rounds = self.rounds(&weights.wo_b);
        let ws = &mut *self.ws;
        let rope = if compressed { &ws.compressed_rope } else { &ws.plain_rope };
        let (heads, width, rotated) = (shape.num_attention_heads, shape.head_dim, shape.qk_rope_head_dim);
        self.backend.rope(&mut ws.core, rows, heads, width, rotated, rope, true);
        self.backend.matmul_grouped(&weights.wo_a, shape.o_groups, &ws.core, rows, &mut ws.out_latent);
        if rounds {
            let latent = shape.o_groups * shape.o_lora_rank;
            self.backend.fake_quantize(&mut ws.out_latent, rows, latent, RowFormat::Fp8);
        }
        self.backend.matmul(&weights.wo_b, &ws.out_latent, rows, &mut ws.y);
        if let Some(probe) = self.probe.as_deref_mut() {
            let size = [rows, shape.hidden_size];
            probe.floats(self.backend, format!("layers.{}.attn_out", layer.number), &size, &ws.y);
        }
    }
}

impl<'a> Keys<'a> {
    /// Where the entries of a source with this ratio lie.
    pub fn tables(&self, ratio: usize) -> BlockTables<'a> {
        BlockTables {
            row_sequence: &self.rows.sequence,
            blocks: self.blocks.0,
            ends: self.blocks.1,
            entries_per_block: BLOCK_TOKENS / ratio,
        }
    }
}
