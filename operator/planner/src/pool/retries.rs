//! Bounded retries (operator.md 7.3): exponential back-off, then nothing more until the revision changes.

use crate::blueprint::{FailureRecord, MAX_FAILURES};
use crate::supernode::place::ROOM_TAKEN;

/// Settings of `decode.recovery`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    pub max_restarts: u32,
    pub backoff: i64,
    pub max_backoff: i64,
    pub reset_after: i64,
}

/// Whether another incarnation may be made now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Retry {
    /// Yes.
    Now,
    /// At this second since 1970.
    At(i64),
    /// Not until the revision changes.
    Exhausted {
        /// Failures within the window.
        failures: u32,
    },
}

/// Decides from the failures of a revision.
pub(crate) fn retry(failures: &[FailureRecord], revision: &str, limits: Limits, now: i64) -> Retry {
    // A clock that was set back must not turn the window around: failures of the future count as now.
    let recent =
        failures.iter().filter(|f| f.revision == revision && now - f.at.min(now) < limits.reset_after);
    let count = recent.clone().count() as u32;
    let Some(last) = recent.clone().map(|f| f.at.min(now)).max() else {
        return Retry::Now;
    };
    let faults = recent.filter(|failure| failure.reason != ROOM_TAKEN).count() as u32;
    if faults > limits.max_restarts {
        return Retry::Exhausted { failures: faults };
    }
    let doublings = (count - 1).min(32);
    let wait = limits.backoff.saturating_mul(1_i64 << doublings).min(limits.max_backoff);
    // The first failure is followed at once: most are accidents.
    let due = if count == 1 { last } else { last + wait };
    if due <= now { Retry::Now } else { Retry::At(due) }
}

/// Remembers a failure, once; the oldest are forgotten. `false`: it was known.
pub(crate) fn remember(failures: &mut Vec<FailureRecord>, failure: FailureRecord) -> bool {
    if failures.iter().any(|f| f.supernode == failure.supernode) {
        return false;
    }
    failures.push(failure);
    let surplus = failures.len().saturating_sub(MAX_FAILURES);
    failures.drain(..surplus);
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { max_restarts: 3, backoff: 10, max_backoff: 25, reset_after: 3600 };

    fn failed(at: i64) -> FailureRecord {
        let name = format!("sn-{at}");
        FailureRecord {
            at,
            supernode: name,
            revision: "r".into(),
            reason: String::new(),
            message: String::new(),
            node: None,
            domain: None,
        }
    }

    #[test]
    fn room_that_others_took_delays_and_never_exhausts() {
        let taken = |at| FailureRecord { reason: ROOM_TAKEN.into(), ..failed(at) };
        let many: Vec<FailureRecord> = (0..10).map(taken).collect();
        assert_eq!(retry(&many, "r", LIMITS, 9), Retry::At(9 + 25));
        let mut faults: Vec<FailureRecord> = (0..4).map(failed).collect();
        faults.extend((4..8).map(taken));
        assert_eq!(retry(&faults, "r", LIMITS, 100), Retry::Exhausted { failures: 4 });
    }

    #[test]
    fn the_wait_doubles_up_to_its_limit_and_then_it_ends() {
        let at = |times: &[i64], now| {
            retry(&times.iter().map(|t| failed(*t)).collect::<Vec<_>>(), "r", LIMITS, now)
        };
        assert_eq!(at(&[], 100), Retry::Now);
        assert_eq!(at(&[100], 100), Retry::Now);
        assert_eq!(at(&[80, 100], 100), Retry::At(120));
        assert_eq!(at(&[60, 80, 100], 100), Retry::At(125));
        assert_eq!(at(&[60, 80, 100], 125), Retry::Now);
        assert_eq!(at(&[40, 60, 80, 100], 125), Retry::Exhausted { failures: 4 });
        assert_eq!(at(&[40, 60, 80, 100], 100 + 3600), Retry::Now);
        assert_eq!(retry(&[failed(40); 1], "other", LIMITS, 50), Retry::Now);
    }

    #[test]
    fn a_clock_that_was_set_back_does_not_stop_recovery_for_ever() {
        let failures = [failed(10_000), failed(10_010)];
        assert_eq!(retry(&failures, "r", LIMITS, 500), Retry::At(520));
    }
}
