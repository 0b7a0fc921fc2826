//! What is known of a slot: how many positions it holds, and from where its rows may be read.
//!
//! Rings are never cleared; no key list may reach below these bounds, so rows of an earlier sequence in the
//! same slot are never seen.

/// Bounds of one slot, in positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Slot {
    /// Positions run so far.
    pub held: usize,
    /// One above the highest position ever written in this sequence: rejected drafts count.
    pub high: usize,
    /// Lowest position it can be cut back to (besides 0, a new sequence).
    pub floor: usize,
    /// First position with window rows.
    pub window_from: usize,
    /// First position with window rows in the layers after the boundary, and with draft context; higher than
    /// `window_from` after a truncated prefill.
    pub consumer_from: usize,
}

impl Slot {
    /// A slot whose rows start at `start`: nothing below exists.
    pub fn starting_at(start: usize) -> Self {
        Self { held: start, high: start, floor: start, window_from: start, consumer_from: start }
    }

    /// Whether rows and open groups of the positions below `tokens` are all still there.
    pub fn can_cut(&self, tokens: usize, slack: usize) -> bool {
        tokens == 0 || (tokens >= self.floor && tokens + slack >= self.high)
    }

    /// Forgets the positions from `tokens` on.
    pub fn cut(&mut self, tokens: usize) {
        if tokens == 0 {
            *self = Self::default();
            return;
        }
        self.held = tokens;
        self.window_from = self.window_from.min(tokens);
        self.consumer_from = self.consumer_from.min(tokens);
    }

    /// Accounts for positions up to `end`.
    pub fn extend(&mut self, end: usize) {
        self.held = end;
        self.high = self.high.max(end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejected_drafts_count_against_the_slack() {
        let mut slot = Slot::default();
        slot.extend(106);
        assert!(slot.can_cut(100, 6) && !slot.can_cut(99, 6));
        slot.cut(101);
        assert!(!slot.can_cut(99, 6), "the rows of 99 - window were overwritten by the drafts");
        slot.extend(102);
        assert!(slot.can_cut(100, 6));
        slot.extend(109);
        assert!(!slot.can_cut(102, 6) && slot.can_cut(103, 6) && slot.can_cut(0, 6));
    }

    #[test]
    fn nothing_below_a_replay_can_be_cut_back_to() {
        let mut slot = Slot::starting_at(128);
        slot.extend(130);
        assert!(slot.can_cut(128, 6) && !slot.can_cut(127, 6));
        slot.cut(0);
        assert_eq!(slot, Slot::default());
    }
}
