//! Checks of a batch before anything changes.

use deepinfer_kernels::Backend;
use deepinfer_serving::batch::{BLOCK_TOKENS, DraftRequest, SequenceStep, StateSlot, StepBatch};

use super::Engine;
use super::error::StepError;
use crate::cache::Slot;

impl<B: Backend> Engine<B> {
    /// Whether the batch can run.
    pub(super) fn check(&self, batch: &StepBatch) -> Result<(), StepError> {
        let (rows, max_rows) = (batch.rows(), self.options.max_rows);
        if rows > max_rows {
            return Err(StepError::TooManyRows { rows, max_rows });
        }
        for (ordinal, step) in batch.sequences.iter().enumerate() {
            self.check_sequence(step)?;
            if batch.sequences[..ordinal].iter().any(|s| s.slot == step.slot) {
                return Err(StepError::SlotTwice { slot: step.slot.0 });
            }
        }
        Ok(())
    }

    /// State of an existing slot.
    pub(super) fn slot(&self, slot: StateSlot) -> Result<&Slot, StepError> {
        let slots = self.slots.len();
        self.slots.get(slot.0 as usize).ok_or(StepError::NoSlot { slot: slot.0, slots })
    }

    fn check_sequence(&self, step: &SequenceStep) -> Result<(), StepError> {
        let slot = step.slot.0;
        let state = self.slot(step.slot)?;
        if step.tokens.is_empty() {
            return Err(StepError::NoTokens { slot });
        }
        if step.start > state.held {
            let (start, held) = (step.start, state.held);
            return Err(StepError::Gap { slot, start, held });
        }
        self.check_cut(step.slot, step.start)?;
        let limit = self.constants.shape.max_position_embeddings;
        let end = step.start.saturating_add(step.tokens.len());
        if end > limit {
            return Err(StepError::ContextLimit { slot, end, limit });
        }
        if let Some(prompt_tokens) = step.prompt_tokens.filter(|&n| n < end) {
            return Err(StepError::BeyondPrompt { slot, end, prompt_tokens });
        }
        for (offset, &token) in step.tokens.iter().enumerate() {
            self.check_token(slot, token, step.start + offset)?;
        }
        self.check_blocks(step, end)?;
        self.check_images(step)
    }

    /// Whether a slot can go back to `tokens` positions.
    pub(super) fn check_cut(&self, slot: StateSlot, tokens: usize) -> Result<(), StepError> {
        let state = self.slot(slot)?;
        let slack = self.context.geometry.slack;
        if tokens >= state.held || state.can_cut(tokens, slack) {
            return Ok(());
        }
        Err(StepError::RollbackTooDeep {
            slot: slot.0,
            tokens,
            lowest: state.floor.max(state.high.saturating_sub(slack)),
        })
    }

    pub(super) fn check_token(&self, slot: u32, token: u32, position: usize) -> Result<(), StepError> {
        let vocab_size = self.constants.shape.vocab_size;
        if (token as usize) < vocab_size {
            return Ok(());
        }
        Err(StepError::BadToken { slot, token, position, vocab_size })
    }

    fn check_blocks(&self, step: &SequenceStep, end: usize) -> Result<(), StepError> {
        let slot = step.slot.0;
        let (given, needed) = (step.blocks.len(), end.div_ceil(BLOCK_TOKENS));
        if given < needed {
            return Err(StepError::MissingBlocks { slot, given, needed, end });
        }
        let blocks = self.options.blocks;
        match step.blocks.iter().find(|b| b.0 as usize >= blocks) {
            Some(&block) => Err(StepError::NoBlock { slot, block: block.0, blocks }),
            None => Ok(()),
        }
    }

    fn check_images(&self, step: &SequenceStep) -> Result<(), StepError> {
        let hidden = self.constants.shape.hidden_size;
        let mut free = 0;
        for span in &step.images {
            let rows = span.embeddings.len() / hidden;
            let detail = if rows == 0 || !span.embeddings.len().is_multiple_of(hidden) {
                "its embeddings are not whole rows of hidden_size"
            } else if span.first < free {
                "it overlaps the span before it, or spans are not in ascending order"
            } else if span.first.saturating_add(rows) > step.tokens.len() {
                "it ends after the step's last token"
            } else {
                free = span.first + rows;
                continue;
            };
            return Err(StepError::BadImage { slot: step.slot.0, first: span.first, detail });
        }
        Ok(())
    }

    /// Whether the drafts can run.
    pub(super) fn check_drafts(&self, requests: &[DraftRequest]) -> Result<(), StepError> {
        if self.weights.draft.is_none() {
            return Err(StepError::NoDraftLayers);
        }
        for request in requests {
            let held = self.slot(request.slot)?.held;
            self.check_token(request.slot.0, request.token, held)?;
        }
        Ok(())
    }
}
