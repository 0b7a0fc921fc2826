//! How the following goes: for metrics and status. Cheap to clone.

use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use deepinfer_protocol::Generation;

/// See the module.
#[derive(Clone, Debug)]
pub struct FleetProbe(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    generation: AtomicU64,
    heard: Mutex<Instant>,
    failures: AtomicU64,
    refused: AtomicU64,
    ledger_failures: AtomicU64,
}

/// At one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FleetHealth {
    /// Of the view that is followed; 0 without one.
    pub generation: Generation,
    /// Since the operator last confirmed it, or since the start.
    pub age: Duration,
    /// Questions without an answer that could be used.
    pub failures: u64,
    /// Of these, views that were refused: older ones, and those of other clusters.
    pub refused: u64,
    /// Views that could not be kept in the ledger.
    pub ledger_failures: u64,
}

impl FleetProbe {
    pub(super) fn new(generation: Generation) -> Self {
        Self(Arc::new(Inner {
            generation: AtomicU64::new(generation.0),
            heard: Mutex::new(Instant::now()),
            failures: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            ledger_failures: AtomicU64::new(0),
        }))
    }

    pub(super) fn followed(&self, generation: Generation) {
        self.0.generation.store(generation.0, Ordering::Relaxed);
    }

    pub(super) fn heard(&self) {
        *self.0.heard.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    pub(super) fn failed(&self, refused: bool) {
        self.0.failures.fetch_add(1, Ordering::Relaxed);
        self.0.refused.fetch_add(u64::from(refused), Ordering::Relaxed);
    }

    pub(super) fn ledger_written(&self, written: bool) {
        self.0.ledger_failures.fetch_add(u64::from(!written), Ordering::Relaxed);
    }

    /// How it goes now.
    pub fn health(&self) -> FleetHealth {
        let inner = &self.0;
        FleetHealth {
            generation: Generation(inner.generation.load(Ordering::Relaxed)),
            age: inner.heard.lock().unwrap_or_else(PoisonError::into_inner).elapsed(),
            failures: inner.failures.load(Ordering::Relaxed),
            refused: inner.refused.load(Ordering::Relaxed),
            ledger_failures: inner.ledger_failures.load(Ordering::Relaxed),
        }
    }

    /// Metric families in the OpenMetrics format, to stand before others; no end mark.
    pub fn families(&self, pod: &str) -> String {
        let FleetHealth { generation, age, failures, refused, ledger_failures } = self.health();
        let mut text = String::new();
        let mut family = |name: &str, kind: &str, help: &str, value: f64| {
            let suffix = if kind == "counter" { "_total" } else { "" };
            // Writing to a string does not fail.
            let _ = writeln!(
                text,
                "# HELP {name} {help}.\n# TYPE {name} {kind}\n{name}{suffix}{{pod=\"{pod}\"}} {value}"
            );
        };
        family("deepinfer_fleet_generation", "gauge", "FleetView that is followed", generation.0 as f64);
        let help = "Time since the operator last confirmed the FleetView";
        family("deepinfer_fleet_age_seconds", "gauge", help, age.as_secs_f64());
        let help = "Questions to the operator without a usable answer";
        family("deepinfer_fleet_failures", "counter", help, failures as f64);
        let help = "Fleet views that were older or of another cluster";
        family("deepinfer_fleet_refused_views", "counter", help, refused as f64);
        let help = "Fleet views that could not be kept on disk";
        family("deepinfer_fleet_ledger_failures", "counter", help, ledger_failures as f64);
        text
    }
}
