//! Children that belong to the whole cluster: identity, keys, network, revisions, gateways.

use std::collections::BTreeMap;

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

/// Keeps what a revision resolved to; gives the template that is in force: the stored one, if there is one.
pub(crate) fn revision(step: &mut Step<'_>, made: Template) -> Template {
    let owner = step.owner();
    if let Some(Object::ControllerRevision(stored)) = step.world.get(Kind::ControllerRevision, &made.revision)
    {
        let data = stored.data.as_ref().map(|raw| raw.0.clone());
        return data.and_then(|data| serde_json::from_value(data).ok()).unwrap_or(made);
    }
    let count = step.world.of(Kind::ControllerRevision).count();
    let object: k8s_openapi::api::apps::v1::ControllerRevision = typed(json!({
        "metadata": {"name": made.revision, "labels": naming::labels(step.cluster_name(), None)},
        "data": made,
        "revision": count + 1,
    }));
    step.ensure_created(object, &owner);
    made
}

/// Plans gateways, their service and their budget.
pub(crate) fn gateway(step: &mut Step<'_>, resolved: &Resolved) {
    let owner = step.owner();
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
            "template": template::gateway(resolved),
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
