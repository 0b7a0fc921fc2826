//! Gangs: which backend makes the pods of a supernode start together or not at all, the object that it wants, and what
//! the pods carry for it (operator.md 6.2).
//!
//! | backend | object | on the pods | who chooses the domain |
//! | --- | --- | --- | --- |
//! | Builtin | none | gate `deepinfer.io/gang` | the operator |
//! | Native | PodGroup of `scheduling.k8s.io` | `schedulingGroup` | the scheduler, if it takes topology constraints |
//! | Volcano | PodGroup of `scheduling.volcano.sh` | scheduler name, annotation | Volcano, by tier |
//! | Kai | PodGroup of `scheduling.run.ai` | scheduler name, annotations, queue label | KAI, if the profile names its Topology |
//! | Kueue | none | labels and annotations | Kueue, by topology annotation |
//!
//! Where the operator chooses, pods are bound to the domain by node affinity. All functions are pure.

mod affinity;
mod ascend;
mod backend;
mod message;
mod object;

use std::collections::BTreeSet;

use deepinfer_crds::Supernode;
use deepinfer_crds::cluster::{SchedulingBackend, Vendor};
use deepinfer_crds::names::GANG_GATE;
use serde_json::{Value, json};

use crate::nodes::Apis;
use crate::topology::{Placement, Profile};

pub(crate) use affinity::apart;
pub(crate) use ascend::host_mounts;
pub(crate) use backend::{backend, chooses_domain, served};
pub(crate) use message::scheduler_message;
pub(crate) use object::object;

/// An incarnation as its backend sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gang<'a> {
    pub supernode: &'a Supernode,
    pub profile: &'a Profile,
    /// Where it goes, as [`survey`](crate::topology::survey) found it; with an empty domain
    /// ([`free_choice`](crate::topology::free_choice)) only the label is known.
    pub placement: Option<&'a Placement>,
    /// Nodes in quarantine.
    pub excluded_nodes: &'a BTreeSet<String>,
    /// Domains in quarantine.
    pub excluded_domains: &'a BTreeSet<String>,
    pub priority_class: Option<&'a str>,
    pub queue: Option<&'a str>,
    /// What each pod asks for.
    pub resource: Option<&'a (String, i64)>,
    pub vendor: Vendor,
    pub apis: &'a Apis,
}

impl Gang<'_> {
    fn name(&self) -> &str {
        self.supernode.metadata.name.as_deref().unwrap_or_default()
    }

    fn pods(&self) -> u32 {
        self.supernode.spec.nodes
    }

    fn has_compute_domain(&self) -> bool {
        self.supernode.spec.compute_domain == Some(true)
    }

    /// The scheduler finds the domain by itself.
    fn chosen_by_scheduler(&self) -> bool {
        chooses_domain(self.supernode.spec.backend, self.has_compute_domain(), self.profile, self.apis)
    }

    /// Label and value that the pods are bound to.
    fn pinned(&self) -> Option<&Placement> {
        self.placement.filter(|placement| !placement.domain.is_empty() && !self.chosen_by_scheduler())
    }

    /// The label whose values are domains, for schedulers that know constraints.
    fn domain_label(&self) -> Option<&str> {
        let first = || self.profile.domain_labels.first();
        let label = self.placement.map(|placement| &placement.label).or_else(first);
        label.filter(|_| self.profile.has_domains()).map(String::as_str)
    }

    fn super_pod(&self) -> bool {
        self.vendor == Vendor::Ascend && self.profile.super_pod
    }

    fn accelerators(&self) -> u32 {
        self.pods() * self.supernode.spec.accelerators_per_node
    }
}

/// Puts on a pod what its backend needs, and binds it to domain and healthy nodes.
pub(crate) fn dress(gang: &Gang<'_>, pod: &mut Value) {
    affinity::require(pod, gang);
    if pod["spec"]["priorityClassName"].is_null()
        && let Some(class) = gang.priority_class
    {
        pod["spec"]["priorityClassName"] = json!(class);
    }
    let name = gang.name();
    match gang.supernode.spec.backend {
        SchedulingBackend::Native => pod["spec"]["schedulingGroup"] = json!({"podGroupName": name}),
        SchedulingBackend::Volcano => {
            pod["spec"]["schedulerName"] = json!("volcano");
            annotate(pod, "scheduling.k8s.io/group-name", name);
            if gang.super_pod() {
                ascend::super_pod(&mut pod["metadata"], gang.accelerators());
            }
        }
        SchedulingBackend::Kai => {
            pod["spec"]["schedulerName"] = json!("kai-scheduler");
            annotate(pod, "pod-group-name", name);
            // KAI would make a group of its own for pods that have an owner, with one member each.
            annotate(pod, "kai.scheduler/skip-podgrouper", "true");
            if let Some(queue) = gang.queue {
                label(pod, "kai.scheduler/queue", queue);
            }
        }
        SchedulingBackend::Kueue => kueue(gang, pod),
        SchedulingBackend::Builtin | SchedulingBackend::Auto => {
            list(&mut pod["spec"]["schedulingGates"]).push(json!({"name": GANG_GATE}));
        }
    }
}

/// Kueue makes the group from the pods themselves.
fn kueue(gang: &Gang<'_>, pod: &mut Value) {
    label(pod, "kueue.x-k8s.io/pod-group-name", gang.name());
    label(pod, "kueue.x-k8s.io/queue-name", gang.queue.unwrap_or_default());
    annotate(pod, "kueue.x-k8s.io/pod-group-total-count", &gang.pods().to_string());
    // An incarnation is never repaired, and never ends by itself.
    annotate(pod, "kueue.x-k8s.io/retriable-in-group", "false");
    annotate(pod, "kueue.x-k8s.io/pod-group-serving", "true");
    if let Some(key) = gang.domain_label() {
        annotate(pod, "kueue.x-k8s.io/podset-required-topology", key);
    }
}

fn label(pod: &mut Value, key: &str, value: &str) {
    pod["metadata"]["labels"][key] = json!(value);
}

fn annotate(pod: &mut Value, key: &str, value: &str) {
    pod["metadata"]["annotations"][key] = json!(value);
}

/// The list at a place of a pod; made if there is none.
fn list(value: &mut Value) -> &mut Vec<Value> {
    if !value.is_array() {
        *value = json!([]);
    }
    value.as_array_mut().expect("made a list above")
}

#[cfg(test)]
mod golden;
#[cfg(test)]
mod tests;
