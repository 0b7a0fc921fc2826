//! Nodes and domains that are avoided after failures (operator.md 7.5): three in an hour, for six hours. Kept in the
//! pool's status, where people see it and the next operator reads it.

use std::collections::BTreeSet;

use deepinfer_crds::DeepInferPool;
use deepinfer_crds::pool::{QuarantineScope, Quarantined};

use crate::apply::time;
use crate::blueprint::FailureRecord;
use crate::supernode::place::ROOM_TAKEN;

/// Failures within [`WINDOW_SECONDS`] that put a node away.
const FAILURES: usize = 3;
/// Window in which failures count together.
const WINDOW_SECONDS: i64 = 3600;
/// How long a node is avoided.
const AVOIDED_SECONDS: i64 = 6 * 3600;
/// Entries that are kept: the oldest go first.
const MAX_ENTRIES: usize = 64;
/// Failures that say nothing about a node: there was no room, or the scheduler erred, or nothing fits anywhere.
const BLAMELESS: [&str; 7] = [
    "GangTimeout",
    ROOM_TAKEN,
    "PlacementViolated",
    "PodDeleted",
    "PodLost",
    "PodReplaced",
    "ChecksumMismatch",
];

/// What is avoided.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Quarantine {
    entries: Vec<Quarantined>,
}

impl Quarantine {
    /// Reads a pool's list; what has expired is left out.
    pub fn read(pool: &DeepInferPool, now: i64) -> Self {
        let entries = pool.status.iter().flat_map(|status| &status.quarantine);
        Self { entries: entries.filter(|entry| entry.until.0.as_second() > now).cloned().collect() }
    }

    /// Counts a new failure; gives the names that are avoided from now on.
    pub fn blame(&mut self, failures: &[FailureRecord], new: &FailureRecord, now: i64) -> Vec<String> {
        let mut added = Vec::new();
        if BLAMELESS.contains(&new.reason.as_str()) {
            return added;
        }
        let fabric = new.reason.starts_with("Fabric");
        let (scope, name) = if fabric {
            (QuarantineScope::Domain, new.domain.clone())
        } else {
            (QuarantineScope::Node, new.node.clone())
        };
        let Some(name) = name else { return added };
        let same = |failure: &&FailureRecord| {
            let blamed = if fabric { &failure.domain } else { &failure.node };
            blamed.as_ref() == Some(&name)
                && failure.reason.starts_with("Fabric") == fabric
                && !BLAMELESS.contains(&failure.reason.as_str())
                && now - failure.at.min(now) < WINDOW_SECONDS
        };
        let count = failures.iter().filter(same).count();
        if count >= FAILURES && !self.entries.iter().any(|e| e.scope == scope && e.name == name) {
            added.push(name.clone());
            self.entries.push(Quarantined {
                scope,
                name,
                reason: new.reason.clone(),
                failures: count as u32,
                until: time(now + AVOIDED_SECONDS),
            });
            let surplus = self.entries.len().saturating_sub(MAX_ENTRIES);
            self.entries.drain(..surplus);
            self.entries.sort_by(|a, b| (a.scope, &a.name).cmp(&(b.scope, &b.name)));
        }
        added
    }

    /// Avoids nodes for another reason than failures; gives whether any is new.
    pub fn avoid(&mut self, nodes: &BTreeSet<String>, reason: &str, now: i64) -> bool {
        let known = |name: &String, entries: &[Quarantined]| {
            entries.iter().any(|entry| entry.scope == QuarantineScope::Node && entry.name == *name)
        };
        let new: Vec<String> = nodes.iter().filter(|name| !known(name, &self.entries)).cloned().collect();
        for name in &new {
            self.entries.push(Quarantined {
                scope: QuarantineScope::Node,
                name: name.clone(),
                reason: reason.to_owned(),
                failures: 1,
                until: time(now + AVOIDED_SECONDS),
            });
        }
        self.entries.sort_by(|a, b| (a.scope, &a.name).cmp(&(b.scope, &b.name)));
        !new.is_empty()
    }

    /// For the status.
    pub fn entries(&self) -> Vec<Quarantined> {
        self.entries.clone()
    }

    /// Nodes to avoid.
    pub fn nodes(&self) -> BTreeSet<String> {
        self.of(QuarantineScope::Node)
    }

    /// Domains to avoid.
    pub fn domains(&self) -> BTreeSet<String> {
        self.of(QuarantineScope::Domain)
    }

    fn of(&self, scope: QuarantineScope) -> BTreeSet<String> {
        self.entries.iter().filter(|entry| entry.scope == scope).map(|entry| entry.name.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(at: i64, reason: &str) -> FailureRecord {
        FailureRecord {
            at,
            supernode: format!("sn-{at}"),
            revision: "r".into(),
            reason: reason.into(),
            message: String::new(),
            node: Some("node-1".into()),
            domain: Some("rack-1".into()),
        }
    }

    #[test]
    fn the_third_failure_within_an_hour_puts_a_node_away() {
        let mut quarantine = Quarantine::default();
        let mut failures = Vec::new();
        for (at, put_away) in [(0, false), (3599, false), (3700, false), (3800, true), (3900, false)] {
            failures.push(failed(at, "Error"));
            let added = quarantine.blame(&failures, &failures[failures.len() - 1].clone(), at);
            assert_eq!(!added.is_empty(), put_away, "{at}");
        }
        assert_eq!(quarantine.nodes(), ["node-1".to_owned()].into());
        assert!(quarantine.domains().is_empty());
    }

    #[test]
    fn a_fabric_fault_puts_the_domain_away_and_a_full_cluster_nobody() {
        let mut quarantine = Quarantine::default();
        for reason in ["GangTimeout", ROOM_TAKEN] {
            let full: Vec<FailureRecord> = (0..5).map(|at| failed(at, reason)).collect();
            assert!(quarantine.blame(&full, &full[4], 5).is_empty(), "{reason}");
        }
        let faults: Vec<FailureRecord> = (0..3).map(|at| failed(at, "FabricNotReady")).collect();
        assert_eq!(quarantine.blame(&faults, &faults[2], 5), ["rack-1"]);
        assert!(quarantine.nodes().is_empty());
    }
}
