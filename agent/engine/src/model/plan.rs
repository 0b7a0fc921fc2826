//! Everything a step needs to know before it computes: which row is which position, which keys it sees, where
//! new rows go. Plain lists of numbers, built on the host, kept between steps.
//!
//! A step runs its layers over one set of rows; with compacting consumer truncation the layers after the
//! boundary run over a second, smaller set.

use deepinfer_serving::batch::{BLOCK_TOKENS, Logits, SequenceStep, StepBatch};

use super::groups::GroupPlan;
use super::rope::Frequencies;
use super::rows::{Row, RowSet};
use super::windows::{WindowPart, WindowPlan};
use crate::cache::{Capacity, Geometry, Histories};
use crate::engram::{DEAD, Hasher};

/// What a step does with one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SequencePlan {
    /// State slot.
    pub slot: usize,
    /// First new position.
    pub start: usize,
    /// Position after the last new one.
    pub end: usize,
    /// First position that may be seen through a producer's window.
    pub window_from: usize,
    /// The same for the boundary layer.
    pub boundary_from: usize,
    /// The same for the layers after it.
    pub consumer_from: usize,
    /// Compressed entries are read, not written.
    pub replay: bool,
}

impl SequencePlan {
    /// First new position that the consumer layers keep.
    pub fn kept_from(&self) -> usize {
        self.consumer_from.clamp(self.start, self.end)
    }

    /// Whether a later zone sees less than the producers do.
    fn is_clipped(&self, window: usize) -> bool {
        let oldest = self.window_from.max((self.start + 1).saturating_sub(window));
        self.boundary_from.max(self.consumer_from) > oldest
    }
}

/// The three kinds of layers that consumer truncation knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Zone {
    /// Before the first layer with ratio 1.
    Producer,
    /// That layer.
    Boundary,
    /// After it.
    Consumer,
}

/// What plans are made from, fixed at open.
#[derive(Debug)]
pub(crate) struct PlanContext {
    /// Ring sizes and ratios.
    pub geometry: Geometry,
    /// Rotation frequencies.
    pub frequencies: Frequencies,
    /// Table rows of tokens, if any layer has a table.
    pub hasher: Option<Hasher>,
    /// Channels of an image embedding.
    pub hidden: usize,
    /// Layers after the boundary drop rows.
    pub compact: bool,
}

/// One step.
#[derive(Clone, Debug, Default)]
pub(crate) struct StepPlan {
    /// Sequences in the order of the batch.
    pub sequences: Vec<SequencePlan>,
    /// Token ids, `[rows]`.
    pub tokens: Vec<u32>,
    /// All rows.
    pub all: RowSet,
    /// Rows of the layers after the boundary; used only if `shrinks`.
    kept: RowSet,
    /// The rows after the boundary are fewer.
    pub shrinks: bool,
    /// Block ids of all sequences.
    pub blocks: Vec<u32>,
    /// End of each sequence's part of `blocks`.
    pub block_ends: Vec<u32>,
    /// New compressed entries, by ratio.
    pub groups: Vec<GroupPlan>,
    /// Rows of the last set whose logits are asked for.
    pub logit_rows: Vec<u32>,
    /// How many of `logit_rows` belong to each sequence.
    pub logit_counts: Vec<usize>,
    /// Rows of the last set whose draft context is kept.
    pub draft_rows: Vec<u32>,
    /// Ring row of each of `draft_rows`.
    pub draft_store: Vec<u32>,
    /// Window plans of the three zones; the later two only if `clipped`.
    windows: [WindowPlan; 3],
    /// Some sequence's consumer windows are shorter than its producer windows, or rows are dropped.
    clipped: bool,
    /// Compressed ids of one sequence, those before the step first.
    ids: Vec<u32>,
    /// History of one row, newest first.
    history: Vec<u32>,
    /// 1 for the image rows of one sequence.
    image: Vec<bool>,
}

impl StepPlan {
    /// An empty plan, with room for decode steps: later ones allocate nothing.
    pub fn new(context: &PlanContext, engram_layers: usize, capacity: Capacity) -> Self {
        let Geometry { window, slack, ratios, .. } = &context.geometry;
        let mut plan = Self {
            all: RowSet::new(ratios.len(), engram_layers),
            kept: RowSet::new(ratios.len(), engram_layers),
            groups: ratios.iter().map(|&ratio| GroupPlan::new(ratio)).collect(),
            ..Self::default()
        };
        // Lists that grow with the length of sequences; the others have their size after the first step.
        let rows = capacity.rows.min(capacity.slots * (slack + 1));
        plan.windows[0].rows.reserve(rows * window);
        plan.blocks.reserve(capacity.blocks);
        plan
    }

    /// Rows after the boundary layer.
    pub fn last(&self) -> &RowSet {
        if self.shrinks { &self.kept } else { &self.all }
    }

    /// Window keys of a zone.
    pub fn windows(&self, zone: Zone) -> &WindowPlan {
        match zone {
            Zone::Boundary if self.clipped => &self.windows[1],
            Zone::Consumer if self.clipped => &self.windows[2],
            _ => &self.windows[0],
        }
    }

    /// Plans a valid batch; `sequences` says where each of its sequences stands. Histories are read and
    /// extended.
    pub fn build(
        &mut self,
        context: &PlanContext,
        batch: &StepBatch,
        sequences: impl Iterator<Item = SequencePlan>,
        histories: &mut Histories,
    ) {
        self.sequences.clear();
        self.sequences.extend(sequences);
        self.tokens.clear();
        self.blocks.clear();
        self.block_ends.clear();
        for step in &batch.sequences {
            self.tokens.extend_from_slice(&step.tokens);
            let blocks = &step.blocks[..step.end().div_ceil(BLOCK_TOKENS)];
            self.blocks.extend(blocks.iter().map(|b| b.0));
            self.block_ends.push(self.blocks.len() as u32);
        }
        let kept: usize = self.sequences.iter().map(|s| s.end - s.kept_from()).sum();
        self.shrinks = context.compact && kept < self.tokens.len();
        self.build_rows(context, batch, histories);
        self.build_windows(&context.geometry);
        for group in &mut self.groups {
            let (slack, frequencies) = (context.geometry.slack, &context.frequencies.compressed);
            group.build(slack, frequencies, &self.sequences, &self.blocks, &self.block_ends);
        }
        self.build_results(&context.geometry, batch);
    }

    /// Fills the row sets.
    fn build_rows(&mut self, context: &PlanContext, batch: &StepBatch, histories: &mut Histories) {
        self.all.clear();
        self.kept.clear();
        let mut id = 0;
        for (ordinal, step) in batch.sequences.iter().enumerate() {
            let sequence = self.sequences[ordinal];
            self.mark_images(step, context.hidden);
            let before = match &context.hasher {
                Some(hasher) => self.compress(hasher, step, sequence.slot, histories),
                None => 0,
            };
            for position in sequence.start..sequence.end {
                let offset = position - sequence.start;
                let row = Row { id, sequence: ordinal, position, image: self.image[offset] };
                if let Some(hasher) = &context.hasher {
                    self.history.clear();
                    let known = self.ids[..=before + offset].iter().rev();
                    self.history.extend(known.take(hasher.history_len()));
                }
                let keep = self.shrinks && position >= sequence.kept_from();
                for set in [Some(&mut self.all), keep.then_some(&mut self.kept)].into_iter().flatten() {
                    set.push(row, &context.frequencies, &context.geometry.ratios);
                    if let Some(hasher) = &context.hasher {
                        set.push_engram(hasher, &self.history);
                    }
                }
                id += 1;
            }
        }
    }

    /// Sets `image` for the rows of one sequence.
    fn mark_images(&mut self, step: &SequenceStep, hidden: usize) {
        self.image.clear();
        self.image.resize(step.tokens.len(), false);
        for span in &step.images {
            self.image[span.first..span.first + span.embeddings.len() / hidden].fill(true);
        }
    }

    /// Sets `ids` to the compressed ids before and in the step, keeps them for later steps, and returns how
    /// many lie before.
    fn compress(
        &mut self,
        hasher: &Hasher,
        step: &SequenceStep,
        slot: usize,
        histories: &mut Histories,
    ) -> usize {
        self.ids.clear();
        histories.before(slot, step.start, &mut self.ids);
        let before = self.ids.len();
        let rows = step.tokens.iter().zip(&self.image);
        self.ids.extend(rows.map(|(&token, &image)| if image { DEAD } else { hasher.compress(token) }));
        histories.store(slot, step.start, &self.ids[before..]);
        before
    }

    /// Plans the window keys of each zone.
    fn build_windows(&mut self, geometry: &Geometry) {
        let (window, ring, shrinks) = (geometry.window, geometry.ring, self.shrinks);
        let sequences = &self.sequences;
        self.clipped = shrinks || sequences.iter().any(|s| s.is_clipped(window));
        let [producer, boundary, consumer] = &mut self.windows;
        let part = move |s: &SequencePlan, from, first_key, first_query| WindowPart {
            slot: s.slot,
            from,
            first_key,
            first_query,
            end: s.end,
        };
        let kept = move |s: &SequencePlan| if shrinks { s.kept_from() } else { s.start };
        producer.build(window, ring, sequences.iter().map(|s| part(s, s.window_from, s.start, s.start)));
        if self.clipped {
            boundary.build(
                window,
                ring,
                sequences.iter().map(|s| part(s, s.boundary_from, s.start, kept(s))),
            );
            consumer.build(
                window,
                ring,
                sequences.iter().map(|s| part(s, s.consumer_from, kept(s), kept(s))),
            );
        }
    }

    /// Chooses the rows that return logits and those that leave draft context.
    fn build_results(&mut self, geometry: &Geometry, batch: &StepBatch) {
        self.logit_rows.clear();
        self.logit_counts.clear();
        self.draft_rows.clear();
        self.draft_store.clear();
        let mut first_row = 0;
        for (sequence, step) in self.sequences.iter().zip(&batch.sequences) {
            let kept = sequence.kept_from();
            // Row of the last set that holds a position.
            let base = if self.shrinks { kept } else { sequence.start };
            let row = |position: usize| (first_row + position - base) as u32;
            let asked = match step.logits {
                Logits::None => sequence.end..sequence.end,
                Logits::Last => kept.max(sequence.end - 1)..sequence.end,
                Logits::All => kept..sequence.end,
            };
            self.logit_counts.push(asked.len());
            self.logit_rows.extend(asked.map(row));
            // Older rows would only be overwritten by newer ones.
            let stored = kept.max(sequence.end.saturating_sub(geometry.ring))..sequence.end;
            self.draft_store.extend(stored.clone().map(|p| geometry.ring_row(sequence.slot, p)));
            self.draft_rows.extend(stored.map(row));
            first_row += sequence.end - base;
        }
    }
}
