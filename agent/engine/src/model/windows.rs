//! Window keys of a step: where new rows are stored, and which stored rows each query sees.

use crate::cache::{RingMoves, RingSpan};

/// Keys and queries of one sequence in one layer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WindowPart {
    /// State slot.
    pub slot: usize,
    /// First position that may be seen.
    pub from: usize,
    /// First position with a new key.
    pub first_key: usize,
    /// First position with a query; not below `first_key`.
    pub first_query: usize,
    /// Position after the last key and query.
    pub end: usize,
}

/// Window keys of all rows of a step in one layer.
#[derive(Clone, Debug, Default)]
pub(crate) struct WindowPlan {
    /// Where new keys go.
    pub moves: RingMoves,
    /// Store rows of all queries' keys, one list after the other, ascending in position.
    pub rows: Vec<u32>,
    /// End of each query's list.
    pub ends: Vec<u32>,
}

impl WindowPlan {
    /// Causal windows: a query at p sees the keys from max(from, p - window + 1) to p.
    pub fn build(&mut self, window: usize, ring: usize, parts: impl Iterator<Item = WindowPart> + Clone) {
        // In place, the newest row may overwrite only what the oldest query no longer sees.
        let in_place = ring - window + 1;
        let scratch = parts.clone().any(|p| p.end - p.first_key > in_place);
        self.moves.begin(scratch);
        self.rows.clear();
        self.ends.clear();
        for part in parts {
            let oldest = part.from.max((part.first_key + 1).saturating_sub(window));
            let place = self.moves.add(
                ring,
                RingSpan {
                    slot: part.slot,
                    oldest: oldest.min(part.first_key),
                    first: part.first_key,
                    end: part.end,
                },
            );
            for query in part.first_query..part.end {
                let first = part.from.max((query + 1).saturating_sub(window));
                self.rows.extend((first..query + 1).map(|p| place.row(p)));
                self.ends.push(self.rows.len() as u32);
            }
        }
    }

    /// Draft blocks: every query sees the last `window` positions before its block and the whole block. The
    /// ring is read only.
    pub fn build_blocks(&mut self, window: usize, ring: usize, parts: impl Iterator<Item = WindowPart>) {
        self.moves.begin(true);
        self.rows.clear();
        self.ends.clear();
        for part in parts {
            let oldest = part.from.max(part.first_key.saturating_sub(window)).min(part.first_key);
            let place = self.moves.add_transient(
                ring,
                RingSpan { slot: part.slot, oldest, first: part.first_key, end: part.end },
            );
            for _ in part.first_query..part.end {
                self.rows.extend((oldest..part.end).map(|p| place.row(p)));
                self.ends.push(self.rows.len() as u32);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(from: usize, first_key: usize, first_query: usize, end: usize) -> WindowPart {
        WindowPart { slot: 0, from, first_key, first_query, end }
    }

    fn lists(plan: &WindowPlan) -> Vec<Vec<u32>> {
        let mut first = 0;
        let list = |&end: &u32| {
            let list = plan.rows[first..end as usize].to_vec();
            first = end as usize;
            list
        };
        plan.ends.iter().map(list).collect()
    }

    #[test]
    fn a_query_sees_its_window_and_itself() {
        let mut plan = WindowPlan::default();
        plan.build(4, 6, [part(0, 9, 9, 11)].into_iter());
        assert!(!plan.moves.scratch);
        assert_eq!(lists(&plan), [[0, 1, 2, 3], [1, 2, 3, 4]], "positions 6..=9 and 7..=10 in a ring of six");
    }

    #[test]
    fn rows_below_the_bound_are_never_seen() {
        let mut plan = WindowPlan::default();
        plan.build(4, 6, [part(8, 9, 9, 11)].into_iter());
        assert_eq!(lists(&plan), [vec![2, 3], vec![2, 3, 4]]);
        plan.build(4, 6, [part(10, 8, 8, 11)].into_iter());
        assert_eq!(lists(&plan), [vec![], vec![], vec![4]], "masked rows see nothing");
    }

    #[test]
    fn long_steps_see_the_same_positions_through_scratch() {
        let mut plan = WindowPlan::default();
        plan.build(4, 6, [part(0, 9, 9, 13)].into_iter());
        assert!(plan.moves.scratch);
        assert_eq!(plan.moves.carry.from, [0, 1, 2], "positions 6, 7, 8");
        assert_eq!(lists(&plan), [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]]);
        plan.build(4, 6, [part(11, 5, 11, 13)].into_iter());
        assert_eq!(plan.moves.carry.from, [] as [u32; 0], "nothing below the bound is carried");
        assert_eq!(lists(&plan), [vec![6], vec![6, 7]]);
    }

    #[test]
    fn a_draft_block_sees_a_whole_window_and_all_of_itself() {
        let mut plan = WindowPlan::default();
        plan.build_blocks(4, 7, [part(0, 9, 9, 11), part(2, 3, 3, 5)].into_iter());
        assert_eq!(plan.moves.carry.from, [5, 6, 0, 1, 2], "positions 5..9, then 2..3");
        assert_eq!(plan.moves.write, [4, 5, 7, 8]);
        assert_eq!(lists(&plan)[1], [0, 1, 2, 3, 4, 5]);
        assert_eq!(lists(&plan)[2], [6, 7, 8]);
        assert!(plan.moves.back.to.is_empty());
    }
}
