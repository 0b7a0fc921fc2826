//! Engram (model.md section 8): rows of an n-gram table, added to each copy of the stream through a gate.

use deepinfer_kernels::{Backend, RowFormat};

use super::forward::Pass;
use super::rows::RowSet;
use super::weights::LayerWeights;

impl<B: Backend> Pass<'_, B> {
    /// `s[i] += g_i(s, key_i) * value` on layers with a table.
    pub fn engram(&mut self, layer: &LayerWeights<B>, rows: &RowSet) {
        let Some(engram) = &layer.engram else { return };
        let shape = &self.constants.shape;
        let width = shape.engram.as_ref().expect("the layer has a table").width();
        let (count, copies, hidden) = (self.rows, shape.hc_mult, shape.hidden_size);
        let rounds = self.rounds(&engram.wkv);
        let ws = &mut *self.ws;
        let ids = &rows.engram[engram.ordinal];
        self.backend.gather(&engram.table, ids, &mut ws.engram_rows);
        if rounds {
            self.backend.fake_quantize(&mut ws.engram_rows, count, width, RowFormat::Fp8);
        }
        self.backend.matmul(&engram.wkv, &ws.engram_rows, count, &mut ws.engram_kv);
        self.backend.engram_gate(
            &mut ws.stream,
            count,
            copies,
            hidden,
            &ws.engram_kv,
            &engram.q_weight,
            &engram.k_weight,
            &rows.open,
            shape.rms_norm_eps,
            &mut ws.engram_gates,
        );
        if let Some(probe) = self.probe.as_deref_mut() {
            let name = |what: &str| format!("layers.{}.engram.{what}", layer.number);
            probe.whole(name("rows"), &[count, ids.len() / count], ids.clone());
            probe.floats(self.backend, name("gate"), &[count, copies], &ws.engram_gates);
        }
    }
}
