//! All watches, and the watchdog that builds those anew that have fallen silent.

use std::collections::BTreeMap;
use std::sync::Arc;

use kube::api::ListParams;
use serde_json::Value;
use tokio::task::JoinHandle;

use super::Caches;
use super::sources::Source;
use super::watch::{Limits, Task, follow};
use crate::health::{Health, WatchAge};
use crate::rest::{Rest, Verb};

/// All watches, and the watchdog over them.
pub struct Watches {
    caches: Arc<Caches>,
    rest: Rest,
    limits: Limits,
    health: Arc<Health>,
    running: BTreeMap<Source, (WatchAge, JoinHandle<()>)>,
}

impl Watches {
    /// None yet.
    pub fn new(caches: Arc<Caches>, rest: Rest, limits: Limits, health: Arc<Health>) -> Self {
        Self { caches, rest, limits, health, running: BTreeMap::new() }
    }

    /// Starts a watch unless it runs.
    pub fn start(&mut self, source: &Source) {
        if !self.running.contains_key(source) {
            let age = self.health.watch(&source.name());
            age.touch();
            let task = self.spawn(source, &age);
            self.running.insert(source.clone(), (age, task));
        }
    }

    /// Ends watches of kinds that are not served any more, and starts those of kinds that are.
    pub fn optional(&mut self, wanted: &[Source], fixed: &[Source]) {
        let unwanted: Vec<Source> =
            self.running.keys().filter(|s| !wanted.contains(s) && !fixed.contains(s)).cloned().collect();
        for source in unwanted {
            if let Some((_, task)) = self.running.remove(&source) {
                task.abort();
            }
            self.health.forget(&source.name());
            self.caches.forget(&source);
            tracing::info!(kind = source.name(), "not served any more: not watched");
        }
        for source in wanted {
            self.start(source);
        }
    }

    fn spawn(&self, source: &Source, age: &WatchAge) -> JoinHandle<()> {
        let task = Task {
            caches: self.caches.clone(),
            rest: self.rest.clone(),
            limits: self.limits,
            age: age.clone(),
        };
        tokio::spawn(follow(source.clone(), task))
    }

    /// One look of the watchdog: a source that has been silent for too long is probed with a list of one object; if
    /// that fails too, or the task has ended, the task is built anew.
    pub async fn look_after(&mut self) {
        let suspects: Vec<Source> = self
            .running
            .iter()
            .filter(|(_, (age, task))| task.is_finished() || age.age() > self.limits.stale)
            .map(|(source, _)| source.clone())
            .collect();
        for source in suspects {
            let params = ListParams { limit: Some(1), ..ListParams::default() };
            let alive = match kube::core::Request::new(source.path()).list(&params) {
                Ok(request) => self.rest.read::<Value>(Verb::List, &source.name(), request).await.is_ok(),
                Err(_) => false,
            };
            let Some((age, task)) = self.running.get(&source) else { continue };
            // Dead by the probe or not: it should have had a bookmark by now.
            tracing::warn!(
                kind = source.name(),
                age_seconds = age.age().as_secs(),
                list_answered = alive,
                "silent watch is built anew"
            );
            task.abort();
            let age = age.clone();
            let task = self.spawn(&source, &age);
            self.running.insert(source, (age, task));
        }
    }

    /// Ends all watches.
    pub fn stop(&mut self) {
        for (_, task) in self.running.values() {
            task.abort();
        }
    }
}
