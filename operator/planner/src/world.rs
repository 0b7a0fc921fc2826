//! Everything a plan may look at, at one moment: the only door in.

use std::collections::BTreeMap;
use std::sync::Arc;

use deepinfer_crds::{DeepInferCluster, DeepInferPool, ExpertPlacement, Supernode};
use deepinfer_protocol::AgentId;
use deepinfer_protocol::agent_status::AgentStatus;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;

use crate::blueprint::Blueprint;
use crate::nodes::{Apis, Nodes};
use crate::object::{Key, Kind, Object};

/// What is known of the model's files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ModelState {
    /// Not looked at yet.
    #[default]
    Unknown,
    /// There and whole.
    Ready {
        /// Digest of config, index and headers.
        digest: String,
    },
    /// Not usable.
    Failed {
        /// `SourceUnreachable`, `ChecksumMismatch`, `CredentialsMissing`.
        reason: String,
        /// For people, with the path.
        message: String,
    },
}

/// An agent as the driver last heard of it.
#[derive(Clone, Debug, PartialEq)]
pub struct AgentWord {
    /// Its data port.
    pub data: std::net::SocketAddr,
    /// Its control port.
    pub control: std::net::SocketAddr,
    /// Its words; `None` while it does not answer.
    pub status: Option<AgentStatus>,
    /// When it last answered, in seconds of `World::now`.
    pub heard: i64,
    /// Since when its questions have no answer; `None` while the last one had one. Not the same as the time since it was
    /// heard: most agents are asked less often than silence takes to mean something.
    pub silent_since: Option<i64>,
}

/// The last write of an object that the API server refused for a reason that a retry does not heal soon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// `QuotaExceeded`, `NameCollision`, `Denied`, `Invalid`.
    pub reason: String,
    /// What the API server said.
    pub message: String,
    /// When, in seconds since 1970.
    pub at: i64,
}

/// One cluster object with its children, at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct World {
    /// Namespace that everything lives in.
    pub namespace: String,
    /// All objects, the cluster's own among them.
    pub objects: BTreeMap<Key, Object>,
    /// Last words of agents, by pod name.
    pub agents: BTreeMap<AgentId, AgentWord>,
    /// The model's files, where the driver can look at them (local mode); in a cluster agents tell.
    pub model: ModelState,
    /// Nodes and what runs on them; shared by the worlds of all clusters.
    pub nodes: Arc<Nodes>,
    /// What the API server offers.
    pub apis: Apis,
    /// The namespace is being deleted: nothing can be created, drains are skipped.
    pub namespace_terminating: bool,
    /// The CRDs are older than this operator needs, and what to do about it: nothing is written but status.
    pub skew: Option<String>,
    /// Writes that were refused, by object.
    pub refusals: BTreeMap<Key, Refusal>,
    /// Committed memory of the last plan.
    pub blueprint: Option<Blueprint>,
    /// Wall clock in seconds since 1970, for time stamps and windows of minutes.
    pub now: i64,
    /// Names of new objects are drawn from this and the blueprint's generation.
    pub seed: u64,
    /// Counts UIDs and resource versions that [`World::apply`] hands out.
    pub(crate) writes: u64,
}

macro_rules! lists {
    ($($(#[$doc:meta])* $list:ident: $kind:ident -> $type:ty),* $(,)?) => {
        impl World {
            $($(#[$doc])*
            pub fn $list(&self) -> impl Iterator<Item = &$type> {
                self.of(Kind::$kind).filter_map(|object| match object {
                    Object::$kind(object) => Some(object),
                    _ => None,
                })
            })*
        }
    };
}

lists! {
    /// Pools by name.
    pools: Pool -> DeepInferPool,
    /// Supernodes by name.
    supernodes: Supernode -> Supernode,
    /// Expert placements by name.
    placements: Placement -> ExpertPlacement,
    /// Deployments by name.
    deployments: Deployment -> Deployment,
    /// Pods by name.
    pods: Pod -> Pod,
}

impl World {
    /// An empty namespace.
    pub fn new(namespace: impl Into<String>, seed: u64) -> Self {
        Self { namespace: namespace.into(), seed, ..Self::default() }
    }

    /// The cluster that this world is about; the first by name.
    pub fn cluster(&self) -> Option<&DeepInferCluster> {
        self.of(Kind::Cluster).find_map(|object| match object {
            Object::Cluster(cluster) => Some(&**cluster),
            _ => None,
        })
    }

    /// Objects of a kind by name.
    pub fn of(&self, kind: Kind) -> impl Iterator<Item = &Object> {
        let from = Key::new(kind, "");
        self.objects.range(from..).take_while(move |(key, _)| key.kind == kind).map(|(_, object)| object)
    }

    /// One object.
    pub fn get(&self, kind: Kind, name: &str) -> Option<&Object> {
        self.objects.get(&Key::new(kind, name))
    }

    /// The words of the agent in a pod.
    pub fn word(&self, pod: &str) -> Option<&AgentStatus> {
        self.agents.get(&AgentId::from(pod))?.status.as_ref()
    }

    /// Puts a user's object into the world as `kubectl apply` does: metadata that the API server owns is kept, the
    /// generation grows if the spec changed.
    pub fn user_applies(&mut self, mut cluster: DeepInferCluster) {
        let name = cluster.metadata.name.clone().unwrap_or_default();
        cluster.metadata.namespace = Some(self.namespace.clone());
        let stamp = self.stamp();
        match self.objects.get(&Key::new(Kind::Cluster, name.clone())) {
            Some(Object::Cluster(live)) => {
                let changed = live.spec != cluster.spec;
                let generation = live.metadata.generation.unwrap_or(1) + i64::from(changed);
                cluster.metadata.uid = live.metadata.uid.clone();
                cluster.metadata.creation_timestamp = live.metadata.creation_timestamp.clone();
                cluster.metadata.finalizers = live.metadata.finalizers.clone();
                cluster.metadata.deletion_timestamp = live.metadata.deletion_timestamp.clone();
                cluster.metadata.generation = Some(generation);
                cluster.status = live.status.clone();
            }
            _ => {
                cluster.metadata.uid = Some(self.new_uid());
                cluster.metadata.creation_timestamp = Some(self.timestamp());
                cluster.metadata.generation = Some(1);
            }
        }
        cluster.metadata.resource_version = Some(stamp);
        self.objects.insert(Key::new(Kind::Cluster, name), cluster.into());
    }

    /// The status of an object as JSON; null if it has none.
    pub(crate) fn status_of(object: &Object) -> Value {
        object.to_value().get_mut("status").map_or(Value::Null, Value::take)
    }
}
