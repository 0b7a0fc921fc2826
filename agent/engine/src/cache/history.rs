//! Compressed token ids of the last positions of every slot, for n-grams.
//!
//! Long enough to start again after a rollback: an n-gram's other tokens plus the slack.

use crate::engram::DEAD;

/// Rings of compressed ids, `[slots, length]`.
#[derive(Clone, Debug)]
pub(crate) struct Histories {
    ids: Vec<u32>,
    length: usize,
    /// Tokens before the current one that an n-gram reads.
    reach: usize,
}

impl Histories {
    /// `reach` tokens before the current one are read; positions can be cut back by `slack`.
    pub fn new(slots: usize, reach: usize, slack: usize) -> Self {
        let length = reach + slack;
        Self { ids: vec![DEAD; slots * length], length, reach }
    }

    /// Bytes of `slots` histories.
    pub fn bytes(slots: usize, reach: usize, slack: usize) -> u64 {
        (slots as u64) * (reach + slack) as u64 * 4
    }

    /// Appends the ids before `position` that exist, oldest first: at most `reach`.
    pub fn before(&self, slot: usize, position: usize, out: &mut Vec<u32>) {
        out.extend((position.saturating_sub(self.reach)..position).map(|p| self.ids[self.at(slot, p)]));
    }

    /// Stores the ids of the positions from `first` on; only the last ones stay.
    pub fn store(&mut self, slot: usize, first: usize, ids: &[u32]) {
        let skipped = ids.len().saturating_sub(self.length);
        for (i, &id) in ids.iter().enumerate().skip(skipped) {
            let at = self.at(slot, first + i);
            self.ids[at] = id;
        }
    }

    /// Makes every position before `position` unknown.
    pub fn clear(&mut self, slot: usize) {
        self.ids[slot * self.length..(slot + 1) * self.length].fill(DEAD);
    }

    fn at(&self, slot: usize, position: usize) -> usize {
        slot * self.length + position % self.length
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rollback_by_the_slack_still_finds_the_ids_before() {
        let mut histories = Histories::new(2, 3, 6);
        let ids: Vec<u32> = (100..120).collect();
        histories.store(1, 0, &ids);
        let mut out = Vec::new();
        histories.before(1, 14, &mut out);
        assert_eq!(out, [111, 112, 113]);
        out.clear();
        histories.before(1, 2, &mut out);
        assert_eq!(out.len(), 2, "a sequence has nothing before its start");
    }
}
