//! Node affinity of gang pods: into the chosen domain, around quarantined nodes and domains; merged with what the pod
//! asks for itself.

use deepinfer_crds::names::label;
use serde_json::{Value, json};

use super::{Gang, list};

/// Adds what is required of nodes to the pod's own affinity.
pub(super) fn require(pod: &mut Value, gang: &Gang<'_>) {
    let mut expressions = Vec::new();
    if let Some(pin) = gang.pinned() {
        expressions.push(json!({"key": pin.label, "operator": "In", "values": [pin.domain]}));
    }
    // Who is bound to one domain is out of all others.
    if expressions.is_empty() && !gang.excluded_domains.is_empty() && gang.profile.has_domains() {
        for label in &gang.profile.domain_labels {
            expressions.push(json!({"key": label, "operator": "NotIn", "values": gang.excluded_domains}));
        }
    }
    // A field selector takes one value each; labels such as kubernetes.io/hostname may differ from the name.
    let fields: Vec<Value> = gang
        .excluded_nodes
        .iter()
        .map(|node| json!({"key": "metadata.name", "operator": "NotIn", "values": [node]}))
        .collect();
    if expressions.is_empty() && fields.is_empty() {
        return;
    }
    let required =
        &mut pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    let terms = list(&mut required["nodeSelectorTerms"]);
    if terms.is_empty() {
        terms.push(json!({}));
    }
    // Terms are alternatives: each must ask for all of it.
    for term in terms {
        if !expressions.is_empty() {
            list(&mut term["matchExpressions"]).extend(expressions.iter().cloned());
        }
        if !fields.is_empty() {
            list(&mut term["matchFields"]).extend(fields.iter().cloned());
        }
    }
}

/// No node with two pods of supernodes, whoever's: a node can be in one ComputeDomain only. Only for these: elsewhere
/// two pods may well share a node that has enough accelerators, and the rule costs the scheduler time.
pub(crate) fn apart(pod: &mut Value) {
    let required =
        &mut pod["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    list(required).push(json!({
        "labelSelector": {"matchExpressions": [{"key": label::SUPERNODE, "operator": "Exists"}]},
        "namespaceSelector": {},
        "topologyKey": "kubernetes.io/hostname",
    }));
}
