//! The FleetView for gateways and agents, by long-poll, from every replica of the operator:
//! `GET /v1/fleet/{namespace}/{cluster}?after=<generation>&waitSeconds=<n>`.
//!
//! | answer | when |
//! | --- | --- |
//! | 200 with the view | its generation is higher than `after` |
//! | 204 | nothing newer within the wait |
//! | 401 | not signed with the cluster's key |
//! | 404 | no such cluster, or its object was deleted meanwhile |
//! | 503 | the views are not known yet, this replica stops, or too many wait here: ask another |
//!
//! Invariants: a generation never goes down for one cluster object; a view is made into JSON once, however many wait for
//! it; nothing is said of a cluster to a caller without its key but whether it exists.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use deepinfer_protocol::fleet::FleetView;
use deepinfer_transport::{ClusterKey, control_auth};
use http::header::{AUTHORIZATION, HeaderValue, RETRY_AFTER};
use http::{Method, Request, StatusCode};
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};
use tokio_util::sync::CancellationToken;

use crate::keys::{ClusterRef, Keys};
use crate::metrics::Metrics;
use crate::serve::{self, Answer};

/// Longest wait; a longer one is cut, which the caller sees as a 204.
const MAX_WAIT: Duration = Duration::from_secs(60);
/// When to come back after a 503, in seconds.
const COME_BACK: &str = "2";
/// Connections beside those that wait: callers that are just answered.
const SPARE_CONNECTIONS: usize = 1024;

/// A view as it is sent.
#[derive(Clone, Debug)]
struct Published {
    generation: u64,
    body: Bytes,
}

#[derive(Debug)]
struct Entry {
    uid: String,
    key: ClusterKey,
    view: watch::Sender<Published>,
}

/// The views of all clusters.
#[derive(Debug)]
pub struct FleetTable {
    keys: Arc<Keys>,
    /// By namespace and name.
    clusters: RwLock<BTreeMap<(String, String), Entry>>,
    synced: AtomicBool,
    waiters: Semaphore,
    most: usize,
    metrics: Arc<Metrics>,
}

impl FleetTable {
    /// Empty, and not synced; at most `waiters` may wait at once.
    pub fn new(keys: Arc<Keys>, waiters: usize, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self {
            keys,
            clusters: RwLock::default(),
            synced: AtomicBool::new(false),
            waiters: Semaphore::new(waiters),
            most: waiters,
            metrics,
        })
    }

    /// All committed views have been set once: from now on a cluster that is not here does not exist.
    pub fn synced(&self) {
        self.synced.store(true, Ordering::Release);
    }

    /// The view of a cluster. A lower generation than the present one of the same object is not taken: events may come
    /// after what this replica wrote itself.
    pub fn set(&self, cluster: &ClusterRef, view: &FleetView) {
        let name = (cluster.namespace.clone(), cluster.name.clone());
        let mut clusters = self.clusters.write().unwrap_or_else(PoisonError::into_inner);
        let present = clusters.get(&name).filter(|entry| entry.uid == cluster.uid);
        if present.is_some_and(|entry| view.generation.0 <= entry.view.borrow().generation) {
            return;
        }
        let body = match serde_json::to_vec(view) {
            Ok(body) => Bytes::from(body),
            Err(error) => {
                tracing::error!(%cluster, err = %error, "a FleetView cannot be written as JSON");
                return;
            }
        };
        let published = Published { generation: view.generation.0, body };
        if let Some(entry) = present {
            // Nobody may be waiting; the value is kept all the same.
            entry.view.send_replace(published);
            return;
        }
        let entry = Entry {
            uid: cluster.uid.clone(),
            key: self.keys.cluster(&cluster.uid),
            view: watch::Sender::new(published),
        };
        clusters.insert(name, entry);
    }

    /// The cluster is gone; who waits is told.
    pub fn remove(&self, namespace: &str, name: &str) {
        let mut clusters = self.clusters.write().unwrap_or_else(PoisonError::into_inner);
        clusters.remove(&(namespace.to_owned(), name.to_owned()));
    }

    /// Generation that is served of a cluster.
    pub fn generation(&self, namespace: &str, name: &str) -> Option<u64> {
        let clusters = self.clusters.read().unwrap_or_else(PoisonError::into_inner);
        clusters.get(&(namespace.to_owned(), name.to_owned())).map(|entry| entry.view.borrow().generation)
    }

    /// What a signed caller may follow.
    fn open(
        &self,
        path: &str,
        authorization: Option<&str>,
    ) -> Result<watch::Receiver<Published>, Box<Answer>> {
        let name = path.strip_prefix("/v1/fleet/").and_then(|rest| rest.split_once('/'));
        let Some((namespace, cluster)) = name else {
            return Err(Box::new(refuse(StatusCode::NOT_FOUND, "only /v1/fleet/NAMESPACE/CLUSTER is here")));
        };
        if !self.synced.load(Ordering::Acquire) {
            return Err(Box::new(later("the FleetViews are not known yet; ask another replica")));
        }
        let clusters = self.clusters.read().unwrap_or_else(PoisonError::into_inner);
        let Some(entry) = clusters.get(&(namespace.to_owned(), cluster.to_owned())) else {
            return Err(Box::new(refuse(StatusCode::NOT_FOUND, "no such cluster")));
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        match control_auth::check(&entry.key, now, "GET", path, authorization) {
            Ok(()) => Ok(entry.view.subscribe()),
            Err(why) => Err(Box::new(refuse(StatusCode::UNAUTHORIZED, why))),
        }
    }

    async fn answer<B>(&self, request: &Request<B>, stop: &CancellationToken) -> Answer {
        if request.method() != Method::GET {
            return refuse(StatusCode::METHOD_NOT_ALLOWED, "only GET is here");
        }
        let asked = match Asked::of(request.uri().query().unwrap_or("")) {
            Ok(asked) => asked,
            Err(why) => return refuse(StatusCode::BAD_REQUEST, &why),
        };
        let authorization = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let mut view = match self.open(request.uri().path(), authorization) {
            Ok(view) => view,
            Err(answer) => return *answer,
        };
        if let Some(answer) = newer(&view.borrow(), asked.after) {
            return answer;
        }
        if asked.wait.is_zero() {
            return nothing_new();
        }
        let Ok(place) = self.waiters.try_acquire() else {
            return later("too many wait here; ask another replica");
        };
        self.count();
        let newer_than = |published: &Published| published.generation > asked.after;
        let answer = tokio::select! {
            changed = view.wait_for(newer_than) => match changed {
                Ok(published) => newer(&published, asked.after).unwrap_or_else(nothing_new),
                Err(_) => refuse(StatusCode::NOT_FOUND, "the cluster was deleted"),
            },
            () = tokio::time::sleep(asked.wait) => nothing_new(),
            () = stop.cancelled() => later("this replica stops; ask another"),
        };
        drop(place);
        self.count();
        answer
    }

    /// Callers that wait now.
    pub fn waiting(&self) -> usize {
        self.most.saturating_sub(self.waiters.available_permits())
    }

    fn count(&self) {
        self.metrics.fleet_waiters(self.waiting());
    }
}

/// Serves until stopped.
pub async fn serve(listener: TcpListener, table: Arc<FleetTable>, stop: CancellationToken) {
    let most = table.most + SPARE_CONNECTIONS;
    let stopped = stop.clone();
    serve::serve(listener, most, stop, move |request| {
        let (table, stop) = (Arc::clone(&table), stopped.clone());
        async move { table.answer(&request, &stop).await }
    })
    .await;
}

/// The query of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Asked {
    after: u64,
    wait: Duration,
}

impl Asked {
    fn of(query: &str) -> Result<Self, String> {
        let mut asked = Self { after: 0, wait: Duration::ZERO };
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let number = || value.parse::<u64>().map_err(|_| format!("{name}: {value:?} is not a number"));
            match name {
                "after" => asked.after = number()?,
                "waitSeconds" => asked.wait = Duration::from_secs(number()?).min(MAX_WAIT),
                // A newer client may say more.
                _ => {}
            }
        }
        Ok(asked)
    }
}

/// The view if it is newer. Generation 0 is a view that was never planned: nobody gets it.
fn newer(published: &Published, after: u64) -> Option<Answer> {
    (published.generation > after)
        .then(|| serve::text(StatusCode::OK, "application/json", published.body.clone()))
}

fn nothing_new() -> Answer {
    let mut answer = Answer::default();
    *answer.status_mut() = StatusCode::NO_CONTENT;
    answer
}

fn later(error: &str) -> Answer {
    let mut answer = refuse(StatusCode::SERVICE_UNAVAILABLE, error);
    answer.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static(COME_BACK));
    answer
}

#[derive(Serialize)]
struct Refusal<'a> {
    error: &'a str,
}

fn refuse(status: StatusCode, error: &str) -> Answer {
    serve::json(status, &Refusal { error })
}

#[cfg(test)]
mod tests {
    use deepinfer_protocol::Generation;

    use super::*;

    fn table() -> Arc<FleetTable> {
        FleetTable::new(Arc::new(Keys::new([1; 32])), 10, Metrics::new("1"))
    }

    fn cluster(uid: &str) -> ClusterRef {
        ClusterRef { namespace: "ns".into(), name: "c".into(), uid: uid.into() }
    }

    fn view(generation: u64) -> FleetView {
        FleetView { generation: Generation(generation), ..FleetView::default() }
    }

    #[test]
    fn a_generation_never_goes_down_but_a_new_object_of_the_name_starts_anew() {
        let table = table();
        table.set(&cluster("u1"), &view(5));
        table.set(&cluster("u1"), &view(4));
        assert_eq!(table.generation("ns", "c"), Some(5));
        table.set(&cluster("u1"), &view(6));
        assert_eq!(table.generation("ns", "c"), Some(6));
        table.set(&cluster("u2"), &view(1));
        assert_eq!(table.generation("ns", "c"), Some(1));
        table.remove("ns", "c");
        assert_eq!(table.generation("ns", "c"), None);
    }

    #[test]
    fn a_query_is_read_and_nonsense_is_named() {
        let asked = Asked::of("after=7&waitSeconds=900&more=x").unwrap();
        assert_eq!(asked, Asked { after: 7, wait: MAX_WAIT });
        assert_eq!(Asked::of("").unwrap(), Asked { after: 0, wait: Duration::ZERO });
        assert!(Asked::of("after=x").unwrap_err().contains("after"));
    }
}
