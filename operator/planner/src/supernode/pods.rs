//! The pods of a supernode: all created together, never one after the other, and never made again.

use deepinfer_crds::Supernode;
use deepinfer_crds::names::label;
use k8s_openapi::api::core::v1::{Pod, Service};
use serde_json::{Value, json};

use crate::cluster::children::{budget, typed};
use crate::cluster::template::Template;
use crate::naming::{self, Component, supernode_pod};
use crate::object::Object;
use crate::step::Step;

/// Plans the pods, the service and the budget of a supernode that has none yet.
pub(crate) fn ensure(step: &mut Step<'_>, supernode: &Supernode, template: &Template) {
    let owner = Object::from(supernode.clone()).owner_reference();
    let name = supernode.metadata.name.as_deref().unwrap_or_default();
    let mut labels = naming::labels(step.cluster_name(), Some(Component::Decode));
    labels.insert(label::SUPERNODE.to_owned(), name.to_owned());
    let selector = [(label::SUPERNODE.to_owned(), name.to_owned())].into();
    let service: Service = typed(json!({
        "metadata": {"name": name, "labels": labels},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": true, "selector": selector},
    }));
    step.ensure(service, &owner);
    step.ensure(budget(name, &labels, &selector, &json!({"minAvailable": supernode.spec.nodes})), &owner);
    let had_pods = supernode.status.as_ref().is_some_and(|s| !s.nodes.is_empty());
    if !had_pods {
        for index in 0..supernode.spec.nodes {
            step.ensure_created(pod(name, index as u16, template), &owner);
        }
    }
}

/// One pod: the template with the place in the gang.
fn pod(supernode: &str, index: u16, template: &Template) -> Pod {
    let mut value = template.pod.clone();
    value["metadata"]["name"] = json!(supernode_pod(supernode, index));
    let labels = &mut value["metadata"]["labels"];
    labels[label::SUPERNODE] = json!(supernode);
    labels[label::NODE_INDEX] = json!(index.to_string());
    if index == 0 {
        labels[label::LEAD] = json!("true");
    }
    if let Some(args) = value["spec"]["containers"][0]["args"].as_array_mut() {
        let at = args.len().min(2);
        args.insert(at, Value::from(format!("--supernode={supernode}")));
        args.insert(at + 1, Value::from(format!("--index={index}")));
    }
    value["spec"]["hostname"] = json!(supernode_pod(supernode, index));
    value["spec"]["subdomain"] = json!(supernode);
    typed(value)
}
