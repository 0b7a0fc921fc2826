//! Which cluster is looked at next, and when a failed one is tried again.
//!
//! A cluster is looked at by one worker at a time. What wakes it meanwhile makes it due again right after, so no
//! event is lost; any number of events before a look make one look.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::error::{Class, Error};

/// Shortest wait after a fault of the API server.
const FIRST_RETRY_MS: u64 = 1_000;
/// Longest wait after a fault of the API server, and the wait after a denial.
const LAST_RETRY_MS: u64 = 300_000;

/// Who is due when; times in milliseconds from any origin.
#[derive(Debug)]
struct Schedule<K> {
    due: BTreeMap<K, u64>,
    order: BTreeSet<(u64, K)>,
    running: BTreeSet<K>,
    again: BTreeMap<K, u64>,
}

impl<K> Default for Schedule<K> {
    fn default() -> Self {
        Self {
            due: BTreeMap::new(),
            order: BTreeSet::new(),
            running: BTreeSet::new(),
            again: BTreeMap::new(),
        }
    }
}

impl<K: Ord + Clone> Schedule<K> {
    /// Due at `at` or before.
    fn wake(&mut self, key: &K, at: u64) {
        if self.running.contains(key) {
            let due = self.again.entry(key.clone()).or_insert(at);
            *due = at.min(*due);
            return;
        }
        match self.due.get(key) {
            Some(before) if *before <= at => return,
            Some(before) => {
                self.order.remove(&(*before, key.clone()));
            }
            None => {}
        }
        self.due.insert(key.clone(), at);
        self.order.insert((at, key.clone()));
    }

    /// The one that has been due for longest; it runs from now on.
    fn take(&mut self, now: u64) -> Option<K> {
        let (at, key) = self.order.first()?.clone();
        if at > now {
            return None;
        }
        self.order.remove(&(at, key.clone()));
        self.due.remove(&key);
        self.running.insert(key.clone());
        Some(key)
    }

    /// It does not run any more; due again at `at`, or before if something woke it meanwhile.
    fn done(&mut self, key: &K, at: Option<u64>) {
        self.running.remove(key);
        let again = self.again.remove(key);
        if let Some(at) = at.into_iter().chain(again).min() {
            self.wake(key, at);
        }
    }

    fn next_at(&self) -> Option<u64> {
        self.order.first().map(|(at, _)| *at)
    }

    fn waiting(&self, now: u64) -> usize {
        self.order.iter().take_while(|(at, _)| *at <= now).count()
    }
}

/// The schedule with a clock, shared by those who wake and those who work.
#[derive(Debug)]
pub struct Queue<K> {
    schedule: Mutex<Schedule<K>>,
    changed: Notify,
    origin: Instant,
}

impl<K: Ord + Clone> Default for Queue<K> {
    fn default() -> Self {
        Self { schedule: Mutex::default(), changed: Notify::new(), origin: Instant::now() }
    }
}

impl<K: Ord + Clone> Queue<K> {
    /// Makes a key due after a while at the latest.
    pub fn wake(&self, key: &K, after: Duration) {
        let at = self.now() + millis(after);
        self.lock().wake(key, at);
        self.changed.notify_one();
    }

    /// Waits for a key that is due; it runs until [`Queue::done`].
    pub async fn next(&self) -> K {
        loop {
            let next_at = {
                let mut schedule = self.lock();
                if let Some(key) = schedule.take(self.now()) {
                    if schedule.next_at().is_some() {
                        self.changed.notify_one();
                    }
                    return key;
                }
                schedule.next_at()
            };
            match next_at {
                Some(at) => {
                    let at = self.origin + Duration::from_millis(at);
                    tokio::select! {
                        () = tokio::time::sleep_until(at) => {}
                        () = self.changed.notified() => {}
                    }
                }
                None => self.changed.notified().await,
            }
        }
    }

    /// A key has been looked at and is due again after a while; `None`: only when something wakes it.
    pub fn done(&self, key: &K, after: Option<Duration>) {
        let now = self.now();
        self.lock().done(key, after.map(|after| now + millis(after)));
        self.changed.notify_one();
    }

    /// Keys that are due and not taken.
    pub fn depth(&self) -> usize {
        let now = self.now();
        self.lock().waiting(now)
    }

    /// Keys that are being looked at.
    pub fn running(&self) -> usize {
        self.lock().running.len()
    }

    fn now(&self) -> u64 {
        millis(self.origin.elapsed())
    }

    fn lock(&self) -> MutexGuard<'_, Schedule<K>> {
        self.schedule.lock().expect("no holder of the schedule panics")
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX / 2)
}

/// How long to wait after the `failures`-th failure in a row (1 = the first). `salt` spreads clusters that fail
/// together, by up to a quarter.
pub fn retry_after(error: &Error, failures: u32, salt: u64) -> Duration {
    let doubled = FIRST_RETRY_MS.saturating_mul(1 << failures.saturating_sub(1).min(20)).min(LAST_RETRY_MS);
    let base = match error.class() {
        Class::Conflict if failures <= 1 => 0,
        Class::Conflict => FIRST_RETRY_MS.saturating_mul(u64::from(failures - 1)).min(10_000),
        Class::Transient => match error.retry_after() {
            Some(asked) => millis(asked).clamp(FIRST_RETRY_MS, LAST_RETRY_MS),
            None => doubled,
        },
        Class::Invalid => doubled.max(10_000),
        Class::Denied => LAST_RETRY_MS,
        // The process ends; nothing is to be tried.
        Class::NotLeader => FIRST_RETRY_MS,
    };
    let spread = base / 4;
    Duration::from_millis(if spread == 0 { base } else { base + salt.wrapping_add(failures.into()) % spread })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Answer;

    fn answered(code: u16, retry_after: Option<u64>) -> Error {
        let answer = Answer { code, retry_after: retry_after.map(Duration::from_secs), ..Answer::default() };
        Error::Answered { verb: "apply", what: "Pod/a".into(), answer }
    }

    #[test]
    fn the_earliest_wish_wins_and_many_wishes_make_one_look() {
        let mut schedule = Schedule::default();
        schedule.wake(&"a", 50);
        schedule.wake(&"a", 20);
        schedule.wake(&"a", 90);
        assert_eq!(schedule.take(19), None);
        assert_eq!(schedule.take(20), Some("a"));
        assert_eq!(schedule.take(1000), None);
    }

    #[test]
    fn who_is_woken_while_it_runs_is_due_again_afterwards_and_never_runs_twice_at_once() {
        let mut schedule = Schedule::default();
        schedule.wake(&"a", 0);
        assert_eq!(schedule.take(0), Some("a"));
        schedule.wake(&"a", 5);
        assert_eq!(schedule.take(10), None);
        schedule.done(&"a", Some(60));
        assert_eq!(schedule.take(10), Some("a"));
        schedule.done(&"a", Some(60));
        assert_eq!(schedule.take(59), None);
        assert_eq!(schedule.take(60), Some("a"));
    }

    #[test]
    fn those_who_wait_longest_come_first() {
        let mut schedule = Schedule::default();
        schedule.wake(&"late", 7);
        schedule.wake(&"early", 3);
        assert_eq!(schedule.waiting(5), 1);
        assert_eq!(schedule.take(9), Some("early"));
        assert_eq!(schedule.take(9), Some("late"));
    }

    #[test]
    fn waits_grow_to_five_minutes_and_an_asked_wait_is_kept() {
        let error = answered(500, None);
        let waits: Vec<u64> = (1..=10).map(|n| retry_after(&error, n, 0).as_secs()).collect();
        assert_eq!(waits[..4], [1, 2, 4, 8]);
        assert!(waits[9] >= 300 && waits[9] < 376, "{waits:?}");
        assert_eq!(retry_after(&answered(429, Some(7)), 1, 0).as_secs(), 7);
        assert_eq!(retry_after(&answered(409, None), 1, 9), Duration::ZERO);
        assert!(retry_after(&answered(409, None), 2, 9) >= Duration::from_secs(1));
        assert!(retry_after(&answered(403, None), 1, 9) >= Duration::from_secs(300));
    }

    #[test]
    fn clusters_that_fail_together_do_not_come_back_together() {
        let error = answered(503, None);
        let waits: BTreeSet<u128> =
            (0..50).map(|uid| retry_after(&error, 6, uid * 7919).as_millis()).collect();
        assert!(waits.len() > 40, "{} different waits", waits.len());
    }

    #[tokio::test]
    async fn a_worker_sleeps_until_something_is_due_and_loses_no_key() {
        let queue = std::sync::Arc::new(Queue::default());
        let total: u32 = 1_000;
        let worker = |queue: std::sync::Arc<Queue<u32>>| async move {
            let mut seen = BTreeSet::new();
            while let Ok(key) = tokio::time::timeout(Duration::from_millis(300), queue.next()).await {
                seen.insert(key);
                tokio::task::yield_now().await;
                queue.done(&key, None);
            }
            seen
        };
        let workers: Vec<_> = (0..4).map(|_| tokio::spawn(worker(queue.clone()))).collect();
        for key in 0..total {
            queue.wake(&key, Duration::from_millis(u64::from(key % 20)));
            if key % 50 == 0 {
                tokio::task::yield_now().await;
            }
        }
        let mut seen = BTreeSet::new();
        for worker in workers {
            seen.extend(worker.await.expect("a worker ends"));
        }
        assert_eq!(seen.len(), total as usize);
        assert_eq!((queue.depth(), queue.running()), (0, 0));
    }
}
