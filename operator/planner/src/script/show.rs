//! What stories print: the world, statuses, the fleet, and why something waits.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use deepinfer_crds::supernode::DomainCandidate;

use super::Story;
use crate::object::Object;
use crate::plan::plan;
use crate::report::Report;

impl Story {
    pub(super) fn show(&mut self) {
        for (key, object) in &self.world.objects {
            let state = match object {
                Object::Supernode(sn) => {
                    let status = sn.status.clone().unwrap_or_default();
                    format!(
                        "{:?} {}",
                        status.phase.unwrap_or(deepinfer_crds::SupernodePhase::Pending),
                        status.ready.unwrap_or_default()
                    )
                }
                Object::Pod(pod) => {
                    let phase = pod.status.as_ref().and_then(|s| s.phase.clone());
                    let deleted = if object.is_deleted() { " (ending)" } else { "" };
                    phase.unwrap_or_else(|| "Pending".to_owned()) + deleted
                }
                Object::Pool(pool) => {
                    let status = pool.status.clone().unwrap_or_default();
                    format!(
                        "{}/{} available",
                        status.available_replicas.unwrap_or(0),
                        pool.spec.replicas.unwrap_or(0)
                    )
                }
                _ => String::new(),
            };
            let _ = writeln!(self.text, "{}", format!("{key}  {state}").trim_end());
        }
    }

    pub(super) fn status(&mut self) {
        let Some(cluster) = self.world.cluster() else {
            self.text.push_str("no cluster\n");
            return;
        };
        let status = cluster.status.clone().unwrap_or_default();
        let summary = status.summary.clone().unwrap_or_default();
        let _ = writeln!(
            self.text,
            "phase {}, prefill {}, decode {}, gateway {}",
            status.phase.map_or("none".to_owned(), |phase| format!("{phase:?}")),
            summary.prefill.unwrap_or_default(),
            summary.decode.unwrap_or_default(),
            summary.gateway.unwrap_or_default()
        );
        for condition in &status.conditions {
            let line = format!(
                "{}={} {} {}",
                condition.type_, condition.status, condition.reason, condition.message
            );
            let _ = writeln!(self.text, "  {}", line.trim_end());
        }
        for waiting in &status.waiting {
            let _ =
                writeln!(self.text, "  waiting {} {} {}", waiting.object, waiting.reason, waiting.message);
        }
    }

    pub(super) fn fleet(&mut self) {
        let Some(blueprint) = &self.world.blueprint else { return };
        let fleet = &blueprint.fleet;
        let leader = |l: &Option<deepinfer_protocol::fleet::Leader>| {
            l.as_ref().map_or("none".to_owned(), |l| format!("{} (epoch {})", l.agent, l.epoch))
        };
        let _ = writeln!(
            self.text,
            "generation {}, prefill led by {}, decode led by {}{}",
            fleet.generation,
            leader(&fleet.prefill_leader),
            leader(&fleet.decode_leader),
            if fleet.closed { ", closed" } else { "" }
        );
        if !fleet.rebuilding.is_empty() {
            let _ = writeln!(self.text, "  rebuilding {:?}: requests wait", fleet.rebuilding);
        }
        for member in &fleet.members {
            let _ = writeln!(self.text, "  {} {:?} serving={}", member.name, member.role, member.serving);
        }
    }

    pub(super) fn explain(&mut self) {
        let report: Report = plan(&self.world, &self.target).report;
        for line in &report.explained {
            let _ = writeln!(self.text, "{line}");
        }
    }

    /// Where supernodes are, and why those without a place have none.
    pub(super) fn why(&mut self) {
        for avoided in self.world.pools().filter_map(|pool| pool.status.as_ref()).flat_map(|s| &s.quarantine)
        {
            let (scope, name) = (avoided.scope, &avoided.name);
            let _ = writeln!(
                self.text,
                "avoided: {scope:?} {name} until {}, {}",
                avoided.until.0, avoided.reason
            );
        }
        for supernode in self.world.supernodes() {
            let status = supernode.status.clone().unwrap_or_default();
            let phase = status.phase.unwrap_or(deepinfer_crds::SupernodePhase::Pending);
            let place = status.placement.unwrap_or_default();
            let domain = status.domain.or(place.domain).unwrap_or_else(|| "no domain".to_owned());
            let name = supernode.metadata.name.as_deref().unwrap_or_default();
            let _ = writeln!(self.text, "{name}  {phase:?}, {domain}, {:?}", supernode.spec.backend);
            let nodes: Vec<&str> = status.nodes.iter().filter_map(|node| node.node.as_deref()).collect();
            if !nodes.is_empty() {
                let _ = writeln!(self.text, "  on {}", nodes.join(", "));
            }
            for candidate in &place.candidates {
                let _ = writeln!(self.text, "  {}", line(candidate));
            }
            if let Some(message) = &place.scheduler_message {
                let _ = writeln!(self.text, "  scheduler: {message}");
            }
        }
    }

    /// Accelerators that pods hold, by domain.
    pub(super) fn room(&mut self) {
        let nodes = self.machines.observe(&self.world);
        let mut domains: BTreeMap<&str, (usize, i64, i64)> = BTreeMap::new();
        for node in nodes.by_name.values() {
            let domain = node.labels.get(super::nodes::CLIQUE).unwrap_or("-");
            let (count, used, all) = domains.entry(domain).or_default();
            *count += 1;
            *used += node.used.values().sum::<i64>();
            *all += node.allocatable.values().sum::<i64>();
        }
        for (domain, (count, used, all)) in domains {
            let _ = writeln!(self.text, "{domain}: {count} nodes, {used} of {all} accelerators held");
        }
    }
}

fn line(candidate: &DomainCandidate) -> String {
    let blocked: Vec<String> =
        candidate.blocked_by.iter().map(|blocked| format!("{} {}", blocked.count, blocked.reason)).collect();
    let blocked = if blocked.is_empty() { String::new() } else { format!(" ({})", blocked.join(", ")) };
    format!("{}: {} of {} nodes free{blocked}", candidate.domain, candidate.free, candidate.nodes)
}
