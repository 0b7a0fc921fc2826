//! Nodes with what runs on them, kept up to date by every change of a node or pod, and handed out as one shared value.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use deepinfer_crds::names::{GANG_GATE, label};
use deepinfer_planner::{Action, Namespaced, NodeFacts, Nodes, Object, Promise, has_ended};
use k8s_openapi::api::core::v1::Pod;

use super::pods::{Devices, requests};
use super::store::{Cached, Change};

/// A snapshot is made again at most this often, unless a placement needs the very last state.
const SNAPSHOT_AGE: Duration = Duration::from_millis(200);
/// Annotation that the planner writes on the pods of a gang that it placed itself.
const DOMAIN: &str = "deepinfer.io/domain";
/// Name of the resource claim with which a pod joins a ComputeDomain.
const FABRIC_CLAIM: &str = "imex";

/// What one pod takes, or is promised.
#[derive(Clone, Debug, PartialEq)]
enum Share {
    Bound {
        node: String,
        used: Devices,
        supernode: Option<Namespaced>,
        fabric: bool,
    },
    Promised {
        supernode: Namespaced,
        domain: String,
        resource: Option<(String, i64)>,
        fabric: bool,
        /// Our gate holds it back.
        gated: bool,
    },
}

/// Counts what nodes have and pods take.
#[derive(Debug)]
pub struct Tracker {
    working: Nodes,
    /// Pods by node that we do not know: their node may come.
    strangers: BTreeMap<String, NodeFacts>,
    /// Pods that a plan is about to make: by supernode, then by pod.
    reserved: BTreeMap<Namespaced, BTreeMap<String, Share>>,
    /// ComputeDomains that a plan is about to make.
    reserved_fabrics: BTreeSet<Namespaced>,
    /// Pods that hold a claim of a ComputeDomain, by supernode: a domain ends with its last pod.
    claims: BTreeMap<Namespaced, u32>,
    snapshot: Arc<Nodes>,
    changed: bool,
    made: Instant,
}

impl Tracker {
    /// `unreadable`: the operator may not read nodes.
    pub fn new(unreadable: bool) -> Self {
        let working = Nodes { unreadable, ..Nodes::default() };
        Self {
            snapshot: Arc::new(working.clone()),
            working,
            strangers: BTreeMap::new(),
            reserved: BTreeMap::new(),
            reserved_fabrics: BTreeSet::new(),
            claims: BTreeMap::new(),
            changed: false,
            made: Instant::now(),
        }
    }

    /// The nodes as they are; a little old unless `fresh`.
    pub fn snapshot(&mut self, fresh: bool) -> Arc<Nodes> {
        if self.changed && (fresh || self.made.elapsed() >= SNAPSHOT_AGE) {
            self.snapshot = Arc::new(self.with_reservations());
            self.changed = false;
            self.made = Instant::now();
        }
        self.snapshot.clone()
    }

    fn with_reservations(&self) -> Nodes {
        let mut nodes = self.working.clone();
        for (supernode, pods) in &self.reserved {
            for share in pods.values() {
                add(&mut nodes, share, supernode);
            }
        }
        nodes.fabrics.extend(self.reserved_fabrics.iter().chain(self.claims.keys()).cloned());
        nodes
    }

    /// Promises the room of what a plan is about to make, so that no other plan counts it meanwhile. Gives the
    /// supernodes, to be released afterwards.
    pub fn reserve(&mut self, namespace: &str, actions: &[Action]) -> BTreeSet<Namespaced> {
        let mut supernodes = BTreeSet::new();
        for action in actions {
            let (Action::Create(object) | Action::Apply(object)) = action else { continue };
            let Some(supernode) = object.label(label::SUPERNODE) else { continue };
            let supernode = (namespace.to_owned(), supernode.to_owned());
            match &**object {
                Object::Pod(pod) => {
                    if let Some(share) = Self::share(namespace, pod, requests(pod)) {
                        let pods = self.reserved.entry(supernode.clone()).or_default();
                        pods.insert(object.name().to_owned(), share);
                    }
                }
                Object::ComputeDomain(_) => {
                    self.reserved_fabrics.insert(supernode.clone());
                }
                _ => continue,
            }
            supernodes.insert(supernode);
            self.changed = true;
        }
        supernodes
    }

    /// A plan has been carried out, or given up: what it made is in the store, the rest is promised to nobody.
    pub fn release(&mut self, supernodes: &BTreeSet<Namespaced>) {
        for supernode in supernodes {
            self.changed |= self.reserved.remove(supernode).is_some();
            self.changed |= self.reserved_fabrics.remove(supernode);
        }
    }

    /// A pod changed.
    pub fn pod(&mut self, change: &Change) {
        let before = change.before.as_ref().and_then(|entry| Self::share_of(&change.key, &entry.cached));
        let after = change.after.as_ref().and_then(|entry| Self::share_of(&change.key, &entry.cached));
        self.unreserve(change);
        if before == after {
            return;
        }
        if let Some(share) = before {
            self.account(&share, -1);
        }
        if let Some(share) = after {
            self.account(&share, 1);
        }
        self.changed = true;
    }

    /// A node changed.
    pub fn node(&mut self, change: &Change) {
        let name = &change.key.1;
        let known = self.working.by_name.remove(name.as_str()).map(Arc::unwrap_or_clone);
        let held = known.or_else(|| self.strangers.remove(name));
        let (used, occupants) = held.map(|node| (node.used, node.occupants)).unwrap_or_default();
        match change.after.as_ref().map(|entry| &entry.cached) {
            Some(Cached::Node(facts)) => {
                self.working.insert(NodeFacts { used, occupants, ..(**facts).clone() });
            }
            _ if !used.is_empty() || !occupants.is_empty() => {
                self.strangers.insert(name.clone(), NodeFacts { used, occupants, ..NodeFacts::default() });
            }
            _ => {}
        }
        self.changed = true;
    }

    /// A ComputeDomain changed.
    pub fn fabric(&mut self, change: &Change) {
        let supernode = |entry: &super::store::Entry| {
            let object = entry.cached.object()?;
            let name = object.label(label::SUPERNODE).unwrap_or_else(|| object.name());
            Some((change.key.0.clone(), name.to_owned()))
        };
        if let Some(before) = change.before.as_ref().and_then(supernode) {
            self.working.fabrics.remove(&before);
        }
        if let Some(after) = change.after.as_ref().and_then(supernode) {
            self.reserved_fabrics.remove(&after);
            self.working.fabrics.insert(after);
        }
        self.changed = true;
    }

    /// A pod that a plan promised is there: it counts as itself.
    fn unreserve(&mut self, change: &Change) {
        let Some(object) = change.after.as_ref().and_then(|entry| entry.cached.object()) else { return };
        let Some(supernode) = object.label(label::SUPERNODE) else { return };
        let supernode = (change.key.0.clone(), supernode.to_owned());
        if let Some(pods) = self.reserved.get_mut(&supernode) {
            self.changed |= pods.remove(&change.key.1).is_some();
            if pods.is_empty() {
                self.reserved.remove(&supernode);
            }
        }
    }

    fn share_of(key: &Namespaced, cached: &Cached) -> Option<Share> {
        match cached {
            Cached::Use(pod) => {
                let (node, used) = (pod.node.clone(), pod.used.clone());
                Some(Share::Bound { node, used, supernode: None, fabric: false })
            }
            Cached::Pod(object, used) => match &**object {
                Object::Pod(pod) => Self::share(&key.0, pod, (**used).clone()),
                _ => None,
            },
            _ => None,
        }
    }

    fn share(namespace: &str, pod: &Pod, used: Devices) -> Option<Share> {
        if has_ended(pod) {
            return None;
        }
        let supernode = pod.metadata.labels.as_ref().and_then(|labels| labels.get(label::SUPERNODE));
        let supernode = supernode.map(|name| (namespace.to_owned(), name.clone()));
        let claims = pod.spec.as_ref().and_then(|spec| spec.resource_claims.as_ref());
        let fabric = claims.is_some_and(|claims| claims.iter().any(|claim| claim.name == FABRIC_CLAIM));
        if let Some(node) = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()) {
            let counts = supernode.is_some() || !used.is_empty();
            return counts.then_some(Share::Bound { node, used, supernode, fabric });
        }
        let supernode = supernode.filter(|_| pod.metadata.deletion_timestamp.is_none())?;
        let domain = domain_of(pod).unwrap_or_default();
        let gates = pod.spec.as_ref().and_then(|spec| spec.scheduling_gates.as_deref()).unwrap_or_default();
        let gated = gates.iter().any(|gate| gate.name == GANG_GATE);
        Some(Share::Promised { supernode, domain, resource: used.into_iter().next(), fabric, gated })
    }

    fn claim(&mut self, supernode: &Namespaced, sign: i64) {
        let pods = self.claims.entry(supernode.clone()).or_insert(0);
        *pods = if sign > 0 { *pods + 1 } else { pods.saturating_sub(1) };
        self.claims.retain(|_, pods| *pods > 0);
    }

    fn account(&mut self, share: &Share, sign: i64) {
        match share {
            Share::Bound { node, used, supernode, fabric } => {
                if let Some(supernode) = supernode.as_ref().filter(|_| *fabric) {
                    self.claim(supernode, sign);
                }
                if let Some(facts) = self.working.node_mut(node) {
                    return occupy(facts, used, supernode.as_ref(), sign);
                }
                let facts = self.strangers.entry(node.clone()).or_default();
                occupy(facts, used, supernode.as_ref(), sign);
                if facts.used.is_empty() && facts.occupants.is_empty() {
                    self.strangers.remove(node);
                }
            }
            Share::Promised { supernode, fabric, gated, .. } => {
                if *fabric {
                    self.claim(supernode, sign);
                }
                if sign > 0 {
                    add(&mut self.working, share, supernode);
                } else if let Some(promise) = self.working.promised.get_mut(supernode) {
                    promise.pods = promise.pods.saturating_sub(1);
                    promise.lifted = promise.lifted.saturating_sub(u32::from(!gated));
                    if promise.pods == 0 {
                        self.working.promised.remove(supernode);
                    }
                }
            }
        }
    }
}

/// The domain that the pod's gang was given, as the plan wrote it on the pod: `label=value`.
fn domain_of(pod: &Pod) -> Option<String> {
    let (_, domain) = pod.metadata.annotations.as_ref()?.get(DOMAIN)?.split_once('=')?;
    Some(domain.to_owned())
}

fn occupy(facts: &mut NodeFacts, used: &Devices, supernode: Option<&Namespaced>, sign: i64) {
    for (resource, count) in used {
        *facts.used.entry(resource.clone()).or_insert(0) += sign * count;
    }
    facts.used.retain(|_, count| *count > 0);
    let Some(supernode) = supernode else { return };
    let pods = facts.occupants.entry(supernode.clone()).or_insert(0);
    *pods = if sign > 0 { *pods + 1 } else { pods.saturating_sub(1) };
    facts.occupants.retain(|_, pods| *pods > 0);
}

fn add(nodes: &mut Nodes, share: &Share, supernode: &Namespaced) {
    if let Share::Promised { domain, resource, gated, .. } = share {
        let promise = nodes.promised.entry(supernode.clone()).or_insert_with(|| Promise {
            domain: domain.clone(),
            pods: 0,
            lifted: 0,
            resource: resource.clone(),
        });
        promise.pods += 1;
        promise.lifted += u32::from(!gated);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::cache::pods::{reduce_node, reduce_pod};
    use crate::cache::store::{Entry, Store};

    struct Room {
        tracker: Tracker,
        pods: Store,
        nodes: Store,
        version: u64,
    }

    impl Room {
        fn new() -> Self {
            let tracker = Tracker::new(false);
            Self { tracker, pods: Store::default(), nodes: Store::default(), version: 0 }
        }

        fn entry(&mut self, name: &str, cached: Cached) -> Entry {
            self.version += 1;
            Entry { version: self.version, uid: format!("uid-{name}"), cluster: None, cached }
        }

        fn node(&mut self, name: &str) {
            let node =
                json!({"metadata": {"name": name}, "status": {"allocatable": {"nvidia.com/gpu": "4"}}});
            let facts = reduce_node(serde_json::from_value(node).expect("a node"));
            let entry = self.entry(name, Cached::Node(Arc::new(facts)));
            let change = self.nodes.seen(&(String::new(), name.to_owned()), entry).expect("news");
            self.tracker.node(&change);
        }

        fn pod(&mut self, name: &str, pod: serde_json::Value) {
            let pod = reduce_pod(serde_json::from_value(pod).expect("a pod"));
            let entry = self.entry(name, pod.expect("of interest"));
            let change = self.pods.seen(&("ns".to_owned(), name.to_owned()), entry).expect("news");
            self.tracker.pod(&change);
        }
    }

    fn member(name: &str, node: Option<&str>) -> serde_json::Value {
        json!({
            "metadata": {
                "name": name,
                "labels": {"deepinfer.io/cluster": "c", "deepinfer.io/supernode": "c-decode-x"},
                "annotations": {"deepinfer.io/domain": "nvidia.com/gpu.clique=rack-a"},
            },
            "spec": {
                "nodeName": node,
                "containers": [{"name": "engine", "resources": {"limits": {"nvidia.com/gpu": "4"}}}],
            },
        })
    }

    #[test]
    fn room_is_promised_until_a_pod_is_bound_and_then_used_whatever_comes_first() {
        let mut room = Room::new();
        let supernode = ("ns".to_owned(), "c-decode-x".to_owned());
        room.pod("a", member("a", None));
        room.pod("b", member("b", None));
        let nodes = room.tracker.snapshot(true);
        let promise = &nodes.promised[&supernode];
        assert_eq!((promise.pods, promise.domain.as_str()), (2, "rack-a"));
        assert_eq!(promise.resource, Some(("nvidia.com/gpu".to_owned(), 4)));
        room.pod("a", member("a", Some("n1")));
        room.node("n1");
        let nodes = room.tracker.snapshot(true);
        assert_eq!(nodes.promised[&supernode].pods, 1);
        assert_eq!(nodes.by_name["n1"].used["nvidia.com/gpu"], 4);
        assert_eq!(nodes.by_name["n1"].occupants[&supernode], 1);
    }

    #[test]
    fn a_promise_tells_pods_behind_our_gate_from_those_that_may_be_bound_at_any_moment() {
        let mut room = Room::new();
        let supernode = ("ns".to_owned(), "c-decode-x".to_owned());
        let gated = |name: &str| {
            let mut pod = member(name, None);
            pod["spec"]["schedulingGates"] = json!([{"name": "deepinfer.io/gang"}]);
            pod
        };
        room.pod("a", gated("a"));
        room.pod("b", gated("b"));
        let promise = |room: &mut Room| {
            let promise = room.tracker.snapshot(true).promised[&supernode].clone();
            (promise.pods, promise.lifted)
        };
        assert_eq!(promise(&mut room), (2, 0));
        room.pod("a", member("a", None));
        assert_eq!(promise(&mut room), (2, 1));
        room.pod("a", member("a", Some("n1")));
        assert_eq!(promise(&mut room), (1, 0));
    }

    #[test]
    fn what_a_pod_took_is_given_back_when_it_goes() {
        let mut room = Room::new();
        room.node("n1");
        room.pod("a", member("a", Some("n1")));
        let change = room.pods.removed(&("ns".to_owned(), "a".to_owned()), "uid-a").expect("it was there");
        room.tracker.pod(&change);
        let nodes = room.tracker.snapshot(true);
        assert_eq!(nodes.by_name["n1"].used, BTreeMap::new());
        assert!(nodes.by_name["n1"].occupants.is_empty() && nodes.promised.is_empty());
    }

    #[test]
    fn a_node_that_comes_back_still_knows_who_runs_on_it() {
        let mut room = Room::new();
        room.node("n1");
        room.pod("a", member("a", Some("n1")));
        let change = room.nodes.removed(&(String::new(), "n1".to_owned()), "uid-n1").expect("it was there");
        room.tracker.node(&change);
        assert!(room.tracker.snapshot(true).by_name.is_empty());
        room.version += 1;
        let node = json!({"metadata": {"name": "n1"}});
        let facts = reduce_node(serde_json::from_value(node).expect("a node"));
        let cached = Cached::Node(Arc::new(facts));
        let entry = Entry { version: room.version, uid: "uid-again".into(), cluster: None, cached };
        let change = room.nodes.seen(&(String::new(), "n1".to_owned()), entry).expect("news");
        room.tracker.node(&change);
        assert_eq!(room.tracker.snapshot(true).by_name["n1"].used["nvidia.com/gpu"], 4);
    }

    /// A ComputeDomain ends with its last pod, even if the object is gone before.
    #[test]
    fn a_fabric_is_taken_as_long_as_a_pod_claims_it() {
        let mut room = Room::new();
        let supernode = ("ns".to_owned(), "c-decode-x".to_owned());
        let mut pod = member("a", Some("n1"));
        pod["spec"]["resourceClaims"] =
            json!([{"name": "imex", "resourceClaimTemplateName": "c-decode-x-imex"}]);
        room.pod("a", pod);
        assert!(room.tracker.snapshot(true).fabrics.contains(&supernode));
        let change = room.pods.removed(&("ns".to_owned(), "a".to_owned()), "uid-a").expect("it was there");
        room.tracker.pod(&change);
        assert!(room.tracker.snapshot(true).fabrics.is_empty());
    }

    /// Two plans never count the same room: what the first is about to make is promised before it is made.
    #[test]
    fn reserved_pods_count_until_they_are_seen_and_only_once() {
        let mut room = Room::new();
        let supernode = ("ns".to_owned(), "c-decode-x".to_owned());
        let create = |name: &str| {
            let pod: Pod = serde_json::from_value(member(name, None)).expect("a pod");
            Action::Create(Box::new(Object::Pod(pod)))
        };
        let actions = [create("a"), create("b")];
        let promised = room.tracker.reserve("ns", &actions);
        assert_eq!(room.tracker.snapshot(true).promised[&supernode].pods, 2);
        room.pod("a", member("a", None));
        assert_eq!(room.tracker.snapshot(true).promised[&supernode].pods, 2);
        room.tracker.release(&promised);
        assert_eq!(room.tracker.snapshot(true).promised[&supernode].pods, 1);
    }
}
