//! What people, the operator and scrapers see of an agent, and how it is told to drain.

use deepinfer_protocol::agent_status::{AgentPhase, AgentStatus, DrainStatus};
use deepinfer_protocol::load::ExpertLoadReport;
use deepinfer_protocol::{Generation, Span};
use deepinfer_serving::node::NodeEvent;
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
        self.tell_all(&NodeEvent::Drain { deadline });
        self.settle();
        self.drain_status()
    }

    /// Takes work again, if something of the drain is left.
    ///
    /// # Errors
    /// [`UndrainTooLate`].
    pub fn undrain(&mut self) -> Result<DrainStatus, UndrainTooLate> {
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
        match group.health(self.now()) {
            (Verdict::Fine, _) => Ok(()),
            (_, span) => Err(format!("a step has not ended for {} s", span.as_millis() / 1000)),
        }
    }

    /// Which experts were chosen; `None` before the first window has closed, and before engines are there.
    pub fn load(&self, detail: LoadDetail) -> Option<ExpertLoadReport> {
        self.book.as_ref()?.report(detail)
    }

    /// Sums over the machines.
    pub(super) fn totals(&self) -> Totals {
        Totals::of(&self.machines.as_ref().map(Machines::statuses).unwrap_or_default())
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
            uptime_seconds: self.now().0 / 1_000_000_000,
        }
    }

    /// Metrics in the exposition format.
    pub fn metrics_text(&self) -> String {
        let imbalance = self.load(LoadDetail::Sums).and_then(|report| report.balance.balancedness);
        let queued = self.leading.epoch().map(|_| self.leading.queued());
        self.metrics.render(&self.status(), &self.totals().node, imbalance, queued)
    }
}
