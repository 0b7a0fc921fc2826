//! Embedding: token rows, or rows that an image brings with it, copied into every copy of the stream.

use deepinfer_kernels::Backend;
use deepinfer_serving::batch::StepBatch;

use super::forward::Pass;

impl<B: Backend> Pass<'_, B> {
    /// `y = table[tokens]`.
    pub fn embed(&mut self, table: &B::Weight, tokens: &[u32]) {
        self.backend.gather(table, tokens, &mut self.ws.y);
    }

    /// Replaces the embeddings of image rows.
    pub fn place_images(&mut self, batch: &StepBatch) {
        let mut row = 0;
        for sequence in &batch.sequences {
            for span in &sequence.images {
                let at = (row + span.first) * self.constants.shape.hidden_size;
                self.backend.write(&mut self.ws.y, at, &span.embeddings);
            }
            row += sequence.tokens.len();
        }
    }

    /// `s[r, i] = y[r]` for every copy i; the first mix reads copy 0.
    pub fn open_stream(&mut self) {
        let shape = &self.constants.shape;
        let (rows, copies) = (self.rows, shape.hc_mult);
        let ws = &mut *self.ws;
        self.backend.broadcast_copies(&ws.y, rows, copies, shape.hidden_size, &mut ws.stream);
        self.backend.write(&mut ws.pre, 0, &ws.first_mix[..rows * copies]);
    }
}
