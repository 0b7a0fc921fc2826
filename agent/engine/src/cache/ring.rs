//! Rows by position in rings, and the detour of long steps.
//!
//! Row of position p: `p % ring`. A step of at most `slack + 1` new rows writes the ring first and reads from
//! it: it overwrites only rows that no query of the step can see. A longer one would overwrite what its own
//! first rows need, so it works in a scratch store: older rows are carried there, new ones are written behind
//! them, and at the end the last `ring` rows go back to the ring. Both ways move the same stored bytes.

/// Where the rows of one sequence lie during a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RingPlace {
    /// First row of the sequence's ring, or of its part of the scratch store.
    base: usize,
    /// Length of the ring; 0: scratch, where rows are consecutive from `oldest`.
    ring: usize,
    /// Position of the first row in scratch.
    oldest: usize,
}

impl RingPlace {
    /// Store row of a position.
    pub fn row(&self, position: usize) -> u32 {
        let offset = match self.ring {
            0 => position - self.oldest,
            ring => position % ring,
        };
        (self.base + offset) as u32
    }
}

/// Row moves of a step over one kind of ring.
#[derive(Clone, Debug, Default)]
pub(crate) struct RingMoves {
    /// The step works in the scratch store.
    pub scratch: bool,
    /// Store row of each new row, ring or scratch.
    pub write: Vec<u32>,
    /// Older rows to carry: ring rows, and their scratch rows.
    pub carry: Moves,
    /// New rows to bring back: scratch rows, and their ring rows.
    pub back: Moves,
    scratch_rows: usize,
}

/// Rows copied from one store to another.
#[derive(Clone, Debug, Default)]
pub(crate) struct Moves {
    pub from: Vec<u32>,
    pub to: Vec<u32>,
}

impl Moves {
    fn clear(&mut self) {
        self.from.clear();
        self.to.clear();
    }
}

/// One sequence's rows in a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingSpan {
    /// State slot.
    pub slot: usize,
    /// Oldest position that the step reads; not above `first`.
    pub oldest: usize,
    /// First new position.
    pub first: usize,
    /// Position after the last new one.
    pub end: usize,
}

impl RingMoves {
    /// Forgets the last step. `scratch`: some sequence has more new rows than `slack + 1`.
    pub fn begin(&mut self, scratch: bool) {
        self.scratch = scratch;
        self.scratch_rows = 0;
        self.write.clear();
        self.carry.clear();
        self.back.clear();
    }

    /// Plans the rows of one sequence, behind those planned before, and says where they lie.
    pub fn add(&mut self, ring: usize, span: RingSpan) -> RingPlace {
        let home = RingPlace { base: span.slot * ring, ring, oldest: 0 };
        if !self.scratch {
            self.write.extend((span.first..span.end).map(|p| home.row(p)));
            return home;
        }
        let place = RingPlace { base: self.scratch_rows, ring: 0, oldest: span.oldest };
        self.scratch_rows += span.end - span.oldest;
        self.carry.from.extend((span.oldest..span.first).map(|p| home.row(p)));
        self.carry.to.extend((span.oldest..span.first).map(|p| place.row(p)));
        self.write.extend((span.first..span.end).map(|p| place.row(p)));
        let kept = span.first.max(span.end.saturating_sub(ring));
        self.back.from.extend((kept..span.end).map(|p| place.row(p)));
        self.back.to.extend((kept..span.end).map(|p| home.row(p)));
        place
    }

    /// Like [`RingMoves::add`] in scratch, but nothing goes back to the ring: the step leaves no trace.
    pub fn add_transient(&mut self, ring: usize, span: RingSpan) -> RingPlace {
        debug_assert!(self.scratch, "transient rows live in scratch");
        let back = (self.back.from.len(), self.back.to.len());
        let place = self.add(ring, span);
        self.back.from.truncate(back.0);
        self.back.to.truncate(back.1);
        place
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(slot: usize, oldest: usize, first: usize, end: usize) -> RingSpan {
        RingSpan { slot, oldest, first, end }
    }

    #[test]
    fn a_short_step_writes_the_ring_in_place() {
        let mut moves = RingMoves::default();
        moves.begin(false);
        let place = moves.add(7, span(2, 9, 12, 15));
        assert_eq!(moves.write, [19, 20, 14], "positions 12, 13, 14 of the third ring");
        assert_eq!(place.row(9), 16);
        assert!(moves.carry.from.is_empty() && moves.back.from.is_empty());
    }

    #[test]
    fn a_long_step_carries_older_rows_and_brings_back_the_last_ones() {
        let mut moves = RingMoves::default();
        moves.begin(true);
        let a = moves.add(7, span(0, 3, 5, 15));
        let b = moves.add(7, span(1, 0, 0, 1));
        assert_eq!((moves.carry.from.as_slice(), moves.carry.to.as_slice()), (&[3, 4][..], &[0, 1][..]));
        assert_eq!(moves.write, [2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
        assert_eq!((a.row(3), a.row(14), b.row(0)), (0, 11, 12));
        assert_eq!(
            moves.back.from,
            [5, 6, 7, 8, 9, 10, 11, 12],
            "the last seven of the first, all of the second"
        );
        assert_eq!(moves.back.to, [1, 2, 3, 4, 5, 6, 0, 7]);
    }

    #[test]
    fn a_transient_step_brings_nothing_back() {
        let mut moves = RingMoves::default();
        moves.begin(true);
        moves.add_transient(7, span(0, 3, 5, 8));
        assert_eq!(moves.write, [2, 3, 4]);
        assert!(moves.back.from.is_empty() && moves.back.to.is_empty());
    }
}
