//! Where an incarnation can go, and if nowhere, why (operator.md 6.1.4, 6.4).

use std::cmp::Reverse;
use std::collections::BTreeMap;

use deepinfer_crds::supernode::{BlockedBy, DomainCandidate};

use super::room::{self, NO_LABEL, Room, Rooms};
use super::{Need, Profile, Survey, Verdict, reason};
use crate::nodes::Nodes;

/// Domains that a status shows.
const SHOWN: usize = 8;
/// Domains that a message names.
const NAMED: usize = 3;

/// Looks at all domains for an incarnation.
pub fn survey(nodes: &Nodes, profile: &Profile, need: &Need) -> Survey {
    if nodes.unreadable || profile.shared_nodes {
        return Survey { verdict: Verdict::Fits(None), candidates: Vec::new() };
    }
    let mut counted = room::count(nodes, profile, need);
    counted.rooms.sort_by(|a, b| rank(a, need).cmp(&rank(b, need)));
    let verdict = verdict(&counted, profile, need);
    let mut candidates: Vec<DomainCandidate> = counted.rooms.iter().map(Room::candidate).collect();
    if counted.unlabelled > 0 {
        let blocked_by =
            vec![BlockedBy { reason: reason::LABEL_MISSING.to_owned(), count: counted.unlabelled }];
        let domain = NO_LABEL.to_owned();
        candidates.truncate(SHOWN - 1);
        candidates.push(DomainCandidate { domain, nodes: counted.unlabelled, free: 0, blocked_by });
    }
    candidates.truncate(SHOWN);
    Survey { verdict, candidates }
}

/// The smaller, the better. Domains with room: the preferred one, then those without a supernode of this pool, then the
/// fullest; after them, the others by how much they have.
fn rank<'a>(room: &'a Room, need: &Need) -> (bool, bool, bool, u32, Reverse<u32>, &'a str, &'a str) {
    let fits = room.free >= need.pods;
    let name = room.name();
    let left = if fits { room.free - need.pods } else { u32::MAX - room.free };
    let label = room.placement.as_ref().map_or("", |placement| &placement.label);
    (
        !fits,
        need.preferred.as_deref() != Some(name),
        fits && need.occupied.contains(name),
        left,
        Reverse(room.nodes),
        name,
        label,
    )
}

/// `counted.rooms` are in their order.
fn verdict(counted: &Rooms, profile: &Profile, need: &Need) -> Verdict {
    if let Some(best) = counted.rooms.first().filter(|room| room.free >= need.pods) {
        return Verdict::Fits(best.placement.clone());
    }
    let what = wanted(need);
    if counted.offering == 0 {
        let resource = need.resource.as_ref().map_or("anything", |(resource, _)| resource);
        let message = format!(
            "no node offers {resource}: install the device plugin of the vendor, or correct \
             spec.accelerator.resourceName"
        );
        return Verdict::Never { reason: reason::DOMAIN_TOO_SMALL, message };
    }
    if counted.rooms.is_empty() {
        return Verdict::Never { reason: reason::LABEL_MISSING, message: label_missing(counted, profile) };
    }
    let largest = counted.rooms.iter().max_by_key(|room| (room.ever, Reverse(room.name())));
    if let Some(largest) = largest
        && largest.ever < need.pods
    {
        let mut message = format!(
            "no domain has {what}: the largest, {}, has {} ({} by {})",
            largest.name(),
            largest.ever,
            if counted.rooms.len() == 1 {
                "1 domain".to_owned()
            } else {
                format!("{} domains", counted.rooms.len())
            },
            if profile.domain_labels.is_empty() {
                "no label".to_owned()
            } else {
                profile.domain_labels.join(" or ")
            },
        );
        if counted.unlabelled > 0 {
            message.push_str(&format!("; {} more nodes have no such label", counted.unlabelled));
        }
        if profile.has_domains() && !profile.compute_domain {
            message.push_str("; a profile with allowCrossDomain may span domains over RDMA");
        }
        return Verdict::Never { reason: reason::DOMAIN_TOO_SMALL, message };
    }
    let big: Vec<&Room> = counted.rooms.iter().filter(|room| room.ever >= need.pods).collect();
    Verdict::NotNow { reason: most_common(&big), message: not_now(&big, &what) }
}

fn wanted(need: &Need) -> String {
    let nodes = if need.pods == 1 { "1 node".to_owned() } else { format!("{} nodes", need.pods) };
    match &need.resource {
        Some((resource, amount)) => format!("{nodes} with {amount} {resource}"),
        None => nodes,
    }
}

fn label_missing(counted: &Rooms, profile: &Profile) -> String {
    let labels = profile.domain_labels.join(" or ");
    let remedy = if profile.domain_labels.iter().any(|label| label.starts_with("nvidia.com/")) {
        "run GPU feature discovery, or the compute-domain plugin of the NVIDIA DRA driver with its clique label on, \
         or label the nodes yourself"
    } else if profile.super_pod {
        "turn on the chart's topology.ascendLabelMirror, which copies the annotation superPodID of nodes"
    } else {
        "label the nodes, or name a profile whose labels they have in spec.accelerator.topologyProfile"
    };
    format!("none of {} nodes with accelerators has the label {labels}: {remedy}", counted.offering)
}

/// The reason of most nodes in domains that are large enough.
fn most_common(rooms: &[&Room]) -> &'static str {
    let mut counts: BTreeMap<&'static str, u32> = BTreeMap::new();
    for (reason, count) in rooms.iter().flat_map(|room| &room.blocked) {
        *counts.entry(reason).or_default() += count;
    }
    let most = counts.into_iter().max_by_key(|(reason, count)| (*count, Reverse(*reason)));
    most.map_or(reason::NOT_ENOUGH_FREE, |(reason, _)| reason)
}

fn not_now(rooms: &[&Room], what: &str) -> String {
    let part = |room: &&Room| {
        let blocked: Vec<String> = room
            .candidate()
            .blocked_by
            .iter()
            .map(|blocked| format!("{} {}", blocked.count, blocked.reason))
            .collect();
        format!("{} has {} of {} ({})", room.name(), room.free, room.nodes, blocked.join(", "))
    };
    let parts: Vec<String> = rooms.iter().take(NAMED).map(part).collect();
    let more = rooms.len().saturating_sub(NAMED);
    let more = if more > 0 { format!("; and {more} more domains") } else { String::new() };
    format!("no domain has {what} free now: {}{more}", parts.join("; "))
}
