//! The committed memory of a plan: ConfigMap `<cluster>-blueprint`, written before anything else and only over the version
//! that the plan was made from. Two operators can not both write a successor of one blueprint, so they never act on two.

use std::io::{Read as _, Write as _};

use deepinfer_crds::names::{label, manager};
use deepinfer_planner::{Blueprint, Key, Kind, Object};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde_json::{Value, json};

use crate::cache::Caches;
use crate::error::Error;
use crate::rest::{Call, Resource, Rest, Verb};

/// The item with the blueprint.
pub const ITEM: &str = "blueprint.json";
/// The same, compressed: a ConfigMap ends at 1 MiB, which 4,000 agents would reach.
const PACKED_ITEM: &str = "blueprint.json.gz";
/// Longer texts are compressed; shorter ones stay readable for people.
const PACK_ABOVE: usize = 256 << 10;
/// Text of a blueprint that is read; a compressed one could hold anything.
const MAX_TEXT: u64 = 64 << 20;

/// Name of the ConfigMap of a cluster.
pub fn name(cluster: &str) -> String {
    format!("{cluster}-blueprint")
}

/// The blueprint in a ConfigMap; `None` if it is not one any more: the plan makes a new one from the living children.
pub fn read(map: &ConfigMap) -> Option<Blueprint> {
    let plain = map.data.as_ref().and_then(|data| data.get(ITEM));
    let packed = map.binary_data.as_ref().and_then(|data| data.get(PACKED_ITEM));
    let read = match (packed, plain) {
        (Some(packed), _) => {
            let text = flate2::read::GzDecoder::new(packed.0.as_slice()).take(MAX_TEXT);
            serde_json::from_reader(std::io::BufReader::new(text))
        }
        (None, Some(text)) => serde_json::from_str(text),
        (None, None) => return None,
    };
    match read {
        Ok(blueprint) => Some(blueprint),
        Err(error) => {
            let name = map.metadata.name.as_deref().unwrap_or_default();
            tracing::warn!(configmap = name, err = %error, "blueprint cannot be read: it is made anew from the children");
            None
        }
    }
}

/// Writes `next` over the ConfigMap that the plan was made from (`live`; `None`: there was none). `owner` is the cluster.
///
/// # Errors
/// [`Error`]; with [`crate::error::Class::Conflict`] somebody else wrote first, and the caches know what.
pub async fn commit(
    rest: &Rest,
    caches: &Caches,
    namespace: &str,
    owner: &OwnerReference,
    live: Option<&ConfigMap>,
    next: &Blueprint,
) -> Result<(), Error> {
    let key = Key::new(Kind::ConfigMap, name(&owner.name));
    let controller = live.and_then(|live| {
        live.metadata.owner_references.as_ref()?.iter().find(|o| o.controller == Some(true))
    });
    if live.is_some() && controller.is_none_or(|controller| controller.uid != owner.uid) {
        // It may have been deleted meanwhile: only then is the next look different.
        learn(rest, caches, namespace, &key, live).await?;
        return Err(Error::Collision { key });
    }
    let resource = Resource::of(Kind::ConfigMap).expect("a core kind");
    let path = resource.path(Some(namespace));
    let written = match live {
        None => {
            let call = Call {
                verb: Verb::Create,
                kind: Some(Kind::ConfigMap),
                what: key.to_string(),
                uri: format!("{path}?fieldManager={}", manager::MAIN),
                content: "application/json",
                body: made(&key.name, namespace, owner, next),
            };
            rest.call(call).await
        }
        Some(live) => {
            let call = Call {
                verb: Verb::Patch,
                kind: Some(Kind::ConfigMap),
                what: key.to_string(),
                uri: format!("{path}/{}?fieldManager={}", key.name, manager::MAIN),
                content: "application/merge-patch+json",
                body: patch(live, &owner.name, next),
            };
            rest.call(call).await
        }
    };
    match written {
        Ok(value) => {
            remember(caches, namespace, &key, value)?;
            Ok(())
        }
        Err(error) if matches!(error.status(), Some(409 | 404)) => {
            learn(rest, caches, namespace, &key, live).await?;
            Err(error)
        }
        Err(error) => Err(error),
    }
}

/// After a conflict: what is there now, so that the next look does not see the old one again.
async fn learn(
    rest: &Rest,
    caches: &Caches,
    namespace: &str,
    key: &Key,
    live: Option<&ConfigMap>,
) -> Result<(), Error> {
    let resource = Resource::of(Kind::ConfigMap).expect("a core kind");
    match rest.get(&resource, namespace, key).await {
        Ok(value) => remember(caches, namespace, key, value),
        Err(error) if error.is_missing() => {
            if let Some(uid) = live.and_then(|live| live.metadata.uid.as_deref()) {
                caches.lost(Kind::ConfigMap, &(namespace.to_owned(), key.name.clone()), uid);
            }
            Ok(())
        }
        Err(error) => Err(error),
    }
}

fn remember(caches: &Caches, namespace: &str, key: &Key, value: Value) -> Result<(), Error> {
    let object = Object::from_value(Kind::ConfigMap, value).map_err(|error| Error::Shape {
        verb: "commit",
        what: key.to_string(),
        message: error.to_string(),
    })?;
    caches.wrote(namespace, object);
    Ok(())
}

fn made(name: &str, namespace: &str, owner: &OwnerReference, next: &Blueprint) -> Value {
    let (mut data, mut packed) = items(next);
    // In a new object there is nothing to lose, and no null.
    for map in [&mut data, &mut packed] {
        map.as_object_mut().into_iter().for_each(|map| map.retain(|_, item| !item.is_null()));
    }
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": labels(&owner.name),
            "ownerReferences": [owner],
        },
        "data": data,
        "binaryData": packed,
    })
}

/// Without its label nobody would see it any more.
fn labels(cluster: &str) -> Value {
    json!({
        label::APP_NAME: label::APP_NAME_VALUE,
        label::APP_INSTANCE: cluster,
        label::APP_MANAGED_BY: label::APP_MANAGED_BY_VALUE,
        label::CLUSTER: cluster,
    })
}

fn patch(live: &ConfigMap, cluster: &str, next: &Blueprint) -> Value {
    let (data, packed) = items(next);
    json!({
        "metadata": {
            "resourceVersion": live.metadata.resource_version,
            "uid": live.metadata.uid,
            "labels": labels(cluster),
        },
        "data": data,
        "binaryData": packed,
    })
}

/// `data` and `binaryData`: one of them has the blueprint, the other one loses what it may have had.
fn items(blueprint: &Blueprint) -> (Value, Value) {
    let text = serde_json::to_string(blueprint).expect("a blueprint is JSON");
    if text.len() <= PACK_ABOVE {
        return (json!({ITEM: text}), json!({PACKED_ITEM: null}));
    }
    let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packer.write_all(text.as_bytes()).expect("memory takes all bytes");
    let packed = ByteString(packer.finish().expect("memory takes all bytes"));
    (json!({ITEM: null}), json!({PACKED_ITEM: packed}))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[test]
    fn a_blueprint_survives_its_config_map_and_rubbish_is_no_blueprint() {
        let blueprint = Blueprint { names: 7, ..Blueprint::default() };
        let owner = OwnerReference { name: "c".into(), uid: "u".into(), ..OwnerReference::default() };
        let value = made(&name("c"), "ns", &owner, &blueprint);
        let map: ConfigMap = serde_json::from_value(value).expect("a ConfigMap");
        assert_eq!(read(&map), Some(blueprint));
        let rubbish = ConfigMap { data: Some(BTreeMap::from([(ITEM.into(), "{".into())])), ..map.clone() };
        assert_eq!(read(&rubbish), None);
        assert_eq!(read(&ConfigMap { data: None, ..map }), None);
    }

    #[test]
    fn a_large_blueprint_is_compressed_and_a_small_one_is_readable_again() {
        let mut blueprint = Blueprint::default();
        for n in 0..20_000 {
            blueprint.failures.insert(format!("pool-{n}"), Vec::new());
        }
        let owner = OwnerReference { name: "c".into(), uid: "u".into(), ..OwnerReference::default() };
        let value = made(&name("c"), "ns", &owner, &blueprint);
        assert!(value.to_string().len() < PACK_ABOVE, "{} bytes", value.to_string().len());
        let map: ConfigMap = serde_json::from_value(value).expect("a ConfigMap");
        assert_eq!(read(&map), Some(blueprint));
        let smaller = patch(&map, "c", &Blueprint::default());
        assert!(smaller["binaryData"][PACKED_ITEM].is_null() && smaller["data"][ITEM].is_string());
        let broken = BTreeMap::from([(PACKED_ITEM.to_owned(), ByteString(b"rubbish".to_vec()))]);
        assert_eq!(read(&ConfigMap { binary_data: Some(broken), ..map }), None);
    }

    #[test]
    fn a_successor_names_the_version_that_it_was_made_from() {
        let mut live = ConfigMap::default();
        live.metadata.resource_version = Some("41".into());
        assert_eq!(patch(&live, "c", &Blueprint::default())["metadata"]["resourceVersion"], "41");
    }
}
