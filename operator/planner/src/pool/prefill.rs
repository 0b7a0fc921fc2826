//! Prefill workers of one pod each: a Deployment for each kv-epoch.

use deepinfer_crds::DeepInferPool;
use deepinfer_crds::names::label;
use k8s_openapi::api::apps::v1::Deployment;
use serde_json::json;

use super::objects::{self, Counts};
use crate::cluster::children::{budget, selector, typed};
use crate::cluster::resolve::Resolved;
use crate::cluster::template::Template;
use crate::naming::{self, Component, pool_name};
use crate::object::{Kind, Object};
use crate::step::Step;

/// Takes the Deployments away when workers have become gangs.
pub(crate) fn remove(step: &mut Step<'_>, pool: &DeepInferPool) {
    let ours = |object: &&Object| object.controller_uid() == pool.metadata.uid.as_deref();
    let old: Vec<Object> = step.world.of(Kind::Deployment).filter(ours).cloned().collect();
    for object in old {
        step.delete(&object, "workers have several pods now");
    }
}

/// Plans the workers; gives how many there are.
pub(crate) fn plan(
    step: &mut Step<'_>,
    pool: &DeepInferPool,
    resolved: &Resolved,
    template: &Template,
) -> Counts {
    let owner = Object::from(pool.clone()).owner_reference();
    let pool_name = pool_name(&resolved.name, Component::Prefill);
    let name = format!("{pool_name}-{}", template.kv_epoch);
    let labels = naming::labels(&resolved.name, Some(Component::Prefill));
    let mut chosen = selector(&resolved.name, Component::Prefill);
    chosen.insert(label::KV_EPOCH.to_owned(), template.kv_epoch.clone());
    let mut pod = template.pod.clone();
    pod["metadata"]["labels"][label::LEAD] = json!("true");
    let replicas = resolved.prefill.life.replicas;
    let deployment: Deployment = typed(json!({
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": chosen},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": pod,
        },
    }));
    step.ensure(deployment, &owner);
    let selector = selector(&resolved.name, Component::Prefill);
    step.ensure(budget(&pool_name, &labels, &selector, &json!({"maxUnavailable": 1})), &owner);
    let mut counts = Counts { desired: replicas, ..Counts::default() };
    let all: Vec<&Object> = step.world.of(Kind::Deployment).collect();
    let mut leftover = Vec::new();
    for object in all {
        let Object::Deployment(live) = object else { continue };
        if object.controller_uid() != pool.metadata.uid.as_deref() {
            continue;
        }
        let status = live.status.clone().unwrap_or_default();
        let count = |value: Option<i32>| value.and_then(|v| u32::try_from(v).ok()).unwrap_or(0);
        counts.replicas += count(status.replicas);
        counts.ready += count(status.ready_replicas);
        counts.available += count(status.available_replicas);
        if object.name() == name {
            counts.updated += count(status.updated_replicas);
        } else {
            leftover.push(object);
        }
    }
    // Workers of another epoch go once the present one can do the work.
    if counts.updated >= replicas {
        for object in leftover {
            step.delete(object, "no decode supernode reads its KV any more");
        }
    }
    let why = format!("{}/{replicas} workers are ready", counts.available);
    if counts.available < replicas {
        let key = Object::from(pool.clone()).key();
        step.wait(&key, "Creating", 0, why.clone());
    }
    objects::status(step, pool, counts, &why, Vec::new());
    counts
}
