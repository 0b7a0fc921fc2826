//! What of a queue of prompts runs in the next step: chunks that fill a time budget (A.3).
//!
//! Invariants (PF-7): the predicted time is within the budget unless the pack is one minimal chunk; every chunk
//! but a prompt's last ends at a multiple of the granularity or at a cut that was asked for; no chunk passes a
//! cut; limits on tokens and sequences hold; blocks and slots that new requests need are there together.

use deepinfer_protocol::Span;

use super::estimate::{ChunkRows, Truncation, WorkShape, prefill_work};
use super::time_model::{StepLoad, TimeModel};

/// How often a request that waits for room may be passed (PF-6).
pub const MAX_PASSES: u32 = 16;
/// How long it may be passed (PF-6).
pub const MAX_PASSING: Span = Span::millis(500);

/// What a step may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackLimits {
    /// Time that the step may take by prediction.
    pub budget: Span,
    /// Rows.
    pub tokens: usize,
    /// Sequences.
    pub sequences: usize,
    /// Chunks that do not end a prompt end at multiples of this many tokens: the least common multiple of a
    /// block and what the ranks of one chunk need (PF-3).
    pub granularity: usize,
    /// A prompt is not cut into less than this to fill a budget.
    pub min_chunk: usize,
}

impl Default for PackLimits {
    /// For accelerators (PF-4).
    fn default() -> Self {
        Self { budget: Span::millis(100), tokens: 32_768, sequences: 64, granularity: 128, min_chunk: 1024 }
    }
}

impl PackLimits {
    /// For the cpu: rows are dear, so a block is a fair chunk.
    pub fn cpu() -> Self {
        Self { min_chunk: 128, ..Self::default() }
    }
}

/// A prompt of the queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PackItem {
    /// Position of the next row: what is computed or cached lies before it.
    pub start: usize,
    /// Length of the prompt, beyond `start`.
    pub end: usize,
    /// First position whose window state is valid: 0, or where a replay began.
    pub window_start: usize,
    /// Positions at which a chunk must end: the end of a replay, a checkpoint, an image's border. In any order;
    /// those up to `start` and from `end` on mean nothing.
    pub cuts: Vec<usize>,
    /// Blocks it needs before it can start; 0 if it holds all of its own.
    pub need_blocks: usize,
    /// It needs a state slot before it can start.
    pub need_slot: bool,
    /// How often later requests passed it while it waited for room.
    pub passes: u32,
    /// How long it has been waiting for room at the head.
    pub blocked_for: Span,
}

impl PackItem {
    fn new_here(&self) -> bool {
        self.need_blocks > 0 || self.need_slot
    }

    /// Rows up to the next cut or the end.
    fn piece(&self) -> usize {
        let cuts = self.cuts.iter().copied().filter(|&cut| cut > self.start);
        cuts.min().unwrap_or(self.end).min(self.end).saturating_sub(self.start)
    }

    /// Rows that end at the `n`-th multiple of the granularity after `start`.
    fn aligned(&self, n: usize, granularity: usize) -> usize {
        (self.start / granularity + n) * granularity - self.start
    }

    /// The largest `n` for which [`PackItem::aligned`] is at most `rows`; 0 if there is none.
    fn aligned_count(&self, rows: usize, granularity: usize) -> usize {
        (self.start + rows) / granularity - self.start / granularity
    }
}

/// What is free for new requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Room {
    /// Blocks, free or evictable.
    pub blocks: usize,
    /// State slots.
    pub slots: usize,
}

/// Part of a prompt that runs in the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Place in the queue.
    pub item: usize,
    /// Rows from its `start`.
    pub tokens: usize,
}

/// A step's chunks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pack {
    /// In queue order, at most one of each item.
    pub chunks: Vec<Chunk>,
    /// Items that wait for room and were passed by a newcomer behind them: count it.
    pub passed: Vec<usize>,
    /// The first item that waits for room.
    pub blocked: Option<usize>,
    /// What the chunks are together.
    pub load: StepLoad,
    /// Predicted time.
    pub predicted: Span,
}

/// What chunks cost. Both must not fall when tokens, work, rows or sequences grow.
pub trait Cost {
    /// Work of the next `tokens` rows of an item.
    fn work(&self, item: &PackItem, tokens: usize) -> u128;
    /// Time of a step.
    fn time(&self, load: StepLoad) -> Span;
}

/// The cost by the estimate and the fitted time model.
#[derive(Clone, Copy, Debug)]
pub struct Estimated<'a> {
    /// Of the model.
    pub shape: &'a WorkShape,
    /// Of the engine.
    pub truncation: Truncation,
    /// Of this machine.
    pub time: &'a TimeModel,
}

impl Cost for Estimated<'_> {
    fn work(&self, item: &PackItem, tokens: usize) -> u128 {
        let chunk = ChunkRows {
            rows: tokens,
            end: item.start + tokens,
            prompt: item.end,
            window_start: item.window_start,
        };
        prefill_work(self.shape, chunk, self.truncation).total
    }

    fn time(&self, load: StepLoad) -> Span {
        self.time.predict(load)
    }
}

/// Fills a step from the queue, in its order.
pub fn pack(queue: &[PackItem], limits: &PackLimits, room: Room, cost: &impl Cost) -> Pack {
    let mut packer = Packer { limits, cost, room, pack: Pack::default(), waiting: Vec::new(), closed: false };
    for (i, item) in queue.iter().enumerate() {
        if packer.pack.chunks.len() >= limits.sequences || packer.pack.load.rows >= limits.tokens {
            break;
        }
        if item.start >= item.end || !packer.admits(i, item) {
            continue;
        }
        if !packer.take(i, item) {
            break;
        }
    }
    packer.pack.predicted = cost.time(packer.pack.load);
    packer.pack
}

struct Packer<'a, C> {
    limits: &'a PackLimits,
    cost: &'a C,
    room: Room,
    pack: Pack,
    /// Items before this one that wait for room.
    waiting: Vec<usize>,
    /// Someone was passed often enough: no newcomer any more. Who has room already goes on, or the room would
    /// never become free.
    closed: bool,
}

impl<C: Cost> Packer<'_, C> {
    fn admits(&mut self, i: usize, item: &PackItem) -> bool {
        if !item.new_here() {
            return true;
        }
        let fits = item.need_blocks <= self.room.blocks && usize::from(item.need_slot) <= self.room.slots;
        if !fits {
            self.pack.blocked.get_or_insert(i);
            self.waiting.push(i);
            self.closed |= item.passes >= MAX_PASSES || item.blocked_for >= MAX_PASSING;
        }
        fits && !self.closed
    }

    /// `false`: the step is full.
    fn take(&mut self, i: usize, item: &PackItem) -> bool {
        let left = self.limits.tokens - self.pack.load.rows;
        let piece = item.piece();
        if piece <= left && self.fits(item, piece) {
            self.push(i, item, piece);
            return true;
        }
        let granularity = self.limits.granularity.max(1);
        let most = item.aligned_count(piece.min(left), granularity);
        let fitting = self.largest(item, most, granularity);
        let minimal = self.limits.min_chunk.max(1);
        if fitting >= minimal {
            self.push(i, item, fitting);
        } else if self.pack.chunks.is_empty() {
            // Progress comes before the budget.
            let up = item.aligned_count(minimal + granularity - 1, granularity).min(most);
            let tokens = if piece <= minimal.min(left) {
                piece
            } else if up > 0 {
                item.aligned(up, granularity)
            } else {
                // An engine whose steps are smaller than a grain cuts inside it.
                piece.min(left)
            };
            self.push(i, item, tokens);
        }
        false
    }

    fn with(&self, item: &PackItem, tokens: usize) -> StepLoad {
        let load = self.pack.load;
        StepLoad {
            work: load.work.saturating_add(self.cost.work(item, tokens)),
            rows: load.rows + tokens,
            sequences: load.sequences + 1,
        }
    }

    fn fits(&self, item: &PackItem, tokens: usize) -> bool {
        self.cost.time(self.with(item, tokens)) <= self.limits.budget
    }

    /// Most rows, up to the `most`-th multiple of the granularity, that fit the budget; 0 if none do.
    fn largest(&self, item: &PackItem, most: usize, granularity: usize) -> usize {
        let (mut low, mut high) = (0, most);
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if self.fits(item, item.aligned(middle, granularity)) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        if low == 0 { 0 } else { item.aligned(low, granularity) }
    }

    fn push(&mut self, i: usize, item: &PackItem, tokens: usize) {
        self.pack.load = self.with(item, tokens);
        self.pack.chunks.push(Chunk { item: i, tokens });
        if item.new_here() {
            self.room.blocks -= item.need_blocks;
            self.room.slots -= usize::from(item.need_slot);
            self.pack.passed.append(&mut self.waiting);
        }
    }
}

/// A request of a queue ordered by what it still needs and how long it has waited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Aged {
    /// Estimated time to finish it.
    pub remaining: Span,
    /// Time since it arrived.
    pub waited: Span,
}

impl Aged {
    /// Smallest goes next: shortest remaining time, less one nanosecond per nanosecond waited, so that nobody
    /// waits for ever (PF-8).
    pub fn key(self) -> i128 {
        i128::from(self.remaining.0) - i128::from(self.waited.0)
    }
}

/// Places of `queue` in the order in which they go next; earlier ones first if equal.
pub fn aged_srpt(queue: &[Aged]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..queue.len()).collect();
    order.sort_by_key(|&i| queue[i].key());
    order
}
