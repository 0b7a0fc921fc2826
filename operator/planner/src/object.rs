//! Kubernetes objects of the kinds that a plan writes, as one type.

use std::fmt;

use deepinfer_crds::{DeepInferCluster, DeepInferPool, ExpertPlacement, Supernode};
use k8s_openapi::api::apps::v1::{ControllerRevision, Deployment};
use k8s_openapi::api::core::v1::{
    ConfigMap, PersistentVolumeClaim, Pod, PodTemplate, Secret, Service, ServiceAccount,
};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Resource;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Names an object inside the namespace that a world covers.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Key {
    /// Its kind.
    pub kind: Kind,
    /// Its name.
    pub name: String,
}

impl Key {
    /// The object of this kind and name.
    pub fn new(kind: Kind, name: impl Into<String>) -> Self {
        Self { kind, name: name.into() }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}/{}", self.kind, self.name)
    }
}

/// An object of a kind that is not ours and not of the core: read and written as it is, its kind found by probing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Foreign {
    /// Group and version.
    pub api_version: String,
    /// Its kind.
    pub kind: String,
    /// Its metadata.
    #[serde(default)]
    pub metadata: ObjectMeta,
    /// What is wanted.
    #[serde(default)]
    pub spec: Value,
    /// What its controller says.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub status: Value,
}

/// How an object is held inside [`Object`]: the few large ones in a box of their own, or every object were as large.
macro_rules! held {
    ($type:ty) => { $type };
    ($type:ty, boxed) => { Box<$type> };
}

macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident($type:ty $(, $held:ident)?)),* $(,)? ; $($(#[$fdoc:meta])* $foreign:ident),* $(,)?) => {
        /// Kinds of a world, in the order in which they are created.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        pub enum Kind {
            $($(#[$doc])* $kind,)*
            $($(#[$fdoc])* $foreign,)*
        }

        /// An object.
        #[derive(Clone, Debug, PartialEq)]
        #[allow(clippy::large_enum_variant)]
        pub enum Object {
            $($(#[$doc])* $kind(held!($type $(, $held)?)),)*
            $($(#[$fdoc])* $foreign(Foreign),)*
        }

        impl Object {
            /// Its kind.
            pub fn kind(&self) -> Kind {
                match self {
                    $(Self::$kind(_) => Kind::$kind,)*
                    $(Self::$foreign(_) => Kind::$foreign,)*
                }
            }

            /// Its metadata.
            pub fn meta(&self) -> &ObjectMeta {
                match self {
                    $(Self::$kind(object) => object.meta(),)*
                    $(Self::$foreign(object) => &object.metadata,)*
                }
            }

            /// Its metadata, to be changed.
            pub fn meta_mut(&mut self) -> &mut ObjectMeta {
                match self {
                    $(Self::$kind(object) => object.meta_mut(),)*
                    $(Self::$foreign(object) => &mut object.metadata,)*
                }
            }

            /// As the API server would show it.
            ///
            /// # Panics
            /// Never: our types have string keys only.
            pub fn to_value(&self) -> Value {
                match self {
                    $(Self::$kind(object) => serde_json::to_value(object),)*
                    $(Self::$foreign(object) => serde_json::to_value(object),)*
                }
                .expect("objects of these kinds are JSON")
            }

            /// Reads an object of a kind.
            ///
            /// # Errors
            /// If the value is not of this kind.
            pub fn from_value(kind: Kind, value: Value) -> Result<Self, serde_json::Error> {
                Ok(match kind {
                    $(Kind::$kind => Self::$kind(serde_json::from_value(value)?),)*
                    $(Kind::$foreign => Self::$foreign(serde_json::from_value(value)?),)*
                })
            }

            /// API version and kind as they are written.
            pub fn type_meta(&self) -> (String, String) {
                match self {
                    $(Self::$kind(_) => (
                        <$type as Resource>::api_version(&()).into_owned(),
                        <$type as Resource>::kind(&()).into_owned(),
                    ),)*
                    $(Self::$foreign(object) => (object.api_version.clone(), object.kind.clone()),)*
                }
            }
        }

        $(impl From<$type> for Object {
            fn from(object: $type) -> Self {
                Self::$kind(object.into())
            }
        })*
    };
}

kinds! {
    /// What the user writes.
    Cluster(DeepInferCluster, boxed),
    /// Identity of the pods; its token is not mounted.
    ServiceAccount(ServiceAccount),
    /// The key of control and data ports.
    Secret(Secret),
    /// Engine settings of a revision.
    ConfigMap(ConfigMap),
    /// What a revision resolved to.
    ControllerRevision(ControllerRevision),
    /// Who may talk to whom.
    NetworkPolicy(NetworkPolicy),
    /// One role's workers or supernodes.
    Pool(DeepInferPool),
    /// One incarnation of a supernode.
    Supernode(Supernode),
    /// Its expert placement.
    Placement(ExpertPlacement),
    /// Names in front of pods.
    Service(Service),
    /// What evictions may do.
    Budget(PodDisruptionBudget),
    /// Single-pod workers and gateways.
    Deployment(Deployment),
    /// What runs.
    Pod(Pod),
    /// A pod spec of the user that `pod.templateRef` names.
    PodTemplate(PodTemplate),
    /// A claim that `pvc://` names.
    Claim(PersistentVolumeClaim);

    /// The gang object of a scheduling backend: a PodGroup of one of four APIs.
    Gang,
    /// The NVLink memory domain of an incarnation.
    ComputeDomain,
}

impl Object {
    /// Its name.
    ///
    /// # Panics
    /// If it has none; every object of a world is named.
    pub fn name(&self) -> &str {
        self.meta().name.as_deref().expect("every object of a world is named")
    }

    /// Its key.
    pub fn key(&self) -> Key {
        Key::new(self.kind(), self.name())
    }

    /// The reference that makes this object the controller of another.
    ///
    /// # Panics
    /// If it was never written: an owner has a UID.
    pub fn owner_reference(&self) -> OwnerReference {
        let (api_version, kind) = self.type_meta();
        OwnerReference {
            api_version,
            kind,
            name: self.name().to_owned(),
            uid: self.meta().uid.clone().expect("an owner was written and has a UID"),
            controller: Some(true),
            block_owner_deletion: Some(true),
        }
    }

    /// UID of its controller.
    pub fn controller_uid(&self) -> Option<&str> {
        let owners = self.meta().owner_references.as_deref().unwrap_or_default();
        owners.iter().find(|o| o.controller == Some(true)).map(|o| o.uid.as_str())
    }

    /// It is being deleted.
    pub fn is_deleted(&self) -> bool {
        self.meta().deletion_timestamp.is_some()
    }

    /// A label.
    pub fn label(&self, name: &str) -> Option<&str> {
        self.meta().labels.as_ref()?.get(name).map(String::as_str)
    }
}

/// Whether `live` has everything that `desired` says: objects by key, lists element by element. What the API server
/// or other managers added beside it does not count.
pub fn covers(live: &Value, desired: &Value) -> bool {
    match (live, desired) {
        (Value::Object(live), Value::Object(desired)) => desired.iter().all(|(key, desired)| {
            // The API server leaves out what is empty.
            let absent = desired.is_null()
                || desired.as_object().is_some_and(serde_json::Map::is_empty)
                || desired.as_array().is_some_and(Vec::is_empty);
            live.get(key).map_or(absent, |live| covers(live, desired))
        }),
        (Value::Array(live), Value::Array(desired)) => {
            live.len() == desired.len() && live.iter().zip(desired).all(|(l, d)| covers(l, d))
        }
        _ => live == desired,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_others_added_does_not_count_but_what_they_changed_does() {
        let desired = json!({"a": 1, "l": [{"n": "x"}], "e": {}, "none": [], "gone": null});
        assert!(covers(&json!({"a": 1, "b": 2, "l": [{"n": "x", "default": true}]}), &desired));
        assert!(!covers(&json!({"a": 2, "l": [{"n": "x"}]}), &desired));
        assert!(!covers(&json!({"a": 1, "l": [{"n": "x"}, {"n": "y"}]}), &desired));
        assert!(!covers(&json!({"l": [{"n": "x"}]}), &desired));
    }
}
