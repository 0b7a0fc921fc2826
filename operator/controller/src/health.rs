//! What `/livez` and `/readyz` say: what is still missing, and how long each watch has been silent.
//!
//! Invariant: both answers come from memory; nobody waits for anybody.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

/// A watch whose silence is this many times the stale limit ends the process.
const DEAD_FACTOR: u32 = 3;

/// Age of the last event or bookmark of a watch; clones share it.
#[derive(Clone, Debug)]
pub struct WatchAge {
    start: Instant,
    /// Milliseconds after `start`.
    touched: Arc<AtomicU64>,
}

impl WatchAge {
    /// Something came.
    pub fn touch(&self) {
        let now = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.touched.store(now, Ordering::Relaxed);
    }

    /// Since then.
    pub fn age(&self) -> Duration {
        self.start.elapsed().saturating_sub(Duration::from_millis(self.touched.load(Ordering::Relaxed)))
    }
}

/// State behind the probes.
#[derive(Debug)]
pub struct Health {
    start: Instant,
    stale: Duration,
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    missing: BTreeMap<&'static str, String>,
    watches: BTreeMap<String, WatchAge>,
    failed: Option<String>,
}

/// An answer: ready or alive, and what speaks against it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct HealthReport {
    /// All is well.
    pub ok: bool,
    /// What is not there yet or broken, and why.
    pub missing: BTreeMap<String, String>,
    /// Seconds since the last word of each watch.
    pub watch_age_seconds: BTreeMap<String, f64>,
}

impl Health {
    /// Nothing is missing yet; `stale` is the silence after which a watch is looked into.
    pub fn new(stale: Duration) -> Arc<Self> {
        Arc::new(Self { start: Instant::now(), stale, inner: Mutex::default() })
    }

    /// Not ready, and why.
    pub fn missing(&self, what: &'static str, why: impl Into<String>) {
        self.inner().missing.insert(what, why.into());
    }

    /// It is there now.
    pub fn satisfied(&self, what: &'static str) {
        self.inner().missing.remove(what);
    }

    /// A watch that must not fall silent. Asked again for the same name it gives the same age.
    pub fn watch(&self, name: &str) -> WatchAge {
        let fresh = WatchAge { start: self.start, touched: Arc::default() };
        fresh.touch();
        self.inner().watches.entry(name.to_owned()).or_insert(fresh).clone()
    }

    /// A watch is no longer wanted: its kind is gone.
    pub fn forget(&self, name: &str) {
        self.inner().watches.remove(name);
    }

    /// Nothing can heal this process; the kubelet starts another.
    pub fn fail(&self, why: impl Into<String>) {
        self.inner().failed = Some(why.into());
    }

    /// Ages of all watches.
    pub fn ages(&self) -> BTreeMap<String, Duration> {
        self.inner().watches.iter().map(|(name, watch)| (name.clone(), watch.age())).collect()
    }

    /// Whether work can be done.
    pub fn ready(&self) -> HealthReport {
        let missing: BTreeMap<&'static str, String> = self.inner().missing.clone();
        self.report(missing.into_iter().map(|(what, why)| (what.to_owned(), why)).collect())
    }

    /// Whether this process is worth keeping.
    pub fn live(&self) -> HealthReport {
        let limit = self.stale * DEAD_FACTOR;
        let mut broken = BTreeMap::new();
        for (name, age) in self.ages().into_iter().filter(|(_, age)| *age > limit) {
            let why = format!("no word for {} s, at most {} s are fine", age.as_secs(), limit.as_secs());
            broken.insert(format!("watch {name}"), why);
        }
        if let Some(why) = &self.inner().failed {
            broken.insert("process".to_owned(), why.clone());
        }
        self.report(broken)
    }

    fn report(&self, missing: BTreeMap<String, String>) -> HealthReport {
        let seconds = |age: Duration| (age.as_secs_f64() * 1e3).round() / 1e3;
        let ages = self.ages().into_iter().map(|(name, age)| (name, seconds(age))).collect();
        HealthReport { ok: missing.is_empty(), missing, watch_age_seconds: ages }
    }

    /// A thread that panicked while it held the lock left whole values behind.
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named_until_it_is_there() {
        let health = Health::new(Duration::from_secs(300));
        assert!(health.ready().ok);
        health.missing("caches", "pods are being listed");
        let report = health.ready();
        assert!(!report.ok && report.missing["caches"].contains("pods"));
        assert!(health.live().ok, "what is not ready is not dead");
        health.satisfied("caches");
        assert!(health.ready().ok);
    }

    #[test]
    fn a_watch_that_is_silent_for_three_limits_ends_the_process() {
        let health = Health::new(Duration::from_nanos(1));
        let watch = health.watch("pods");
        std::thread::sleep(Duration::from_millis(2));
        let report = health.live();
        assert!(!report.ok && report.missing["watch pods"].contains("no word"), "{report:?}");
        let patient = Health::new(Duration::from_secs(300));
        let other = patient.watch("pods");
        other.touch();
        assert!(patient.live().ok && patient.watch("pods").age() < Duration::from_secs(1));
        health.forget("pods");
        assert!(health.live().ok);
        drop(watch);
        health.fail("the lease thread died");
        assert!(!health.live().ok);
    }
}
