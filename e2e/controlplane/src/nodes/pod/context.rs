//! What everything that works on one pod shares.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, ResourceExt as _};
use serde_json::json;
use tokio::sync::{Mutex as AsyncMutex, watch};
use tokio::time::Instant;

use super::super::calls::within;
use super::super::node::{Link, Node};
use super::super::process::Place;
use super::super::shared::Shared;
use super::env::Surroundings;
use super::fields::Addresses;
use super::publish::Published;
use super::view::{View, views};
use super::volumes::Folders;
use crate::network::PodNetwork;

/// The pod as the API server last showed it.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    pub pod: Arc<Pod>,
    /// The object is no longer there.
    pub gone: bool,
}

impl Seen {
    /// Whether the pod has to end.
    pub(crate) fn leaving(&self) -> bool {
        self.gone || self.pod.metadata.deletion_timestamp.is_some()
    }

    /// How long its containers may take to end.
    pub(crate) fn grace(&self) -> Duration {
        if self.gone {
            return Duration::ZERO;
        }
        let spec = self.pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds);
        let grace = self.pod.metadata.deletion_grace_period_seconds.or(spec).unwrap_or(30);
        Duration::from_secs(u64::try_from(grace).unwrap_or(0))
    }
}

/// One pod on one node.
pub(crate) struct Context {
    pub shared: Arc<Shared>,
    pub node: Arc<Node>,
    pub namespace: String,
    pub name: String,
    pub uid: String,
    /// Volumes and working folders; gone with the pod.
    pub folder: PathBuf,
    /// Logs; they stay until the nodes stop.
    pub logs: PathBuf,
    pub network: PodNetwork,
    /// The pod's own address, as text.
    pub address: String,
    pub began: Timestamp,
    pub seen: watch::Receiver<Seen>,
    pub board: watch::Sender<Vec<View>>,
    pub folders: Mutex<Folders>,
    pub cable_cut: AtomicBool,
    /// Nothing of the pod runs, nor will again.
    pub over: AtomicBool,
    pub published: AsyncMutex<Published>,
    tokens: AsyncMutex<BTreeMap<String, (Instant, String)>>,
}

impl Context {
    /// Gives a pod its address and folders. Nothing runs yet.
    pub(crate) async fn new(
        shared: Arc<Shared>,
        node: Arc<Node>,
        seen: watch::Receiver<Seen>,
    ) -> anyhow::Result<Context> {
        let pod = seen.borrow().pod.clone();
        let namespace = pod.namespace().unwrap_or_default();
        let (name, uid) = (pod.name_any(), pod.uid().unwrap_or_default());
        let folder = shared.root().join("pods").join(&uid);
        let logs = shared.root().join("logs").join(format!("{namespace}_{name}_{uid}"));
        std::fs::create_dir_all(&folder)?;
        std::fs::create_dir_all(&logs)?;
        let network = shared.network.attach(&shared.options.hosts).await?;
        let began = pod.status.as_ref().and_then(|status| status.start_time.as_ref());
        Ok(Context {
            began: began.map_or_else(Timestamp::now, |time| time.0),
            board: watch::Sender::new(views(&pod)),
            address: network.address.to_string(),
            published: AsyncMutex::new(Published::of(&pod)),
            folders: Mutex::new(Folders::new()),
            cable_cut: AtomicBool::new(false),
            over: AtomicBool::new(false),
            tokens: AsyncMutex::new(BTreeMap::new()),
            shared,
            node,
            namespace,
            name,
            uid,
            folder,
            logs,
            network,
            seen,
        })
    }

    /// The pod as it is now.
    pub(crate) fn pod(&self) -> Arc<Pod> {
        self.seen.borrow().pod.clone()
    }

    /// The client for this pod's namespace.
    pub(crate) fn api(&self) -> Api<Pod> {
        Api::namespaced(self.shared.client.clone(), &self.namespace)
    }

    /// What environment and files are made from.
    pub(crate) fn surroundings<'a>(&'a self, pod: &'a Pod) -> Surroundings<'a> {
        Surroundings {
            pod,
            namespace: &self.namespace,
            addresses: Addresses { pod: &self.address, host: &self.shared.host },
            sources: &self.shared.sources,
        }
    }

    /// Where the processes of this pod run.
    pub(crate) fn place(&self) -> Place<'_> {
        let namespace = self.network.namespace.as_deref();
        Place { namespace, folder: &self.folder, groups: &self.shared.groups }
    }

    /// Changes what is known about one container.
    pub(crate) fn update(&self, index: usize, change: impl FnOnce(&mut View)) {
        self.board.send_modify(|views| {
            if let Some(view) = views.get_mut(index) {
                change(view);
            }
        });
    }

    /// The log of one run of a container.
    pub(crate) fn log(&self, container: &str, run: i32) -> PathBuf {
        self.logs.join(format!("{container}.{run}.log"))
    }

    /// Whether probes can say nothing now, because the cable or the machine is cut by the test. The kubelet of a real
    /// node is beside its pods and would still reach them.
    pub(crate) fn probes_hold(&self) -> bool {
        self.cable_cut.load(Ordering::Relaxed) || *self.node.link.borrow() != Link::On
    }

    /// Waits until the pod has to end.
    pub(crate) async fn leaving(&self) {
        // The sender lives in the node's table as long as this pod's task; without it there is nothing to wait for.
        self.seen.clone().wait_for(Seen::leaving).await.ok();
    }

    /// The folders of the volumes, once they are made.
    pub(crate) fn folders(&self) -> Folders {
        self.folders.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// A token of the pod's service account, renewed when four fifths of its life are over.
    pub(crate) async fn token(
        &self,
        pod: &Pod,
        audience: Option<&str>,
        lifetime: Duration,
    ) -> anyhow::Result<String> {
        let mut tokens = self.tokens.lock().await;
        let key = audience.unwrap_or_default().to_owned();
        if let Some((until, token)) = tokens.get(&key).filter(|(until, _)| Instant::now() < *until) {
            tracing::trace!(?until, "token kept");
            return Ok(token.clone());
        }
        let account = pod.spec.as_ref().and_then(|spec| spec.service_account_name.as_deref());
        let account = (self.namespace.as_str(), account.unwrap_or("default"));
        let token = self.shared.sources.token(account, (&self.name, &self.uid), audience, lifetime).await?;
        tokens.insert(key, (Instant::now() + lifetime * 4 / 5, token.clone()));
        Ok(token)
    }

    /// Tells people of a trouble, as an event of the pod. Best effort, and nobody waits for it.
    pub(crate) fn warn(&self, reason: &str, message: &str) {
        let now = Timestamp::now();
        let event = json!({
            "metadata": { "generateName": format!("{}.", self.name), "namespace": self.namespace },
            "involvedObject": {
                "apiVersion": "v1", "kind": "Pod", "name": self.name, "namespace": self.namespace, "uid": self.uid,
            },
            "reason": reason, "message": message, "type": "Warning",
            "source": { "component": "process-node", "host": self.node.spec.name },
            "firstTimestamp": format!("{now:.0}"), "lastTimestamp": format!("{now:.0}"), "count": 1,
        });
        let api = Api::namespaced(self.shared.client.clone(), &self.namespace);
        let event = serde_json::from_value::<k8s_openapi::api::core::v1::Event>(event);
        let event = event.expect("an event of the shape above");
        tokio::spawn(async move {
            if let Err(error) = within(api.create(&PostParams::default(), &event)).await {
                tracing::debug!(%error, reason = event.reason, "an event was not written");
            }
        });
    }
}
