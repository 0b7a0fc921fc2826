//! Nodes and what runs on them, as far as placement must know: counted once for all clusters by the driver.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Taint;

/// A namespace and a name in it.
pub type Namespaced = (String, String);

/// A node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeFacts {
    /// Its name.
    pub name: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Its taints, those of the node life cycle included.
    pub taints: Vec<Taint>,
    /// Its Ready condition is true.
    pub ready: bool,
    /// Second since 1970 at which `ready` last changed; 0 if unknown.
    pub ready_since: i64,
    /// Cordoned.
    pub unschedulable: bool,
    /// It is being deleted.
    pub deleted: bool,
    /// What it offers, by resource: accelerators only.
    pub allocatable: BTreeMap<String, i64>,
    /// What pods that are bound to it and have not ended ask for, by resource: accelerators only.
    pub used: BTreeMap<String, i64>,
    /// Pods of supernodes on it, of all clusters.
    pub occupants: BTreeMap<Namespaced, u32>,
}

/// Pods of an incarnation that are made and not bound: their room is promised.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Promise {
    /// Value of the domain label that they are bound to; empty if the scheduler chooses.
    pub domain: String,
    /// Pods that are not bound yet.
    pub pods: u32,
    /// Resource that each pod asks for, and how much.
    pub resource: Option<(String, i64)>,
}

/// All nodes at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Nodes {
    /// By name.
    pub by_name: BTreeMap<String, NodeFacts>,
    /// By supernode, of all clusters.
    pub promised: BTreeMap<Namespaced, Promise>,
    /// Supernodes of all clusters that have, or wait for, a ComputeDomain.
    pub fabrics: BTreeSet<Namespaced>,
    /// The operator may not read nodes: nothing is known, nothing is decided by them.
    pub unreadable: bool,
}

/// What the API server offers beside its core, as probed at start and every ten minutes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Apis {
    /// Version of `scheduling.k8s.io` whose PodGroups work: the kind is served and pods keep `schedulingGroup`.
    pub native_gang: Option<NativeVersion>,
    /// A PodGroup with a topology constraint is accepted.
    pub native_topology: bool,
    /// `scheduling.volcano.sh/v1beta1` PodGroups are served.
    pub volcano: bool,
    /// `scheduling.run.ai/v2alpha2` PodGroups are served.
    pub kai: bool,
    /// `kueue.x-k8s.io` LocalQueues are served.
    pub kueue: bool,
    /// `resource.nvidia.com/v1beta1` ComputeDomains are served.
    pub compute_domain: bool,
}

/// Versions of the native gang API.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NativeVersion {
    /// Kubernetes 1.36: `disruptionMode` is a word.
    V1Alpha2,
    /// Kubernetes 1.37: `disruptionMode` is a struct.
    V1Beta1,
}
