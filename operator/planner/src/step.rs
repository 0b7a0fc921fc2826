//! What all steps of a plan share: the world they look at, and the actions they add.

use std::collections::BTreeMap;
use std::sync::Arc;

use deepinfer_crds::{DeepInferCluster, Supernode};
use deepinfer_protocol::agent_status::Role;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde_json::Value;

use crate::action::{Action, EventKind};
use crate::blueprint::Blueprint;
use crate::naming::{APPLIED, digest, random_part};
use crate::nodes::{Namespaced, Nodes, Promise};
use crate::object::{Key, Kind, Object, covers};
use crate::report::{Report, Waiting};
use crate::topology::{self, Need, Profile, Survey, Verdict};
use crate::world::World;

/// A plan being made.
pub(crate) struct Step<'a> {
    pub world: &'a World,
    pub cluster: &'a DeepInferCluster,
    /// The memory that it leaves.
    pub next: Blueprint,
    pub actions: Vec<Action>,
    pub report: Report,
    /// Roles whose pools this plan keeps up: what they lose is made anew.
    pub kept_up: Vec<Role>,
    /// Nodes, with the room that this plan has promised.
    nodes: Arc<Nodes>,
    /// Surveys of this plan that found no room, by what was needed.
    without_room: Vec<(Need, Survey)>,
}

impl<'a> Step<'a> {
    pub fn new(world: &'a World, cluster: &'a DeepInferCluster, memory: &Blueprint) -> Self {
        let next = memory.clone();
        let nodes = Arc::clone(&world.nodes);
        Self {
            world,
            cluster,
            next,
            actions: Vec::new(),
            report: Report::default(),
            kept_up: Vec::new(),
            nodes,
            without_room: Vec::new(),
        }
    }

    /// Nodes, with the room that this plan has promised so far.
    pub fn nodes(&self) -> &Nodes {
        &self.nodes
    }

    /// Looks for a place. Many members of a pool may wait for the same: for those that hold nothing yet the answer "no"
    /// is found once in a plan.
    pub fn survey(&mut self, profile: &Profile, mut need: Need, holds_nothing: bool) -> Survey {
        if holds_nothing {
            need.me = Namespaced::default();
            if let Some((_, known)) = self.without_room.iter().find(|(known, _)| *known == need) {
                return known.clone();
            }
        }
        let survey = topology::survey(&self.nodes, profile, &need);
        if holds_nothing && !matches!(survey.verdict, Verdict::Fits(_)) {
            self.without_room.push((need, survey.clone()));
        }
        survey
    }

    /// Counts the ComputeDomain of a supernode that this plan makes.
    pub fn fabric(&mut self, supernode: Namespaced) {
        Arc::make_mut(&mut self.nodes).fabrics.insert(supernode);
    }

    /// Promises room to the pods of a supernode that this plan makes.
    pub fn promise(&mut self, supernode: Namespaced, promise: Promise) {
        Arc::make_mut(&mut self.nodes).promised.insert(supernode, promise);
    }

    pub fn cluster_name(&self) -> &str {
        self.cluster.metadata.name.as_deref().unwrap_or_default()
    }

    pub fn cluster_key(&self) -> Key {
        Key::new(Kind::Cluster, self.cluster_name())
    }

    /// The cluster as controller of a child.
    pub fn owner(&self) -> OwnerReference {
        Object::from(self.cluster.clone()).owner_reference()
    }

    /// A name `<prefix>-<five letters>` that no object of this kind has or had.
    pub fn fresh_name(&mut self, kind: Kind, prefix: &str) -> String {
        loop {
            self.next.names += 1;
            let name = format!("{prefix}-{}", random_part(self.world.seed, self.next.names));
            if self.world.get(kind, &name).is_none() {
                return name;
            }
        }
    }

    /// Makes or changes a child so that it is as `desired`; nothing if it is already. Gives whether it is there.
    pub fn ensure(&mut self, desired: impl Into<Object>, owner: &OwnerReference) -> bool {
        let object = owned(desired.into(), owner);
        match self.compare(&object) {
            Compared::Same => true,
            Compared::Foreign => {
                self.collision(&object);
                false
            }
            Compared::Missing => {
                self.say_refusal(&object.key());
                self.actions.push(Action::Apply(Box::new(object)));
                false
            }
            Compared::Different { drifted } => {
                self.say_refusal(&object.key());
                if drifted {
                    let note = "a field that the operator owns was changed by hand and is set back";
                    self.event(object.key(), EventKind::Warning, "DriftCorrected", note);
                }
                self.actions.push(Action::Apply(Box::new(object)));
                true
            }
        }
    }

    /// Makes a child that never changes; nothing if it is there.
    pub fn ensure_created(&mut self, desired: impl Into<Object>, owner: &OwnerReference) -> bool {
        let object = owned(desired.into(), owner);
        match self.compare(&object) {
            Compared::Missing => {
                self.say_refusal(&object.key());
                self.actions.push(Action::Create(Box::new(object)));
                false
            }
            Compared::Foreign => {
                self.collision(&object);
                false
            }
            Compared::Same | Compared::Different { .. } => true,
        }
    }

    /// Writes a status if it differs.
    pub fn status(&mut self, key: Key, status: Value) {
        let live = self.world.objects.get(&key).map(World::status_of);
        if live.is_some_and(|live| live != status) {
            self.actions.push(Action::Status { key, status });
        }
    }

    pub fn delete(&mut self, object: &Object, why: impl Into<String>) {
        let (key, uid) = (object.key(), object.meta().uid.clone());
        let twice =
            self.actions.iter().any(|a| matches!(a, Action::Delete { key: other, .. } if *other == key));
        if !object.is_deleted() && !twice {
            self.actions.push(Action::Delete { key, uid, grace_seconds: None, why: why.into() });
        }
    }

    pub fn event(&mut self, regarding: Key, kind: EventKind, reason: &'static str, note: impl Into<String>) {
        self.actions.push(Action::Event { regarding, kind, reason, note: note.into() });
    }

    pub fn wait(&mut self, object: &Key, reason: &str, since: i64, message: impl Into<String>) {
        let waiting =
            Waiting { object: object.to_string(), reason: reason.to_owned(), since, message: message.into() };
        self.report.waiting.push(waiting);
    }

    /// Says what the API server answered when it was asked for this last; the driver asks again after a while.
    fn say_refusal(&mut self, key: &Key) {
        if let Some(refusal) = self.world.refusals.get(key).cloned() {
            self.wait(key, &refusal.reason, refusal.at, refusal.message);
        }
    }

    /// A write of this supernode's children that the API server refused: reason and what it said.
    pub fn refused_children(&self, supernode: &Supernode) -> Option<(String, String)> {
        let name = supernode.metadata.name.as_deref()?;
        let ours = |key: &Key| {
            key.name.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
        };
        let refusal = self.world.refusals.iter().find(|(key, _)| ours(key)).map(|(_, refusal)| refusal)?;
        Some((refusal.reason.clone(), refusal.message.clone()))
    }

    fn compare(&self, desired: &Object) -> Compared {
        let Some(live) = self.world.objects.get(&desired.key()) else {
            return Compared::Missing;
        };
        if live.controller_uid() != desired.controller_uid() {
            return Compared::Foreign;
        }
        let applied = |object: &Object| object.meta().annotations.as_ref()?.get(APPLIED).cloned();
        let same = applied(live) == applied(desired);
        match (same, covers(&live.to_value(), &desired.to_value())) {
            (true, true) => Compared::Same,
            (drifted, _) => Compared::Different { drifted },
        }
    }

    fn collision(&mut self, object: &Object) {
        let key = object.key();
        let message = "an object of this name exists and is not ours: delete or rename it".to_owned();
        self.wait(&key, "NameCollision", 0, message);
    }
}

enum Compared {
    Missing,
    Same,
    Different { drifted: bool },
    Foreign,
}

/// The object with its owner and the digest of what is applied.
fn owned(mut object: Object, owner: &OwnerReference) -> Object {
    object.meta_mut().owner_references = Some(vec![owner.clone()]);
    let applied = digest(&object.to_value(), 16);
    let annotations = object.meta_mut().annotations.get_or_insert_with(BTreeMap::new);
    annotations.insert(APPLIED.to_owned(), applied);
    object
}
