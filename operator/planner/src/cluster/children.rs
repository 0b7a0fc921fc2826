//! Children that belong to the whole cluster: identity, keys, network, revisions, gateways.

use std::collections::{BTreeMap, BTreeSet};

use deepinfer_crds::names::{label, port};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Secret, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::resolve::Resolved;
use super::template::{self, Template};
use crate::action::Action;
use crate::naming::{self, Component, pool_name};
use crate::object::{Key, Kind, Object};
use crate::step::Step;

/// Generation of the first key.
const FIRST_KEY: u64 = 1;

/// Plans identity, keys and network rules.
pub(crate) fn foundation(step: &mut Step<'_>, resolved: &Resolved) {
    let owner = step.owner();
    let name = &resolved.name;
    let labels = || Some(naming::labels(name, None));
    let account = ServiceAccount {
        metadata: meta(format!("{name}-engine"), labels()),
        automount_service_account_token: Some(false),
        ..ServiceAccount::default()
    };
    step.ensure(account, &owner);
    let key = Key::new(Kind::Secret, naming::key_secret(name, FIRST_KEY));
    if !step.world.objects.contains_key(&key) {
        let mut secret =
            Secret { metadata: meta(key.name, labels()), immutable: Some(true), ..Secret::default() };
        secret.metadata.owner_references = Some(vec![owner.clone()]);
        let secret = Box::new(Object::from(secret));
        step.actions.push(Action::DeriveKey { secret, generation: FIRST_KEY });
    }
    step.ensure(network_policy(name), &owner);
}

/// Keeps what a revision resolved to; gives the template that is in force: the stored one, if there is one. `frozen`:
/// the one that the pool has now, whatever the spec would make.
pub(crate) fn revision(step: &mut Step<'_>, made: Template, frozen: Option<Component>) -> Template {
    let owner = step.owner();
    let stored = |step: &Step<'_>, revision: &str| match step.world.get(Kind::ControllerRevision, revision) {
        Some(Object::ControllerRevision(stored)) => {
            let data = stored.data.as_ref().map(|raw| raw.0.clone())?;
            serde_json::from_value::<Template>(data).ok()
        }
        _ => None,
    };
    if let Some(component) = frozen
        && let Some(Object::Pool(pool)) =
            step.world.get(Kind::Pool, &pool_name(step.cluster_name(), component))
        && let Some(kept) = stored(step, &pool.spec.revision)
    {
        return kept;
    }
    if step.world.get(Kind::ControllerRevision, &made.revision).is_some() {
        return stored(step, &made.revision).unwrap_or(made);
    }
    let all = step.world.of(Kind::ControllerRevision).filter_map(|object| match object {
        Object::ControllerRevision(stored) => Some(stored.revision),
        _ => None,
    });
    let number = all.max().unwrap_or(0) + 1;
    let object: k8s_openapi::api::apps::v1::ControllerRevision = typed(json!({
        "metadata": {"name": made.revision, "labels": naming::labels(step.cluster_name(), None)},
        "data": made,
        "revision": number,
    }));
    step.ensure_created(object, &owner);
    made
}

/// Removes revisions beyond the history limit that nobody uses, the oldest first.
pub(crate) fn forget_revisions(step: &mut Step<'_>, resolved: &Resolved, current: [&Template; 2]) {
    let mut used: BTreeSet<String> = current.iter().map(|template| template.revision.clone()).collect();
    used.extend(step.world.supernodes().map(|sn| sn.spec.revision.clone()));
    used.extend(step.world.pools().map(|pool| pool.spec.revision.clone()));
    let uid = step.cluster.metadata.uid.clone();
    let mut old: Vec<(i64, Object)> = step
        .world
        .of(Kind::ControllerRevision)
        .filter(|object| object.controller_uid() == uid.as_deref() && !used.contains(object.name()))
        .filter_map(|object| match object {
            Object::ControllerRevision(stored) => Some((stored.revision, object.clone())),
            _ => None,
        })
        .collect();
    old.sort_by_key(|(number, _)| *number);
    let surplus = old.len().saturating_sub(resolved.revision_history as usize);
    for (_, object) in old.into_iter().take(surplus) {
        step.delete(&object, "older than the history that is kept");
    }
}

/// Plans gateways, their service and their budget.
/// `frozen`: the image under which the revision was made.
pub(crate) fn gateway(step: &mut Step<'_>, resolved: &Resolved, frozen: Option<&str>) {
    let owner = step.owner();
    let mut resolved = resolved.clone();
    let named = step.cluster.spec.gateway.as_ref().is_some_and(|gateway| gateway.image.is_some());
    if let Some(image) = frozen.filter(|_| !named) {
        resolved.gateway.image = image.to_owned();
    }
    let resolved = &resolved;
    let name = pool_name(&resolved.name, Component::Gateway);
    let labels = naming::labels(&resolved.name, Some(Component::Gateway));
    let selector = selector(&resolved.name, Component::Gateway);
    let replicas = resolved.gateway.replicas;
    let deployment: Deployment = typed(json!({
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": selector},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": template::gateway(resolved, &step.world.namespace),
        },
    }));
    step.ensure(deployment, &owner);
    let spec = step.cluster.spec.gateway.as_ref().and_then(|g| g.service.clone()).unwrap_or_default();
    let service: Service = typed(json!({
        "metadata": {"name": name, "labels": labels, "annotations": spec.annotations},
        "spec": {
            "type": spec.service_type,
            "selector": selector,
            "ports": [{"name": "http", "port": port::GATEWAY, "targetPort": port::GATEWAY}],
        },
    }));
    step.ensure(service, &owner);
    step.ensure(budget(&name, &labels, &selector, &json!({"maxUnavailable": 1})), &owner);
}

/// A disruption budget.
pub(crate) fn budget(
    name: &str,
    labels: &BTreeMap<String, String>,
    selector: &BTreeMap<String, String>,
    bound: &Value,
) -> PodDisruptionBudget {
    let mut spec = json!({
        "selector": {"matchLabels": selector},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    });
    if let (Some(spec), Some(bound)) = (spec.as_object_mut(), bound.as_object()) {
        spec.extend(bound.clone());
    }
    typed(json!({"metadata": {"name": name, "labels": labels}, "spec": spec}))
}

/// Labels that never change: what Services, Deployments and budgets select by.
pub(crate) fn selector(cluster: &str, component: Component) -> BTreeMap<String, String> {
    BTreeMap::from([
        (label::CLUSTER.to_owned(), cluster.to_owned()),
        (label::ROLE.to_owned(), component.as_str().to_owned()),
    ])
}

/// Metadata with a name and labels.
pub(crate) fn meta(name: impl Into<String>, labels: Option<BTreeMap<String, String>>) -> ObjectMeta {
    ObjectMeta { name: Some(name.into()), labels, ..ObjectMeta::default() }
}

/// An object written as JSON.
///
/// # Panics
/// If it is not of the type; the golden objects of the tests cover each.
pub(crate) fn typed<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("children are written in the shape of their kind")
}

/// Engine pods talk to pods of the same cluster only; anybody may reach the gateways.
fn network_policy(cluster: &str) -> NetworkPolicy {
    let ours = json!({"matchLabels": {label::CLUSTER: cluster}});
    typed(json!({
        "metadata": {"name": cluster, "labels": naming::labels(cluster, None)},
        "spec": {
            "podSelector": {
                "matchLabels": {label::CLUSTER: cluster},
                "matchExpressions": [{"key": label::ROLE, "operator": "In", "values": ["prefill", "decode"]}],
            },
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": ours}]},
                {"ports": [{"port": port::CONTROL}, {"port": port::METRICS}]},
            ],
        },
    }))
}
