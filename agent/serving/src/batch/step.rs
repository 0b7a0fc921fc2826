//! One step: rows of several sequences, prefill chunks and decode rows together.
//!
//! The scheduler owns blocks and slots and names them; the engine owns their bytes. A step is complete in itself:
//! an engine keeps nothing about a sequence but the bytes in its slot and blocks and how many tokens they cover.

/// Tokens covered by one KV block, for every layer at once.
pub const BLOCK_TOKENS: usize = 128;

/// A block of compressed KV and index keys: [`BLOCK_TOKENS`] tokens of every source layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

/// The place of a running sequence's constant-size state: window rings, open groups, n-gram history.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StateSlot(pub u32);

/// Which rows of a sequence return logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Logits {
    /// None: a prefill chunk that is not the last.
    None,
    /// The last row only.
    #[default]
    Last,
    /// Every row: verification of drafts, prompt log-probabilities.
    All,
}

/// Rows of this step that belong to an image and bring their embeddings with them.
#[derive(Clone, Debug, PartialEq)]
pub struct ImageSpan {
    /// First row, counted from the first token of this [`SequenceStep`].
    pub first: usize,
    /// Embeddings, `[rows, hidden_size]`; all rows of the span in this step, delimiters included.
    pub embeddings: Vec<f32>,
}

/// The part of one sequence in a step.
#[derive(Clone, Debug, PartialEq)]
pub struct SequenceStep {
    /// Where its state lies. A slot appears at most once in a step.
    pub slot: StateSlot,
    /// Position of the first token. 0 starts a new sequence in the slot. Lower than what the slot holds: the
    /// later positions are forgotten first (rejected drafts), by at most the ring's slack.
    pub start: usize,
    /// New tokens, at least one.
    pub tokens: Vec<u32>,
    /// Blocks of the positions 0 .. start + tokens.len(), in order, complete.
    pub blocks: Vec<BlockId>,
    /// Rows that return logits.
    pub logits: Logits,
    /// Length of the whole prompt while it is being prefilled. Consumer truncation measures its kept rows from
    /// there; decode steps have `None`.
    pub prompt_tokens: Option<usize>,
    /// Rebuilds the state below `start + tokens.len()` from tokens already in the blocks: compressed entries are
    /// read but not written, and no window row below the replay's first position is seen.
    pub replay: bool,
    /// Image spans inside `tokens`.
    pub images: Vec<ImageSpan>,
}

impl SequenceStep {
    /// A text chunk without special treatment that returns its last row's logits.
    pub fn text(slot: StateSlot, start: usize, tokens: Vec<u32>, blocks: Vec<BlockId>) -> Self {
        Self {
            slot,
            start,
            tokens,
            blocks,
            logits: Logits::Last,
            prompt_tokens: None,
            replay: false,
            images: Vec::new(),
        }
    }

    /// Position after the last token.
    pub fn end(&self) -> usize {
        self.start + self.tokens.len()
    }
}

/// Everything an engine runs in one step.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepBatch {
    /// The sequences, each with its rows.
    pub sequences: Vec<SequenceStep>,
}

impl StepBatch {
    /// Token rows of the step.
    pub fn rows(&self) -> usize {
        self.sequences.iter().map(|s| s.tokens.len()).sum()
    }
}

/// Rows `first .. first + len` of a row-major result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct RowRange {
    /// First row.
    pub first: usize,
    /// Number of rows.
    pub len: usize,
}

/// What a step gave. Reused between steps: no allocation once it has grown.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutput {
    /// Columns of `logits`.
    pub vocab_size: usize,
    /// Logits of the asked rows, `[sum of ranges, vocab_size]`.
    pub logits: Vec<f32>,
    /// Rows of `logits` of each sequence, in the order of the batch.
    pub ranges: Vec<RowRange>,
    /// Arrivals by layer and local slot, `[layers][slots]` flattened with `slots_per_layer`: exact, this step only.
    pub arrivals: Vec<u32>,
    /// Columns of `arrivals`.
    pub slots_per_layer: usize,
}

impl StepOutput {
    /// Logits of the `row`-th returned row of sequence `sequence`.
    pub fn row(&self, sequence: usize, row: usize) -> &[f32] {
        let range = self.ranges[sequence];
        assert!(row < range.len, "sequence {sequence} returned {} rows, asked for {row}", range.len);
        let at = (range.first + row) * self.vocab_size;
        &self.logits[at..at + self.vocab_size]
    }
}

/// Asks for a block of draft tokens after `token`, the sampled token that the model has not run yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftRequest {
    /// The sequence.
    pub slot: StateSlot,
    /// The token at the position after the slot's last.
    pub token: u32,
}

/// Greedy drafts of one request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DraftOutput {
    /// Proposed tokens, `[block]`.
    pub tokens: Vec<u32>,
    /// Their logits with the Markov bias, `[block, vocab_size]`.
    pub logits: Vec<f32>,
    /// Confidence logits, `[block]`; the estimate of acceptance is `sigmoid(c / temperature)`.
    pub confidence: Vec<f32>,
}
