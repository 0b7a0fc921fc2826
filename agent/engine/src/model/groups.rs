//! Compressed entries of a step: which groups of tokens are completed, from which rows, and where they are
//! stored.

use super::plan::SequencePlan;
use super::rope::push_cos_sin;
use crate::cache::{RingMoves, RingSpan};
use deepinfer_serving::batch::BLOCK_TOKENS;

/// New entries of the KV sources with one compression ratio.
#[derive(Clone, Debug, Default)]
pub(crate) struct GroupPlan {
    /// Tokens per entry.
    pub ratio: usize,
    /// Values and gates of the open groups (ratio above 1).
    pub moves: RingMoves,
    /// Rows of each new entry's tokens, `[entries * ratio]`: rows of the open-group store, or rows of the
    /// step if the ratio is 1.
    pub members: Vec<u32>,
    /// Row of the main KV and index key stores for each new entry.
    pub store: Vec<u32>,
    /// Cosines and sines at the first token of each new entry, `[entries, rd]`.
    pub rope: Vec<f32>,
}

impl GroupPlan {
    /// An empty plan for a ratio.
    pub fn new(ratio: usize) -> Self {
        Self { ratio, ..Self::default() }
    }

    /// Number of new entries.
    pub fn len(&self) -> usize {
        self.store.len()
    }

    /// Length of the ring that holds the open group of one slot: also what a rollback by `slack` needs again.
    pub fn ring(ratio: usize, slack: usize) -> usize {
        if ratio > 1 { ratio + slack } else { 0 }
    }

    /// Plans all groups that these sequences complete. A replayed sequence completes none: its entries exist.
    pub fn build(
        &mut self,
        slack: usize,
        frequencies: &[f32],
        sequences: &[SequencePlan],
        blocks: &[u32],
        block_ends: &[u32],
    ) {
        let ratio = self.ratio;
        let entries_per_block = BLOCK_TOKENS / ratio;
        self.moves.begin(sequences.iter().any(|s| s.end - s.start > slack + 1));
        self.members.clear();
        self.store.clear();
        self.rope.clear();
        let (mut first_row, mut first_block) = (0, 0);
        for (sequence, &last_block) in sequences.iter().zip(block_ends) {
            let place = (ratio > 1).then(|| {
                let span = RingSpan {
                    slot: sequence.slot,
                    oldest: sequence.start - sequence.start % ratio,
                    first: sequence.start,
                    end: sequence.end,
                };
                self.moves.add(Self::ring(ratio, slack), span)
            });
            let groups = sequence.start / ratio..sequence.end / ratio;
            for group in groups.filter(|_| !sequence.replay) {
                for token in group * ratio..(group + 1) * ratio {
                    self.members.push(match place {
                        Some(place) => place.row(token),
                        None => (first_row + token - sequence.start) as u32,
                    });
                }
                let block = blocks[first_block + group / entries_per_block] as usize;
                self.store.push((block * entries_per_block + group % entries_per_block) as u32);
                push_cos_sin(frequencies, group * ratio, &mut self.rope);
            }
            first_row += sequence.end - sequence.start;
            first_block = last_block as usize;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sequence(slot: usize, start: usize, end: usize, replay: bool) -> SequencePlan {
        SequencePlan { slot, start, end, window_from: 0, boundary_from: 0, consumer_from: 0, replay }
    }

    #[test]
    fn a_group_that_an_earlier_step_began_is_completed_from_the_ring() {
        let mut plan = GroupPlan::new(2);
        let sequences = [sequence(1, 3, 4, false), sequence(0, 4, 5, false)];
        plan.build(6, &[1.0], &sequences, &[9, 5], &[1, 2]);
        assert_eq!(plan.members, [8 + 2, 8 + 3], "ring of eight rows in slot 1");
        assert_eq!(plan.store, [9 * 64 + 1]);
        assert_eq!(plan.rope, [2f32.cos(), 2f32.sin()], "rotated at the group's first token");
        assert_eq!(plan.moves.write, [8 + 3, 4]);
    }

    #[test]
    fn a_long_step_reads_its_groups_from_scratch() {
        let mut plan = GroupPlan::new(4);
        plan.build(2, &[1.0], &[sequence(0, 6, 13, false)], &[7], &[1]);
        assert_eq!(plan.moves.carry.from, [4, 5], "positions 4 and 5 in a ring of six");
        assert_eq!(plan.members, (0..8).collect::<Vec<u32>>());
        assert_eq!(plan.store, [7 * 32 + 1, 7 * 32 + 2]);
        assert_eq!(plan.moves.back.to, [1, 2, 3, 4, 5, 0], "positions 7 to 12");
    }

    #[test]
    fn a_replay_completes_nothing_but_fills_the_open_group() {
        for ratio in [1, 2] {
            let mut plan = GroupPlan::new(ratio);
            plan.build(6, &[1.0], &[sequence(0, 0, 3, true), sequence(1, 0, 2, false)], &[0, 1], &[1, 2]);
            assert_eq!(plan.len(), 2 / ratio);
            assert_eq!(plan.moves.write.len(), if ratio == 1 { 0 } else { 5 });
            if ratio == 1 {
                assert_eq!(plan.members, [3, 4], "rows of the step");
            }
        }
    }

    #[test]
    fn entries_cross_blocks() {
        let mut plan = GroupPlan::new(1);
        plan.build(6, &[1.0], &[sequence(0, 127, 129, false)], &[3, 8], &[2]);
        assert_eq!(plan.store, [3 * 128 + 127, 8 * 128]);
    }
}
