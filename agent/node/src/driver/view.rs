//! What people, the operator and scrapers see of an agent, and how it is told to drain.

use deepinfer_protocol::agent_status::{AgentPhase, AgentStatus, DrainStatus, Role, reason_code};
use deepinfer_protocol::fleet::FleetMember;
use deepinfer_protocol::load::ExpertLoadReport;
use deepinfer_protocol::{AgentId, Generation, Rank, Span};
use deepinfer_serving::node::{NodeEvent, NodeStatus};
use thiserror::Error;

use super::book::LoadDetail;
use super::core::Core;
use super::machines::{Machines, Totals};
use crate::engine::group::RankGroup;
use crate::engine::watchdog::Verdict;

/// Undrain came too late: nothing is left here, and others have been told.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("the drain is complete; start a new agent instead")]
pub struct UndrainTooLate;

impl Core {
    /// Takes no new work; what runs is cut after `deadline`.
    pub fn drain(&mut self, deadline: Span) -> DrainStatus {
        let deadline = self.now() + deadline;
        if self.machines.is_none() {
            // They are told when they are there; the earlier of two deadlines counts, as with machines.
            self.early_drain = Some(self.early_drain.map_or(deadline, |earlier| earlier.min(deadline)));
        }
        self.tell_all(&NodeEvent::Drain { deadline });
        self.settle();
        self.drain_status()
    }

    /// Takes work again, if something of the drain is left.
    ///
    /// # Errors
    /// [`UndrainTooLate`].
    pub fn undrain(&mut self) -> Result<DrainStatus, UndrainTooLate> {
        if self.machines.is_none() {
            self.early_drain = None;
        }
        if !self.totals().drain.may_undrain() || self.failing_since.is_some() {
            return Err(UndrainTooLate);
        }
        self.tell_all(&NodeEvent::Undrain);
        self.settle();
        Ok(self.drain_status())
    }

    /// Where the drain stands.
    pub fn drain_status(&self) -> DrainStatus {
        self.totals().drain.status()
    }

    /// Whether new work is taken.
    ///
    /// # Errors
    /// Why not, for people.
    pub fn readiness(&self) -> Result<(), String> {
        if self.phase != AgentPhase::Serving {
            return Err(self.reason.clone());
        }
        let Some(group) = self.group.as_ref().filter(|group| group.ready()) else {
            let why = self.group.as_ref().map_or("", |group| group.reason());
            return Err(format!("engines are being replaced: {why}"));
        };
        if self.totals().node.draining {
            return Err("draining".to_owned());
        }
        if self.waits_for_fabric() {
            return Err(format!("fabric self-test: {}", self.fabric()));
        }
        match group.health(self.now()) {
            (Verdict::Fine, _) => Ok(()),
            (_, span) => Err(format!("a step has not ended for {} s", span.as_millis() / 1000)),
        }
    }

    /// Whether the process is worth keeping.
    ///
    /// # Errors
    /// Why a new one must take its place.
    pub fn health(&self) -> Result<(), String> {
        if self.dead { Err(self.reason.clone()) } else { Ok(()) }
    }

    /// The other agents of the supernode, as the fleet names them.
    pub fn siblings(&self) -> Vec<FleetMember> {
        let own = &self.setup;
        let of_supernode = |m: &&FleetMember| own.supernode.is_some() && m.supernode == own.supernode;
        let members = self.fleet.members.iter().filter(|m| m.name != own.name);
        members.filter(of_supernode).cloned().collect()
    }

    /// Name in the fleet.
    pub fn name(&self) -> &AgentId {
        &self.setup.name
    }

    /// Index 0 of a supernode speaks for all of it.
    pub fn is_first(&self) -> bool {
        self.setup.index == 0
    }

    /// Looks whether every agent of the supernode answers on its data port. Once passed, a lost one is no reason to
    /// stop: each agent has engines of its own, and what becomes of the supernode is decided elsewhere.
    pub(super) fn test_fabric(&mut self) {
        if self.waits_for_fabric() && self.machines.is_some() && self.fabric() == "ok" {
            self.fabric_passed = true;
            tracing::info!("the fabric self-test has passed");
        }
    }

    fn waits_for_fabric(&self) -> bool {
        self.setup.fabric && !self.fabric_passed
    }

    /// Outcome of the test now: `ok`, or who does not answer.
    fn fabric(&self) -> String {
        if self.setup.role == Role::Prefill {
            return String::new();
        }
        if self.setup.fabric && self.fleet.generation == Generation(0) {
            return "no fleet view has come yet".to_owned();
        }
        let siblings = self.siblings();
        let (named, nodes) = (siblings.len() + 1, usize::from(self.setup.nodes));
        if self.setup.fabric && named < nodes {
            return format!("{named} of the supernode's {nodes} pods are known so far");
        }
        let connected = self.setup.transport.connected();
        match siblings.iter().find(|sibling| !connected.contains(&sibling.name)) {
            Some(sibling) => format!("{} does not answer at its data port {}", sibling.name, sibling.data),
            None => "ok".to_owned(),
        }
    }

    /// Which experts were chosen; `None` before the first window has closed, and before engines are there.
    pub fn load(&self, detail: LoadDetail) -> Option<ExpertLoadReport> {
        self.book.as_ref()?.report(detail)
    }

    /// Sums over the machines.
    pub(super) fn totals(&self) -> Totals {
        let mut totals = Totals::of(&self.machines.as_ref().map(Machines::statuses).unwrap_or_default());
        totals.node.draining |= self.early_drain.is_some();
        totals.drain.draining |= self.early_drain.is_some();
        totals
    }

    /// What this agent says about itself.
    pub fn status(&self) -> AgentStatus {
        let totals = self.totals();
        let ready = self.readiness();
        let group = self.group.as_ref();
        let draining = totals.node.draining;
        let phase = match self.phase {
            AgentPhase::Serving if draining && totals.drain.held == 0 => AgentPhase::Drained,
            AgentPhase::Serving if draining => AgentPhase::Draining,
            AgentPhase::Serving if !group.is_some_and(RankGroup::ready) => AgentPhase::Warming,
            AgentPhase::Serving if self.waits_for_fabric() => AgentPhase::Warming,
            phase => phase,
        };
        AgentStatus {
            name: self.setup.name.clone(),
            role: self.setup.role,
            supernode: self.setup.supernode.clone(),
            index: self.setup.index,
            ranks: self.setup.ranks,
            phase,
            accepting: ready.is_ok(),
            reason_code: match self.phase {
                AgentPhase::Serving if self.waits_for_fabric() => reason_code::FABRIC_NOT_READY.to_owned(),
                _ => self.code.to_owned(),
            },
            reason: ready.err().unwrap_or_default(),
            inflight: totals.node.inflight,
            kv_blocks_used: totals.node.blocks.used as u64,
            kv_blocks_cached: totals.node.blocks.cached as u64,
            kv_blocks_total: totals.node.blocks.total as u64,
            parked_bytes: totals.node.parked_bytes,
            steps: self.step,
            abandoned_threads: group.map_or(0, RankGroup::abandoned),
            replaced_engines: group.map_or(0, RankGroup::replaced),
            fleet_generation: self.fleet.generation,
            leads: self.leading.epoch(),
            placement: Generation(0),
            engine: self.engine.clone(),
            kv_epoch: self.kv_epoch.clone(),
            model_digest: self.model_digest.clone(),
            fabric: self.fabric(),
            // A cpu has no health of its own to tell.
            device_health: "ok".to_owned(),
            uptime_seconds: self.now().0 / 1_000_000_000,
        }
    }

    /// Metrics in the exposition format.
    pub fn metrics_text(&self) -> String {
        let imbalance = self.load(LoadDetail::Sums).and_then(|report| report.balance.balancedness);
        let queued = self.leading.epoch().map(|_| self.leading.queued());
        let ranks =
            self.machines.as_ref().map(|machines| machines.ranks().into_iter().zip(machines.statuses()));
        let ranks: Vec<(Rank, NodeStatus)> = ranks.into_iter().flatten().collect();
        let own = self.metrics.render(&self.status(), &self.totals().node, &ranks, imbalance, queued);
        let fleet = self.setup.probe.as_ref().map(|probe| probe.families(self.setup.name.as_str()));
        fleet.unwrap_or_default() + &own
    }
}
