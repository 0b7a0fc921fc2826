//! What the API server makes of an action, for worlds that have none: local mode, the simulator, scripts and
//! property tests, and own writes that no watch has shown yet.

use deepinfer_crds::names::{GANG_GATE, ROUTABLE_GATE, annotation};
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde_json::Value;
use thiserror::Error;

use crate::action::{Action, PodChange};
use crate::emulate::has_ended;
use crate::object::{Key, Kind, Object};
use crate::world::World;

/// Why the API server refuses a write.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Conflict {
    /// Created before, by somebody else.
    #[error("{0} already exists")]
    Exists(Key),
    /// To be changed, but gone.
    #[error("{0} does not exist")]
    Missing(Key),
    /// Deleted and made again meanwhile.
    #[error("{0} is another object than the one that the plan saw")]
    Replaced(Key),
    /// A status that does not fit the kind.
    #[error("status of {key}: {message}")]
    Invalid {
        /// Of what.
        key: Key,
        /// What does not fit.
        message: String,
    },
}

impl World {
    /// Does one action. Calls to agents and events change nothing here.
    ///
    /// # Errors
    /// [`Conflict`]; the world is unchanged then.
    pub fn apply(&mut self, action: &Action) -> Result<(), Conflict> {
        match action {
            Action::Create(object) => self.create(object),
            Action::DeriveKey { secret, .. } => self.create(secret),
            Action::Apply(object) => {
                self.merge(object);
                Ok(())
            }
            Action::Status { key, status } => self.write_status(key, status),
            Action::Finalizers { key, ours } => self.write_finalizers(key, ours),
            Action::Delete { key, uid, grace_seconds, .. } => {
                self.delete(key, uid.as_deref(), *grace_seconds)
            }
            Action::Pod { key, uid, change } => self.change_pod(key, uid.as_deref(), change),
            Action::Replicas { key, replicas } => self.write_replicas(key, *replicas),
            Action::CallAgent { .. } | Action::Event { .. } => Ok(()),
        }
    }

    /// Marks the world's cluster as `kubectl delete` does.
    pub fn user_deletes(&mut self) {
        if let Some(name) = self.cluster().and_then(|c| c.metadata.name.clone()) {
            let _ = self.delete(&Key::new(Kind::Cluster, name), None, None);
        }
    }

    /// A finalizer of somebody else is put on an object, or taken off it.
    pub fn others_hold(&mut self, key: &Key, finalizer: &str, holds: bool) {
        let stamp = self.stamp();
        let Some(live) = self.objects.get_mut(key) else { return };
        let meta = live.meta_mut();
        let all = meta.finalizers.get_or_insert_default();
        all.retain(|name| name != finalizer);
        if holds {
            all.push(finalizer.to_owned());
        }
        meta.resource_version = Some(stamp);
        if meta.deletion_timestamp.is_some() && meta.finalizers.as_ref().is_none_or(Vec::is_empty) {
            self.remove(key);
        }
    }

    /// Takes a pod away, as its kubelet does once its containers have ended.
    pub fn pod_ended(&mut self, name: &str) {
        self.remove(&Key::new(Kind::Pod, name));
    }

    fn create(&mut self, object: &Object) -> Result<(), Conflict> {
        let key = object.key();
        if let Some(live) = self.objects.get(&key) {
            let ours = live.controller_uid() == object.controller_uid() && !live.is_deleted();
            return if ours { Ok(()) } else { Err(Conflict::Exists(key)) };
        }
        self.insert_new(object.clone());
        Ok(())
    }

    fn insert_new(&mut self, mut object: Object) {
        let (uid, stamp, now) = (self.new_uid(), self.stamp(), self.timestamp());
        let meta = object.meta_mut();
        meta.namespace = Some(self.namespace.clone());
        meta.uid = Some(uid);
        meta.resource_version = Some(stamp);
        meta.creation_timestamp = Some(now);
        meta.generation = Some(1);
        self.objects.insert(object.key(), object);
    }

    /// Server-side apply by one manager: maps are merged, lists are replaced, what the apply does not name stays.
    fn merge(&mut self, object: &Object) {
        let key = object.key();
        let Some(live) = self.objects.get(&key) else {
            return self.insert_new(object.clone());
        };
        let (before, desired) = (live.to_value(), object.to_value());
        let mut merged = before.clone();
        let applied_before = before.pointer("/metadata/annotations/deepinfer.io~1applied");
        let applied_now = desired.pointer("/metadata/annotations/deepinfer.io~1applied");
        if applied_before != applied_now && key.kind != Kind::Pool {
            // Owned fields that are no longer named are removed; in these kinds all of the spec is ours.
            if let Some(map) = merged.as_object_mut() {
                map.remove("spec");
                map.remove("data");
            }
            // So are labels and annotations, but for those that Kubernetes' own controllers write.
            for field in ["labels", "annotations"] {
                let wanted = desired["metadata"][field].clone();
                if let Some(live) = merged["metadata"][field].as_object_mut() {
                    live.retain(|key, _| key.contains("kubernetes.io/") || !wanted[key].is_null());
                }
            }
        }
        merge_value(&mut merged, &desired);
        let mut merged =
            Object::from_value(key.kind, merged).expect("two objects of one kind merge into one");
        let stamp = self.stamp();
        let changed = merged.to_value().get("spec") != before.get("spec");
        let meta = merged.meta_mut();
        meta.resource_version = Some(stamp);
        meta.generation = Some(meta.generation.unwrap_or(1) + i64::from(changed));
        self.objects.insert(key, merged);
    }

    fn change_pod(&mut self, key: &Key, uid: Option<&str>, change: &PodChange) -> Result<(), Conflict> {
        let (stamp, now) = (self.stamp(), self.timestamp());
        let Some(Object::Pod(pod)) = self.objects.get_mut(key) else {
            return Err(Conflict::Missing(key.clone()));
        };
        if uid.is_some_and(|uid| pod.metadata.uid.as_deref() != Some(uid)) {
            return Err(Conflict::Replaced(key.clone()));
        }
        match change {
            PodChange::LiftGate => {
                if let Some(gates) = pod.spec.as_mut().and_then(|s| s.scheduling_gates.as_mut()) {
                    gates.retain(|gate| gate.name != GANG_GATE);
                }
            }
            PodChange::Routable { holds, reason } => {
                let status = pod.status.get_or_insert_default();
                let conditions = status.conditions.get_or_insert_default();
                let word = if *holds { "True" } else { "False" };
                let since = conditions
                    .iter()
                    .find(|c| c.type_ == ROUTABLE_GATE && c.status == word)
                    .and_then(|c| c.last_transition_time.clone());
                conditions.retain(|c| c.type_ != ROUTABLE_GATE);
                conditions.push(PodCondition {
                    type_: ROUTABLE_GATE.to_owned(),
                    status: word.to_owned(),
                    reason: Some(reason.clone()),
                    last_transition_time: Some(since.unwrap_or(now)),
                    ..PodCondition::default()
                });
            }
            PodChange::Drain(drain) => {
                let annotations = pod.metadata.annotations.get_or_insert_default();
                match drain {
                    Some(drain) => annotations.insert(annotation::DRAIN.to_owned(), drain.clone()),
                    None => annotations.remove(annotation::DRAIN),
                };
            }
        }
        pod.metadata.resource_version = Some(stamp);
        Ok(())
    }

    fn write_replicas(&mut self, key: &Key, replicas: u32) -> Result<(), Conflict> {
        let stamp = self.stamp();
        let Some(Object::Pool(pool)) = self.objects.get_mut(key) else {
            return Err(Conflict::Missing(key.clone()));
        };
        pool.spec.replicas = Some(replicas);
        pool.metadata.resource_version = Some(stamp);
        Ok(())
    }

    fn write_status(&mut self, key: &Key, status: &Value) -> Result<(), Conflict> {
        let live = self.objects.get(key).ok_or_else(|| Conflict::Missing(key.clone()))?;
        let mut value = live.to_value();
        value["status"] = status.clone();
        let mut object = Object::from_value(key.kind, value)
            .map_err(|error| Conflict::Invalid { key: key.clone(), message: error.to_string() })?;
        object.meta_mut().resource_version = Some(self.stamp());
        self.objects.insert(key.clone(), object);
        Ok(())
    }

    fn write_finalizers(&mut self, key: &Key, ours: &[String]) -> Result<(), Conflict> {
        let stamp = self.stamp();
        let live = self.objects.get_mut(key).ok_or_else(|| Conflict::Missing(key.clone()))?;
        let meta = live.meta_mut();
        let mut all = meta.finalizers.take().unwrap_or_default();
        all.retain(|f| !crate::naming::is_ours(f));
        all.extend_from_slice(ours);
        meta.resource_version = Some(stamp);
        let gone = all.is_empty() && meta.deletion_timestamp.is_some();
        meta.finalizers = Some(all).filter(|all| !all.is_empty());
        if gone {
            self.remove(key);
        }
        Ok(())
    }

    fn delete(&mut self, key: &Key, uid: Option<&str>, grace: Option<i64>) -> Result<(), Conflict> {
        let (stamp, now) = (self.stamp(), self.timestamp());
        let Some(live) = self.objects.get_mut(key) else {
            return Ok(()); // gone already: what was wanted
        };
        if uid.is_some_and(|uid| live.meta().uid.as_deref() != Some(uid)) {
            return Err(Conflict::Replaced(key.clone()));
        }
        // A pod that a node may run stays until its kubelet says that it has ended; one that nobody has begun, or that
        // has ended, goes at once, as at the API server. What has finalizers stays until they are gone.
        let held = live.meta().finalizers.as_ref().is_some_and(|f| !f.is_empty());
        let runs = matches!(live, Object::Pod(pod) if may_run(pod));
        let meta = live.meta_mut();
        if !held && (!runs || grace == Some(0)) {
            self.remove(key);
        } else if meta.deletion_timestamp.is_none() {
            meta.deletion_timestamp = Some(now);
            meta.deletion_grace_period_seconds = grace;
            meta.resource_version = Some(stamp);
        }
        Ok(())
    }

    /// Removes an object and deletes what it owned, as the garbage collector does.
    fn remove(&mut self, key: &Key) {
        let Some(object) = self.objects.remove(key) else {
            return;
        };
        let uid = object.meta().uid.clone();
        let owned = self.objects.values().filter(|o| uid.is_some() && o.controller_uid() == uid.as_deref());
        let owned: Vec<Key> = owned.map(Object::key).collect();
        for key in owned {
            let _ = self.delete(&key, None, None);
        }
    }

    pub(crate) fn new_uid(&mut self) -> String {
        self.writes += 1;
        format!("{:08x}-0000-4000-8000-{:012x}", self.seed & 0xffff_ffff, self.writes)
    }

    pub(crate) fn stamp(&mut self) -> String {
        self.writes += 1;
        self.writes.to_string()
    }

    pub(crate) fn timestamp(&self) -> Time {
        time(self.now)
    }
}

/// Seconds since 1970 as the API writes them.
pub fn time(seconds: i64) -> Time {
    Time(Timestamp::from_second(seconds).unwrap_or(Timestamp::UNIX_EPOCH))
}

fn merge_value(live: &mut Value, desired: &Value) {
    match (live, desired) {
        (Value::Object(live), Value::Object(desired)) => {
            for (key, value) in desired {
                merge_value(live.entry(key.clone()).or_insert(Value::Null), value);
            }
        }
        (live, desired) => *live = desired.clone(),
    }
}
/// Somebody may be running it: it is bound, or runs where nobody binds (one machine), and has not ended.
fn may_run(pod: &Pod) -> bool {
    let bound = pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some());
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    !has_ended(pod) && (bound || phase == Some("Running"))
}
