//! Head (model.md section 9): the last mix folds the stream; norm and head only for the rows that are asked
//! for.

use deepinfer_kernels::Backend;

use super::forward::Pass;

impl<B: Backend> Pass<'_, B> {
    /// Appends `head rms(sum_i pre[i] s[i], norm)` of the given rows to `out`, `[ids.len(), vocab]`.
    pub fn logits(&mut self, norm: &B::Buf<f32>, head: &B::Weight, ids: &[u32], out: &mut Vec<f32>) {
        let shape = &self.constants.shape;
        let (copies, hidden, vocab) = (shape.hc_mult, shape.hidden_size, shape.vocab_size);
        let backend = self.backend;
        let at = out.len();
        out.resize(at + ids.len() * vocab, 0.0);
        let pieces = ids.chunks(self.ws.head_rows).zip(out[at..].chunks_mut(self.ws.head_rows * vocab));
        for (ids, out) in pieces {
            let ws = &mut *self.ws;
            let rows = ids.len();
            backend.take_rows(&ws.stream, copies * hidden, ids, &mut ws.stream_taken);
            backend.take_rows(&ws.pre, copies, ids, &mut ws.pre_taken);
            backend.hc_collapse(&ws.stream_taken, rows, copies, hidden, &ws.pre_taken, &mut ws.y);
            backend.rmsnorm(&ws.y, rows, hidden, norm, shape.rms_norm_eps, &mut ws.x.plain);
            backend.matmul(head, &ws.x.plain, rows, &mut ws.logits);
            backend.read(&ws.logits, 0, out);
        }
    }
}
