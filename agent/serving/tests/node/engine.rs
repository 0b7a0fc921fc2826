//! A scripted engine. It keeps real contents in its blocks and slots, so that a machine which gives a block to two
//! sequences, steps a slot that was not restored, or imports pieces in the wrong order draws other tokens than
//! [`reference`] does.
//!
//! Position `p` of a sequence has the row `r_p = mix(r_(p-1), token_p)`. A step writes its rows into the blocks and
//! reads all rows of the sequence back from there; the next token depends on all of them, on the slot's state
//! (the last row) and on the draw. A slot knows from which position on its window is valid.

use std::collections::VecDeque;
use std::sync::Arc;

use deepinfer_protocol::Span;
use deepinfer_protocol::generate::{FinishReason, GenerateSpec, Token};
use deepinfer_protocol::message::PieceKind;
use deepinfer_serving::batch::{BLOCK_TOKENS, BlockId, SequenceStep, StateSlot};
use deepinfer_serving::node::{EngineCommand, EngineEvent, Pieces, Sample, StepResult, StepWork};

/// Tokens that rebuild the state of the scripted engine.
pub const REPLAY: u32 = 256;
/// Ids are below this.
pub const VOCABULARY: u64 = 5_000;
const SEED_ROW: u64 = 0x51ed_270b_9f65_1b35;
const MAGIC: u64 = 0x00d5_ee90_1fe2;

/// A good mixer of two numbers.
pub fn mix(a: u64, b: u64) -> u64 {
    let mut z = a.rotate_left(23) ^ b.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn draw(rows: u64, state: u64, sample: &Sample) -> u32 {
    let mut x = mix(mix(rows, state), mix(sample.seed, sample.position));
    loop {
        let id = (x % VOCABULARY) as u32;
        if !sample.forbidden.contains(&id) {
            return id;
        }
        x = mix(x, 1);
    }
}

/// All output tokens of a request run alone, and why it ends. `limit`: longest sequence.
pub fn reference(prompt: &[u32], spec: &GenerateSpec, limit: u32) -> (Vec<u32>, FinishReason) {
    let (mut rows, mut state) = (0, SEED_ROW);
    let (mut length, mut output) = (0_u32, Vec::new());
    let mut next = prompt.to_vec();
    loop {
        for token in next.drain(..) {
            state = mix(state, u64::from(token));
            rows = mix(rows, state);
            length += 1;
        }
        let forbidden =
            if (output.len() as u32) < spec.min_tokens { spec.stop_tokens.clone() } else { Vec::new() };
        let sample = Sample {
            temperature: spec.temperature,
            top_p: spec.top_p,
            seed: spec.seed,
            position: u64::from(length),
            logprobs: None,
            forbidden,
        };
        let token = draw(rows, state, &sample);
        output.push(token);
        if spec.stop_tokens.contains(&token) {
            return (output, FinishReason::Stop);
        }
        if output.len() as u32 >= spec.max_tokens || length + 1 >= limit {
            return (output, FinishReason::Length);
        }
        next.push(token);
    }
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    held: usize,
    state: u64,
    window_from: usize,
}

const EMPTY: Slot = Slot { held: 0, state: SEED_ROW, window_from: 0 };

#[derive(Debug)]
enum Job {
    Command(EngineCommand),
    Step(StepWork),
}

/// See the module.
#[derive(Debug)]
pub struct Engine {
    slots: Vec<Option<Slot>>,
    blocks: Vec<[u64; BLOCK_TOKENS]>,
    queue: VecDeque<Job>,
    stepping: bool,
    dead: bool,
    /// Rows run, replayed ones among them.
    pub rows: u64,
    /// Chunks of every step: (start, rows, replay).
    pub chunks: Vec<Vec<(usize, usize, bool)>>,
    /// Checkpoints do not fit it.
    pub refuse_restores: bool,
    /// Sequences do not fit it.
    pub refuse_imports: bool,
    /// Tells runs of engines in one test apart: a new engine's blocks hold other garbage.
    generation: u64,
}

impl Engine {
    pub fn new(slots: u32, blocks: u32) -> Self {
        let mut engine = Self {
            slots: Vec::new(),
            blocks: Vec::new(),
            queue: VecDeque::new(),
            stepping: false,
            dead: false,
            rows: 0,
            chunks: Vec::new(),
            refuse_restores: false,
            refuse_imports: false,
            generation: 0,
        };
        engine.replace(slots as usize, blocks as usize);
        engine
    }

    fn replace(&mut self, slots: usize, blocks: usize) {
        self.generation += 1;
        self.slots = vec![None; slots];
        self.blocks = (0..blocks).map(|b| [mix(self.generation, b as u64); BLOCK_TOKENS]).collect();
        self.queue.clear();
        self.stepping = false;
    }

    /// The engine dies: what it is given from now on is lost.
    pub fn crash(&mut self) {
        self.replace(self.slots.len(), self.blocks.len());
        self.dead = true;
    }

    /// An empty one takes its place.
    pub fn revive(&mut self) {
        self.dead = false;
    }

    /// Queues a command; commands and steps run in the order in which they were given.
    pub fn command(&mut self, command: EngineCommand) {
        if !self.dead {
            self.queue.push_back(Job::Command(command));
        }
    }

    pub fn start_step(&mut self, work: StepWork) {
        assert!(!self.stepping, "a step is under way already");
        assert_eq!(work.batch.sequences.len(), work.samples.len());
        if !self.dead {
            self.stepping = true;
            self.queue.push_back(Job::Step(work));
        }
    }

    /// A step was given and its result not taken.
    pub fn stepping(&self) -> bool {
        self.stepping
    }

    pub fn busy(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Runs what was given first.
    pub fn run_one(&mut self) -> Option<EngineEvent> {
        match self.queue.pop_front()? {
            Job::Command(command) => self.run_command(command),
            Job::Step(work) => {
                let result = self.run_step(&work);
                self.stepping = false;
                Some(EngineEvent::StepDone(result))
            }
        }
    }

    fn run_command(&mut self, command: EngineCommand) -> Option<EngineEvent> {
        match command {
            EngineCommand::Export { ticket, slot, blocks } => {
                let pieces = self.export(slot, &blocks);
                Some(EngineEvent::Exported { ticket, pieces })
            }
            EngineCommand::Import { ticket, slot, blocks, pieces } => {
                let fits = !self.refuse_imports && self.import(slot, &blocks, &pieces);
                Some(EngineEvent::Imported { ticket, fits })
            }
            EngineCommand::Checkpoint { ticket, slot, position } => {
                let held = self.slots[slot.0 as usize].filter(|s| s.held == position as usize);
                let state = held.map(|s| encode(&[MAGIC, s.held as u64, s.state, s.window_from as u64]));
                Some(EngineEvent::Checkpointed { ticket, state })
            }
            EngineCommand::Restore { ticket, slot, state } => {
                let fits = !self.refuse_restores && self.restore(slot, &state);
                Some(EngineEvent::Restored { ticket, fits })
            }
            EngineCommand::BeginReplay { slot, start, history } => {
                assert_eq!(history.len(), start as usize);
                assert!(start > 0 && (start as usize).is_multiple_of(BLOCK_TOKENS));
                let state = history.iter().fold(SEED_ROW, |row, &token| mix(row, u64::from(token)));
                let held = start as usize;
                self.slots[slot.0 as usize] = Some(Slot { held, state, window_from: held });
                None
            }
            EngineCommand::Reset(slot) => {
                self.slots[slot.0 as usize] = None;
                None
            }
        }
    }

    fn run_step(&mut self, work: &StepWork) -> StepResult {
        let mut used = std::collections::BTreeSet::new();
        let mut tokens = Vec::new();
        for (step, sample) in work.batch.sequences.iter().zip(&work.samples) {
            assert!(used.insert(step.slot), "{:?} twice in a step", step.slot);
            let (rows, state) = self.run_sequence(step);
            let token = sample.as_ref().map(|s| Token { id: draw(rows, state, s), logprob: None });
            tokens.push(token);
        }
        let rows = work.batch.rows() as u64;
        self.rows += rows;
        let chunks = work.batch.sequences.iter().map(|s| (s.start, s.tokens.len(), s.replay));
        self.chunks.push(chunks.collect());
        StepResult { tokens, elapsed: Span::micros(50 + 10 * rows), ..StepResult::default() }
    }

    /// Runs a sequence's rows; gives the digest of all its rows as they are in the blocks, and its state.
    fn run_sequence(&mut self, step: &SequenceStep) -> (u64, u64) {
        assert!(!step.tokens.is_empty());
        assert!(step.blocks.len() >= step.end().div_ceil(BLOCK_TOKENS), "blocks are missing");
        let slot = &mut self.slots[step.slot.0 as usize];
        let mut held = if step.start == 0 { EMPTY } else { slot.expect("a slot that holds something") };
        assert_eq!(held.held, step.start, "the rows continue the slot");
        for (p, &token) in (step.start..).zip(&step.tokens) {
            held.state = mix(held.state, u64::from(token));
            if !step.replay {
                self.blocks[step.blocks[p / BLOCK_TOKENS].0 as usize][p % BLOCK_TOKENS] = held.state;
            }
        }
        if !step.replay && held.window_from > 0 && step.start - held.window_from < REPLAY as usize {
            held.state ^= 0xbad;
        }
        held.held = step.end();
        self.slots[step.slot.0 as usize] = Some(held);
        (self.digest(&step.blocks, step.end()), held.state)
    }

    fn digest(&self, blocks: &[BlockId], end: usize) -> u64 {
        let row = |p: usize| self.blocks[blocks[p / BLOCK_TOKENS].0 as usize][p % BLOCK_TOKENS];
        (0..end).fold(0, |sum, p| mix(sum, row(p)))
    }

    fn export(&self, slot: StateSlot, blocks: &[BlockId]) -> Pieces {
        let held = self.slots[slot.0 as usize].expect("an export of something");
        assert_eq!(blocks.len(), held.held.div_ceil(BLOCK_TOKENS), "all blocks of the rows, no more");
        let mut pieces: Pieces = (0..)
            .zip(blocks)
            .map(|(i, b)| (PieceKind::Block(i), encode(&self.blocks[b.0 as usize])))
            .collect();
        let state = [MAGIC, held.held as u64, held.state, held.window_from as u64];
        pieces.push((PieceKind::State, encode(&state)));
        pieces
    }

    fn import(&mut self, slot: StateSlot, blocks: &[BlockId], pieces: &Pieces) -> bool {
        let Some(((PieceKind::State, state), rest)) = pieces.split_last() else { return false };
        if rest.len() != blocks.len() || !self.restore(slot, state) {
            return false;
        }
        for (i, ((kind, bytes), block)) in (0..).zip(rest.iter().zip(blocks)) {
            assert_eq!(*kind, PieceKind::Block(i));
            let rows = decode(bytes);
            self.blocks[block.0 as usize].copy_from_slice(&rows);
        }
        true
    }

    fn restore(&mut self, slot: StateSlot, state: &[u8]) -> bool {
        let [MAGIC, held, state, window_from] = decode(state)[..] else { return false };
        let slot = &mut self.slots[slot.0 as usize];
        *slot = Some(Slot { held: held as usize, state, window_from: window_from as usize });
        true
    }
}

fn encode(words: &[u64]) -> Arc<[u8]> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

fn decode(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().expect("eight bytes"))).collect()
}

/// A small generator of pseudo-random numbers for schedules.
#[derive(Clone, Debug)]
pub struct Dice(pub u64);

impl Dice {
    pub fn roll(&mut self, below: usize) -> usize {
        self.0 = self.0.wrapping_add(1);
        (mix(self.0, 77) % below.max(1) as u64) as usize
    }

    pub fn one_in(&mut self, n: usize) -> bool {
        self.roll(n) == 0
    }
}
