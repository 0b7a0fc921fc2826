//! Objects of lists and events, read into what the caches keep. What this release cannot read is kept as unreadable, so
//! that nobody takes it for gone.

use std::sync::Arc;

use deepinfer_crds::names::label;
use deepinfer_planner::{Kind, Namespaced, Object};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::sources::{Shelf, Source};
use super::store::{Cached, Entry};
use super::{entry_of, pods, version_of};

/// An object of a list or of an event, as its kind or, if it is not like its kind, as what it is called.
#[derive(Clone)]
pub(super) enum Parsed<K> {
    Good(Box<K>),
    Bad(Box<ObjectMeta>, String),
}

impl<'de, K: DeserializeOwned> Deserialize<'de> for Parsed<K> {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let meta = value.get("metadata").cloned().unwrap_or_default();
        match serde_json::from_value::<K>(value) {
            Ok(object) => Ok(Self::Good(Box::new(object))),
            Err(error) => {
                let meta: ObjectMeta = serde_json::from_value(meta).map_err(serde::de::Error::custom)?;
                Ok(Self::Bad(Box::new(meta), error.to_string()))
            }
        }
    }
}

/// An object as the caches take it.
pub(super) struct Seen {
    pub key: Namespaced,
    pub uid: String,
    pub version: u64,
    pub entry: Option<Entry>,
}

fn named(meta: &ObjectMeta, entry: Option<Entry>) -> Option<Seen> {
    let key = (meta.namespace.clone().unwrap_or_default(), meta.name.clone()?);
    Some(Seen { key, uid: meta.uid.clone().unwrap_or_default(), version: version_of(meta)?, entry })
}

fn object(object: Object) -> Option<Seen> {
    let meta = object.meta();
    let mut seen = named(meta, None)?;
    seen.entry = entry_of(object);
    Some(seen)
}

pub(super) fn parsed<K: Into<Object>>(source: &Source, parsed: Parsed<K>) -> Option<Seen> {
    match parsed {
        Parsed::Good(good) => object((*good).into()),
        Parsed::Bad(meta, why) => unreadable(source, &meta, why),
    }
}

/// An object of a kind that is found by probing. Lists of built-in kinds leave out what their items are.
pub(super) fn foreign(source: &Source, mut value: Value, kind: Kind) -> Option<Seen> {
    if let Some(map) = value.as_object_mut() {
        map.entry("apiVersion").or_insert_with(|| source.resource.api_version().into());
        map.entry("kind").or_insert_with(|| source.resource.kind.clone().into());
    }
    let meta = value.get("metadata").cloned().unwrap_or_default();
    match Object::from_value(kind, value) {
        Ok(read) => object(read),
        Err(error) => {
            let meta: ObjectMeta = serde_json::from_value(meta).unwrap_or_default();
            unreadable(source, &meta, error.to_string())
        }
    }
}

fn unreadable(source: &Source, meta: &ObjectMeta, why: String) -> Option<Seen> {
    let mut seen = named(meta, None)?;
    tracing::warn!(kind = source.name(), namespace = seen.key.0, name = seen.key.1, err = why, "unreadable");
    let cluster = match source.shelf {
        Shelf::Kind(Kind::Cluster) => Some(seen.key.1.clone()),
        _ => meta.labels.as_ref().and_then(|labels| labels.get(label::CLUSTER)).cloned(),
    };
    let cached = Cached::Unreadable(Arc::from(why));
    seen.entry = Some(Entry { version: seen.version, uid: seen.uid.clone(), cluster, cached });
    Some(seen)
}

pub(super) fn pod(pod: Pod) -> Option<Seen> {
    object(Object::Pod(pod))
}

pub(super) fn node(node: Node) -> Option<Seen> {
    let mut seen = named(&node.metadata, None)?;
    let (version, uid) = (seen.version, seen.uid.clone());
    let cached = Cached::Node(Arc::new(pods::reduce_node(node)));
    seen.entry = Some(Entry { version, uid, cluster: None, cached });
    Some(seen)
}

#[cfg(test)]
mod tests {
    use deepinfer_crds::Supernode;

    use super::*;

    #[test]
    fn an_object_of_a_newer_release_is_kept_as_unreadable_and_not_lost() {
        let text = r#"{"metadata": {"name": "c-decode-x", "namespace": "ns", "uid": "u", "resourceVersion": "7",
            "labels": {"deepinfer.io/cluster": "c"}}, "spec": {"clusterName": 7}}"#;
        let item: Parsed<Supernode> = serde_json::from_str(text).expect("it has metadata");
        let fixed = super::super::sources::fixed(&[], false);
        let source = fixed.iter().find(|s| s.shelf == Shelf::Kind(Kind::Supernode)).expect("it is watched");
        let seen = parsed(source, item).expect("it has a name");
        let entry = seen.entry.expect("it is kept");
        assert_eq!((entry.version, entry.cluster.as_deref()), (7, Some("c")));
        assert!(matches!(entry.cached, Cached::Unreadable(_)));
    }

    #[test]
    fn items_of_a_list_of_a_built_in_kind_are_what_their_list_is() {
        let apis = deepinfer_planner::Apis {
            native_gang: Some(deepinfer_planner::NativeVersion::V1Alpha2),
            ..deepinfer_planner::Apis::default()
        };
        let sources = super::super::sources::optional(&[], &apis);
        let item = serde_json::json!({
            "metadata": {"name": "c-decode-x", "namespace": "ns", "uid": "u", "resourceVersion": "7"},
            "spec": {},
        });
        let seen = foreign(&sources[0], item, Kind::Gang).expect("it has a name");
        let entry = seen.entry.expect("it is kept");
        let object = entry.cached.object().expect("it is readable");
        assert_eq!(object.type_meta(), ("scheduling.k8s.io/v1alpha2".to_owned(), "PodGroup".to_owned()));
    }
}
