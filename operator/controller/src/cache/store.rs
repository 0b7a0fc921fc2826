//! The objects of one kind as this replica knows them: what watches brought, and our own writes before any watch did.
//!
//! Three rules keep it right whatever the order in which answers and events arrive:
//! an object is replaced only by a newer version of it (versions are numbers that only grow);
//! what we saw go stays gone (a UID never comes back), however late its last events are;
//! a list takes away what it does not have, unless we wrote it after the list was made.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use deepinfer_planner::{Namespaced, NodeFacts, Object};

use super::pods::{Devices, PodUse};

/// UIDs of deleted objects that are remembered; by then their events have long come.
const MAX_GONE: usize = 50_000;

/// What is kept of an object.
#[derive(Clone, Debug, PartialEq)]
pub enum Cached {
    /// All of it, without the fields that nobody reads.
    Object(Arc<Object>),
    /// A pod of ours without its containers, and what these ask for.
    Pod(Arc<Object>, Arc<Devices>),
    /// What a pod of others takes from its node.
    Use(Arc<PodUse>),
    /// What placement must know of a node.
    Node(Arc<NodeFacts>),
    /// It does not have the shape that this release knows; why.
    Unreadable(Arc<str>),
}

impl Cached {
    /// The object, if it is kept as one.
    pub fn object(&self) -> Option<&Arc<Object>> {
        match self {
            Self::Object(object) | Self::Pod(object, _) => Some(object),
            _ => None,
        }
    }
}

/// An object with what tells its versions apart.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Its resource version.
    pub version: u64,
    /// Its UID.
    pub uid: String,
    /// The cluster that its labels name.
    pub cluster: Option<String>,
    /// What is kept.
    pub cached: Cached,
}

/// A change of a store, as those who follow it see it.
#[derive(Clone, Debug)]
pub struct Change {
    /// Namespace and name.
    pub key: Namespaced,
    /// Before; `None`: it is new.
    pub before: Option<Entry>,
    /// After; `None`: it is gone.
    pub after: Option<Entry>,
}

/// Objects of one kind.
#[derive(Debug, Default)]
pub struct Store {
    entries: BTreeMap<Namespaced, Entry>,
    /// Names by namespace and cluster.
    children: BTreeMap<Namespaced, BTreeSet<String>>,
    gone: BTreeSet<String>,
    gone_order: VecDeque<String>,
}

impl Store {
    /// One object.
    pub fn get(&self, key: &Namespaced) -> Option<&Entry> {
        self.entries.get(key)
    }

    /// All objects.
    pub fn iter(&self) -> impl Iterator<Item = (&Namespaced, &Entry)> {
        self.entries.iter()
    }

    /// Objects whose labels name a cluster.
    pub fn of_cluster(&self, cluster: &Namespaced) -> impl Iterator<Item = (&String, &Entry)> {
        let names = self.children.get(cluster).into_iter().flatten();
        names.filter_map(|name| {
            self.entries.get(&(cluster.0.clone(), name.clone())).map(|entry| (name, entry))
        })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// There are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// An object was seen, by a watch or in the answer to a write.
    pub fn seen(&mut self, key: &Namespaced, entry: Entry) -> Option<Change> {
        if self.gone.contains(&entry.uid) {
            return None;
        }
        if let Some(before) = self.entries.get(key) {
            let newer = entry.version > before.version;
            if !newer {
                return None;
            }
        }
        Some(self.put(key, Some(entry)))
    }

    /// An object that nobody needs to know about any more was seen at a version: its labels or requests changed.
    pub fn unwanted(&mut self, key: &Namespaced, version: u64) -> Option<Change> {
        let before = self.entries.get(key)?;
        (version > before.version).then(|| self.put(key, None))
    }

    /// An object went: a watch said so, or the answer to a delete did.
    pub fn removed(&mut self, key: &Namespaced, uid: &str) -> Option<Change> {
        self.bury(uid);
        let before = self.entries.get(key)?;
        (before.uid == uid).then(|| self.put(key, None))
    }

    /// All objects of a part of the kind, as a list of `version` has them; without entry: nobody needs to know it.
    pub fn listed(
        &mut self,
        version: u64,
        list: Vec<(Namespaced, Option<Entry>)>,
        part: impl Fn(&Namespaced, &Entry) -> bool,
    ) -> Vec<Change> {
        let names: BTreeSet<&Namespaced> = list.iter().map(|(key, _)| key).collect();
        let missing: Vec<(Namespaced, String)> = self
            .entries
            .iter()
            .filter(|(key, entry)| part(key, entry) && entry.version <= version && !names.contains(key))
            .map(|(key, entry)| (key.clone(), entry.uid.clone()))
            .collect();
        let mut changes: Vec<Change> =
            missing.iter().filter_map(|(key, uid)| self.removed(key, uid)).collect();
        changes.extend(list.into_iter().filter_map(|(key, entry)| match entry {
            Some(entry) => self.seen(&key, entry),
            None => self.unwanted(&key, version),
        }));
        changes
    }

    /// Forgets a part of the kind, as when its API is not served any more.
    pub fn forget(&mut self, part: impl Fn(&Namespaced, &Entry) -> bool) -> Vec<Change> {
        let keys: Vec<Namespaced> =
            self.entries.iter().filter(|(key, entry)| part(key, entry)).map(|(key, _)| key.clone()).collect();
        keys.iter().map(|key| self.put(key, None)).collect()
    }

    fn put(&mut self, key: &Namespaced, after: Option<Entry>) -> Change {
        let before = match &after {
            Some(entry) => self.entries.insert(key.clone(), entry.clone()),
            None => self.entries.remove(key),
        };
        let cluster = |entry: &Option<Entry>| entry.as_ref().and_then(|entry| entry.cluster.clone());
        let (was, is) = (cluster(&before), cluster(&after));
        if was != is || before.is_none() {
            if let Some(was) = was {
                let parent = (key.0.clone(), was);
                if let Some(names) = self.children.get_mut(&parent) {
                    names.remove(&key.1);
                    if names.is_empty() {
                        self.children.remove(&parent);
                    }
                }
            }
            if let Some(is) = is {
                self.children.entry((key.0.clone(), is)).or_default().insert(key.1.clone());
            }
        }
        Change { key: key.clone(), before, after }
    }

    fn bury(&mut self, uid: &str) {
        if uid.is_empty() || !self.gone.insert(uid.to_owned()) {
            return;
        }
        self.gone_order.push_back(uid.to_owned());
        if self.gone_order.len() > MAX_GONE
            && let Some(oldest) = self.gone_order.pop_front()
        {
            self.gone.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> Namespaced {
        ("ns".to_owned(), name.to_owned())
    }

    fn entry(uid: &str, version: u64, cluster: Option<&str>) -> Entry {
        let cached = Cached::Unreadable(Arc::from("a test needs no content"));
        Entry { version, uid: uid.to_owned(), cluster: cluster.map(str::to_owned), cached }
    }

    fn names(store: &Store, cluster: &str) -> Vec<String> {
        store.of_cluster(&key(cluster)).map(|(name, _)| name.clone()).collect()
    }

    #[test]
    fn our_own_write_is_not_undone_by_an_older_event_and_its_own_event_changes_nothing() {
        let mut store = Store::default();
        store.seen(&key("a"), entry("1", 10, Some("c")));
        assert!(store.seen(&key("a"), entry("1", 20, Some("c"))).is_some(), "the answer to our write");
        assert!(store.seen(&key("a"), entry("1", 15, Some("c"))).is_none(), "an event from before it");
        assert!(store.seen(&key("a"), entry("1", 20, Some("c"))).is_none(), "its own event");
        assert!(store.seen(&key("a"), entry("1", 21, Some("c"))).is_some(), "what came after it");
    }

    #[test]
    fn a_deleted_object_does_not_come_back_by_a_late_event_but_its_successor_does() {
        let mut store = Store::default();
        store.seen(&key("a"), entry("1", 10, None));
        assert!(store.removed(&key("a"), "1").is_some(), "the answer to our delete");
        assert!(store.seen(&key("a"), entry("1", 12, None)).is_none(), "an event from before it");
        assert!(store.removed(&key("a"), "1").is_none(), "its own event");
        assert!(store.seen(&key("a"), entry("2", 14, None)).is_some(), "another object of the name");
        assert!(store.removed(&key("a"), "1").is_none(), "a very late event of the first");
        assert_eq!(store.get(&key("a")).map(|e| e.uid.as_str()), Some("2"));
    }

    /// OP-061: a DELETE that was lost with a broken watch is made up for by the next list.
    #[test]
    fn a_list_takes_away_what_it_does_not_have_except_what_we_wrote_after_it() {
        let mut store = Store::default();
        store.seen(&key("dead"), entry("1", 10, Some("c")));
        store.seen(&key("old"), entry("2", 11, Some("c")));
        store.seen(&key("ours"), entry("3", 40, Some("c")));
        let list = vec![(key("old"), Some(entry("2", 30, Some("c"))))];
        let changes = store.listed(35, list, |_, _| true);
        assert_eq!(changes.len(), 2);
        assert_eq!(names(&store, "c"), ["old", "ours"]);
        let other = store.listed(50, Vec::new(), |key, _| key.0 == "another");
        assert!(other.is_empty(), "a list of one namespace says nothing about others");
    }

    #[test]
    fn children_are_found_by_cluster_and_follow_their_label() {
        let mut store = Store::default();
        store.seen(&key("a"), entry("1", 1, Some("c")));
        store.seen(&key("b"), entry("2", 2, Some("c")));
        store.seen(&key("x"), entry("3", 3, Some("d")));
        assert_eq!(names(&store, "c"), ["a", "b"]);
        store.seen(&key("b"), entry("2", 4, Some("d")));
        assert_eq!(
            (names(&store, "c"), names(&store, "d")),
            (vec!["a".into()], vec!["b".into(), "x".into()])
        );
        store.unwanted(&key("a"), 5);
        assert!(names(&store, "c").is_empty() && store.len() == 2);
        assert_eq!(store.children.len(), 1, "nothing is kept of clusters without children");
    }
}
