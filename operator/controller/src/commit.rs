//! The committed memory of a plan: ConfigMap `<cluster>-blueprint`, written before anything else and only over the version
//! that the plan was made from. Two operators can not both write a successor of one blueprint, so they never act on two.

use deepinfer_crds::names::{label, manager};
use deepinfer_planner::{Blueprint, Key, Kind, Object};
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde_json::{Value, json};

use crate::cache::Caches;
use crate::error::Error;
use crate::rest::{Call, Resource, Rest, Verb};

/// The item with the blueprint.
pub const ITEM: &str = "blueprint.json";

/// Name of the ConfigMap of a cluster.
pub fn name(cluster: &str) -> String {
    format!("{cluster}-blueprint")
}

/// The blueprint in a ConfigMap; `None` if it is not one any more: the plan makes a new one from the living children.
pub fn read(map: &ConfigMap) -> Option<Blueprint> {
    let text = map.data.as_ref()?.get(ITEM)?;
    match serde_json::from_str(text) {
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
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": labels(&owner.name),
            "ownerReferences": [owner],
        },
        "data": {ITEM: text(next)},
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
    json!({
        "metadata": {
            "resourceVersion": live.metadata.resource_version,
            "uid": live.metadata.uid,
            "labels": labels(cluster),
        },
        "data": {ITEM: text(next)},
    })
}

fn text(blueprint: &Blueprint) -> String {
    serde_json::to_string(blueprint).expect("a blueprint is JSON")
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
    fn a_successor_names_the_version_that_it_was_made_from() {
        let mut live = ConfigMap::default();
        live.metadata.resource_version = Some("41".into());
        assert_eq!(patch(&live, "c", &Blueprint::default())["metadata"]["resourceVersion"], "41");
    }
}
