//! What a node remembers of requests: the newest attempt it has seen of each, which of a leader's decisions it has
//! heard, and how the attempt ended here. So an old attempt is fenced off and a repeated message is answered from
//! memory. Forgetting is harmless (the running sequence itself is asked first), so the oldest entries are dropped.

use std::collections::{BTreeMap, VecDeque};

use deepinfer_protocol::message::{Assignment, Message};
use deepinfer_protocol::{Attempt, RequestId};

/// Requests remembered: many times what an engine runs at once, and a few megabytes.
pub const MAX_REMEMBERED: usize = 16_384;
/// Decisions remembered of one attempt: it is placed once and again after each preemption, which are few.
const MAX_DECISIONS: usize = 16;

/// How a piece of work stands to what is remembered.
#[derive(Clone, Debug, PartialEq)]
pub enum Standing {
    /// Never heard of, a newer attempt, or a new decision about an attempt that did not end here.
    New,
    /// This decision was heard and taken.
    Taken,
    /// This decision was heard and refused, with this answer.
    Refused(Message),
    /// The attempt ended here; the answer to give again, if there is one.
    Ended(Option<Message>),
    /// A newer attempt was seen.
    Old,
}

#[derive(Clone, Debug)]
struct Entry {
    attempt: Attempt,
    taken: VecDeque<Assignment>,
    refused: Option<(Assignment, Message)>,
    ended: Option<Option<Message>>,
}

impl Entry {
    fn of(attempt: Attempt) -> Self {
        Self { attempt, taken: VecDeque::new(), refused: None, ended: None }
    }
}

/// See the module.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    entries: BTreeMap<RequestId, Entry>,
    order: VecDeque<RequestId>,
}

impl Ledger {
    /// What is known of this work.
    pub fn standing(&self, request: RequestId, attempt: Attempt, assignment: Assignment) -> Standing {
        let Some(entry) = self.entries.get(&request) else { return Standing::New };
        if attempt != entry.attempt {
            return if attempt < entry.attempt { Standing::Old } else { Standing::New };
        }
        if let Some(answer) = &entry.ended {
            return Standing::Ended(answer.clone());
        }
        if let Some((refused, answer)) = &entry.refused
            && *refused == assignment
        {
            return Standing::Refused(answer.clone());
        }
        if entry.taken.contains(&assignment) { Standing::Taken } else { Standing::New }
    }

    /// The decision was taken: work begins.
    pub fn take(&mut self, request: RequestId, attempt: Attempt, assignment: Assignment) {
        let entry = self.entry(request, attempt);
        entry.taken.push_back(assignment);
        if entry.taken.len() > MAX_DECISIONS {
            entry.taken.pop_front();
        }
        entry.refused = None;
    }

    /// The decision was refused with this answer; another decision may be taken.
    pub fn refuse(&mut self, request: RequestId, attempt: Attempt, assignment: Assignment, answer: Message) {
        self.entry(request, attempt).refused = Some((assignment, answer));
    }

    /// The attempt and older ones are over here. An end that is known stays: what was said is said again.
    pub fn end(&mut self, request: RequestId, attempt: Attempt, answer: Option<Message>) {
        let entry = self.entry(request, attempt);
        if entry.attempt == attempt && entry.ended.is_none() {
            entry.ended = Some(answer);
        }
    }

    /// The entry of the newest attempt; a newer one than is known replaces it.
    fn entry(&mut self, request: RequestId, attempt: Attempt) -> &mut Entry {
        if !self.entries.contains_key(&request) {
            self.order.push_back(request);
            if self.order.len() > MAX_REMEMBERED
                && let Some(oldest) = self.order.pop_front()
            {
                self.entries.remove(&oldest);
            }
        }
        let entry = self.entries.entry(request).or_insert_with(|| Entry::of(attempt));
        if attempt > entry.attempt {
            *entry = Entry::of(attempt);
        }
        entry
    }
}

#[cfg(test)]
mod tests {
    use deepinfer_protocol::Epoch;

    use super::*;

    const R: RequestId = RequestId(7);

    fn decision(number: u64) -> Assignment {
        Assignment { epoch: Epoch(1), number }
    }

    #[test]
    fn an_older_attempt_is_fenced_off_and_a_newer_one_is_new() {
        let mut ledger = Ledger::default();
        ledger.take(R, Attempt(1), decision(1));
        assert_eq!(ledger.standing(R, Attempt(0), decision(9)), Standing::Old);
        assert_eq!(ledger.standing(R, Attempt(1), decision(1)), Standing::Taken);
        assert_eq!(ledger.standing(R, Attempt(2), decision(1)), Standing::New);
    }

    #[test]
    fn a_refused_decision_is_refused_again_but_another_one_may_be_taken() {
        let mut ledger = Ledger::default();
        ledger.refuse(R, Attempt(0), decision(1), Message::Heartbeat);
        assert_eq!(ledger.standing(R, Attempt(0), decision(1)), Standing::Refused(Message::Heartbeat));
        assert_eq!(ledger.standing(R, Attempt(0), decision(2)), Standing::New);
    }

    #[test]
    fn an_ended_attempt_gives_its_first_answer_whatever_decision_comes() {
        let mut ledger = Ledger::default();
        ledger.end(R, Attempt(3), Some(Message::Heartbeat));
        ledger.end(R, Attempt(3), None);
        assert_eq!(ledger.standing(R, Attempt(3), decision(5)), Standing::Ended(Some(Message::Heartbeat)));
        assert_eq!(ledger.standing(R, Attempt(2), decision(5)), Standing::Old);
        assert_eq!(ledger.standing(R, Attempt(4), decision(5)), Standing::New);
    }

    #[test]
    fn memory_is_bounded_and_the_oldest_goes_first() {
        let mut ledger = Ledger::default();
        for request in 0..MAX_REMEMBERED as u128 + 1 {
            ledger.end(RequestId(request), Attempt(0), None);
        }
        assert_eq!(ledger.entries.len(), MAX_REMEMBERED);
        assert_eq!(ledger.order.len(), MAX_REMEMBERED);
        assert_eq!(ledger.standing(RequestId(0), Attempt(0), decision(1)), Standing::New);
        assert_eq!(ledger.standing(RequestId(1), Attempt(0), decision(1)), Standing::Ended(None));
    }
}
