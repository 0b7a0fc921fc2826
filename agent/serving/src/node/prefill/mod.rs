//! A prefill worker: runs prompts in chunks, reusing blocks of earlier prompts, draws the first token, and parks the
//! sequence in host memory for a decode rank.
//!
//! ```text
//!  Prefill   blocks for all rows, slot           state restored          last chunk: Tokens (the first)
//!  ------> Waiting ---------------------> (Restoring) ---> Running ------------------------------------+
//!             |  prefix adopted; a better one                  chunk by chunk: full blocks are named,   |
//!             |  is looked for until it starts                 the checkpoint is copied out             |
//!             +--> Refuse                                                                               |
//!                                       parked, PrefillDone <--- leaving (Export) <---------------------+
//!                                           |                                    (gone, if it ended the sequence)
//!                                       ReleaseKv, Cancel, lease: gone
//! ```
//!
//! A sequence holds blocks for its whole prompt and a slot from the acceptance on (PF-7), so nothing waits inside
//! for room. Both are given back when the export is issued: the engine runs commands and steps in the order in
//! which they were given, so whoever gets them next comes later.

mod accept;
mod figures;
mod finish;
mod options;
mod sequence;
mod step;

use std::collections::{BTreeMap, BTreeSet};

use deepinfer_protocol::message::{Failure, Message};
use deepinfer_protocol::{AgentId, Attempt, RequestId, Time};

use self::figures::State;
pub use self::options::WorkerOptions;
use self::sequence::{Leaving, Running, Sequence, Stage};
use super::desk::{Desk, PARKED_LONGEST, Subject, process_of};
use super::{EngineCommand, EngineEvent, NodeAction, NodeEvent, Ticket};
use crate::batch::{Estimated, StateSlot, StepLoad};
use crate::kv::{BlockKey, BlockPool, CheckpointStore};

/// See the module.
#[derive(Clone, Debug)]
pub struct PrefillWorker {
    options: WorkerOptions,
    desk: Desk<State>,
    pool: BlockPool,
    checkpoints: CheckpointStore,
    free_slots: BTreeSet<StateSlot>,
    sequences: BTreeMap<RequestId, Sequence>,
    leaving: BTreeMap<Ticket, Leaving>,
    restores: BTreeMap<Ticket, RequestId>,
    /// Checkpoints on their way out of the engine.
    cutting: BTreeMap<Ticket, BlockKey>,
    stepping: Option<(Vec<Running>, StepLoad)>,
    engine: bool,
    tokens_per_second: u32,
    next_ticket: u64,
}

impl PrefillWorker {
    /// A worker with an empty engine.
    pub fn new(options: WorkerOptions) -> Self {
        Self {
            desk: Desk::new(options.lease),
            pool: BlockPool::new(options.blocks as usize),
            checkpoints: CheckpointStore::new(options.checkpoint_bytes),
            free_slots: (0..options.slots).map(StateSlot).collect(),
            sequences: BTreeMap::new(),
            leaving: BTreeMap::new(),
            restores: BTreeMap::new(),
            cutting: BTreeMap::new(),
            stepping: None,
            engine: true,
            tokens_per_second: 0,
            next_ticket: 0,
            options,
        }
    }

    /// Tells the machine something; what it wants done is added to `out`, to be carried out in this order.
    pub fn on_event(&mut self, now: Time, event: NodeEvent, out: &mut Vec<NodeAction>) {
        match event {
            NodeEvent::Message { from, message, .. } => {
                self.desk.leases.heard(&from);
                self.on_message(now, &from, message, out);
            }
            NodeEvent::PeerUp { peer, process } => self.on_peer_up(&peer, process, out),
            NodeEvent::PeerLost(peer) => self.desk.leases.lost(now, peer),
            NodeEvent::Engine(event) => self.on_engine(now, event, out),
            NodeEvent::Drain { deadline } => {
                self.desk.drain.start(deadline);
                self.on_time(now, out);
            }
            NodeEvent::Undrain => self.desk.drain.stop(),
            NodeEvent::Leader(leader) => self.desk.reporter.follow(leader),
            NodeEvent::Tick => self.on_time(now, out),
        }
        self.report(now, out);
    }

    /// Whether a sequence of this request is parked here: its fetches go to this worker.
    pub fn parks(&self, request: RequestId) -> bool {
        self.desk.parking.get(request).is_some()
    }

    fn ticket(&mut self) -> Ticket {
        self.next_ticket += 1;
        Ticket(self.next_ticket)
    }

    fn cost(&self) -> Estimated<'_> {
        let WorkerOptions { shape, truncation, time, .. } = &self.options;
        Estimated { shape, truncation: *truncation, time }
    }

    fn on_message(&mut self, now: Time, from: &AgentId, message: Message, out: &mut Vec<NodeAction>) {
        match message {
            Message::Prefill(work) => self.accept(now, from, work, out),
            Message::Cancel { request, attempt } => self.cancel(request, attempt, out),
            Message::FetchKv { request, attempt, only } => {
                self.desk.parking.answer(from, request, attempt, only, out);
            }
            Message::ReleaseKv { request, attempt } => {
                if self.desk.parking.release(request, attempt).is_none() {
                    self.desk.ignore();
                }
            }
            Message::Heartbeat => {}
            _ => self.desk.ignore(),
        }
    }

    fn on_engine(&mut self, now: Time, event: EngineEvent, out: &mut Vec<NodeAction>) {
        match event {
            EngineEvent::StepDone(result) => self.on_step_done(now, result, out),
            EngineEvent::Exported { ticket, pieces } => self.on_exported(now, ticket, pieces, out),
            EngineEvent::Checkpointed { ticket, state } => self.on_checkpointed(ticket, state),
            EngineEvent::Restored { ticket, fits } => self.on_restored(ticket, fits, out),
            EngineEvent::Lost(failure) => self.on_engine_lost(failure, out),
            EngineEvent::Ready => self.engine = true,
            EngineEvent::Imported { .. } => self.desk.ignore(),
        }
    }

    fn on_time(&mut self, now: Time, out: &mut Vec<NodeAction>) {
        for owner in self.desk.leases.expired(now) {
            self.drop_where(|subject| subject.owner == owner, Failure::LeaseExpired, out);
        }
        let oldest = now - PARKED_LONGEST;
        self.desk.drop_parked(|_, parked| parked.since < oldest, Failure::LeaseExpired, out);
        if self.desk.drain.overdue(now) {
            let cut = self.drop_where(|_| true, Failure::DrainDeadline, out);
            self.desk.drain.count_cut(cut);
        }
    }

    /// A peer is there. What a gateway's process before this one owned is freed: nobody else will.
    fn on_peer_up(&mut self, peer: &AgentId, process: Option<u64>, out: &mut Vec<NodeAction>) {
        self.desk.leases.heard(peer);
        if let Some(process) = process {
            let orphan = |s: &Subject| s.owner == *peer && process_of(s.request) != process;
            self.drop_where(orphan, Failure::LeaseExpired, out);
        }
    }

    /// Ends what is cut, with word to the gateways; gives how many sequences that were.
    fn drop_where(
        &mut self,
        which: impl Fn(&Subject) -> bool,
        reason: Failure,
        out: &mut Vec<NodeAction>,
    ) -> u32 {
        let held = self.sequences.values().map(|s| &s.subject);
        let all = held.chain(self.leaving.values().map(|l| &l.subject));
        let chosen: Vec<Subject> = all.filter(|subject| which(subject)).cloned().collect();
        for subject in &chosen {
            self.free_all_of(subject.request, subject.attempt, out);
            self.desk.fail(subject, reason, out);
        }
        chosen.len() as u32 + self.desk.drop_parked(|subject, _| which(subject), reason, out)
    }

    /// Stops everything about this attempt and older ones (PD-9). Its chunk in the step that runs is wasted.
    fn cancel(&mut self, request: RequestId, attempt: Attempt, out: &mut Vec<NodeAction>) {
        self.free_all_of(request, attempt, out);
        self.desk.ledger.end(request, attempt, None);
    }

    /// Frees what is held for this attempt and older ones.
    fn free_all_of(&mut self, request: RequestId, attempt: Attempt, out: &mut Vec<NodeAction>) {
        if self.sequences.get(&request).is_some_and(|s| s.subject.attempt <= attempt) {
            self.free(request, out);
        }
        self.leaving.retain(|_, l| l.subject.request != request || l.subject.attempt > attempt);
        self.desk.parking.cancel(request, attempt);
    }

    /// Gives blocks and slot of a sequence back; named blocks stay in the cache.
    fn free(&mut self, request: RequestId, out: &mut Vec<NodeAction>) -> Option<Sequence> {
        let sequence = self.sequences.remove(&request)?;
        self.pool.release_all(&sequence.blocks);
        self.free_slots.insert(sequence.slot);
        if let Stage::Restoring(ticket) = sequence.stage {
            self.restores.remove(&ticket);
        }
        if self.engine && sequence.stage != Stage::Waiting {
            out.push(NodeAction::Engine(EngineCommand::Reset(sequence.slot)));
        }
        Some(sequence)
    }
}
