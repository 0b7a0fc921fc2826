//! When a node reports to its leader: soon after a change, and now and then without one, so that silence means
//! something (PF-9). A report carries the leader's decisions that were heard since the last one.

use deepinfer_protocol::fleet::Leader;
use deepinfer_protocol::message::Assignment;
use deepinfer_protocol::{AgentId, Epoch, Span, Time};

/// Least time between two reports.
pub const REPORT_AFTER: Span = Span::millis(20);
/// Most time between two reports.
pub const REPORT_LATEST: Span = Span::millis(250);
/// Decisions kept for the next report. A leader that hears of none drops its entry after 5 s anyway.
const MAX_SEEN: usize = 4_096;

/// A report that is due.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Due {
    /// To whom.
    pub to: AgentId,
    /// Under which leadership.
    pub epoch: Epoch,
    /// Decisions of that leadership heard since the last report.
    pub seen: Vec<Assignment>,
}

/// See the module. `S` is the part of a report whose change is worth a message.
#[derive(Clone, Debug)]
pub struct Reporter<S> {
    leader: Option<Leader>,
    said: Option<(Time, S)>,
    seen: Vec<Assignment>,
}

impl<S: PartialEq> Default for Reporter<S> {
    fn default() -> Self {
        Self { leader: None, said: None, seen: Vec::new() }
    }
}

impl<S: PartialEq> Reporter<S> {
    /// Who to report to from now on. A new leader gets a report at once.
    pub fn follow(&mut self, leader: Option<Leader>) {
        if leader != self.leader {
            self.said = None;
            self.leader = leader;
        }
    }

    /// A decision was heard, whether it was taken or refused.
    pub fn heard(&mut self, assignment: Assignment) {
        if self.seen.len() == MAX_SEEN {
            self.seen.remove(0);
        }
        self.seen.push(assignment);
    }

    /// Whether a report can be due: it is too early, or nobody listens, if not. The state is not needed to know.
    pub fn may_be_due(&self, now: Time) -> bool {
        let early = self.said.as_ref().is_some_and(|(at, _)| now.since(*at) < REPORT_AFTER);
        self.leader.is_some() && !early
    }

    /// Whether a report with this state is due; it counts as sent.
    pub fn due(&mut self, now: Time, state: S) -> Option<Due> {
        let Leader { agent, epoch } = self.leader.clone().filter(|_| self.may_be_due(now))?;
        if let Some((at, said)) = &self.said {
            let changed = *said != state || !self.seen.is_empty();
            if !changed && now.since(*at) < REPORT_LATEST {
                return None;
            }
        }
        self.said = Some((now, state));
        let mut seen = std::mem::take(&mut self.seen);
        seen.retain(|assignment| assignment.epoch == epoch);
        Some(Due { to: agent, epoch, seen })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leader(epoch: u64) -> Leader {
        Leader { agent: AgentId::from("p-0"), epoch: Epoch(epoch) }
    }

    #[test]
    fn a_change_is_reported_after_20_ms_and_silence_after_250() {
        let mut reporter = Reporter::default();
        let at = |millis| Time(0) + Span::millis(millis);
        assert_eq!(reporter.due(at(0), 1), None, "there is no leader");
        reporter.follow(Some(leader(1)));
        assert!(reporter.due(at(0), 1).is_some());
        assert_eq!(reporter.due(at(19), 2), None);
        assert!(reporter.due(at(20), 2).is_some());
        assert_eq!(reporter.due(at(269), 2), None);
        assert!(reporter.due(at(270), 2).is_some());
    }

    #[test]
    fn decisions_are_acknowledged_once_and_only_to_the_leadership_that_made_them() {
        let mut reporter = Reporter::default();
        let decision = |epoch, number| Assignment { epoch: Epoch(epoch), number };
        reporter.follow(Some(leader(2)));
        reporter.heard(decision(1, 9));
        reporter.heard(decision(2, 1));
        assert_eq!(reporter.due(Time(0), ()).expect("due").seen, [decision(2, 1)]);
        assert_eq!(reporter.due(Time(0) + REPORT_LATEST, ()).expect("due").seen, []);
    }
}
