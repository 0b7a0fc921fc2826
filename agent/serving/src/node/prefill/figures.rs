//! What a worker says about itself: its status, its invariants, and its reports to the leader.

use std::collections::BTreeSet;

use deepinfer_protocol::message::{Message, PrefillReport};
use deepinfer_protocol::{Span, Time};

use super::PrefillWorker;
use super::sequence::{Sequence, Stage};
use crate::batch::{BlockId, Cost, StateSlot, StepLoad, TimeModel};
use crate::kv::blocks_for;
use crate::node::desk::send;
use crate::node::{NodeAction, NodeStatus};

/// The part of the report whose change is worth a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct State {
    tokens: u64,
    requests: u32,
    free_blocks: u32,
    free_slots: u32,
    parked_bytes: u64,
    draining: bool,
}

impl PrefillWorker {
    /// Where it stands.
    pub fn status(&self) -> NodeStatus {
        let running = self.sequences.values().filter(|s| s.stage == Stage::Running).count() as u32;
        let loading = self.sequences.len() as u32 - running;
        let (leaving, parked) = (self.leaving.len() as u32, self.desk.parking.len() as u32);
        NodeStatus {
            inflight: running + loading + leaving + parked,
            loading,
            running,
            leaving,
            parked,
            parked_bytes: self.desk.parking.bytes(),
            blocks: self.pool.counts(),
            checkpoints: self.checkpoints.counts(),
            free_slots: self.free_slots.len() as u32,
            total_slots: self.options.slots,
            backlog: self.backlog(),
            engine: self.engine,
            draining: !self.desk.drain.accepts(),
            cut: self.desk.drain.cut(),
            counts: self.desk.counts.clone(),
        }
    }

    /// How long steps take by what was learned, for the watchdog and for metrics.
    pub fn time_model(&self) -> &TimeModel {
        &self.options.time
    }

    /// Whether blocks, checkpoints and slots add up.
    ///
    /// # Errors
    /// A sentence about the first invariant that does not hold.
    pub fn check(&self) -> Result<(), String> {
        self.pool.check()?;
        self.checkpoints.check()?;
        let held: BTreeSet<BlockId> =
            self.sequences.values().flat_map(|s| s.blocks.iter().copied()).collect();
        let used = self.pool.counts().used;
        if held.len() != used {
            return Err(format!("sequences hold {} blocks, the pool says {used}", held.len()));
        }
        let slots: BTreeSet<StateSlot> = self.sequences.values().map(|s| s.slot).collect();
        if slots.len() != self.sequences.len() || !slots.is_disjoint(&self.free_slots) {
            return Err("a slot has two owners".to_owned());
        }
        if slots.len() + self.free_slots.len() != self.options.slots as usize {
            return Err("a slot is lost".to_owned());
        }
        let short = |s: &&Sequence| s.blocks.len() != blocks_for(s.length());
        match self.sequences.values().find(short) {
            Some(sequence) => Err(format!("{} does not hold its blocks", sequence.subject.request)),
            None => Ok(()),
        }
    }

    pub(super) fn report(&mut self, now: Time, out: &mut Vec<NodeAction>) {
        if !self.desk.reporter.may_be_due(now) {
            return;
        }
        let left = |s: &Sequence| (s.length() - s.next) as u64;
        let state = State {
            tokens: self.sequences.values().map(left).sum(),
            requests: self.sequences.len() as u32,
            free_blocks: if self.engine { self.pool.available() as u32 } else { 0 },
            free_slots: if self.engine { self.free_slots.len() as u32 } else { 0 },
            parked_bytes: self.desk.parking.bytes(),
            draining: !self.desk.drain.accepts(),
        };
        let Some(due) = self.desk.reporter.due(now, state.clone()) else { return };
        let report = PrefillReport {
            epoch: due.epoch,
            backlog: self.backlog(),
            tokens: state.tokens,
            requests: state.requests,
            free_blocks: state.free_blocks,
            total_blocks: self.options.blocks,
            free_slots: state.free_slots,
            parked_bytes: state.parked_bytes,
            parked_limit: self.options.parked_bytes,
            tokens_per_second: self.tokens_per_second,
            draining: state.draining,
            kv_epoch: self.options.kv_epoch.clone(),
            seen: due.seen,
        };
        send(&due.to, Message::PrefillReport(report), out);
    }

    /// Predicted time of everything that has not run.
    fn backlog(&self) -> Span {
        self.sequences.values().fold(Span::ZERO, |sum, s| sum.plus(self.remaining(s)))
    }

    /// Predicted time of one sequence, alone.
    pub(super) fn remaining(&self, sequence: &Sequence) -> Span {
        let cost = self.cost();
        let rows = sequence.length() - sequence.next;
        let work = cost.work(&sequence.item(), rows);
        cost.time(StepLoad { work, rows, sequences: 1 })
    }
}
