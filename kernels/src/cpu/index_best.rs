//! The best k of a stream of scored ordinals, without sorting the stream.
//!
//! Order: higher score first, lower ordinal among equals. Scores are compared as numbers (-0 equals +0). The answer
//! is a property of the set: how the stream is cut into parts that are merged later does not matter.

/// Scores tested at a time.
const BLOCK: usize = 32;

/// A score and its ordinal in one number that ascends with the order above.
fn pack(score: f32, ordinal: u32) -> u64 {
    let bits = (score + 0.0).to_bits();
    // Floats compare like their bits, negative ones the other way round.
    let key = if bits >> 31 == 0 { bits | 1 << 31 } else { !bits };
    u64::from(key) << 32 | u64::from(!ordinal)
}

/// The score in a packed number.
fn score_of(packed: u64) -> f32 {
    let key = (packed >> 32) as u32;
    f32::from_bits(if key >> 31 == 1 { key & !(1 << 31) } else { !key })
}

/// The ordinal in a packed number.
fn ordinal_of(packed: u64) -> u32 {
    !(packed as u32)
}

/// Collects the best `keep` of what it is shown. Keeps its memory when it is started anew.
#[derive(Default)]
pub(super) struct Best {
    keep: usize,
    /// The best so far and some that may be beaten, in no order.
    held: Vec<u64>,
    /// Scores up to this one are beaten by `keep` others; NaN (below nothing) until so many are known.
    bar: f32,
}

impl Best {
    /// Forgets everything and keeps `keep` from now on.
    pub(super) fn start(&mut self, keep: usize) {
        self.keep = keep;
        self.bar = f32::NAN;
        self.held.clear();
        self.held.reserve(2 * keep + BLOCK);
    }

    /// Shows the scores of the ordinals `first ..`; ordinals ascend from call to call.
    pub(super) fn push_run(&mut self, scores: &[f32], first: u32) {
        for (block, scores) in scores.chunks(BLOCK).enumerate() {
            if self.keep == 0 || self.all_beaten(scores) {
                continue;
            }
            for (i, &score) in scores.iter().enumerate() {
                self.consider(score, first + (block * BLOCK + i) as u32);
            }
            self.tighten();
        }
    }

    /// Shows the scores of `ordinals`; ordinals ascend from call to call.
    pub(super) fn push_some(&mut self, scores: &[f32], ordinals: &[u32]) {
        for (scores, ordinals) in scores.chunks(BLOCK).zip(ordinals.chunks(BLOCK)) {
            if self.keep == 0 || self.all_beaten(scores) {
                continue;
            }
            for (&score, &ordinal) in scores.iter().zip(ordinals) {
                self.consider(score, ordinal);
            }
            self.tighten();
        }
    }

    /// Shows one ordinal, higher than those before.
    pub(super) fn push(&mut self, score: f32, ordinal: u32) {
        if self.keep > 0 {
            self.consider(score, ordinal);
            self.tighten();
        }
    }

    /// Shows an ordinal that beats every other.
    pub(super) fn push_first(&mut self, ordinal: u32) {
        if self.keep > 0 {
            self.held.push(u64::from(u32::MAX) << 32 | u64::from(!ordinal));
            self.tighten();
        }
    }

    /// Whether no score of a block can be among the best. Without a branch inside, so that it becomes vector code.
    fn all_beaten(&self, scores: &[f32]) -> bool {
        let mut beaten = true;
        for &score in scores {
            beaten &= score <= self.bar;
        }
        beaten
    }

    fn consider(&mut self, score: f32, ordinal: u32) {
        // Not `score > bar`: while the bar is NaN everything passes.
        let beaten = score <= self.bar;
        if !beaten {
            self.held.push(pack(score, ordinal));
        }
    }

    /// Throws the beaten ones out when they have become many.
    fn tighten(&mut self) {
        if self.held.len() >= 2 * self.keep {
            self.cut();
        }
    }

    /// Keeps the best `keep` only.
    fn cut(&mut self) {
        if self.held.len() > self.keep {
            self.held.select_nth_unstable_by(self.keep - 1, |a, b| b.cmp(a));
            self.held.truncate(self.keep);
        }
        if self.held.len() == self.keep {
            // With `select_nth` the last one is the worst; without it any order is possible.
            let worst = self.held.iter().min().expect("keep is positive");
            self.bar = score_of(*worst);
        }
    }

    /// The best `keep` in no order, to be merged with [`Best::merge`].
    pub(super) fn packed(&mut self) -> &[u64] {
        if self.keep > 0 {
            self.cut();
        }
        &self.held
    }

    /// Shows what another collector has [`Best::packed`].
    pub(super) fn merge(&mut self, packed: &[u64]) {
        self.held.extend_from_slice(packed);
        if self.keep == 0 {
            self.held.clear();
        }
    }

    /// Writes the ordinals of the best in ascending order and answers how many there are.
    pub(super) fn write_ascending(&mut self, out: &mut [u32]) -> usize {
        let packed = self.packed();
        let out = &mut out[..packed.len()];
        for (out, &packed) in out.iter_mut().zip(packed) {
            *out = ordinal_of(packed);
        }
        out.sort_unstable();
        out.len()
    }
}
