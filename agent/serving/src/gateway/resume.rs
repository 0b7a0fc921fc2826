//! What follows a failure (E.6, PD-10): the same request again with its tokens as context, or its end.

use deepinfer_protocol::Span;
use deepinfer_protocol::message::Failure;

use super::vacancy::Dice;

/// What happened to a try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blow {
    /// A worker or rank was lost or broke under the running request.
    Crash,
    /// Work had begun and could not go on.
    Failed,
    /// Nothing of it had begun, or it was cut by plan: costs no try.
    Harmless,
}

/// What a message says about a try in a stage where the request was, or was not, in an engine.
pub(super) fn blow(reason: Failure, in_engine: bool) -> Blow {
    match reason {
        Failure::EngineLost | Failure::EngineHung if in_engine => Blow::Crash,
        Failure::EngineLost | Failure::EngineHung | Failure::KvLost | Failure::LeaseExpired => Blow::Failed,
        Failure::Internal => Blow::Failed,
        Failure::DrainDeadline => Blow::Harmless,
    }
}

/// What is decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Try again after this.
    Again(Span),
    /// It ends; for people.
    End(String),
}

/// The tries of a request so far, this blow included.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tries {
    pub failures: u32,
    pub crashes: u32,
    pub max_attempts: u32,
    pub max_crashes: u32,
}

/// Decides. The wait doubles with every failed try and is drawn from the half below to the half above.
pub(super) fn verdict(tries: Tries, why: &str, first: Span, dice: &mut Dice) -> Verdict {
    if tries.crashes >= tries.max_crashes {
        return Verdict::End(format!(
            "it was running at {} crashes and is not tried again (last: {why})",
            tries.crashes
        ));
    }
    if tries.failures >= tries.max_attempts {
        return Verdict::End(format!("{} attempts failed (last: {why})", tries.failures));
    }
    // The shift is bounded by the attempts; more than ten doublings would be a minute and is never useful.
    let wait = first.times(1 << tries.failures.saturating_sub(1).min(10));
    Verdict::Again(Span(wait.0 / 2 + dice.below(wait.0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tries(failures: u32, crashes: u32) -> Tries {
        Tries { failures, crashes, max_attempts: 3, max_crashes: 2 }
    }

    #[test]
    fn waits_double_and_are_spread_by_half() {
        let mut dice = Dice::new(3);
        for failures in 1..3 {
            let base = 50u64 << (failures - 1);
            for _ in 0..50 {
                let Verdict::Again(wait) = verdict(tries(failures, 0), "x", Span::millis(50), &mut dice)
                else {
                    panic!("attempts are left");
                };
                assert!(wait >= Span::millis(base / 2) && wait <= Span::millis(base * 3 / 2), "{wait:?}");
            }
        }
    }

    #[test]
    fn the_third_failure_and_the_second_crash_end_a_request() {
        let mut dice = Dice::new(3);
        assert!(matches!(verdict(tries(3, 0), "x", Span(1), &mut dice), Verdict::End(_)));
        assert!(matches!(verdict(tries(2, 2), "x", Span(1), &mut dice), Verdict::End(_)));
        assert!(matches!(verdict(tries(2, 1), "x", Span(1), &mut dice), Verdict::Again(_)));
    }

    #[test]
    fn only_an_engine_that_breaks_under_the_request_is_a_crash() {
        assert_eq!(blow(Failure::EngineLost, true), Blow::Crash);
        assert_eq!(blow(Failure::EngineLost, false), Blow::Failed);
        assert_eq!(blow(Failure::KvLost, true), Blow::Failed);
        assert_eq!(blow(Failure::DrainDeadline, true), Blow::Harmless);
    }
}
