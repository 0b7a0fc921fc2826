//! One sequence on an engine of its own, in the words of the vectors: steps, drafts, rollback.
//!
//! Refusals of the engine become text: they are results of the vector that caused them, not errors of the suite.

use deepinfer_kernels::Backend;
use deepinfer_serving::batch::{
    BLOCK_TOKENS, BlockId, DraftOutput, DraftRequest, ImageSpan, Logits, SequenceStep, StateSlot, StepBatch,
    StepOutput,
};

use super::Stop;
use crate::engine::{BoundarySwa, Engine, EngineOptions, Truncation};
use crate::numerics::Numerics;
use crate::record::Probe;
use crate::weights::Checkpoint;

const SLOT: StateSlot = StateSlot(0);

/// How the engine of a session is opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub numerics: Numerics,
    /// Longest sequence, drafts included.
    pub positions: usize,
    /// Longest step.
    pub max_rows: usize,
    pub truncation: Truncation,
    pub keep: Option<usize>,
    pub boundary_swa: BoundarySwa,
}

impl Setup {
    /// Without consumer truncation.
    pub fn exact(numerics: Numerics, positions: usize, max_rows: usize) -> Self {
        Self {
            numerics,
            positions,
            max_rows,
            truncation: Truncation::Off,
            keep: None,
            boundary_swa: BoundarySwa::Truncated,
        }
    }
}

/// A sequence and its engine.
pub(crate) struct Session<B: Backend> {
    pub engine: Engine<B>,
    blocks: Vec<BlockId>,
    batch: StepBatch,
    out: StepOutput,
    drafts: Vec<DraftOutput>,
}

/// Tokens of a step and what is special about them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Step {
    pub tokens: Vec<u32>,
    pub logits: Logits,
    pub prompt_tokens: Option<usize>,
    pub images: Vec<ImageSpan>,
}

impl<B: Backend> Session<B> {
    /// Opens an engine with room for one sequence.
    pub fn open(backend: B, checkpoint: &Checkpoint, setup: Setup) -> Result<Self, String> {
        let blocks = setup.positions.div_ceil(BLOCK_TOKENS).max(1);
        let options = EngineOptions {
            numerics: Some(setup.numerics),
            slots: 1,
            blocks,
            max_rows: setup.max_rows,
            truncation: setup.truncation,
            keep: setup.keep,
            boundary_swa: setup.boundary_swa,
        };
        let engine = Engine::open(backend, checkpoint, options).map_err(|e| e.to_string())?;
        Ok(Self {
            engine,
            blocks: (0..blocks as u32).map(BlockId).collect(),
            batch: StepBatch::default(),
            out: StepOutput::default(),
            drafts: Vec::new(),
        })
    }

    /// Runs tokens after what the session holds.
    pub fn step(&mut self, step: Step, probe: Option<&mut Probe>) -> Result<(), Stop> {
        let start = self.held();
        let end = start + step.tokens.len();
        self.batch.sequences = vec![SequenceStep {
            logits: step.logits,
            prompt_tokens: step.prompt_tokens,
            images: step.images,
            ..SequenceStep::text(SLOT, start, step.tokens, self.blocks[..end.div_ceil(BLOCK_TOKENS)].to_vec())
        }];
        match probe {
            Some(probe) => self.engine.execute_probed(&self.batch, &mut self.out, probe),
            None => self.engine.execute(&self.batch, &mut self.out),
        }
        .map_err(|e| Stop::Refused(format!("step at position {start}: {e}")))
    }

    /// One decode step.
    pub fn decode(&mut self, token: u32) -> Result<(), Stop> {
        let tokens = vec![token];
        self.step(Step { tokens, ..Step::default() }, None)
    }

    /// Logits of the rows that the last step returned.
    pub fn logits(&self) -> &[f32] {
        &self.out.logits
    }

    /// Logits of the last row.
    pub fn last(&self) -> &[f32] {
        let vocab = self.out.vocab_size;
        &self.out.logits[self.out.logits.len().saturating_sub(vocab)..]
    }

    /// Logits of each returned row, in order.
    pub fn rows(&self) -> impl Iterator<Item = &[f32]> {
        self.out.logits.chunks_exact(self.out.vocab_size.max(1))
    }

    /// A block of drafts after `token`.
    pub fn draft(&mut self, token: u32) -> Result<&DraftOutput, Stop> {
        let request = DraftRequest { slot: SLOT, token };
        self.engine
            .draft(&[request], &mut self.drafts)
            .map_err(|e| Stop::Refused(format!("draft at position {}: {e}", self.held())))?;
        self.drafts.first().ok_or_else(|| Stop::Refused("the engine returned no draft".to_string()))
    }

    /// Positions held.
    pub fn held(&self) -> usize {
        self.engine.held(SLOT)
    }

    /// Forgets all positions from `tokens` on.
    pub fn truncate(&mut self, tokens: usize) -> Result<(), Stop> {
        self.engine.truncate(SLOT, tokens).map_err(|e| Stop::Refused(format!("rollback to {tokens}: {e}")))
    }
}

/// The token with the highest logit; the lowest of equal ones.
pub(crate) fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, v) in logits.iter().enumerate() {
        if *v > logits[best] {
            best = i;
        }
    }
    best as u32
}
