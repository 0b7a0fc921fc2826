//! How long a step may take before it counts as stalled, and as hung. Pure.

use std::collections::VecDeque;

use deepinfer_protocol::{Span, Time};

/// Steps that are remembered for predictions.
const REMEMBERED: usize = 64;
/// A step this many times longer than predicted is hung, if it also exceeds the limit.
const HUNG_FACTOR: u64 = 20;
/// A step this many times longer than predicted is stalled: no new work, but it may still come back.
const STALLED_FACTOR: u64 = 10;
/// A step shorter than this is never stalled.
const STALLED_AFTER: Span = Span::secs(5);

/// What a running step looks like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// As expected.
    Fine,
    /// Suspiciously long: readiness says no.
    Stalled,
    /// It will not come back.
    Hung,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Watchdog {
    limit: Span,
    /// Nanoseconds per row of recent steps, and of a whole step.
    recent: VecDeque<(u64, Span)>,
}

impl Watchdog {
    /// `limit`: no shorter step is hung.
    pub fn new(limit: Span) -> Self {
        Self { limit, recent: VecDeque::new() }
    }

    /// A step of `rows` rows took `elapsed`.
    pub fn observe(&mut self, rows: usize, elapsed: Span) {
        if self.recent.len() == REMEMBERED {
            self.recent.pop_front();
        }
        self.recent.push_back((elapsed.0 / rows.max(1) as u64, elapsed));
    }

    /// Predicted time of a step of `rows` rows: the slowest of the recent ones, by row or as a whole.
    pub fn predict(&self, rows: usize) -> Span {
        let by_row = self.recent.iter().map(|(ns, _)| ns.saturating_mul(rows as u64)).max().unwrap_or(0);
        let whole = self.recent.iter().map(|(_, span)| span.0).max().unwrap_or(0);
        Span(by_row.max(whole))
    }

    /// What to think of a step of `rows` rows that began at `begun`.
    pub fn judge(&self, now: Time, begun: Time, rows: usize) -> Verdict {
        let taken = now.since(begun);
        let predicted = self.predict(rows);
        if taken > self.limit.max(predicted.times(HUNG_FACTOR)) {
            Verdict::Hung
        } else if taken > STALLED_AFTER.min(self.limit).max(predicted.times(STALLED_FACTOR)) {
            Verdict::Stalled
        } else {
            Verdict::Fine
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Time {
        Time(0) + Span::secs(seconds)
    }

    #[test]
    fn a_step_is_hung_after_the_limit_and_twenty_predictions() {
        let mut dog = Watchdog::new(Span::secs(30));
        assert_eq!(dog.judge(at(5), at(0), 64), Verdict::Fine);
        assert_eq!(dog.judge(at(6), at(0), 64), Verdict::Stalled);
        assert_eq!(dog.judge(at(30), at(0), 64), Verdict::Stalled);
        assert_eq!(dog.judge(at(31), at(0), 64), Verdict::Hung);
        // Steps of two seconds: twenty of them are more than the limit.
        dog.observe(64, Span::secs(2));
        assert_eq!(dog.judge(at(31), at(0), 64), Verdict::Stalled);
        assert_eq!(dog.judge(at(40), at(0), 64), Verdict::Stalled);
        assert_eq!(dog.judge(at(41), at(0), 64), Verdict::Hung);
    }

    #[test]
    fn predictions_grow_with_rows_and_forget_old_steps() {
        let mut dog = Watchdog::new(Span::secs(30));
        dog.observe(10, Span::millis(10));
        assert_eq!(dog.predict(100), Span::millis(100));
        assert_eq!(
            dog.predict(1),
            Span::millis(10),
            "a small step is not faster than the last one as a whole"
        );
        for _ in 0..REMEMBERED {
            dog.observe(10, Span::millis(1));
        }
        assert_eq!(dog.predict(100), Span::millis(10));
    }
}
