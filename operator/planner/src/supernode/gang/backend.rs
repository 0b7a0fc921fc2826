//! The choice of a backend: the first that works, or the one that the user names.

use deepinfer_crds::cluster::SchedulingBackend;

use crate::nodes::Apis;
use crate::topology::Profile;

/// Backend of new incarnations, and what the user should know about it (event BackendFallback).
///
/// # Errors
/// If the named backend is not there, or none can do what the profile asks for: names the API and the fix.
pub(crate) fn backend(
    asked: Option<SchedulingBackend>,
    queue: Option<&str>,
    apis: &Apis,
    nodes_unreadable: bool,
    profile: &Profile,
) -> Result<(SchedulingBackend, Option<String>), String> {
    // Somebody must choose a domain: the backend, or the operator, who needs to see nodes.
    let works = |backend: SchedulingBackend| {
        served(backend, queue, apis)?;
        if nodes_unreadable && profile.has_domains() && !chooses_domain(backend, false, profile, apis) {
            return Err(format!(
                "{backend:?} needs the operator to choose a domain, which may not read nodes \
                 (topology.readNodes is off): turn it on{}",
                remedy(backend)
            ));
        }
        Ok(backend)
    };
    let chosen = match asked {
        None | Some(SchedulingBackend::Auto) => {
            let order = [
                SchedulingBackend::Native,
                SchedulingBackend::Kueue,
                SchedulingBackend::Volcano,
                SchedulingBackend::Kai,
                SchedulingBackend::Builtin,
            ];
            // Builtin is the last; its refusal is the answer.
            order
                .into_iter()
                .map(works)
                .find(Result::is_ok)
                .unwrap_or_else(|| works(SchedulingBackend::Builtin))
        }
        Some(named) => works(named),
    };
    let chosen = chosen.map_err(|why| format!("spec.scheduling.backend: {why}"))?;
    Ok((chosen, note(chosen, queue, apis, profile)))
}

/// Whether the APIs of a backend are there; also for incarnations that exist.
///
/// # Errors
/// Names the API and the fix.
pub(crate) fn served(backend: SchedulingBackend, queue: Option<&str>, apis: &Apis) -> Result<(), String> {
    let there = |served: bool, what: &str, fix: &str| {
        if served {
            Ok(())
        } else {
            Err(format!("the API server does not serve {what}: {fix}, or choose Auto"))
        }
    };
    match backend {
        SchedulingBackend::Native => there(
            apis.native_gang.is_some(),
            "PodGroups of scheduling.k8s.io, or pods do not keep spec.schedulingGroup",
            "turn on the feature gates GenericWorkload and GangScheduling and serve the API",
        ),
        SchedulingBackend::Volcano => {
            there(apis.volcano, "PodGroups of scheduling.volcano.sh/v1beta1", "install Volcano")
        }
        SchedulingBackend::Kai => {
            there(apis.kai, "PodGroups of scheduling.run.ai/v2alpha2", "install the KAI scheduler")?;
            needs_queue(queue, "KAI schedules nothing without a queue")
        }
        SchedulingBackend::Kueue => {
            there(apis.kueue, "LocalQueues of kueue.x-k8s.io", "install Kueue")?;
            needs_queue(queue, "Kueue takes pods by the LocalQueue that they name")
        }
        SchedulingBackend::Builtin | SchedulingBackend::Auto => Ok(()),
    }
}

fn needs_queue(queue: Option<&str>, why: &str) -> Result<(), String> {
    match queue {
        Some(queue) if !queue.is_empty() => Ok(()),
        _ => Err(format!("{why}: set spec.scheduling.queue")),
    }
}

/// Whether the backend finds a domain by itself, so that a gang may be made although nothing is free now. With a
/// ComputeDomain the operator chooses: no scheduler knows the limit of ComputeDomains in a clique.
pub(crate) fn chooses_domain(
    backend: SchedulingBackend,
    compute_domain: bool,
    profile: &Profile,
    apis: &Apis,
) -> bool {
    if !profile.has_domains() {
        return backend != SchedulingBackend::Builtin;
    }
    !compute_domain
        && match backend {
            SchedulingBackend::Native => apis.native_topology,
            SchedulingBackend::Volcano => profile.volcano_tier > 0,
            SchedulingBackend::Kai => !profile.kai_topology.is_empty(),
            SchedulingBackend::Kueue => true,
            SchedulingBackend::Builtin | SchedulingBackend::Auto => false,
        }
}

/// How a backend comes to choose domains.
fn remedy(backend: SchedulingBackend) -> &'static str {
    match backend {
        SchedulingBackend::Native => ", or the feature gate TopologyAwareWorkloadScheduling",
        SchedulingBackend::Volcano => ", or give the profile a volcanoTier",
        SchedulingBackend::Kai => ", or give the profile a kaiTopology",
        SchedulingBackend::Kueue | SchedulingBackend::Builtin | SchedulingBackend::Auto => {
            ", or install a gang scheduler that knows topology"
        }
    }
}

fn note(chosen: SchedulingBackend, queue: Option<&str>, apis: &Apis, profile: &Profile) -> Option<String> {
    let mut notes = Vec::new();
    if !chooses_domain(chosen, false, profile, apis) && profile.has_domains() {
        match chosen {
            SchedulingBackend::Native => notes.push(
                "Native without topology constraints (feature gate TopologyAwareWorkloadScheduling is off): the \
                 operator chooses the domain and binds pods to it by node affinity"
                    .to_owned(),
            ),
            SchedulingBackend::Kai => notes.push(
                "the topology profile names no kaiTopology: the operator chooses the domain and binds pods to it by \
                 node affinity"
                    .to_owned(),
            ),
            _ => {}
        }
    }
    if let Some(queue) = queue
        && matches!(chosen, SchedulingBackend::Native | SchedulingBackend::Builtin)
    {
        notes.push(format!(
            "spec.scheduling.queue {queue:?} has no effect: {chosen:?} has no queues; name Kueue, Volcano or Kai"
        ));
    }
    (!notes.is_empty()).then(|| notes.join("; "))
}
