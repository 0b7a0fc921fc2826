//! The pods of a supernode: all created together, never one after the other, and never made again.

use deepinfer_crds::names::label;
use deepinfer_crds::{PoolRole, Supernode};
use k8s_openapi::api::core::v1::{Pod, Service};
use serde_json::{Value, json};

use crate::cluster::children::{budget, typed as object};
use crate::cluster::template::Template;
use crate::naming::{self, Component, supernode_pod};
use crate::object::Object;
use crate::step::Step;

/// What the members of a pool with this role are called.
pub(crate) fn component(role: PoolRole) -> Component {
    match role {
        PoolRole::Prefill | PoolRole::Vision => Component::Prefill,
        PoolRole::Decode => Component::Decode,
    }
}

/// Plans the service and the budget of a supernode.
pub(crate) fn ensure_names(step: &mut Step<'_>, supernode: &Supernode) {
    let owner = Object::from(supernode.clone()).owner_reference();
    let name = supernode.metadata.name.as_deref().unwrap_or_default();
    let mut labels = naming::labels(step.cluster_name(), Some(component(supernode.spec.role)));
    labels.insert(label::SUPERNODE.to_owned(), name.to_owned());
    let selector = [(label::SUPERNODE.to_owned(), name.to_owned())].into();
    let service: Service = object(json!({
        "metadata": {"name": name, "labels": labels},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": true, "selector": selector},
    }));
    step.ensure(service, &owner);
    step.ensure(budget(name, &labels, &selector, &json!({"minAvailable": supernode.spec.nodes})), &owner);
}

/// Plans the pods of a supernode on one machine: nothing decides where they go.
pub(crate) fn ensure(step: &mut Step<'_>, supernode: &Supernode, template: &Template) {
    let owner = Object::from(supernode.clone()).owner_reference();
    let had_pods = supernode.status.as_ref().is_some_and(|s| !s.nodes.is_empty());
    if !had_pods {
        for index in 0..supernode.spec.nodes {
            step.ensure_created(typed(value(supernode, index as u16, template)), &owner);
        }
    }
}

/// One pod: the template with the place in the gang.
pub(crate) fn value(supernode: &Supernode, index: u16, template: &Template) -> Value {
    let name = supernode.metadata.name.as_deref().unwrap_or_default();
    let mut value = template.pod.clone();
    value["metadata"]["name"] = json!(supernode_pod(name, index));
    let labels = &mut value["metadata"]["labels"];
    labels[label::SUPERNODE] = json!(name);
    labels[label::NODE_INDEX] = json!(index.to_string());
    if index == 0 {
        labels[label::LEAD] = json!("true");
    }
    let containers = value["spec"]["containers"].as_array_mut();
    let engine = containers.into_iter().flatten().find(|container| container["name"] == "engine");
    if let Some(args) = engine.and_then(|engine| engine["args"].as_array_mut()) {
        let at = args.len().min(2);
        args.insert(at, Value::from(format!("--supernode={name}")));
        args.insert(at + 1, Value::from(format!("--index={index}")));
    }
    value["spec"]["hostname"] = json!(supernode_pod(name, index));
    value["spec"]["subdomain"] = json!(name);
    value
}

/// A pod from its value.
pub(crate) fn typed(value: Value) -> Pod {
    object(value)
}
