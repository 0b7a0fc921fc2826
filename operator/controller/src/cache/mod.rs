//! What this replica knows of the API server: objects by kind, nodes with what runs on them, and our own writes that no
//! watch has shown yet.
//!
//! One lock over everything, held for moments: a world is one consistent look. Objects are shared, not copied; a plan
//! copies those of its own cluster only.
//! Secrets are never read: that one of ours exists is remembered from the answer to its creation.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use deepinfer_crds::DeepInferCluster;
use deepinfer_crds::names::label;
use deepinfer_planner::{Action, Blueprint, Kind, Namespaced, Nodes, Object};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use self::nodes::Tracker;
use self::sources::{Shelf, Source};
use self::store::{Cached, Change, Entry, Store};
use self::words::Words;
use crate::commit;
use crate::keys::ClusterRef;

pub mod nodes;
pub mod pods;
mod read;
pub mod sources;
pub mod store;
pub mod watch;
pub mod watchdog;
mod words;

/// Events of children come in bunches; a look after the bunch is enough.
const BUNCH: Duration = Duration::from_millis(20);
/// The same for nodes, which concern every cluster.
const NODE_BUNCH: Duration = Duration::from_millis(500);

/// Version of an object that was found to be there and may not be read.
pub const UNSEEN_VERSION: u64 = 1;

/// Who wants to know what changed.
pub trait Listener: Send + Sync {
    /// A cluster should be looked at within this time.
    fn wake(&self, cluster: &Namespaced, within: Duration);
    /// The committed memory of a cluster is this.
    fn committed(&self, cluster: &ClusterRef, blueprint: &Blueprint);
    /// A cluster object is gone.
    fn gone(&self, cluster: &Namespaced);
}

/// All that is known.
pub struct Caches {
    inner: Mutex<Inner>,
    listener: Box<dyn Listener>,
}

struct Inner {
    stores: BTreeMap<Shelf, Store>,
    tracker: Tracker,
    listed: BTreeSet<Source>,
    words: Words,
}

/// A cluster with its children, as they were at one moment.
#[derive(Clone, Debug, Default)]
pub struct Family {
    /// The cluster object, its children, and what its spec names.
    pub objects: Vec<Arc<Object>>,
    /// Children that this release cannot read, and why.
    pub unreadable: Vec<(String, Arc<str>)>,
    /// All nodes.
    pub nodes: Arc<Nodes>,
}

impl Caches {
    /// Empty; `nodes_unreadable`: the operator may not read nodes.
    pub fn new(nodes_unreadable: bool, listener: Box<dyn Listener>) -> Self {
        let inner = Inner {
            stores: BTreeMap::new(),
            tracker: Tracker::new(nodes_unreadable),
            listed: BTreeSet::new(),
            words: Words::default(),
        };
        Self { inner: Mutex::new(inner), listener }
    }

    /// A watch brought an object; `None`: nobody needs to know it any more.
    pub fn seen(&self, shelf: Shelf, key: &Namespaced, version: u64, entry: Option<Entry>) {
        let change = {
            let mut inner = self.lock();
            let entry = entry.map(|entry| inner.share(entry));
            let store = inner.stores.entry(shelf).or_default();
            let change = match entry {
                Some(entry) => store.seen(key, entry),
                None => store.unwanted(key, version),
            };
            change.inspect(|change| inner.track(shelf, change))
        };
        self.tell(shelf, change.into_iter().collect(), true);
    }

    /// A watch said that an object went.
    pub fn removed(&self, shelf: Shelf, key: &Namespaced, uid: &str) {
        self.remove(shelf, key, uid, true);
    }

    /// A list brought all objects of a source.
    pub fn listed(&self, source: &Source, version: u64, list: Vec<(Namespaced, Option<Entry>)>) {
        let changes = {
            let mut inner = self.lock();
            let list =
                list.into_iter().map(|(key, entry)| (key, entry.map(|entry| inner.share(entry)))).collect();
            let store = inner.stores.entry(source.shelf).or_default();
            let changes = store.listed(version, list, |key, entry| source.covers(key, entry));
            for change in &changes {
                inner.track(source.shelf, change);
            }
            inner.listed.insert(source.clone());
            changes
        };
        self.tell(source.shelf, changes, true);
    }

    /// The API of a source is not served any more.
    pub fn forget(&self, source: &Source) {
        let changes = {
            let mut inner = self.lock();
            inner.listed.remove(source);
            let store = inner.stores.entry(source.shelf).or_default();
            let changes = store.forget(|key, entry| source.covers(key, entry));
            for change in &changes {
                inner.track(source.shelf, change);
            }
            changes
        };
        self.tell(source.shelf, changes, true);
    }

    /// The answer to our own write, or to a read of one object: nobody is woken by it.
    pub fn wrote(&self, namespace: &str, object: Object) {
        let shelf = Shelf::Kind(object.kind());
        let key = (namespace.to_owned(), object.name().to_owned());
        let Some(entry) = entry_of(object) else { return };
        let change = {
            let mut inner = self.lock();
            let change = inner.stores.entry(shelf).or_default().seen(&key, entry);
            change.inspect(|change| inner.track(shelf, change))
        };
        self.tell(shelf, change.into_iter().collect(), false);
    }

    /// The answer to our own delete, or to a read that found nothing: the object is gone.
    pub fn lost(&self, kind: Kind, key: &Namespaced, uid: &str) {
        self.remove(Shelf::Kind(kind), key, uid, false);
    }

    fn remove(&self, shelf: Shelf, key: &Namespaced, uid: &str, wake: bool) {
        let change = {
            let mut inner = self.lock();
            let change = inner.stores.entry(shelf).or_default().removed(key, uid);
            change.inspect(|change| inner.track(shelf, change))
        };
        self.tell(shelf, change.into_iter().collect(), wake);
    }

    /// Forgets the Secrets of a cluster that were never seen, only found to be there.
    pub fn unremember_secrets(&self, cluster: &Namespaced) {
        let mut inner = self.lock();
        if let Some(store) = inner.stores.get_mut(&Shelf::Kind(Kind::Secret)) {
            store.forget(|key, entry| of_cluster(cluster, key, entry) && entry.version <= UNSEEN_VERSION);
        }
    }

    /// Forgets all Secrets of a cluster: whether they exist is found out by creating them.
    pub fn forget_secrets(&self, cluster: &Namespaced) {
        let mut inner = self.lock();
        if let Some(store) = inner.stores.get_mut(&Shelf::Kind(Kind::Secret)) {
            store.forget(|key, entry| of_cluster(cluster, key, entry));
        }
    }

    /// Whether each of these sources has been listed once.
    pub fn missing(&self, sources: &[Source]) -> Vec<String> {
        let inner = self.lock();
        sources.iter().filter(|source| !inner.listed.contains(source)).map(Source::name).collect()
    }

    /// All clusters.
    pub fn clusters(&self) -> Vec<Namespaced> {
        let inner = self.lock();
        inner
            .stores
            .get(&Shelf::Kind(Kind::Cluster))
            .into_iter()
            .flat_map(Store::iter)
            .map(|(key, _)| key.clone())
            .collect()
    }

    /// One object.
    pub fn get(&self, kind: Kind, namespace: &str, name: &str) -> Option<Arc<Object>> {
        let key = (namespace.to_owned(), name.to_owned());
        self.lock().stores.get(&Shelf::Kind(kind))?.get(&key)?.cached.object().cloned()
    }

    /// A cluster with everything that a plan of it looks at. `fresh`: with the very last state of the nodes.
    pub fn family(&self, cluster: &Namespaced, fresh: bool) -> Family {
        let mut inner = self.lock();
        let nodes = inner.tracker.snapshot(fresh);
        let mut family = Family { nodes, ..Family::default() };
        let Some(entry) = inner.stores.get(&Shelf::Kind(Kind::Cluster)).and_then(|store| store.get(cluster))
        else {
            return family;
        };
        family.add(&cluster.1, entry);
        for (shelf, store) in &inner.stores {
            if matches!(shelf, Shelf::Kind(kind) if *kind != Kind::Cluster) {
                for (name, entry) in store.of_cluster(cluster) {
                    family.add(name, entry);
                }
            }
        }
        let named = entry.cached.object().map(|object| references(object)).unwrap_or_default();
        for (kind, name) in named {
            let key = (cluster.0.clone(), name.clone());
            let found = inner.stores.get(&Shelf::Kind(kind)).and_then(|store| store.get(&key));
            if let Some(entry) = found.filter(|entry| entry.cluster.as_ref() != Some(&cluster.1)) {
                family.add(&name, entry);
            }
        }
        family
    }

    /// Promises the room that a plan needs; gives what to release.
    pub fn reserve(&self, namespace: &str, actions: &[Action]) -> BTreeSet<Namespaced> {
        self.lock().tracker.reserve(namespace, actions)
    }

    /// Gives back what was promised to a plan and not used.
    pub fn release(&self, promised: &BTreeSet<Namespaced>) {
        self.lock().tracker.release(promised);
    }

    /// How many objects are kept, by kind, for the log.
    pub fn sizes(&self) -> BTreeMap<Shelf, usize> {
        self.lock().stores.iter().map(|(shelf, store)| (*shelf, store.len())).collect()
    }

    /// What is not watched goes with its cluster, and so do late answers about it.
    fn forget_unwatched(&self, cluster: &Namespaced) {
        let mut inner = self.lock();
        for kind in [Kind::Secret, Kind::ServiceAccount] {
            if let Some(store) = inner.stores.get_mut(&Shelf::Kind(kind)) {
                store.forget(|key, entry| of_cluster(cluster, key, entry));
            }
        }
    }

    fn tell(&self, shelf: Shelf, changes: Vec<Change>, wake: bool) {
        if shelf == Shelf::Node {
            // One wake for a whole list: it is the same for every node.
            if changes.iter().any(facts_changed) {
                for cluster in self.clusters() {
                    self.listener.wake(&cluster, NODE_BUNCH);
                }
            }
            return;
        }
        for change in changes {
            if shelf == Shelf::Kind(Kind::ConfigMap) {
                self.tell_blueprint(&change);
            }
            let uid = |entry: &Option<Entry>| entry.as_ref().map(|entry| entry.uid.clone());
            if shelf == Shelf::Kind(Kind::Cluster)
                && change.before.is_some()
                && uid(&change.before) != uid(&change.after)
            {
                self.forget_unwatched(&change.key);
                self.listener.gone(&change.key);
            }
            if wake {
                self.tell_clusters(shelf, &change);
            }
        }
    }

    fn tell_blueprint(&self, change: &Change) {
        let Some(entry) = &change.after else { return };
        let (Some(cluster), Some(object)) = (&entry.cluster, entry.cached.object()) else { return };
        let Object::ConfigMap(map) = &**object else { return };
        if object.name() != commit::name(cluster) {
            return;
        }
        let Some(uid) = object.controller_uid() else { return };
        let reference =
            ClusterRef { namespace: change.key.0.clone(), name: cluster.clone(), uid: uid.to_owned() };
        if let Some(blueprint) = commit::read(map) {
            self.listener.committed(&reference, &blueprint);
        }
    }

    fn tell_clusters(&self, shelf: Shelf, change: &Change) {
        fn cached(entry: &Option<Entry>) -> Option<&Cached> {
            entry.as_ref().map(|entry| &entry.cached)
        }
        let object = |entry: &Option<Entry>| entry.as_ref().and_then(|entry| entry.cached.object().cloned());
        match shelf {
            Shelf::Node => {}
            Shelf::Kind(Kind::Cluster) => match (object(&change.before), object(&change.after)) {
                (Some(before), Some(after)) if same_wish(before.meta(), after.meta()) => {}
                _ => self.listener.wake(&change.key, Duration::ZERO),
            },
            Shelf::Kind(kind @ (Kind::PodTemplate | Kind::Claim)) => {
                for cluster in self.referring(&change.key, kind) {
                    self.listener.wake(&cluster, BUNCH);
                }
            }
            // Kubelets write much that no plan looks at.
            Shelf::Kind(Kind::Pod)
                if cached(&change.before).is_some_and(|before| Some(before) == cached(&change.after)) => {}
            Shelf::Kind(_) => {
                let mut parents = BTreeSet::new();
                for entry in change.before.iter().chain(&change.after) {
                    parents.extend(entry.cluster.clone());
                }
                for parent in parents {
                    self.listener.wake(&(change.key.0.clone(), parent), BUNCH);
                }
            }
        }
    }

    /// Clusters whose spec names an object.
    fn referring(&self, key: &Namespaced, kind: Kind) -> Vec<Namespaced> {
        let inner = self.lock();
        let clusters = inner.stores.get(&Shelf::Kind(Kind::Cluster)).into_iter().flat_map(Store::iter);
        clusters
            .filter(|(cluster, entry)| {
                let named = entry.cached.object().map(|object| references(object)).unwrap_or_default();
                cluster.0 == key.0 && named.contains(&(kind, key.1.clone()))
            })
            .map(|(cluster, _)| cluster.clone())
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().expect("no holder of the caches panics")
    }
}

fn of_cluster(cluster: &Namespaced, key: &Namespaced, entry: &Entry) -> bool {
    key.0 == cluster.0 && entry.cluster.as_ref() == Some(&cluster.1)
}

impl Inner {
    /// An entry whose node says shared words.
    fn share(&mut self, mut entry: Entry) -> Entry {
        if let Cached::Node(facts) = &mut entry.cached {
            let facts = Arc::make_mut(facts);
            facts.labels = self.words.share(&facts.labels);
        }
        entry
    }

    fn track(&mut self, shelf: Shelf, change: &Change) {
        match shelf {
            Shelf::Node => self.tracker.node(change),
            Shelf::Kind(Kind::Pod) => self.tracker.pod(change),
            Shelf::Kind(Kind::ComputeDomain) => self.tracker.fabric(change),
            Shelf::Kind(_) => {}
        }
    }
}

impl Family {
    fn add(&mut self, name: &str, entry: &Entry) {
        match &entry.cached {
            Cached::Object(object) | Cached::Pod(object, _) => self.objects.push(object.clone()),
            Cached::Unreadable(why) => self.unreadable.push((name.to_owned(), why.clone())),
            Cached::Use(_) | Cached::Node(_) => {}
        }
    }
}

/// What a store keeps of an object; `None` if it has no version, which the API server never sends.
pub fn entry_of(mut object: Object) -> Option<Entry> {
    let meta = object.meta_mut();
    meta.managed_fields = None;
    let version = version_of(meta)?;
    let uid = meta.uid.clone().unwrap_or_default();
    let cluster = meta.labels.as_ref().and_then(|labels| labels.get(label::CLUSTER)).cloned();
    let cached = match object {
        Object::Pod(pod) => pods::reduce_pod(pod)?,
        other => Cached::Object(Arc::new(other)),
    };
    Some(Entry { version, uid, cluster, cached })
}

/// The version of an object as a number, which is what it is.
pub fn version_of(meta: &ObjectMeta) -> Option<u64> {
    meta.resource_version.as_ref()?.parse().ok()
}

/// Objects of the namespace that the spec of a cluster names: pod templates and claims.
fn references(object: &Object) -> BTreeSet<(Kind, String)> {
    let Object::Cluster(cluster) = object else { return BTreeSet::new() };
    let mut names: BTreeSet<(Kind, String)> =
        templates(cluster).into_iter().map(|name| (Kind::PodTemplate, name)).collect();
    let claim = cluster.spec.model.source.uri.strip_prefix("pvc://");
    if let Some(claim) = claim.and_then(|rest| rest.split('/').next()) {
        names.insert((Kind::Claim, claim.to_owned()));
    }
    names
}

fn templates(cluster: &DeepInferCluster) -> Vec<String> {
    let spec = &cluster.spec;
    let vision = spec.vision.as_ref().and_then(|pool| pool.pod.as_ref());
    let pods = [spec.prefill.pod.as_ref(), spec.decode.pod.as_ref(), vision];
    let names = pods.into_iter().flatten().filter_map(|pod| pod.template_ref.as_ref());
    names.map(|reference| reference.name.clone()).collect()
}

/// What the user wants and who holds the object is as before: only its status moved.
fn same_wish(before: &ObjectMeta, after: &ObjectMeta) -> bool {
    before.uid == after.uid
        && before.generation == after.generation
        && before.deletion_timestamp == after.deletion_timestamp
        && before.finalizers == after.finalizers
        && before.labels == after.labels
        && before.annotations == after.annotations
}

/// A node differs in something that placement looks at.
fn facts_changed(change: &Change) -> bool {
    match (&change.before, &change.after) {
        (Some(before), Some(after)) => before.cached != after.cached,
        _ => true,
    }
}

#[cfg(test)]
mod tests;
