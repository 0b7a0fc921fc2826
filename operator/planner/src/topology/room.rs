//! The room of each domain: nodes counted once, by what becomes of them.

use std::collections::{BTreeMap, BTreeSet};

use deepinfer_crds::supernode::{BlockedBy, DomainCandidate};

use super::node::{blocked, could_ever, offers};
use super::profile::label_of;
use super::{Need, Placement, Profile, reason};
use crate::nodes::{Namespaced, Nodes, Promise};

/// Name of the one domain of profiles that have none.
pub(super) const ANY: &str = "any";
/// Name under which nodes without a domain label are shown.
pub(super) const NO_LABEL: &str = "(no label)";

/// A domain, counted. Each node is either free or blocked by one reason.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Room {
    /// Label and value; `None` where all nodes are one domain.
    pub placement: Option<Placement>,
    /// Nodes in it.
    pub nodes: u32,
    /// Nodes that can take a pod now.
    pub free: u32,
    /// Nodes that could if nobody used them and nothing was wrong.
    pub ever: u32,
    /// The others, by reason.
    pub blocked: BTreeMap<&'static str, u32>,
}

impl Room {
    pub fn name(&self) -> &str {
        self.placement.as_ref().map_or(ANY, |placement| &placement.domain)
    }

    /// Takes free nodes away, at most `count`.
    fn block(&mut self, reason: &'static str, count: u32) {
        let count = count.min(self.free);
        if count > 0 {
            self.free -= count;
            *self.blocked.entry(reason).or_default() += count;
        }
    }

    pub fn candidate(&self) -> DomainCandidate {
        let mut blocked_by: Vec<BlockedBy> = self
            .blocked
            .iter()
            .map(|(reason, count)| BlockedBy { reason: (*reason).to_owned(), count: *count })
            .collect();
        blocked_by.sort_by(|a, b| b.count.cmp(&a.count).then_with(|| a.reason.cmp(&b.reason)));
        DomainCandidate { domain: self.name().to_owned(), nodes: self.nodes, free: self.free, blocked_by }
    }
}

/// What the nodes come to.
pub(super) struct Rooms {
    /// By name.
    pub rooms: Vec<Room>,
    /// Nodes that have the accelerators.
    pub offering: u32,
    /// Of these, those without a domain label.
    pub unlabelled: u32,
}

/// A domain as a node names it: label and value. `None` where all nodes are one.
type Name<'a> = Option<(&'a str, &'a str)>;

/// A domain while its nodes are counted.
#[derive(Default)]
struct Counted<'a> {
    name: Name<'a>,
    room: Room,
    /// Other supernodes in it that have a ComputeDomain.
    neighbours: BTreeSet<&'a Namespaced>,
}

/// Counts nodes that have the accelerators; others are nobody's candidates.
pub(super) fn count(nodes: &Nodes, profile: &Profile, need: &Need) -> Rooms {
    let mut found = Rooms { rooms: Vec::new(), offering: 0, unlabelled: 0 };
    let mut counted: Vec<Counted<'_>> = Vec::new();
    let mut places: BTreeMap<Name<'_>, usize> = BTreeMap::new();
    let mut last = 0;
    for node in nodes.by_name.values().filter(|node| offers(node, need)) {
        found.offering += 1;
        let label = label_of(profile, &node.labels);
        if label.is_none() && !profile.domain_labels.is_empty() {
            found.unlabelled += 1;
            continue;
        }
        let name = label.filter(|_| profile.has_domains());
        // Nodes of a domain mostly have names that follow each other.
        if counted.get(last).is_none_or(|counted| counted.name != name) {
            last = *places.entry(name).or_insert(counted.len());
            if last == counted.len() {
                counted.push(Counted { name, ..Counted::default() });
            }
        }
        let Counted { room, neighbours, .. } = &mut counted[last];
        room.nodes += 1;
        room.ever += u32::from(could_ever(node, need));
        match blocked(node, need) {
            Some(reason) => *room.blocked.entry(reason).or_default() += 1,
            None => room.free += 1,
        }
        if need.compute_domain {
            let others = node.occupants.keys().filter(|who| **who != need.me);
            for who in others {
                if !neighbours.contains(who) && nodes.fabrics.contains(who) {
                    neighbours.insert(who);
                }
            }
        }
    }
    let promised = promised(nodes, need);
    for Counted { name, mut room, mut neighbours } in counted {
        room.placement =
            name.map(|(label, domain)| Placement { label: label.to_owned(), domain: domain.to_owned() });
        let mut taken = 0_u32;
        // Where all nodes are one domain, every promise takes from it.
        let here: Vec<&(&Namespaced, u32)> = match name {
            Some((_, domain)) => promised.get(domain).into_iter().flatten().collect(),
            None => promised.values().flatten().collect(),
        };
        for (who, pods) in here {
            taken = taken.saturating_add(*pods);
            if need.compute_domain && nodes.fabrics.contains(*who) {
                neighbours.insert(who);
            }
        }
        restrict(&mut room, need, u32::try_from(neighbours.len()).unwrap_or(u32::MAX), taken);
        found.rooms.push(room);
    }
    found
}

/// What is promised to others, by domain: to whom, and how many nodes. A gang whose domain the scheduler still has to
/// choose is under the empty name and takes nothing from a domain: it may wait long, and would block every one
/// meanwhile; the gang timeout heals the race.
fn promised<'a>(nodes: &'a Nodes, need: &Need) -> BTreeMap<&'a str, Vec<(&'a Namespaced, u32)>> {
    let mut by_domain: BTreeMap<&str, Vec<(&Namespaced, u32)>> = BTreeMap::new();
    let begun: BTreeSet<&Namespaced> = match need.gated {
        true => nodes.by_name.values().flat_map(|node| node.occupants.keys()).collect(),
        false => BTreeSet::new(),
    };
    let yields = |who: &Namespaced, promise: &Promise| {
        need.gated && promise.lifted == 0 && *who > need.me && !begun.contains(who)
    };
    for (who, promise) in nodes.promised.iter().filter(|(who, _)| **who != need.me) {
        if yields(who, promise) {
            continue;
        }
        let same = match (&promise.resource, &need.resource) {
            (Some((theirs, _)), Some((ours, _))) => theirs == ours,
            _ => false,
        };
        let pods = if same { promise.pods } else { 0 };
        by_domain.entry(&promise.domain).or_default().push((who, pods));
    }
    by_domain
}

/// What keeps a whole domain from being used.
fn restrict(room: &mut Room, need: &Need, neighbours: u32, promised: u32) {
    let (all, name) = (room.free, room.name().to_owned());
    let is_domain = room.placement.is_some();
    if room.ever < need.pods {
        room.block(reason::DOMAIN_TOO_SMALL, all);
    } else if is_domain && need.excluded_domains.contains(&name) {
        room.block(reason::QUARANTINED, all);
    } else if is_domain && need.spread_required && need.occupied.contains(&name) {
        room.block(reason::SPREAD_REQUIRED, all);
    } else if is_domain && need.compute_domain && need.per_clique > 0 && neighbours >= need.per_clique {
        room.block(reason::CLIQUE_BUSY, all);
    } else {
        room.block(reason::NOT_ENOUGH_FREE, promised);
    }
}
