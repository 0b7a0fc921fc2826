//! Nodes and what runs on them, as far as placement must know: counted once for all clusters by the driver.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::api::core::v1::Taint;

/// A namespace and a name in it.
pub type Namespaced = (String, String);

/// Labels of a node, sorted by key. Copies share them, and whoever reads thousands of nodes can share the words: of a
/// fleet's labels most are the same on every node.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Labels(Arc<[(Arc<str>, Arc<str>)]>);

impl Labels {
    /// The value of a label.
    pub fn get(&self, key: &str) -> Option<&str> {
        let at = self.0.binary_search_by(|(label, _)| (**label).cmp(key)).ok()?;
        Some(&self.0[at].1)
    }

    /// Whether there is such a label.
    pub fn contains_key(&self, key: &str) -> bool {
        self.get(key).is_some()
    }

    /// All of them, by key.
    pub fn iter(&self) -> impl Iterator<Item = (&Arc<str>, &Arc<str>)> {
        self.0.iter().map(|(key, value)| (key, value))
    }

    /// Sets a label; copies keep what they have.
    pub fn insert(&mut self, key: &str, value: &str) {
        self.remove(key);
        let others = self.0.iter().cloned();
        *self = others.chain([(key.into(), value.into())]).collect();
    }

    /// Takes a label away; copies keep what they have.
    pub fn remove(&mut self, key: &str) {
        *self = self.0.iter().filter(|(label, _)| **label != *key).cloned().collect();
    }
}

/// The last of two labels with one key counts.
impl<K: Into<Arc<str>>, V: Into<Arc<str>>> FromIterator<(K, V)> for Labels {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(labels: I) -> Self {
        let sorted: BTreeMap<Arc<str>, Arc<str>> =
            labels.into_iter().map(|(key, value)| (key.into(), value.into())).collect();
        Self(sorted.into_iter().collect())
    }
}

impl std::fmt::Debug for Labels {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

/// A node.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NodeFacts {
    /// Its name.
    pub name: String,
    /// Its labels.
    pub labels: Labels,
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
    /// Of these, pods that no gate of ours holds back: the scheduler may bind them at any moment.
    pub lifted: u32,
    /// Resource that each pod asks for, and how much.
    pub resource: Option<(String, i64)>,
}

/// All nodes at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Nodes {
    /// By name; looks at one moment and at the next share what did not change.
    pub by_name: BTreeMap<Arc<str>, Arc<NodeFacts>>,
    /// By supernode, of all clusters.
    pub promised: BTreeMap<Namespaced, Promise>,
    /// Supernodes of all clusters that have, or wait for, a ComputeDomain.
    pub fabrics: BTreeSet<Namespaced>,
    /// The operator may not read nodes: nothing is known, nothing is decided by them.
    pub unreadable: bool,
}

impl Nodes {
    /// Adds a node, or puts it in the place of an older one.
    pub fn insert(&mut self, node: NodeFacts) {
        self.by_name.insert(node.name.as_str().into(), Arc::new(node));
    }

    /// A node, to be changed.
    pub fn node_mut(&mut self, name: &str) -> Option<&mut NodeFacts> {
        self.by_name.get_mut(name).map(Arc::make_mut)
    }

    /// All nodes, to be changed.
    pub fn nodes_mut(&mut self) -> impl Iterator<Item = &mut NodeFacts> {
        self.by_name.values_mut().map(Arc::make_mut)
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_found_set_and_taken_away_and_copies_keep_theirs() {
        let mut labels: Labels = [("b", "1"), ("a", "2"), ("b", "3")].into_iter().collect();
        let copy = labels.clone();
        assert_eq!((labels.get("a"), labels.get("b"), labels.get("c")), (Some("2"), Some("3"), None));
        labels.insert("c", "4");
        labels.insert("a", "5");
        labels.remove("b");
        labels.remove("unknown");
        assert_eq!(format!("{labels:?}"), r#"{"a": "5", "c": "4"}"#);
        assert_eq!(format!("{copy:?}"), r#"{"a": "2", "b": "3"}"#);
        assert!(labels.contains_key("c") && !copy.contains_key("c"));
    }
}
