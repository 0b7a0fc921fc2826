//! Why a cluster is as it is.

use deepinfer_crds::condition::{self, kind, reason};
use deepinfer_crds::{ClusterStatus, SupernodePhase};

use super::{Explanation, pods, supernode};
use crate::view::{View, name_of};
use deepinfer_crds::table::since;

/// Supernodes that are explained one by one.
const PARTS_MAX: usize = 4;
/// Pods that are named one by one.
const PODS_MAX: usize = 8;

/// Explains a cluster.
pub fn explain(view: &View) -> Explanation {
    let name = name_of(&view.cluster.metadata);
    let Some(status) = view.cluster.status.clone() else {
        return unseen(name);
    };
    let mut why = Explanation {
        object: format!("DeepInferCluster/{name}"),
        headline: headline(view, &status),
        ..Explanation::default()
    };
    if status.observed_generation < view.cluster.metadata.generation {
        why.problem = true;
        why.cause("NotSeenYet", "the last change of the spec has not been seen by the operator");
        why.help(OPERATOR.to_owned());
    }
    conditions(&mut why, &status);
    for waiting in &status.waiting {
        let text =
            format!("{} has waited {}: {}", waiting.object, since(&waiting.since, view.now), waiting.message);
        why.cause(&waiting.reason, text);
        why.problem = true;
    }
    for pool in &view.pools {
        supernode::quarantine(&mut why, view, name_of(&pool.metadata));
    }
    let well = [SupernodePhase::Serving, SupernodePhase::Draining, SupernodePhase::Drained];
    let troubled = view.supernodes.iter().filter(|s| {
        let phase = s.status.as_ref().and_then(|s| s.phase);
        phase.is_none_or(|phase| !well.contains(&phase))
    });
    why.parts = troubled.take(PARTS_MAX).map(|s| supernode::explain(view, s)).collect();
    let troubles: Vec<_> = view.other_pods().filter_map(pods::trouble).collect();
    for trouble in &troubles {
        why.help_against(&trouble.reason);
    }
    why.pods = troubles.into_iter().take(PODS_MAX).collect();
    why.problem |= why.parts.iter().any(|p| p.problem) || why.pods.iter().any(|p| p.reason != "Terminating");
    why
}

/// What to look at when nobody acts.
const OPERATOR: &str = "is the operator up? kubectl get pods -n deepinfer-system, and its log: kubectl logs -n deepinfer-system \
     deployment/deepinfer-operator";

fn unseen(name: &str) -> Explanation {
    let mut why = Explanation {
        object: format!("DeepInferCluster/{name}"),
        headline: format!("{name} has no status: no operator has looked at it yet."),
        problem: true,
        ..Explanation::default()
    };
    why.help(OPERATOR.to_owned());
    why
}

fn headline(view: &View, status: &ClusterStatus) -> String {
    let name = name_of(&view.cluster.metadata);
    let summary = status.summary.clone().unwrap_or_default();
    let part = |what: &str, count: Option<String>| count.map(|count| format!("{what} {count}"));
    let parts =
        [part("prefill", summary.prefill), part("decode", summary.decode), part("gateway", summary.gateway)];
    let counts: Vec<String> = parts.into_iter().flatten().collect();
    let counts = if counts.is_empty() { String::new() } else { format!(": {}", counts.join(", ")) };
    if view.cluster.metadata.deletion_timestamp.is_some() {
        return format!("{name} is being deleted{counts}.");
    }
    if condition::is_true(&status.conditions, kind::READY) {
        return format!("{name} serves as its spec says{counts}.");
    }
    if condition::is_true(&status.conditions, kind::AVAILABLE) {
        return format!("{name} serves, but not as its spec says{counts}.");
    }
    format!("{name} does not serve{counts}.")
}

fn conditions(why: &mut Explanation, status: &ClusterStatus) {
    let get = |kind| condition::get(&status.conditions, kind);
    for kind in [kind::STALLED, kind::DEGRADED, kind::SCALING_CONFLICT, kind::PAUSED] {
        if let Some(c) = get(kind).filter(|c| c.status == "True") {
            why.cause(&c.reason, c.message.clone());
            why.problem |= kind != kind::PAUSED;
        }
    }
    let expected = [
        kind::MODEL_READY,
        kind::TOPOLOGY_AVAILABLE,
        kind::GATEWAY_READY,
        kind::PREFILL_READY,
        kind::DECODE_READY,
        kind::VISION_READY,
        kind::READY,
    ];
    for kind in expected {
        let Some(c) = get(kind).filter(|c| c.status == "False") else { continue };
        if c.reason == reason::SUSPENDED {
            why.cause(&c.reason, c.message.clone());
            continue;
        }
        why.problem = true;
        let message = if c.message.is_empty() { format!("{kind} is False") } else { c.message.clone() };
        // The same words in several conditions are one cause.
        if !why.causes.iter().any(|cause| cause.message == message) {
            why.cause(&c.reason, message);
        }
    }
    if let Some(c) = get(kind::FIELDS_IGNORED).filter(|c| c.status == "True") {
        why.cause(&c.reason, c.message.clone());
    }
}
