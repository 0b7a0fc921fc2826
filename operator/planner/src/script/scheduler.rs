//! The scheduler of a story: binds pods without gates to nodes that they may and can go to; pods of a PodGroup all
//! together, into one domain if it asks for one, or not at all.

use std::collections::{BTreeMap, BTreeSet};

use deepinfer_crds::names::label;
use k8s_openapi::api::core::v1::{NodeSelectorRequirement, NodeSelectorTerm, Pod, PodCondition};
use serde_json::Value;

use super::nodes::{Machines, asks};
use crate::emulate::has_ended;
use crate::nodes::{NodeFacts, Nodes};
use crate::object::{Key, Kind, Object};
use crate::topology::is_tolerated;
use crate::world::World;

/// Binds what can be bound; gives whether the world changed.
pub(super) fn schedule(machines: &Machines, world: &mut World) -> bool {
    if !machines.any() {
        return false;
    }
    let waiting = world.pods().filter(|pod| waits(pod)).cloned();
    let mut groups: BTreeMap<(String, String), Vec<Pod>> = BTreeMap::new();
    for pod in waiting {
        let name = pod.metadata.name.clone().unwrap_or_default();
        let group = group(&pod).unwrap_or_default();
        let alone = if group.is_empty() { name } else { String::new() };
        groups.entry((group, alone)).or_default().push(pod);
    }
    let mut changed = false;
    for ((group, _), pods) in groups {
        let nodes = machines.observe(world);
        let gang = world.get(Kind::Gang, &group).map(Object::to_value).unwrap_or_default();
        match place(&nodes, &pods, &gang) {
            Some(places) => {
                for (pod, node) in places {
                    changed |= write(world, &pod, Some(node), String::new());
                }
            }
            None => {
                let message =
                    format!("0/{} nodes are available for {} pods", nodes.by_name.len(), pods.len());
                for pod in pods {
                    let name = pod.metadata.name.unwrap_or_default();
                    changed |= write(world, &name, None, message.clone());
                }
            }
        }
    }
    changed
}

fn waits(pod: &Pod) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let gated = spec.scheduling_gates.as_ref().is_some_and(|gates| !gates.is_empty());
    spec.node_name.is_none() && !gated && !has_ended(pod) && pod.metadata.deletion_timestamp.is_none()
}

/// The gang that a pod belongs to, by the field or the annotations of the backends.
fn group(pod: &Pod) -> Option<String> {
    let native = pod.spec.as_ref()?.scheduling_group.as_ref().and_then(|group| group.pod_group_name.clone());
    let annotations = pod.metadata.annotations.as_ref();
    let named = |key: &str| annotations.and_then(|annotations| annotations.get(key)).cloned();
    native.or_else(|| named("scheduling.k8s.io/group-name")).or_else(|| named("pod-group-name"))
}

/// A node for each pod, or nothing: in the first domain that holds them all.
fn place(nodes: &Nodes, pods: &[Pod], gang: &Value) -> Option<Vec<(String, String)>> {
    let spec = &gang["spec"];
    let least = spec["schedulingPolicy"]["gang"]["minCount"].as_u64().or_else(|| spec["minMember"].as_u64());
    if least.is_some_and(|least| (pods.len() as u64) < least) {
        return None;
    }
    let Some(key) = spec["schedulingConstraints"]["topology"][0]["key"].as_str() else {
        return fill(nodes.by_name.values().map(|node| &**node), pods);
    };
    let domains: BTreeSet<&str> = nodes.by_name.values().filter_map(|node| node.labels.get(key)).collect();
    domains.into_iter().find_map(|domain| {
        let inside = nodes.by_name.values().filter(|node| node.labels.get(key) == Some(domain));
        fill(inside.map(|node| &**node), pods)
    })
}

/// The first node with room for each pod in turn.
fn fill<'a>(nodes: impl Iterator<Item = &'a NodeFacts>, pods: &[Pod]) -> Option<Vec<(String, String)>> {
    let mut nodes: Vec<NodeFacts> = nodes.cloned().collect();
    let mut places = Vec::new();
    for pod in pods {
        let node = nodes.iter_mut().find(|node| allowed(pod, node) && has_room(pod, node))?;
        for (resource, amount) in asks(pod) {
            *node.used.entry(resource).or_default() += amount;
        }
        if is_member(pod) {
            *node.occupants.entry(<_>::default()).or_default() += 1;
        }
        places.push((pod.metadata.name.clone().unwrap_or_default(), node.name.clone()));
    }
    Some(places)
}

fn is_member(pod: &Pod) -> bool {
    pod.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(label::SUPERNODE))
}

fn has_room(pod: &Pod, node: &NodeFacts) -> bool {
    let get = |map: &BTreeMap<String, i64>, key: &String| map.get(key).copied().unwrap_or(0);
    let fits = |(resource, amount): (String, i64)| {
        get(&node.allocatable, &resource) - get(&node.used, &resource) >= amount
    };
    let anti = pod.spec.as_ref().and_then(|spec| spec.affinity.as_ref()?.pod_anti_affinity.as_ref());
    // The only rule of this kind that we write: no second pod of any supernode.
    asks(pod).into_iter().all(fits) && (anti.is_none() || node.occupants.is_empty())
}

fn allowed(pod: &Pod, node: &NodeFacts) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let tolerations = spec.tolerations.as_deref().unwrap_or_default();
    let mut selector = spec.node_selector.iter().flatten();
    let affinity = spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
    let required = affinity.and_then(|a| a.required_during_scheduling_ignored_during_execution.as_ref());
    node.ready
        && !node.deleted
        && !node.unschedulable
        && node.taints.iter().all(|taint| is_tolerated(taint, tolerations))
        && selector.all(|(key, value)| node.labels.get(key) == Some(value.as_str()))
        && required.is_none_or(|required| required.node_selector_terms.iter().any(|term| holds(term, node)))
}

fn holds(term: &NodeSelectorTerm, node: &NodeFacts) -> bool {
    let labels = term.match_expressions.iter().flatten();
    let fields = term.match_fields.iter().flatten();
    labels.into_iter().all(|wish| meets(wish, node.labels.get(&wish.key)))
        && fields.into_iter().all(|wish| meets(wish, Some(node.name.as_str())))
}

fn meets(wish: &NodeSelectorRequirement, value: Option<&str>) -> bool {
    let listed = || wish.values.iter().flatten().any(|listed| Some(listed.as_str()) == value);
    match wish.operator.as_str() {
        "In" => listed(),
        "NotIn" => !listed(),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        _ => false,
    }
}

/// Writes where a pod goes, or why it does not; gives whether that is new.
fn write(world: &mut World, pod: &str, node: Option<String>, message: String) -> bool {
    let now = world.timestamp();
    let Some(Object::Pod(pod)) = world.objects.get_mut(&Key::new(Kind::Pod, pod)) else { return false };
    let before = pod.clone();
    let conditions = pod.status.get_or_insert_default().conditions.get_or_insert_default();
    let status = if node.is_some() { "True" } else { "False" };
    let told = conditions.iter().find(|c| c.type_ == "PodScheduled" && c.status == status);
    let since = told.and_then(|condition| condition.last_transition_time.clone());
    conditions.retain(|condition| condition.type_ != "PodScheduled");
    conditions.push(PodCondition {
        type_: "PodScheduled".to_owned(),
        status: status.to_owned(),
        last_transition_time: Some(since.unwrap_or(now)),
        reason: node.is_none().then(|| "Unschedulable".to_owned()),
        message: node.is_none().then_some(message),
        ..PodCondition::default()
    });
    if let Some(spec) = &mut pod.spec {
        spec.node_name = node;
    }
    before != *pod
}
