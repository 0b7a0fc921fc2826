//! Optimistic accounting (PF-9): what was assigned and not yet acknowledged in a report of the target.
//!
//! Invariant: an assignment is counted exactly once, either here or, once its target has seen it, in the target's
//! own report. It leaves by acknowledgement, by a word of the gateway, with either peer, or by age.

use std::collections::BTreeMap;

use deepinfer_protocol::message::Assignment;
use deepinfer_protocol::{AgentId, Attempt, RequestId, Span, Time};

/// One assignment that its target has not reported yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unseen<L> {
    /// Whose.
    pub request: RequestId,
    /// Which try.
    pub attempt: Attempt,
    /// Who owns the request.
    pub gateway: AgentId,
    /// When it was made.
    pub at: Time,
    /// What it will weigh.
    pub load: L,
}

/// The assignments of one target, by number.
#[derive(Clone, Debug)]
pub struct Assigned<L> {
    unseen: BTreeMap<Assignment, Unseen<L>>,
}

impl<L> Default for Assigned<L> {
    fn default() -> Self {
        Self { unseen: BTreeMap::new() }
    }
}

impl<L> Assigned<L> {
    /// Counts a new one.
    pub fn add(&mut self, assignment: Assignment, unseen: Unseen<L>) {
        self.unseen.insert(assignment, unseen);
    }

    /// The target has seen these, taken or refused: its reports speak for them now.
    pub fn acknowledge(&mut self, seen: &[Assignment]) {
        for assignment in seen {
            self.unseen.remove(assignment);
        }
    }

    /// The gateway gave up this attempt and older ones, or the target refused.
    pub fn cancel(&mut self, request: RequestId, attempt: Attempt) {
        self.unseen.retain(|_, u| u.request != request || u.attempt > attempt);
    }

    /// The gateway is gone.
    pub fn drop_gateway(&mut self, gateway: &AgentId) {
        self.unseen.retain(|_, u| u.gateway != *gateway);
    }

    /// What is older than `limit` never arrived.
    pub fn expire(&mut self, now: Time, limit: Span) {
        self.unseen.retain(|_, u| now.since(u.at) < limit);
    }

    /// The assignment of this request, to repeat it. `None` once seen.
    pub fn find(&self, request: RequestId) -> Option<(Assignment, &Unseen<L>)> {
        self.unseen.iter().find(|(_, u)| u.request == request).map(|(a, u)| (*a, u))
    }

    /// What waits to be seen.
    pub fn loads(&self) -> impl Iterator<Item = &L> {
        self.unseen.values().map(|u| &u.load)
    }

    /// How many.
    pub fn len(&self) -> usize {
        self.unseen.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.unseen.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use deepinfer_protocol::Epoch;

    use super::*;

    fn assigned() -> Assigned<u32> {
        let mut assigned = Assigned::default();
        for number in 1..=3u64 {
            let unseen = Unseen {
                request: RequestId(u128::from(number)),
                attempt: Attempt(1),
                gateway: AgentId::from(if number == 3 { "b" } else { "a" }),
                at: Time(number),
                load: 10,
            };
            assigned.add(Assignment { epoch: Epoch(1), number }, unseen);
        }
        assigned
    }

    #[test]
    fn an_assignment_leaves_by_acknowledgement_cancel_gateway_or_age() {
        let mut a = assigned();
        a.acknowledge(&[
            Assignment { epoch: Epoch(1), number: 1 },
            Assignment { epoch: Epoch(2), number: 2 },
        ]);
        assert_eq!(a.len(), 2, "numbers of another epoch acknowledge nothing");
        a.cancel(RequestId(2), Attempt(0));
        assert_eq!(a.len(), 2, "an older attempt's cancel leaves the newer one");
        a.cancel(RequestId(2), Attempt(1));
        assert_eq!(a.loads().sum::<u32>(), 10);
        a.drop_gateway(&"a".into());
        assert!(a.find(RequestId(3)).is_some());
        a.expire(Time(13), Span(10));
        assert!(a.is_empty());
    }
}
