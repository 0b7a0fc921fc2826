//! One task for each source: list everything, then follow the changes, for ever.
//!
//! Each task has its own back-off. A watch that brings neither an event nor a bookmark for a while is taken for dead and
//! made again; what it missed comes with the next events (same version) or with a list (version too old).
//! The watchdog looks at all of them from outside and builds tasks anew that do not even do that.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use deepinfer_crds::{DeepInferCluster, DeepInferPool, ExpertPlacement, Supernode};
use deepinfer_planner::Kind;
use futures_util::StreamExt;
use k8s_openapi::api::apps::v1::{ControllerRevision, Deployment};
use k8s_openapi::api::core::v1::{
    ConfigMap, PersistentVolumeClaim, PodTemplate, Secret, Service, ServiceAccount,
};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ListMeta;
use kube::api::{ListParams, WatchEvent, WatchParams};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::Caches;
use super::read::{Parsed, Seen, foreign, node, parsed, pod};
use super::sources::{Shelf, Source};
use crate::error::Error;
use crate::health::WatchAge;
use crate::rest::{Rest, Verb, transport};

/// Objects of one page of a list.
const PAGE: u32 = 500;
/// First and longest wait after a failure.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// A watch that lasted this long was a good one.
const GOOD: Duration = Duration::from_secs(10);
/// Failures of a watch in a row after which everything is listed again, whatever the server said.
const GIVE_UP: u32 = 5;

/// Limits of a watch.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The API server is asked to end a watch after this long.
    pub watch: Duration,
    /// A watch without event or bookmark for this long is dead.
    pub idle: Duration,
    /// A source without a word for this long is looked into by the watchdog.
    pub stale: Duration,
}

impl Limits {
    /// Bookmarks come once a minute; two that are missing are a dead connection.
    pub fn new(stale: Duration) -> Self {
        Self { watch: (stale * 4 / 5).max(Duration::from_secs(1)), idle: stale / 2, stale }
    }
}

/// Follows a source until it is told to stop.
pub fn follow(source: Source, task: Task) -> Pin<Box<dyn Future<Output = ()> + Send>> {
    macro_rules! ours {
        ($type:ty) => {{
            let of = source.clone();
            Box::pin(task.run::<Parsed<$type>>(source, move |item| parsed::<$type>(&of, item)))
        }};
    }
    match source.shelf {
        Shelf::Node => Box::pin(task.run(source, node)),
        Shelf::Kind(kind) => match kind {
            Kind::Cluster => ours!(DeepInferCluster),
            Kind::Pool => ours!(DeepInferPool),
            Kind::Supernode => ours!(Supernode),
            Kind::Placement => ours!(ExpertPlacement),
            Kind::ServiceAccount => ours!(ServiceAccount),
            Kind::Secret => ours!(Secret),
            Kind::ConfigMap => ours!(ConfigMap),
            Kind::ControllerRevision => ours!(ControllerRevision),
            Kind::NetworkPolicy => ours!(NetworkPolicy),
            Kind::Service => ours!(Service),
            Kind::Budget => ours!(PodDisruptionBudget),
            Kind::Deployment => ours!(Deployment),
            Kind::PodTemplate => ours!(PodTemplate),
            Kind::Claim => ours!(PersistentVolumeClaim),
            Kind::Pod => Box::pin(task.run(source, pod)),
            Kind::Gang | Kind::ComputeDomain => {
                let of = source.clone();
                Box::pin(task.run::<Value>(source, move |item| foreign(&of, item, kind)))
            }
        },
    }
}

/// What a task works with.
#[derive(Clone)]
pub struct Task {
    /// Where it puts what it sees.
    pub caches: Arc<Caches>,
    /// The API server.
    pub rest: Rest,
    /// Its limits.
    pub limits: Limits,
    /// Touched by each event and bookmark.
    pub age: WatchAge,
}

#[derive(Deserialize)]
struct Page<K> {
    metadata: ListMeta,
    items: Vec<K>,
}

/// Why a watch ended.
enum Ended {
    /// As it should: go on from here.
    Done(String),
    /// The version is too old: list again.
    Expired,
    Failed(Error, String),
}

impl Task {
    async fn run<K: DeserializeOwned + Clone + Send + 'static>(
        self,
        source: Source,
        read: impl Fn(K) -> Option<Seen> + Send,
    ) {
        let mut failures = 0;
        loop {
            let mut version = match self.list(&source, &read).await {
                Ok(version) => version,
                Err(error) => {
                    failures += 1;
                    self.back_off(&source, "list", &error, failures).await;
                    continue;
                }
            };
            let mut broken = 0;
            while broken < GIVE_UP {
                let begun = tokio::time::Instant::now();
                match self.watch(&source, version, &read).await {
                    Ended::Done(last) => version = last,
                    Ended::Expired => break,
                    Ended::Failed(error, last) => {
                        version = last;
                        if begun.elapsed() > GOOD {
                            broken = 0;
                        }
                        broken += 1;
                        self.back_off(&source, "watch", &error, broken).await;
                        continue;
                    }
                }
                (broken, failures) = (0, 0);
            }
        }
    }

    /// Puts everything into the caches; gives the version from which to follow.
    async fn list<K: DeserializeOwned>(
        &self,
        source: &Source,
        read: &impl Fn(K) -> Option<Seen>,
    ) -> Result<String, Error> {
        let mut seen = Vec::new();
        let mut token: Option<String> = None;
        let what = source.name();
        let version = loop {
            let params = ListParams {
                label_selector: source.selector().map(str::to_owned),
                limit: Some(PAGE),
                continue_token: token,
                ..ListParams::default()
            };
            let request = kube::core::Request::new(source.path()).list(&params).map_err(|error| {
                Error::Shape { verb: "list", what: what.clone(), message: error.to_string() }
            })?;
            let page: Page<K> = match self.rest.read(Verb::List, &what, request).await {
                Ok(page) => page,
                // The kind is not served (yet): it has no objects. The probe says what to do about it.
                Err(error) if error.is_missing() => {
                    self.caches.listed(source, 0, Vec::new());
                    self.age.touch();
                    return Err(error);
                }
                Err(error) => return Err(error),
            };
            seen.extend(page.items.into_iter().filter_map(read));
            token = page.metadata.continue_.filter(|token| !token.is_empty());
            if token.is_none() {
                break page.metadata.resource_version.unwrap_or_default();
            }
            self.age.touch();
        };
        let number = version.parse().unwrap_or(0);
        let list = seen.into_iter().map(|seen| (seen.key, seen.entry)).collect();
        self.caches.listed(source, number, list);
        self.age.touch();
        Ok(version)
    }

    async fn watch<K: DeserializeOwned + Clone + Send + 'static>(
        &self,
        source: &Source,
        mut version: String,
        read: &impl Fn(K) -> Option<Seen>,
    ) -> Ended {
        let what = source.name();
        let params = WatchParams {
            label_selector: source.selector().map(str::to_owned),
            timeout: Some(u32::try_from(self.limits.watch.as_secs()).unwrap_or(240)),
            ..WatchParams::default()
        };
        let request = match kube::core::Request::new(source.path()).watch(&params, &version) {
            Ok(request) => request,
            Err(error) => {
                let error = Error::Shape { verb: "watch", what, message: error.to_string() };
                return Ended::Failed(error, version);
            }
        };
        let late =
            |what: String| Error::TimedOut { verb: "watch", what, seconds: self.limits.idle.as_secs() };
        let opened = self.rest.client().request_events::<K>(request);
        let stream = match tokio::time::timeout(self.rest.deadline(), opened).await {
            Err(_) => return Ended::Failed(late(what), version),
            Ok(Err(error)) => return ended(&what, error, version),
            Ok(Ok(stream)) => stream,
        };
        let mut stream = std::pin::pin!(stream);
        loop {
            let event = match tokio::time::timeout(self.limits.idle, stream.next()).await {
                Err(_) => return Ended::Failed(late(what), version),
                Ok(None) => return Ended::Done(version),
                Ok(Some(Err(error))) => return ended(&what, error, version),
                Ok(Some(Ok(event))) => event,
            };
            self.age.touch();
            match event {
                WatchEvent::Added(item) | WatchEvent::Modified(item) => {
                    if let Some(seen) = read(item) {
                        version = seen.version.to_string();
                        self.caches.seen(source.shelf, &seen.key, seen.version, seen.entry);
                    }
                }
                WatchEvent::Deleted(item) => {
                    if let Some(seen) = read(item) {
                        version = seen.version.to_string();
                        self.caches.removed(source.shelf, &seen.key, &seen.uid);
                    }
                }
                WatchEvent::Bookmark(bookmark) => version = bookmark.metadata.resource_version,
                WatchEvent::Error(status) => {
                    return ended(&what, kube::Error::Api(status), version);
                }
            }
        }
    }

    async fn back_off(&self, source: &Source, verb: &str, error: &Error, failures: u32) {
        let wait = back_off(failures, salt());
        // A kind that is not there is the probe's business; a first failure heals by itself most of the time.
        let quiet = failures <= 1 || error.is_missing();
        let (kind, seconds, class) = (source.name(), wait.as_secs_f64(), error.class().as_str());
        if quiet {
            tracing::debug!(kind, verb, err = %error, err_class = class, retry_seconds = seconds, "watch");
        } else {
            tracing::warn!(kind, verb, err = %error, err_class = class, retry_seconds = seconds, "watch");
        }
        tokio::time::sleep(wait).await;
    }
}

fn ended(what: &str, error: kube::Error, version: String) -> Ended {
    match error {
        kube::Error::Api(status) if status.code == 410 => Ended::Expired,
        kube::Error::Api(status) => {
            let answer = crate::error::Answer {
                code: status.code,
                reason: status.reason.clone(),
                message: status.message.clone(),
                retry_after: None,
            };
            Ended::Failed(Error::Answered { verb: "watch", what: what.to_owned(), answer }, version)
        }
        other => Ended::Failed(transport(Verb::List, what, other), version),
    }
}

/// 1 s, 2 s, ... 30 s, and up to half as much again, so that many watches do not come back together.
fn back_off(failures: u32, salt: u64) -> Duration {
    let base = BACKOFF.0.saturating_mul(1 << failures.saturating_sub(1).min(10)).min(BACKOFF.1);
    let spread = u64::try_from(base.as_millis() / 2).unwrap_or(1).max(1);
    base + Duration::from_millis(salt % spread)
}

fn salt() -> u64 {
    let mut bytes = [0; 8];
    // Without randomness the watches come back together, which is a pity and no more.
    let _ = getrandom::fill(&mut bytes);
    u64::from_le_bytes(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_from_one_second_to_thirty_and_differ() {
        let waits: Vec<u64> = (1..=8).map(|failures| back_off(failures, 0).as_secs()).collect();
        assert_eq!(waits, [1, 2, 4, 8, 16, 30, 30, 30]);
        assert!(
            back_off(8, 14_999) < Duration::from_secs(45) && back_off(1, 499) < Duration::from_millis(1500)
        );
    }
}
