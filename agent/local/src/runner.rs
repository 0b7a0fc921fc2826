//! Runs sequences through an engine: prompts in chunks, then token by token, several side by side.
//!
//! One sequence owns one state slot and a fixed run of blocks. A step takes the pending tokens of every sequence,
//! at most `chunk` rows in all; a sequence whose tokens have all run samples its next token.

use anyhow::{Context, Result, ensure};
use deepinfer_engine::sampler::{self, Sampling};
use deepinfer_engine::{Checkpoint, Engine, EngineOptions, Numerics};
use deepinfer_kernels::Backend;
use deepinfer_serving::batch::{
    BLOCK_TOKENS, BlockId, Logits, SequenceStep, StateSlot, StepBatch, StepOutput,
};

/// How the runner is sized.
#[derive(Clone, Copy, Debug)]
pub struct RunnerOptions {
    /// Sequences at once.
    pub slots: usize,
    /// Longest sequence in tokens.
    pub context: usize,
    /// Rows of one step.
    pub chunk: usize,
    /// Rounding; `None` leaves it to the checkpoint.
    pub numerics: Option<Numerics>,
}

/// One running sequence.
#[derive(Debug)]
pub struct Sequence {
    slot: usize,
    /// Prompt, then generated tokens.
    pub ids: Vec<u32>,
    /// Length of the prompt.
    pub prompt: usize,
    /// Tokens that the model has run.
    held: usize,
    sampling: Sampling,
}

impl Sequence {
    /// A sequence that starts in `slot`, which must be free.
    pub fn new(slot: usize, prompt_ids: Vec<u32>, sampling: Sampling) -> Self {
        Self { slot, prompt: prompt_ids.len(), ids: prompt_ids, held: 0, sampling }
    }

    /// Goes on with `prompt_ids` where this sequence stands, as far as the tokens that have run are its beginning.
    pub fn continued(mut self, prompt_ids: Vec<u32>, sampling: Sampling) -> Self {
        let same = self.ids[..self.held] == prompt_ids[..self.held.min(prompt_ids.len())];
        if !same || self.held >= prompt_ids.len() {
            self.held = 0;
        }
        self.prompt = prompt_ids.len();
        self.ids = prompt_ids;
        self.sampling = sampling;
        self
    }

    /// Its state slot.
    pub fn slot(&self) -> usize {
        self.slot
    }

    /// Generated tokens so far.
    pub fn generated(&self) -> &[u32] {
        &self.ids[self.prompt..]
    }
}

/// An engine with its step buffers.
#[derive(Debug)]
pub struct Runner<B: Backend> {
    engine: Engine<B>,
    options: RunnerOptions,
    batch: StepBatch,
    output: StepOutput,
}

impl<B: Backend> Runner<B> {
    /// Opens the engine; says before allocating if memory does not suffice.
    pub fn open(backend: B, checkpoint: &Checkpoint, options: RunnerOptions) -> Result<Self> {
        let engine_options = EngineOptions {
            numerics: options.numerics,
            slots: options.slots,
            blocks: options.slots * options.context.div_ceil(BLOCK_TOKENS),
            max_rows: options.chunk.max(options.slots),
            ..EngineOptions::default()
        };
        let engine = Engine::open(backend, checkpoint, engine_options)
            .context("engine (sized by --context, --batch and --chunk)")?;
        Ok(Self { engine, options, batch: StepBatch::default(), output: StepOutput::default() })
    }

    /// The engine.
    pub fn engine(&self) -> &Engine<B> {
        &self.engine
    }

    /// The sizes it was opened with.
    pub fn options(&self) -> &RunnerOptions {
        &self.options
    }

    /// Says what is wrong with a prompt before any of it runs.
    pub fn check_prompt(&self, ids: &[u32]) -> Result<()> {
        ensure!(!ids.is_empty(), "the prompt is empty");
        let context = self.options.context;
        ensure!(
            ids.len() < context,
            "the prompt has {} tokens, the limit is {} (context {context} less one for an answer): shorten it or raise --context",
            ids.len(),
            context - 1
        );
        let vocab = self.engine.shape().vocab_size;
        if let Some(bad) = ids.iter().find(|id| **id as usize >= vocab) {
            anyhow::bail!("token id {bad} is outside the vocabulary of {vocab}");
        }
        Ok(())
    }

    /// Runs one step over `sequences`; gives the ordinals of those that got a new token.
    pub fn step(&mut self, sequences: &mut [&mut Sequence]) -> Result<Vec<usize>> {
        let members = self.pack(sequences);
        self.engine.execute(&self.batch, &mut self.output).context("step")?;
        let mut advanced = Vec::with_capacity(members.len());
        for (at, &ordinal) in members.iter().enumerate() {
            let sequence = &mut *sequences[ordinal];
            sequence.held += self.batch.sequences[at].tokens.len();
            if sequence.held == sequence.ids.len() {
                let logits = self.output.row(at, 0);
                let token = sampler::sample(logits, &sequence.sampling, sequence.ids.len() as u64);
                sequence.ids.push(token);
                advanced.push(ordinal);
            }
        }
        Ok(advanced)
    }

    /// Fills the batch; decode rows first, then prompt chunks in order while rows are left.
    fn pack(&mut self, sequences: &[&mut Sequence]) -> Vec<usize> {
        let mut order: Vec<usize> = (0..sequences.len()).collect();
        order.sort_by_key(|&i| (sequences[i].ids.len() - sequences[i].held > 1, i));
        let mut left = self.options.chunk.max(self.options.slots);
        self.batch.sequences.clear();
        let mut members = Vec::with_capacity(order.len());
        for ordinal in order {
            let sequence = &*sequences[ordinal];
            let pending = &sequence.ids[sequence.held..];
            let take = pending.len().min(left);
            if take == 0 {
                continue;
            }
            left -= take;
            let end = sequence.held + take;
            let blocks = self.blocks(sequence.slot, end);
            let mut step = SequenceStep::text(
                StateSlot(sequence.slot as u32),
                sequence.held,
                pending[..take].to_vec(),
                blocks,
            );
            step.prompt_tokens = (sequence.held < sequence.prompt).then_some(sequence.prompt);
            if end < sequence.ids.len() {
                step.logits = Logits::None;
            }
            self.batch.sequences.push(step);
            members.push(ordinal);
        }
        members
    }

    fn blocks(&self, slot: usize, tokens: usize) -> Vec<BlockId> {
        let per_slot = self.options.context.div_ceil(BLOCK_TOKENS);
        let first = slot * per_slot;
        (first..first + tokens.div_ceil(BLOCK_TOKENS)).map(|b| BlockId(b as u32)).collect()
    }
}
