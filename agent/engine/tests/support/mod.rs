//! What the engine's tests share: checkpoints of the repository, a generator of numbers, and [`Rig`], an engine
//! with the blocks and slots of a few sequences.

// Every test binary uses its own part of this.
#![allow(dead_code)]

use std::path::{Path, PathBuf};

use deepinfer_engine::engine::{BoundarySwa, Engine, EngineOptions, Truncation};
use deepinfer_engine::{Checkpoint, Numerics};
use deepinfer_kernels::{Backend, Cpu};
use deepinfer_serving::batch::{
    BLOCK_TOKENS, BlockId, DraftOutput, DraftRequest, Logits, SequenceStep, StateSlot, StepBatch, StepOutput,
};

/// A path inside the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// A checkpoint of the repository.
pub fn checkpoint(path: &str) -> Checkpoint {
    Checkpoint::open(&repository(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Both golden checkpoints in both numerics: name and checkpoint.
pub fn golden_models() -> Vec<(String, Checkpoint, Numerics)> {
    let mut models = Vec::new();
    for name in ["tiny-bf16", "tiny-quant"] {
        for numerics in [Numerics::F32, Numerics::Quantized] {
            let path = format!("e2e/golden/{name}");
            models.push((format!("{name}, {numerics}"), checkpoint(&path), numerics));
        }
    }
    models
}

/// Numbers that look random and are the same in every run.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// A number of the range, both ends included.
    pub fn within(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    /// Tokens of a vocabulary; the first three ids are special and left out.
    pub fn tokens(&mut self, count: usize, vocab: usize) -> Vec<u32> {
        (0..count).map(|_| self.within(3, vocab - 1) as u32).collect()
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }

    /// Lengths of 1 or more that add up to `total`: many short ones, a few long ones.
    pub fn cuts(&mut self, total: usize) -> Vec<usize> {
        let mut cuts = Vec::new();
        let mut left = total;
        while left > 0 {
            let longest = [1, 3, 8, 40, total][self.below(5)].min(left);
            let cut = self.within(1, longest);
            cuts.push(cut);
            left -= cut;
        }
        cuts
    }
}

/// Bits of floats: equality that knows NaN and the sign of zero.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Asserts that two runs of floats are the same bits, and says where they part.
#[track_caller]
pub fn same_bits(what: &str, want: &[f32], got: &[f32]) {
    assert_eq!(want.len(), got.len(), "{what}: lengths");
    let differing = want.iter().zip(got).filter(|(w, g)| w.to_bits() != g.to_bits()).count();
    if let Some(at) = want.iter().zip(got).position(|(w, g)| w.to_bits() != g.to_bits()) {
        panic!(
            "{what}: {differing} of {} values differ, first at {at}: {} instead of {}",
            want.len(),
            got[at],
            want[at]
        );
    }
}

/// The token with the highest logit.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, v) in logits.iter().enumerate() {
        if *v > logits[best] {
            best = i;
        }
    }
    best as u32
}

/// Options with room for `slots` sequences of `positions` tokens, no truncation.
pub fn options(numerics: Numerics, slots: usize, positions: usize, max_rows: usize) -> EngineOptions {
    EngineOptions {
        numerics: Some(numerics),
        slots,
        blocks: slots * positions.div_ceil(BLOCK_TOKENS),
        max_rows,
        truncation: Truncation::Off,
        keep: None,
        boundary_swa: BoundarySwa::Truncated,
    }
}

/// An engine whose slot `s` owns a fixed list of blocks.
pub struct Rig<B: Backend> {
    pub engine: Engine<B>,
    pub out: StepOutput,
    blocks: Vec<Vec<BlockId>>,
}

impl<B: Backend> Rig<B> {
    /// Opens an engine and deals its blocks out to the slots in turn.
    pub fn open(backend: B, checkpoint: &Checkpoint, options: EngineOptions) -> Self {
        let slots = options.slots;
        let ids: Vec<u32> = (0..options.blocks as u32).collect();
        let engine = Engine::open(backend, checkpoint, options).unwrap_or_else(|e| panic!("{e}"));
        let mut rig = Self { engine, out: StepOutput::default(), blocks: vec![Vec::new(); slots] };
        rig.deal(ids);
        rig
    }

    /// The same around an engine that is open.
    pub fn around(engine: Engine<B>) -> Self {
        let (slots, blocks) = (engine.options().slots, engine.options().blocks);
        let mut rig = Self { engine, out: StepOutput::default(), blocks: vec![Vec::new(); slots] };
        rig.deal((0..blocks as u32).collect());
        rig
    }

    /// Blocks of a slot.
    pub fn blocks(&self, slot: usize) -> &[BlockId] {
        &self.blocks[slot]
    }

    /// Gives the blocks to the slots in turn, in the order of `ids`.
    pub fn deal(&mut self, ids: Vec<u32>) {
        let slots = self.blocks.len();
        self.blocks = vec![Vec::new(); slots];
        for (i, id) in ids.into_iter().enumerate() {
            self.blocks[i % slots].push(BlockId(id));
        }
    }

    /// Lets `slot` read the first `tokens` positions (whole blocks) of another slot.
    pub fn share(&mut self, from: usize, slot: usize, tokens: usize) {
        assert_eq!(tokens % BLOCK_TOKENS, 0, "whole blocks are shared");
        for block in 0..tokens / BLOCK_TOKENS {
            self.blocks[slot][block] = self.blocks[from][block];
        }
    }

    /// A step of one sequence that returns the logits of every row.
    pub fn sequence(&self, slot: usize, start: usize, tokens: &[u32]) -> SequenceStep {
        let blocks = (start + tokens.len()).div_ceil(BLOCK_TOKENS);
        SequenceStep {
            logits: Logits::All,
            ..SequenceStep::text(
                StateSlot(slot as u32),
                start,
                tokens.to_vec(),
                self.blocks[slot][..blocks].to_vec(),
            )
        }
    }

    /// Runs sequences together; logits of each.
    pub fn step(&mut self, sequences: Vec<SequenceStep>) -> Vec<Vec<f32>> {
        let batch = StepBatch { sequences };
        self.engine.execute(&batch, &mut self.out).unwrap_or_else(|e| panic!("{e}"));
        let vocab = self.out.vocab_size;
        let part = |first: usize, len: usize| self.out.logits[first * vocab..(first + len) * vocab].to_vec();
        self.out.ranges.iter().map(|r| part(r.first, r.len)).collect()
    }

    /// Runs one sequence after what its slot holds; logits of every row.
    pub fn extend(&mut self, slot: usize, tokens: &[u32]) -> Vec<f32> {
        let start = self.held(slot);
        self.run(slot, start, tokens)
    }

    /// Runs one sequence from `start`; logits of every row.
    pub fn run(&mut self, slot: usize, start: usize, tokens: &[u32]) -> Vec<f32> {
        let sequence = self.sequence(slot, start, tokens);
        self.step(vec![sequence]).remove(0)
    }

    /// A block of drafts.
    pub fn draft(&mut self, slot: usize, token: u32) -> DraftOutput {
        let request = DraftRequest { slot: StateSlot(slot as u32), token };
        let mut out = Vec::new();
        self.engine.draft(&[request], &mut out).unwrap_or_else(|e| panic!("{e}"));
        out.remove(0)
    }

    /// Positions that a slot holds.
    pub fn held(&self, slot: usize) -> usize {
        self.engine.held(StateSlot(slot as u32))
    }

    /// Forgets all positions from `tokens` on.
    pub fn truncate(&mut self, slot: usize, tokens: usize) {
        self.engine.truncate(StateSlot(slot as u32), tokens).unwrap_or_else(|e| panic!("{e}"));
    }

    /// Columns of a row of logits.
    pub fn vocab(&self) -> usize {
        self.engine.shape().vocab_size
    }
}

/// Logits of every row of one pass over a whole text, in an engine that has run nothing else.
pub fn one_pass<B: Backend>(backend: B, model: &Checkpoint, numerics: Numerics, tokens: &[u32]) -> Vec<f32> {
    let options = options(numerics, 1, tokens.len(), tokens.len());
    Rig::open(backend, model, options).extend(0, tokens)
}

/// The backend most tests run on.
pub fn cpu() -> Cpu {
    Cpu::new(2)
}
