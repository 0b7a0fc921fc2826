//! Actions of a plan, done at the API server: in order, and side by side where order says nothing (the pods of a
//! gang, objects of one kind, statuses that follow each other).
//!
//! Every write may be repeated: what was done and not answered is found done the next time. What is refused for a
//! reason that a retry does not heal becomes a lesson for the next plan and stops nobody else; after any other failure
//! only statuses are still written, because they say what is, not what was wanted.

mod apply;
mod create;
mod delete;
mod finalizers;
mod pod;
mod status;

use std::collections::BTreeMap;
use std::sync::Arc;

use deepinfer_crds::names::{label, manager};
use deepinfer_planner::{Action, Key, Kind, Namespaced, Object, World};
use futures_util::StreamExt;
use serde_json::Value;

pub use self::status::Limiter;
use crate::agents::Agents;
use crate::cache::Caches;
use crate::error::Error;
use crate::gather::Lessons;
use crate::keys::{ClusterRef, Keys};
use crate::metrics::Metrics;
use crate::recorder::{Recorder, Regarding};
use crate::rest::{Resource, Rest};

/// Writes of one reconcile at the same time.
const AT_ONCE: usize = 32;

/// Does what plans want.
pub struct Executor {
    /// The API server; writes only while this replica leads.
    pub rest: Rest,
    /// Learn of each answer.
    pub caches: Arc<Caches>,
    /// Learn of each refusal.
    pub lessons: Arc<Lessons>,
    /// Are called.
    pub agents: Arc<Agents>,
    /// Keys of clusters.
    pub keys: Arc<Keys>,
    /// Writes events.
    pub recorder: Recorder,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// How often each status may be written.
    pub limiter: Limiter,
}

/// What became of the actions.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Writes that were done, by kind of action.
    pub done: BTreeMap<&'static str, usize>,
    /// Writes that were refused.
    pub refused: usize,
    /// Writes that were not tried because they were refused a short while ago.
    pub left_alone: usize,
    /// Objects were made, changed or deleted, so that the next plan sees another world.
    pub moved: bool,
    /// A status was held back: another look within a second.
    pub held_back: bool,
    /// The first failure.
    pub error: Option<Error>,
}

/// Result of one action.
enum Done {
    /// The API server did it, or had done it before.
    Wrote,
    /// There was nothing to do.
    Nothing,
    /// Not now: it was refused a short while ago.
    Refused,
    /// Not now: the status was written less than a second ago.
    HeldBack,
}

/// For whom actions are done.
struct On<'a> {
    cluster: &'a ClusterRef,
    key: Namespaced,
    world: &'a World,
}

impl On<'_> {
    fn namespace(&self) -> &str {
        &self.key.0
    }

    /// The UID of an object as the plan saw it.
    fn uid(&self, key: &Key) -> Option<&str> {
        self.world.objects.get(key)?.meta().uid.as_deref()
    }
}

impl Executor {
    /// Does the actions for a cluster. Never fails as a whole: [`Outcome::error`].
    pub async fn execute(&self, cluster: &ClusterRef, world: &World, actions: &[Action]) -> Outcome {
        let on = On { cluster, key: (cluster.namespace.clone(), cluster.name.clone()), world };
        let mut outcome = Outcome::default();
        let mut rest = actions;
        while let Some(first) = rest.first() {
            let alike = rest.iter().take_while(|action| class(action) == class(first)).count();
            let (batch, after) = rest.split_at(alike);
            rest = after;
            if outcome.error.is_some() && !matches!(first, Action::Status { .. }) {
                continue;
            }
            let calls: Vec<_> = batch.iter().map(|action| self.act(&on, action)).collect();
            let results: Vec<_> = futures_util::stream::iter(calls).buffered(AT_ONCE).collect().await;
            for (action, result) in batch.iter().zip(results) {
                self.settle(&on, action, result, &mut outcome);
            }
        }
        outcome
    }

    async fn act(&self, on: &On<'_>, action: &Action) -> Result<Done, Error> {
        if let Some(key) = subject(action)
            && self.lessons.is_refused(&on.key, &key)
        {
            return Ok(Done::Refused);
        }
        match action {
            Action::Create(object) => self.create(on, object).await,
            Action::DeriveKey { secret, generation } => self.derive_key(on, secret, *generation).await,
            Action::Apply(object) => self.apply(on, object).await,
            Action::Replicas { key, replicas } => self.write_replicas(on, key, *replicas).await,
            Action::Status { key, status } => self.write_status(on, key, status).await,
            Action::Finalizers { key, ours } => self.write_finalizers(on, key, ours).await,
            Action::Delete { key, uid, grace_seconds, .. } => {
                self.delete(on, key, uid.as_deref(), *grace_seconds).await
            }
            Action::Pod { key, uid, change } => self.change_pod(on, key, uid.as_deref(), change).await,
            Action::CallAgent { agent, call } => {
                // An agent that does not answer is asked again by the next plan; it stops nothing else.
                if let Err(error) = self.agents.call(on.cluster, agent, call).await {
                    tracing::info!(cluster = on.cluster.name, namespace = on.namespace(), agent = %agent, err = %error, "agent");
                }
                Ok(Done::Nothing)
            }
            Action::Event { regarding, kind, reason, note } => {
                let mut note = note.clone();
                if *reason == "DriftCorrected" {
                    if self.lessons.is_refused(&on.key, regarding) {
                        return Ok(Done::Nothing);
                    }
                    self.metrics.drift(regarding.kind);
                    let by = self.other_manager(on, regarding).await;
                    note = format!("{note} (last changed by {by})");
                    self.lessons.drifted(&on.key, regarding, &by);
                }
                if let Some(object) = self.live(on, regarding) {
                    self.recorder.record(Regarding::of(&object), *kind, reason, note);
                }
                Ok(Done::Nothing)
            }
        }
    }

    fn settle(&self, on: &On<'_>, action: &Action, result: Result<Done, Error>, outcome: &mut Outcome) {
        match result {
            Ok(Done::Wrote) => {
                if let Some(key) = subject(action) {
                    self.lessons.accepted(&on.key, &key);
                }
                *outcome.done.entry(word(action)).or_insert(0) += 1;
                outcome.moved |= !matches!(action, Action::Status { .. });
            }
            Ok(Done::Nothing) => {}
            Ok(Done::Refused) => outcome.left_alone += 1,
            Ok(Done::HeldBack) => outcome.held_back = true,
            Err(error) if error.namespace_terminates() => {
                self.lessons.terminates(on.namespace());
                outcome.refused += 1;
            }
            Err(error) => match (error.refusal(), subject(action)) {
                (Some(reason), Some(key)) => {
                    let status = error.status();
                    tracing::warn!(
                        cluster = on.cluster.name, namespace = on.namespace(), action = %action, reason,
                        err = %error, err_class = error.class().as_str(), api_status = status, "refused"
                    );
                    let message = error.answer().map_or_else(|| error.to_string(), |a| a.message.clone());
                    self.lessons.refused(&on.key, key, reason, message);
                    outcome.refused += 1;
                }
                _ => {
                    if outcome.error.is_none() {
                        outcome.error = Some(error);
                    }
                }
            },
        }
    }

    /// An object as it is known now: the plan's world may be older than this plan's own writes.
    fn live(&self, on: &On<'_>, key: &Key) -> Option<Arc<Object>> {
        let known = self.caches.get(key.kind, on.namespace(), &key.name);
        known.or_else(|| on.world.objects.get(key).cloned().map(Arc::new))
    }

    /// The kind of an object as the API server names it; foreign kinds by the object that is there.
    fn resource(&self, on: &On<'_>, key: &Key) -> Result<Resource, Error> {
        Resource::of(key.kind)
            .or_else(|| self.live(on, key).map(|object| Resource::of_object(&object)))
            .ok_or_else(|| Error::Gone { key: key.clone() })
    }

    /// The field manager that wrote an object last, but for our own.
    async fn other_manager(&self, on: &On<'_>, key: &Key) -> String {
        let unknown = "an unknown manager".to_owned();
        let Ok(resource) = self.resource(on, key) else { return unknown };
        let Ok(value) = self.rest.get(&resource, on.namespace(), key).await else { return unknown };
        let managers = value["metadata"]["managedFields"].as_array().map_or(&[][..], Vec::as_slice);
        // Who writes its status is its controller, not somebody's hand.
        let specs = managers.iter().filter(|entry| entry["subresource"].as_str().is_none_or(str::is_empty));
        let others = specs.filter_map(|entry| Some((entry["time"].as_str()?, entry["manager"].as_str()?)));
        let others = others.filter(|(_, manager)| !manager.starts_with(manager::MAIN));
        others.max().map_or(unknown, |(_, manager)| manager.to_owned())
    }

    /// Puts the object of an answer into the caches.
    fn remember(&self, on: &On<'_>, verb: &'static str, key: &Key, value: Value) -> Result<Object, Error> {
        let object = Object::from_value(key.kind, value).map_err(|error| Error::Shape {
            verb,
            what: key.to_string(),
            message: error.to_string(),
        })?;
        self.caches.wrote(on.namespace(), object.clone());
        Ok(object)
    }

    /// After a conflict: what is there now goes into the caches, so that the next look sees it.
    async fn learn(&self, on: &On<'_>, resource: &Resource, key: &Key) -> Result<Option<Object>, Error> {
        match self.rest.get(resource, on.namespace(), key).await {
            Ok(value) => {
                let known = self.caches.get(key.kind, on.namespace(), &key.name);
                let uid = value["metadata"]["uid"].as_str().map(str::to_owned);
                if let Some(known) = known.filter(|known| known.meta().uid != uid) {
                    self.forget(on, key, known.meta().uid.as_deref());
                }
                let labels = &value["metadata"]["labels"];
                if watched_whole(key.kind) || !labels[label::CLUSTER].is_null() {
                    return self.remember(on, "get", key, value).map(Some);
                }
                // Somebody else's: no watch would tell when it goes, so it is not kept.
                let shape = |error: serde_json::Error| Error::Shape {
                    verb: "get",
                    what: key.to_string(),
                    message: error.to_string(),
                };
                Object::from_value(key.kind, value).map(Some).map_err(shape)
            }
            Err(error) if error.is_missing() => {
                let known = self.live(on, key).and_then(|object| object.meta().uid.clone());
                self.forget(on, key, known.as_deref());
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// An object is gone.
    fn forget(&self, on: &On<'_>, key: &Key, uid: Option<&str>) {
        if let Some(uid) = uid {
            self.caches.lost(key.kind, &(on.namespace().to_owned(), key.name.clone()), uid);
        }
    }
}

/// Kinds whose watches see every object, not only those with our label.
fn watched_whole(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::Cluster
            | Kind::Pool
            | Kind::Supernode
            | Kind::Placement
            | Kind::Pod
            | Kind::PodTemplate
            | Kind::Claim
            | Kind::ServiceAccount
    )
}

/// Actions of one class that follow each other may be done at the same time.
fn class(action: &Action) -> (u8, Option<Kind>) {
    match action {
        Action::Create(object) => (0, Some(object.kind())),
        Action::Apply(object) => (1, Some(object.kind())),
        // They say what was seen before any of them is written.
        Action::Status { .. } => (2, None),
        Action::Finalizers { key, .. } => (3, Some(key.kind)),
        Action::Delete { key, .. } => (4, Some(key.kind)),
        Action::Pod { .. } => (5, None),
        Action::Replicas { .. } => (6, None),
        Action::DeriveKey { .. } => (7, None),
        Action::CallAgent { .. } => (8, None),
        Action::Event { .. } => (9, None),
    }
}

/// The object that an action writes.
fn subject(action: &Action) -> Option<Key> {
    match action {
        Action::Create(object) | Action::Apply(object) | Action::DeriveKey { secret: object, .. } => {
            Some(object.key())
        }
        Action::Delete { key, .. } | Action::Pod { key, .. } | Action::Replicas { key, .. } => {
            Some(key.clone())
        }
        // A status must be written even if its object was refused a change: it says so.
        Action::Status { .. }
        | Action::Finalizers { .. }
        | Action::CallAgent { .. }
        | Action::Event { .. } => None,
    }
}

fn word(action: &Action) -> &'static str {
    match action {
        Action::Create(_) => "create",
        Action::Apply(_) => "apply",
        Action::Status { .. } => "status",
        Action::Finalizers { .. } => "finalizers",
        Action::Delete { .. } => "delete",
        Action::Pod { .. } => "pod",
        Action::Replicas { .. } => "replicas",
        Action::DeriveKey { .. } => "derive",
        Action::CallAgent { .. } => "call",
        Action::Event { .. } => "event",
    }
}

/// The object without what only the API server writes and without nulls, which would be wishes of their own.
fn body(object: &Object, namespace: &str) -> Value {
    let mut value = object.to_value();
    if let Some(map) = value.as_object_mut() {
        map.remove("status");
    }
    prune(&mut value);
    value["metadata"]["namespace"] = Value::from(namespace);
    value
}

fn prune(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|_, value| !value.is_null());
            map.values_mut().for_each(prune);
        }
        Value::Array(list) => list.iter_mut().for_each(prune),
        _ => {}
    }
}
