//! One node: its object, its lease, its status, and a worker for each pod that is bound to it.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, ResourceExt as _};
use tokio::sync::{Notify, watch};
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::calls::{Soon, within};
use super::devices::Devices;
use super::options::NodeSpec;
use super::pod::context::{Context, Seen};
use super::pod::worker::work;
use super::register::{post_status, register, renew_lease};
use super::shared::Shared;

/// How often the status of a node is written though nothing changed.
const STATUS_PERIOD: Duration = Duration::from_secs(60);

/// After a call that failed.
const AGAIN: Duration = Duration::from_millis(500);

/// How a node is connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Link {
    /// All is well.
    On,
    /// It runs, but nobody hears of it.
    Cut,
    /// It has no power.
    Off,
}

/// A pod and those who work on it.
struct Resident {
    seen: watch::Sender<Seen>,
    /// Set once the pod has an address.
    context: Option<Arc<Context>>,
    off: CancellationToken,
    task: Option<JoinHandle<()>>,
}

/// A node and its pods.
pub(crate) struct Node {
    pub spec: NodeSpec,
    pub link: watch::Sender<Link>,
    /// Changes with every boot.
    pub boot: Mutex<u32>,
    devices: Mutex<Devices>,
    residents: Mutex<HashMap<String, Resident>>,
    pub changed: Notify,
    task: Mutex<Option<AbortHandle>>,
}

impl Node {
    pub(crate) fn new(spec: NodeSpec) -> Self {
        Node {
            devices: Mutex::new(Devices::new(&spec.allocatable)),
            spec,
            link: watch::Sender::new(Link::On),
            boot: Mutex::new(1),
            residents: Mutex::default(),
            changed: Notify::new(),
            task: Mutex::default(),
        }
    }

    /// Remembers the task that runs this node, so that it can be ended.
    pub(crate) fn attach(&self, task: AbortHandle) {
        *self.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(task);
    }

    /// Ends the task of this node. Its pods go on.
    pub(crate) fn abort(&self) {
        if let Some(task) = self.task.lock().unwrap_or_else(PoisonError::into_inner).take() {
            task.abort();
        }
    }

    pub(crate) fn devices(&self) -> MutexGuard<'_, Devices> {
        self.devices.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn residents(&self) -> MutexGuard<'_, HashMap<String, Resident>> {
        self.residents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All pods that have an address.
    pub(crate) fn contexts(&self) -> Vec<Arc<Context>> {
        self.residents().values().filter_map(|resident| resident.context.clone()).collect()
    }

    /// Takes all power: processes are killed, nothing is told to anybody. Returns when nothing runs any more.
    pub(crate) async fn clear(&self) {
        let all: Vec<_> = self.residents().drain().map(|(_, resident)| resident).collect();
        for resident in &all {
            resident.off.cancel();
        }
        for task in all.into_iter().filter_map(|resident| resident.task) {
            // A task that failed has dropped its processes too.
            task.await.ok();
        }
    }

    /// Ends the tasks of all pods without waiting.
    pub(crate) fn drop_all(&self) {
        self.abort();
        for (_, resident) in self.residents().drain() {
            resident.off.cancel();
            resident.task.inspect(JoinHandle::abort);
        }
    }
}

/// Runs a node while it has power and link, for as long as it exists.
pub(crate) async fn run(node: Arc<Node>, shared: Arc<Shared>) {
    let mut link = node.link.subscribe();
    loop {
        if link.wait_for(|link| *link == Link::On).await.is_err() {
            return;
        }
        tokio::select! {
            () = connected(&node, &shared) => {}
            _ = link.wait_for(|link| *link != Link::On) => {}
        }
    }
}

async fn connected(node: &Arc<Node>, shared: &Arc<Shared>) {
    while let Err(error) = within(register(node, shared)).await {
        tracing::debug!(%error, node = node.spec.name, "a node was not registered");
        sleep(AGAIN).await;
    }
    tokio::join!(keep_lease(node, shared), keep_status(node, shared), watch_pods(node, shared));
}

async fn keep_lease(node: &Node, shared: &Shared) {
    loop {
        let pause = match within(renew_lease(node, shared)).await {
            Ok(()) => shared.options.lease_period,
            Err(error) => {
                tracing::debug!(%error, node = node.spec.name, "a lease was not renewed");
                AGAIN
            }
        };
        sleep(pause).await;
    }
}

async fn keep_status(node: &Node, shared: &Shared) {
    loop {
        let pause = match within(post_status(node, shared)).await {
            Ok(()) => STATUS_PERIOD,
            Err(error) => {
                tracing::debug!(%error, node = node.spec.name, "a node status was not written");
                AGAIN
            }
        };
        tokio::select! {
            () = sleep(pause) => {}
            () = node.changed.notified() => {}
        }
    }
}

async fn watch_pods(node: &Arc<Node>, shared: &Arc<Shared>) {
    let bound = watcher::Config::default().fields(&format!("spec.nodeName={}", node.spec.name));
    let stream = watcher(Api::<Pod>::all(shared.client.clone()), bound).backoff(Soon);
    let mut stream = std::pin::pin!(stream);
    let mut listed: Option<BTreeMap<String, Pod>> = None;
    while let Some(event) = stream.next().await {
        match event {
            Ok(watcher::Event::Init) => listed = Some(BTreeMap::new()),
            Ok(watcher::Event::InitApply(pod)) => {
                listed.get_or_insert_default().insert(pod.uid().unwrap_or_default(), pod);
            }
            Ok(watcher::Event::InitDone) => {
                let listed = listed.take().unwrap_or_default();
                let missing: Vec<_> =
                    node.residents().keys().filter(|uid| !listed.contains_key(*uid)).cloned().collect();
                missing.iter().for_each(|uid| gone(node, uid));
                listed.into_values().for_each(|pod| see(node, shared, pod));
            }
            Ok(watcher::Event::Apply(pod)) => see(node, shared, pod),
            Ok(watcher::Event::Delete(pod)) => gone(node, &pod.uid().unwrap_or_default()),
            Err(error) => tracing::debug!(%error, node = node.spec.name, "watch of pods"),
        }
    }
}

/// Tells the worker of a pod what the server shows now; a new pod gets a worker.
fn see(node: &Arc<Node>, shared: &Arc<Shared>, pod: Pod) {
    let uid = pod.uid().unwrap_or_default();
    let seen = Seen { pod: Arc::new(pod), gone: false };
    let mut residents = node.residents();
    if let Some(resident) = residents.get(&uid) {
        resident.seen.send_replace(seen);
        return;
    }
    let (sender, receiver) = watch::channel(seen);
    let off = CancellationToken::new();
    let task = tokio::spawn(settle(node.clone(), shared.clone(), receiver, uid.clone(), off.clone()));
    residents.insert(uid, Resident { seen: sender, context: None, off, task: Some(task) });
}

fn gone(node: &Node, uid: &str) {
    if let Some(resident) = node.residents().get(uid) {
        resident.seen.send_modify(|seen| seen.gone = true);
    }
}

/// Gives a pod its address and works on it to the end.
async fn settle(
    node: Arc<Node>,
    shared: Arc<Shared>,
    seen: watch::Receiver<Seen>,
    uid: String,
    off: CancellationToken,
) {
    let name = seen.borrow().pod.name_any();
    let context = loop {
        match Context::new(shared.clone(), node.clone(), seen.clone()).await {
            Ok(context) => break Arc::new(context),
            Err(error) => tracing::warn!(error = format!("{error:#}"), pod = name, "a pod gets no place"),
        }
        tokio::select! {
            () = sleep(AGAIN) => {}
            () = off.cancelled() => return,
        }
    };
    shared.note_logs(&context);
    if let Some(resident) = node.residents().get_mut(&uid) {
        resident.context = Some(context.clone());
    }
    work(context, off.clone()).await;
    // When the node went off, another pod task may own the entry by now.
    if !off.is_cancelled() {
        node.residents().remove(&uid);
    }
}
