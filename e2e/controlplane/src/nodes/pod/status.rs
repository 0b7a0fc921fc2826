//! The status of a pod, computed from its containers as a kubelet does.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{HostIP, Pod, PodCondition, PodIP, PodStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use super::view::{Role, State, View};

/// What the status needs besides the containers.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    pub address: String,
    pub host: String,
    pub began: Timestamp,
    /// All processes have ended and none will start again.
    pub over: bool,
    pub now: Timestamp,
}

/// Since when each condition has its status.
pub(crate) type Since = BTreeMap<String, (String, Timestamp)>;

/// The status of a pod, with only the conditions that a kubelet owns. Others (readiness gates, `PodScheduled`) belong
/// to whoever writes them.
pub(crate) fn status(pod: &Pod, views: &[View], facts: &Facts, since: &mut Since) -> PodStatus {
    let (inits, mains): (Vec<_>, Vec<_>) = views.iter().partition(|view| view.role != Role::Main);
    let phase = phase(pod, views, facts.over);
    let conditions = conditions(pod, views, phase, facts.over);
    let conditions = conditions.into_iter().map(|found| stamp(found, facts.now, since)).collect();
    let inits: Vec<_> = inits.into_iter().map(View::to_api).collect();
    PodStatus {
        phase: Some(phase.to_owned()),
        observed_generation: pod.metadata.generation,
        conditions: Some(conditions),
        container_statuses: Some(mains.into_iter().map(View::to_api).collect()),
        init_container_statuses: (!inits.is_empty()).then_some(inits),
        host_ip: Some(facts.host.clone()),
        host_ips: Some(vec![HostIP { ip: facts.host.clone() }]),
        pod_ip: Some(facts.address.clone()),
        pod_ips: Some(vec![PodIP { ip: facts.address.clone() }]),
        start_time: Some(Time(facts.began)),
        ..PodStatus::default()
    }
}

/// Whether a container counts as started for the sake of those after it.
pub(crate) fn lets_others_start(view: &View) -> bool {
    match view.role {
        Role::Init => view.done == Some(true),
        Role::Sidecar => view.started,
        Role::Main => true,
    }
}

fn phase(pod: &Pod, views: &[View], over: bool) -> &'static str {
    // A pod that has ended stays ended.
    match pod.status.as_ref().and_then(|s| s.phase.as_deref()) {
        Some("Succeeded") => return "Succeeded",
        Some("Failed") => return "Failed",
        _ => {}
    }
    let policy = restart_policy(pod);
    let mains = || views.iter().filter(|view| view.role == Role::Main);
    let failed = |view: &View| matches!(&view.state, State::Terminated(end) if end.exit_code != 0);
    let init_failed = views.iter().any(|v| v.role == Role::Init && v.done == Some(false));
    let waiting = mains().any(|v| matches!(v.state, State::Waiting { .. }) && v.last.is_none());
    if over {
        let bad = init_failed || waiting || mains().any(failed);
        return if bad { "Failed" } else { "Succeeded" };
    }
    // As a kubelet's: a pod has not ended while anything of it runs, the sidecars above all.
    let runs = views.iter().any(|view| matches!(view.state, State::Running { .. }));
    if init_failed && policy == "Never" {
        return if runs { "Pending" } else { "Failed" };
    }
    if waiting || !views.iter().all(lets_others_start) && mains().all(|v| !v.began) {
        return "Pending";
    }
    let all_ended = mains().all(|view| view.done.is_some());
    match all_ended && !runs {
        false => "Running",
        true if mains().any(failed) => "Failed",
        true => "Succeeded",
    }
}

/// The restart policy of a pod; Always if it says none.
pub(crate) fn restart_policy(pod: &Pod) -> &str {
    pod.spec.as_ref().and_then(|spec| spec.restart_policy.as_deref()).unwrap_or("Always")
}

/// A condition before it has a time.
struct Found {
    kind: &'static str,
    good: bool,
    reason: Option<&'static str>,
    message: Option<String>,
}

fn conditions(pod: &Pod, views: &[View], phase: &str, over: bool) -> Vec<Found> {
    let good = |kind, good| Found { kind, good, reason: None, message: None };
    let because = |kind, reason, message| Found { kind, good: false, reason: Some(reason), message };
    let listed =
        |what: &str, names: &[&str]| Some(format!("containers with {what} status: [{}]", names.join(" ")));

    let late: Vec<_> = views.iter().filter(|v| !lets_others_start(v)).map(|v| v.name.as_str()).collect();
    let initialized = if phase == "Succeeded" {
        Found { kind: "Initialized", good: true, reason: Some("PodCompleted"), message: None }
    } else if late.is_empty() || views.iter().any(|v| v.role == Role::Main && v.began) {
        good("Initialized", true)
    } else {
        because("Initialized", "ContainersNotInitialized", listed("incomplete", &late))
    };

    let serving = views.iter().filter(|v| v.role != Role::Init);
    let unready: Vec<_> = serving.filter(|v| !v.ready).map(|v| v.name.as_str()).collect();
    let containers = match phase {
        "Succeeded" => because("ContainersReady", "PodCompleted", None),
        "Failed" => because("ContainersReady", "PodFailed", None),
        _ if unready.is_empty() => good("ContainersReady", true),
        _ => because("ContainersReady", "ContainersNotReady", listed("unready", &unready)),
    };

    let gates: Vec<_> = shut_gates(pod).collect();
    let ready = if !containers.good {
        Found { kind: "Ready", message: containers.message.clone(), ..containers }
    } else if gates.is_empty() {
        good("Ready", true)
    } else {
        let message =
            gates.iter().map(|gate| format!("corresponding condition of pod readiness gate \"{gate}\""));
        let message = message.collect::<Vec<_>>().join(", ") + " is not \"True\"";
        because("Ready", "ReadinessGatesNotReady", Some(message))
    };
    vec![good("PodReadyToStartContainers", !over), initialized, containers, ready]
}

/// Readiness gates whose condition is not True.
fn shut_gates(pod: &Pod) -> impl Iterator<Item = &str> {
    let conditions = pod.status.as_ref().and_then(|s| s.conditions.as_deref()).unwrap_or_default();
    let gates = pod.spec.iter().flat_map(|spec| spec.readiness_gates.iter().flatten());
    gates.map(|gate| gate.condition_type.as_str()).filter(|gate| {
        !conditions.iter().any(|condition| condition.type_ == *gate && condition.status == "True")
    })
}

fn stamp(found: Found, now: Timestamp, since: &mut Since) -> PodCondition {
    let status = if found.good { "True" } else { "False" };
    let entry = since.entry(found.kind.to_owned()).or_insert_with(|| (status.to_owned(), now));
    if entry.0 != status {
        *entry = (status.to_owned(), now);
    }
    PodCondition {
        type_: found.kind.to_owned(),
        status: status.to_owned(),
        reason: found.reason.map(str::to_owned),
        message: found.message,
        last_transition_time: Some(Time(entry.1)),
        ..PodCondition::default()
    }
}

/// What the API server already says about the times of a pod's conditions.
pub(crate) fn since(pod: &Pod) -> Since {
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let known = conditions
        .filter_map(|c| Some((c.type_.clone(), (c.status.clone(), c.last_transition_time.as_ref()?.0))));
    known.collect()
}

#[cfg(test)]
#[path = "status_tests.rs"]
mod tests;
