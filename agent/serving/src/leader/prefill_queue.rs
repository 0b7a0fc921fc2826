//! The queue of prompts, in the order in which they are given to workers: requests that were admitted before
//! come first, then aged shortest-remaining-first (PF-8).
//!
//! `estimate - waited` grows smaller for all entries alike as time passes, so the order of `estimate + arrival`
//! never changes and the queue can be kept sorted. Invariant: a request is in the queue at most once.

use std::collections::BTreeMap;

use deepinfer_protocol::message::PrefillEntry;
use deepinfer_protocol::{AgentId, Attempt, RequestId, Span, Time};

/// Place in the order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Key {
    /// 0: resumed; 1: new.
    class: u8,
    /// Estimate plus arrival in nanoseconds; an arrival may lie before this process.
    due: i128,
    /// Order of insertion, for ties.
    number: u64,
}

/// A prompt that waits.
#[derive(Clone, Debug)]
pub struct Queued {
    /// What the gateway said.
    pub entry: PrefillEntry,
    /// Who owns it.
    pub gateway: AgentId,
    /// Estimated time of its prefill on one worker.
    pub estimate: Span,
    /// When it expires.
    pub deadline: Time,
    /// How often a later one went first because this one found no blocks (PF-6).
    pub passed: u32,
    /// Since when it finds none.
    pub blocked_since: Option<Time>,
}

/// The queue.
#[derive(Clone, Debug, Default)]
pub struct PrefillQueue {
    order: BTreeMap<Key, Queued>,
    keys: BTreeMap<RequestId, Key>,
    numbers: u64,
    total: Span,
}

impl PrefillQueue {
    /// Puts an entry in its place; an older attempt of it is replaced. Says `false` if this attempt or a newer
    /// one is there already.
    pub fn insert(&mut self, now: Time, gateway: AgentId, entry: PrefillEntry, estimate: Span) -> bool {
        if let Some(key) = self.keys.get(&entry.request) {
            if self.order[key].entry.attempt >= entry.attempt {
                return false;
            }
            self.remove(entry.request);
        }
        self.numbers += 1;
        let key = Key {
            class: u8::from(!entry.resumed),
            due: i128::from(now.0) - i128::from(entry.waited.0) + i128::from(estimate.0),
            number: self.numbers,
        };
        self.keys.insert(entry.request, key);
        self.total = self.total.plus(estimate);
        let deadline = now + entry.deadline;
        self.order.insert(key, Queued { entry, gateway, estimate, deadline, passed: 0, blocked_since: None });
        true
    }

    /// Takes a request out.
    pub fn remove(&mut self, request: RequestId) -> Option<Queued> {
        let queued = self.keys.remove(&request).and_then(|key| self.order.remove(&key))?;
        self.total.0 = self.total.0.saturating_sub(queued.estimate.0);
        Some(queued)
    }

    /// Takes a request out if it waits under this attempt or an older one.
    pub fn cancel(&mut self, request: RequestId, attempt: Attempt) {
        if self.keys.get(&request).is_some_and(|key| self.order[key].entry.attempt <= attempt) {
            self.remove(request);
        }
    }

    /// Takes out everything that a gateway owns.
    pub fn drop_gateway(&mut self, gateway: &AgentId) {
        let own = self.order.values().filter(|q| q.gateway == *gateway).map(|q| q.entry.request);
        for request in own.collect::<Vec<_>>() {
            self.remove(request);
        }
    }

    /// Takes out and returns what has waited for its deadline. Resumed requests have none: they were admitted.
    pub fn expired(&mut self, now: Time) -> Vec<Queued> {
        let late: Vec<RequestId> = self
            .order
            .values()
            .filter(|q| !q.entry.resumed && q.deadline <= now)
            .map(|q| q.entry.request)
            .collect();
        late.into_iter().filter_map(|request| self.remove(request)).collect()
    }

    /// The first `most` requests in order.
    pub fn head(&self, most: usize) -> Vec<RequestId> {
        self.order.values().take(most).map(|q| q.entry.request).collect()
    }

    /// The entry of a request.
    pub fn get(&self, request: RequestId) -> Option<&Queued> {
        self.keys.get(&request).map(|key| &self.order[key])
    }

    /// The same, to note that it was passed.
    pub fn get_mut(&mut self, request: RequestId) -> Option<&mut Queued> {
        self.keys.get(&request).and_then(|key| self.order.get_mut(key))
    }

    /// Work of one worker that everything here comes to.
    pub fn total(&self) -> Span {
        self.total
    }

    /// Work of one worker that a new entry with this estimate would wait for.
    pub fn ahead(&self, now: Time, waited: Span, estimate: Span) -> Span {
        let due = i128::from(now.0) - i128::from(waited.0) + i128::from(estimate.0);
        let last = Key { class: 1, due, number: u64::MAX };
        self.order.range(..=last).fold(Span::ZERO, |sum, (_, q)| sum.plus(q.estimate))
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.order.clear();
        self.keys.clear();
        self.total = Span::ZERO;
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(request: u128, tokens: u32, resumed: bool) -> PrefillEntry {
        PrefillEntry {
            request: RequestId(request),
            attempt: Attempt(0),
            tokens,
            max_tokens: 1,
            waited: Span::ZERO,
            deadline: Span::secs(10),
            resumed,
            exclude: Vec::new(),
        }
    }

    #[test]
    fn short_prompts_go_first_but_a_long_one_is_not_passed_for_ever() {
        let mut queue = PrefillQueue::default();
        let gateway = AgentId::from("g");
        queue.insert(Time(0), gateway.clone(), entry(1, 4000, false), Span::millis(400));
        queue.insert(Time(0), gateway.clone(), entry(2, 100, false), Span::millis(10));
        let late = Time(0) + Span::millis(395);
        queue.insert(late, gateway.clone(), entry(3, 100, false), Span::millis(10));
        assert_eq!(queue.head(9), [RequestId(2), RequestId(1), RequestId(3)]);
        queue.insert(late, gateway, entry(4, 9000, true), Span::secs(1));
        assert_eq!(queue.head(1), [RequestId(4)], "what was admitted before comes first");
    }

    #[test]
    fn a_request_is_queued_once_and_only_its_newest_attempt() {
        let mut queue = PrefillQueue::default();
        let gateway = AgentId::from("g");
        let newer = PrefillEntry { attempt: Attempt(2), ..entry(1, 10, false) };
        assert!(queue.insert(Time(0), gateway.clone(), entry(1, 10, false), Span(1)));
        assert!(queue.insert(Time(0), gateway.clone(), newer.clone(), Span(1)));
        assert!(!queue.insert(Time(0), gateway.clone(), entry(1, 10, false), Span(1)));
        assert_eq!(queue.len(), 1);
        queue.cancel(RequestId(1), Attempt(1));
        assert_eq!(queue.get(RequestId(1)).map(|q| q.entry.attempt), Some(Attempt(2)));
        queue.drop_gateway(&gateway);
        assert!(queue.is_empty());
        assert!(queue.insert(Time(0), gateway, newer, Span(1)), "nothing of it is remembered");
    }

    #[test]
    fn a_waiting_request_expires_and_a_resumed_one_does_not() {
        let mut queue = PrefillQueue::default();
        queue.insert(Time(0), "g".into(), entry(1, 10, false), Span(1));
        queue.insert(Time(0), "g".into(), entry(2, 10, true), Span(1));
        assert!(queue.expired(Time(0) + Span::secs(9)).is_empty());
        let late = queue.expired(Time(0) + Span::secs(10));
        assert_eq!(late.iter().map(|q| q.entry.request).collect::<Vec<_>>(), [RequestId(1)]);
        assert_eq!(queue.len(), 1);
    }
}
