//! Why a supernode is where it is.

use deepinfer_crds::supernode::{LastFailure, PlacementStatus};
use deepinfer_crds::{Supernode, SupernodePhase, SupernodeStatus};

use super::{Explanation, pods};
use crate::view::{View, name_of};
use deepinfer_crds::table::{count, moment, since, span};

/// Pods that are named one by one.
const PODS_MAX: usize = 8;

/// Explains one supernode of a cluster.
pub fn explain(view: &View, supernode: &Supernode) -> Explanation {
    let name = name_of(&supernode.metadata);
    let status = supernode.status.clone().unwrap_or_default();
    let phase = status.phase.unwrap_or(SupernodePhase::Pending);
    let mut why = Explanation {
        object: format!("Supernode/{name}"),
        headline: headline(view, supernode, &status, phase),
        problem: !matches!(
            phase,
            SupernodePhase::Serving | SupernodePhase::Draining | SupernodePhase::Drained
        ),
        ..Explanation::default()
    };
    if phase <= SupernodePhase::Placing {
        placement(&mut why, view, status.placement.as_ref());
    }
    if let Some(failure) = &status.last_failure {
        let ago = since(&failure.time, view.now);
        why.cause(&failure.reason, format!("its last failure, {ago} ago{}", blamed(failure)));
    }
    if let Some(fabric) = status.fabric.as_deref().filter(|f| !f.eq_ignore_ascii_case("ok")) {
        why.cause("FabricNotReady", format!("the fabric self-test says {fabric}"));
    }
    if phase != SupernodePhase::Serving {
        agents(&mut why, &status);
    }
    let troubles: Vec<_> = view.pods_of(name).filter_map(pods::trouble).collect();
    for trouble in &troubles {
        why.help_against(&trouble.reason);
    }
    why.problem |= troubles.iter().any(|t| t.reason != "Terminating");
    why.pods = troubles.into_iter().take(PODS_MAX).collect();
    quarantine(&mut why, view, &supernode.spec.pool_name);
    why
}

fn headline(view: &View, supernode: &Supernode, status: &SupernodeStatus, phase: SupernodePhase) -> String {
    let name = name_of(&supernode.metadata);
    let nodes = count(supernode.spec.nodes, "node");
    let ready = status.ready.clone().unwrap_or_else(|| format!("0/{}", supernode.spec.nodes));
    let place = status.domain.as_ref().map_or_else(String::new, |domain| format!(" in domain {domain}"));
    let old = deepinfer_crds::table::age(&supernode.metadata, view.now);
    match phase {
        SupernodePhase::Serving => {
            let running =
                status.inflight.map_or_else(String::new, |n| format!(", {}", count(n, "sequence") + " run"));
            format!("{name} serves: {ready} nodes are ready{place}{running}.")
        }
        SupernodePhase::Pending => format!("{name} has not been started yet: it was made {old} ago."),
        SupernodePhase::Placing => format!("{name} waits for {nodes} in one domain; it was made {old} ago."),
        SupernodePhase::Starting => format!("{name} has its nodes{place}; {ready} agents are ready."),
        SupernodePhase::Warming => {
            format!("{name} loads weights and warms up{place}; {ready} nodes are ready.")
        }
        SupernodePhase::Degraded => {
            format!("{name} serves with fewer ranks{place}: {ready} nodes are ready.")
        }
        SupernodePhase::Draining => match &supernode.spec.drain {
            Some(drain) => format!(
                "{name} takes no new work ({}); {} left until {}.",
                drain.reason,
                count(status.inflight.unwrap_or(0), "sequence"),
                moment(&drain.deadline)
            ),
            None => {
                format!("{name} takes no new work; {} left.", count(status.inflight.unwrap_or(0), "sequence"))
            }
        },
        SupernodePhase::Drained => format!("{name} has drained and goes away."),
        SupernodePhase::Terminating => format!("{name} is being taken down{place}; its pods end."),
        SupernodePhase::Failed => format!(
            "{name} is given up after {}: it is not tried again until the spec changes.",
            count(status.restart_count.unwrap_or(0), "failure")
        ),
    }
}

/// Why no domain was good enough.
fn placement(why: &mut Explanation, view: &View, placement: Option<&PlacementStatus>) {
    let Some(placement) = placement else {
        why.cause("SchedulerPending", "no word about its placement yet");
        return;
    };
    let mut blocked: Vec<(&str, u32)> = Vec::new();
    for by in placement.candidates.iter().flat_map(|c| &c.blocked_by) {
        match blocked.iter_mut().find(|(reason, _)| *reason == by.reason) {
            Some((_, n)) => *n += by.count,
            None => blocked.push((&by.reason, by.count)),
        }
    }
    for (reason, nodes) in blocked {
        why.cause(reason, format!("keeps {} out, over all candidates", count(nodes, "node")));
    }
    if let Some(message) = &placement.scheduler_message {
        why.cause("SchedulerPending", format!("the scheduler says: {message}"));
    }
    if let Some(position) = placement.queue_position {
        why.cause("Queued", format!("it is number {position} in the queue of the gang backend"));
    }
    if let Some(at) = &placement.retry_at {
        let left = span(at.0.as_second() - view.now);
        let tries = placement
            .attempts
            .map_or_else(String::new, |n| format!(" after {}", count(n, "try").replace("trys", "tries")));
        why.cause("BackOff", format!("the next try is in {left}, at {}{tries}", moment(at)));
    }
    why.candidates.clone_from(&placement.candidates);
}

/// Pod, node, exit code and words of a failure.
fn blamed(failure: &LastFailure) -> String {
    let mut text = String::new();
    if let Some(pod) = &failure.pod {
        text += &format!(", pod {pod}");
    }
    if let Some(node) = &failure.node {
        text += &format!(" on node {node}");
    }
    if let Some(code) = failure.exit_code {
        text += &format!(", exit code {code}");
    }
    match failure.message.as_deref().filter(|m| !m.is_empty()) {
        Some(message) => text + ": " + message,
        None => text,
    }
}

/// Agents that are not serving, as far as the operator heard of them.
fn agents(why: &mut Explanation, status: &SupernodeStatus) {
    let mut states: Vec<(&str, u32)> = Vec::new();
    for node in status.nodes.iter().filter(|n| !matches!(n.state.as_str(), "Serving" | "Ready")) {
        match states.iter_mut().find(|(state, _)| *state == node.state) {
            Some((_, n)) => *n += 1,
            None => states.push((&node.state, 1)),
        }
    }
    for (state, n) in states {
        why.cause(state, format!("is the state of {}", count(n, "agent")));
    }
    let unhealthy = |health: &str| !matches!(health, "Healthy" | "healthy" | "ok" | "Unknown" | "");
    for node in &status.nodes {
        if let Some(health) = node.device_health.as_deref().filter(|h| unhealthy(h)) {
            let place = node.node.as_deref().unwrap_or("an unknown node");
            why.cause("DeviceUnhealthy", format!("pod {} on {place}: {health}", node.pod));
        }
    }
}

/// What the pool avoids.
pub fn quarantine(why: &mut Explanation, view: &View, pool: &str) {
    let pools = view.pools.iter().filter(|p| name_of(&p.metadata) == pool);
    for one in pools.flat_map(|p| p.status.iter()).flat_map(|s| &s.quarantine) {
        let what = format!("{:?}", one.scope).to_lowercase();
        why.cause(
            "Quarantined",
            format!(
                "{what} {} is avoided until {} after {} ({})",
                one.name,
                moment(&one.until),
                count(one.failures, "failure"),
                one.reason
            ),
        );
    }
}
