//! What a rank says about itself: its status, its invariants, and its reports to the leader.

use std::collections::BTreeSet;

use deepinfer_protocol::message::{DecodeReport, Message};
use deepinfer_protocol::{Span, Time};

use super::DecodeRank;
use super::sequence::Sequence;
use crate::batch::StateSlot;
use crate::kv::{CheckpointCounts, blocks_for};
use crate::node::desk::send;
use crate::node::{NodeAction, NodeStatus};

/// The part of the report whose change is worth a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct State {
    requests: u32,
    tokens: u64,
    free_blocks: u32,
    free_slots: u32,
    draining: bool,
}

impl DecodeRank {
    /// Where it stands.
    pub fn status(&self) -> NodeStatus {
        let running = self.sequences.values().filter(|s| s.running()).count() as u32;
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
            checkpoints: CheckpointCounts::default(),
            free_slots: self.free_slots.len() as u32,
            total_slots: self.options.slots,
            backlog: Span::ZERO,
            engine: self.engine,
            draining: !self.desk.drain.accepts(),
            cut: self.desk.drain.cut(),
            counts: self.desk.counts.clone(),
        }
    }

    /// Whether blocks and slots add up.
    ///
    /// # Errors
    /// A sentence about the first invariant that does not hold.
    pub fn check(&self) -> Result<(), String> {
        self.pool.check()?;
        let held: usize = self.sequences.values().map(|s| s.blocks.len()).sum();
        let used = self.pool.counts().used;
        if held != used {
            return Err(format!("sequences hold {held} blocks, the pool says {used}"));
        }
        let slots: BTreeSet<StateSlot> = self.sequences.values().map(|s| s.slot).collect();
        if slots.len() != self.sequences.len() || !slots.is_disjoint(&self.free_slots) {
            return Err("a slot has two owners".to_owned());
        }
        if slots.len() + self.free_slots.len() != self.options.slots as usize {
            return Err("a slot is lost".to_owned());
        }
        let short = |s: &&Sequence| s.blocks.len() < blocks_for(s.tokens.len());
        if let Some(sequence) = self.sequences.values().find(short) {
            return Err(format!("{} has too few blocks for its next row", sequence.subject.request));
        }
        Ok(())
    }

    pub(super) fn report(&mut self, now: Time, out: &mut Vec<NodeAction>) {
        if !self.desk.reporter.may_be_due(now) {
            return;
        }
        let limit = self.limit();
        let reserved = |s: &Sequence| u64::from(s.need(limit).reserved(self.options.reserve));
        let state = State {
            requests: self.sequences.len() as u32,
            tokens: self.sequences.values().map(reserved).sum(),
            free_blocks: if self.engine { self.pool.available() as u32 } else { 0 },
            free_slots: if self.engine { self.free_slots.len() as u32 } else { 0 },
            draining: !self.desk.drain.accepts(),
        };
        let Some(due) = self.desk.reporter.due(now, state.clone()) else { return };
        let report = DecodeReport {
            epoch: due.epoch,
            rank: self.options.rank,
            requests: state.requests,
            tokens: state.tokens,
            free_blocks: state.free_blocks,
            total_blocks: self.options.blocks,
            free_slots: state.free_slots,
            max_requests: self.most_requests(),
            step: self.last_step,
            draining: state.draining,
            kv_epoch: self.options.kv_epoch.clone(),
            seen: due.seen,
        };
        send(&due.to, Message::DecodeReport(report), out);
    }

    /// Most requests at once.
    pub(super) fn most_requests(&self) -> u32 {
        self.options.max_requests.min(self.options.max_rows).min(self.options.slots)
    }
}
