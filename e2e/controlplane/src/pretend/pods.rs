//! The pods that agents are pretended for, followed by a watch of their metadata.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use deepinfer_crds::names::label;
use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::api::PartialObjectMeta;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Client, ResourceExt};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Pause before a broken watch is made again.
const PAUSE: Duration = Duration::from_millis(500);

/// What is known of a pod and what its agent has been told.
#[derive(Clone, Debug)]
pub(super) struct PodState {
    pub(super) namespace: String,
    pub(super) uid: String,
    pub(super) labels: BTreeMap<String, String>,
    /// First call.
    pub(super) since: Option<Instant>,
    /// When its drain began, and its deadline.
    pub(super) drain: Option<(Instant, Duration)>,
}

impl PodState {
    pub(super) fn label(&self, name: &str) -> Option<&str> {
        self.labels.get(name).map(String::as_str)
    }
}

/// Pods by name.
#[derive(Clone, Default)]
pub(super) struct Pods(Arc<Mutex<BTreeMap<String, PodState>>>);

impl Pods {
    pub(super) fn lock(&self) -> MutexGuard<'_, BTreeMap<String, PodState>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Follows all pods of clusters until it is stopped.
    pub(super) async fn follow(self, client: Client, stop: CancellationToken) {
        let api: Api<PartialObjectMeta<Pod>> = Api::all(client);
        let config = watcher::Config::default().labels(label::CLUSTER);
        let mut watch = std::pin::pin!(watcher::watcher(api, config));
        let mut listed: Vec<String> = Vec::new();
        loop {
            let event = tokio::select! {
                () = stop.cancelled() => return,
                event = watch.next() => event,
            };
            match event {
                Some(Ok(Event::Init)) => listed.clear(),
                Some(Ok(Event::InitApply(pod))) => {
                    listed.push(pod.name_any());
                    self.put(pod);
                }
                Some(Ok(Event::InitDone)) => {
                    listed.sort_unstable();
                    self.lock().retain(|name, _| listed.binary_search(name).is_ok());
                }
                Some(Ok(Event::Apply(pod))) => self.put(pod),
                Some(Ok(Event::Delete(pod))) => {
                    let uid = pod.uid();
                    self.lock()
                        .retain(|name, known| *name != pod.name_any() || Some(&known.uid) != uid.as_ref());
                }
                Some(Err(error)) => {
                    tracing::debug!(%error, "the pretend agents' watch of pods");
                    tokio::time::sleep(PAUSE).await;
                }
                None => return,
            }
        }
    }

    fn put(&self, pod: PartialObjectMeta<Pod>) {
        let uid = pod.uid().unwrap_or_default();
        let mut pods = self.lock();
        let known = pods.entry(pod.name_any()).or_insert_with(|| PodState {
            namespace: pod.namespace().unwrap_or_default(),
            uid: uid.clone(),
            labels: BTreeMap::new(),
            since: None,
            drain: None,
        });
        if known.uid != uid {
            (known.since, known.drain, known.uid) = (None, None, uid);
        }
        known.labels = pod.metadata.labels.unwrap_or_default();
    }
}
