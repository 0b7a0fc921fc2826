//! A scripted engine: the next token is a function of the whole sequence, and the bytes of blocks and states are
//! kept, so that a sequence whose KV went wrong anywhere draws other tokens or is caught at once.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use deepinfer_protocol::Span;
use deepinfer_protocol::generate::Token;
use deepinfer_protocol::message::{Failure, PieceKind};
use deepinfer_serving::batch::{BLOCK_TOKENS, BlockId, StateSlot};
use deepinfer_serving::node::{EngineCommand, EngineEvent, Pieces, Sample, StepResult, StepWork};

/// Tokens are below this.
pub const VOCABULARY: u64 = 60;
/// Ends a sequence if it is a stop token of the request.
pub const STOP: u32 = 7;

/// What a prefix of tokens comes to: the state after it.
pub fn fold(hash: u64, token: u32) -> u64 {
    let mut z = hash ^ (u64::from(token).wrapping_add(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z ^ (z >> 29)
}

/// The token drawn after a prefix.
pub fn draw(hash: u64, sample: &Sample) -> u32 {
    let mut hash = fold(fold(hash, sample.seed as u32), sample.position as u32);
    loop {
        let token = ((hash >> 7) % VOCABULARY) as u32;
        if !sample.forbidden.contains(&token) {
            return token;
        }
        hash = fold(hash, token);
    }
}

/// State after each position from `first` on.
#[derive(Clone, Debug)]
struct State {
    first: usize,
    hashes: Vec<u64>,
    /// A replay rebuilds it: the bytes of blocks count until it has run.
    replaying: bool,
}

impl State {
    fn position(&self) -> usize {
        self.first + self.hashes.len() - 1
    }
}

/// One engine.
#[derive(Default)]
pub struct ScriptedEngine {
    slots: BTreeMap<StateSlot, State>,
    blocks: BTreeMap<BlockId, Vec<u32>>,
    /// Answers that were not delivered yet, oldest first.
    pub answers: VecDeque<EngineEvent>,
    /// A step's answer is among them.
    pub stepping: bool,
}

impl ScriptedEngine {
    /// Everything in it is gone.
    pub fn lose(&mut self) {
        *self = Self::default();
        self.answers.push_back(EngineEvent::Lost(Failure::EngineLost));
    }

    /// Runs a command; its answer waits in `answers`.
    pub fn command(&mut self, command: EngineCommand) {
        match command {
            EngineCommand::Export { ticket, slot, blocks } => {
                let pieces = self.export(slot, &blocks);
                self.answers.push_back(EngineEvent::Exported { ticket, pieces });
            }
            EngineCommand::Import { ticket, slot, blocks, pieces } => {
                self.import(slot, &blocks, pieces);
                self.answers.push_back(EngineEvent::Imported { ticket, fits: true });
            }
            EngineCommand::Checkpoint { ticket, slot, position } => {
                let state = &self.slots[&slot];
                let at = (position as usize).checked_sub(state.first);
                let bytes =
                    at.and_then(|at| state.hashes.get(at)).map(|hash| state_bytes(position as usize, *hash));
                self.answers.push_back(EngineEvent::Checkpointed { ticket, state: bytes });
            }
            EngineCommand::Restore { ticket, slot, state } => {
                self.slots.insert(slot, state_of(&state));
                self.answers.push_back(EngineEvent::Restored { ticket, fits: true });
            }
            EngineCommand::BeginReplay { slot, start, history } => {
                let hash = history.iter().fold(0, |hash, token| fold(hash, *token));
                assert_eq!(history.len(), start as usize, "a replay knows all tokens before it");
                self.slots.insert(slot, State { first: start as usize, hashes: vec![hash], replaying: true });
            }
            EngineCommand::Reset(slot) => {
                self.slots.remove(&slot);
            }
        }
    }

    /// Runs a step; its answer waits in `answers`.
    pub fn step(&mut self, work: &StepWork, elapsed: Span) {
        let mut tokens = Vec::new();
        let mut slots = Vec::new();
        for (sequence, sample) in work.batch.sequences.iter().zip(&work.samples) {
            assert!(!slots.contains(&sequence.slot), "a slot is twice in a step");
            slots.push(sequence.slot);
            if sequence.start == 0 {
                self.slots.insert(sequence.slot, State { first: 0, hashes: vec![0], replaying: false });
            }
            self.rows(sequence.slot, sequence.start, &sequence.tokens, &sequence.blocks, sequence.replay);
            let hash = *self.slots[&sequence.slot].hashes.last().expect("a state has a hash");
            tokens.push(sample.as_ref().map(|sample| {
                assert_eq!(sample.position as usize, sequence.end(), "drawn at the end of the rows");
                Token { id: draw(hash, sample), logprob: None }
            }));
        }
        self.stepping = true;
        self.answers.push_back(EngineEvent::StepDone(StepResult {
            tokens,
            arrivals: Vec::new(),
            slots_per_layer: 0,
            elapsed,
        }));
    }

    fn rows(&mut self, slot: StateSlot, start: usize, tokens: &[u32], blocks: &[BlockId], replay: bool) {
        let state = self.slots.get_mut(&slot).expect("a sequence continues in its slot");
        assert_eq!(state.position(), start, "the slot stands elsewhere");
        assert!(!replay || state.replaying, "a replay was not begun");
        state.replaying = replay;
        for (offset, token) in tokens.iter().enumerate() {
            let (block, at) = ((start + offset) / BLOCK_TOKENS, (start + offset) % BLOCK_TOKENS);
            let bytes = self.blocks.entry(blocks[block]).or_default();
            if replay {
                assert_eq!(bytes.get(at), Some(token), "a block does not hold what is replayed");
            } else {
                bytes.truncate(at);
                assert_eq!(bytes.len(), at, "a block has a hole");
                bytes.push(*token);
            }
            let last = *state.hashes.last().expect("a state has a hash");
            state.hashes.push(fold(last, *token));
        }
        let end = start + tokens.len();
        let content: Vec<u32> =
            blocks.iter().flat_map(|b| self.blocks.get(b).into_iter().flatten().copied()).collect();
        let hash = content.iter().take(end).fold(0, |hash, token| fold(hash, *token));
        assert_eq!(Some(&hash), state.hashes.last(), "blocks and state are of different sequences");
    }

    fn export(&self, slot: StateSlot, blocks: &[BlockId]) -> Pieces {
        let state = &self.slots[&slot];
        let position = state.position();
        let mut pieces: Pieces = Vec::new();
        for (i, block) in blocks.iter().enumerate().take(position.div_ceil(BLOCK_TOKENS)) {
            let bytes: Vec<u8> = self.blocks[block].iter().flat_map(|t| t.to_le_bytes()).collect();
            pieces.push((PieceKind::Block(i as u32), bytes.into()));
        }
        let hash = *state.hashes.last().expect("a state has a hash");
        pieces.push((PieceKind::State, state_bytes(position, hash)));
        pieces
    }

    fn import(&mut self, slot: StateSlot, blocks: &[BlockId], pieces: Pieces) {
        let mut blocks = blocks.iter();
        for (kind, bytes) in pieces {
            match kind {
                PieceKind::Block(_) => {
                    let tokens = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
                    let block = blocks.next().expect("as many blocks as pieces");
                    self.blocks.insert(*block, tokens.collect());
                }
                PieceKind::State => {
                    self.slots.insert(slot, state_of(&bytes));
                }
            }
        }
        assert!(blocks.next().is_none(), "as many pieces as blocks");
    }
}

fn state_bytes(position: usize, hash: u64) -> Arc<[u8]> {
    [(position as u64).to_le_bytes(), hash.to_le_bytes()].concat().into()
}

fn state_of(bytes: &[u8]) -> State {
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    State { first: number(0) as usize, hashes: vec![number(8)], replaying: false }
}
