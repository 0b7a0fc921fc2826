//! A step that nobody asked for: caches, buffers and threads are warm before the first request.

use deepinfer_kernels::Backend;
use deepinfer_serving::batch::{BLOCK_TOKENS, BlockId, SequenceStep, StateSlot, StepBatch, StepOutput};

use super::Engine;
use super::error::StepError;

impl<B: Backend> Engine<B> {
    /// Runs a step of `rows` rows (as many as a step, the context and the blocks allow) through all layers in
    /// an empty slot and puts back what it overwrote: no sequence notices. Its arrivals are counted nowhere.
    ///
    /// In a supernode all ranks warm up together, in place of a step; `rows` may differ and be 0.
    ///
    /// # Errors
    /// [`StepError::NoFreeSlot`] if `rows` is not 0 and every slot is in use; [`StepError::Exchange`].
    pub fn warm_up(&mut self, rows: usize) -> Result<(), StepError> {
        let limit = self.constants.shape.max_position_embeddings;
        let rows = rows.min(self.options.max_rows).min(limit).min(self.options.blocks * BLOCK_TOKENS);
        let Some(slot) = self.slots.iter().position(|slot| slot.held == 0).filter(|_| rows > 0) else {
            self.warm_up_with(&StepBatch::default())?;
            return if rows == 0 { Ok(()) } else { Err(StepError::NoFreeSlot { slots: self.slots.len() }) };
        };
        let blocks: Vec<BlockId> = (0..rows.div_ceil(BLOCK_TOKENS) as u32).map(BlockId).collect();
        let kept: Vec<Vec<u8>> = blocks.iter().map(|&b| self.export_block(b)).collect::<Result<_, _>>()?;
        let vocab = self.constants.shape.vocab_size;
        let tokens = (0..rows).map(|i| (i % vocab) as u32).collect();
        let slot = StateSlot(slot as u32);
        let step = SequenceStep::text(slot, 0, tokens, blocks.clone());
        let ran = self.warm_up_with(&StepBatch { sequences: vec![step] });
        for (&block, bytes) in blocks.iter().zip(&kept) {
            self.import_block(block, bytes)?;
        }
        self.reset(slot);
        ran
    }

    /// Runs a batch whose output nobody sees. What earlier steps have not reported stays unreported.
    fn warm_up_with(&mut self, batch: &StepBatch) -> Result<(), StepError> {
        let unreported = std::mem::take(&mut self.unreported);
        let ran = self.execute(batch, &mut StepOutput::default());
        self.unreported = unreported;
        ran
    }
}
