//! A decode rank: fetches sequences that others have parked, runs one token of each per step, and parks those that
//! must give way.
//!
//! ```text
//!  Decode                all pieces verified         fits            stop, length: Tokens(finish)
//!  ------> Fetching ----------------------> Importing ----> Running ------------------------------> gone
//!             |         (Fetched, while the                   |
//!             |          engine is replaced)                  | no block left: gives way
//!             | KvGone, damaged twice, silence                v
//!             +--> Failed(KvLost)                          leaving (Export) --> parked, Preempted
//! ```
//!
//! Blocks and slot are held from the acceptance on. They are given back in the moment in which the command that
//! last reads them is issued (or none is needed): the engine runs commands and steps in the order in which they
//! were given, so whoever gets them next comes later. Results of a step are taken by request and attempt; what
//! left while the step ran is dropped.

mod accept;
mod figures;
mod load;
mod options;
mod room;
mod sequence;
mod step;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use deepinfer_protocol::message::{Failure, Message};
use deepinfer_protocol::{AgentId, Attempt, Rank, RequestId, Span, Time};

use self::figures::State;
pub use self::options::RankOptions;
use self::sequence::{Leaving, Sequence, Stage};
use super::desk::{Desk, PARKED_LONGEST, Subject, process_of};
use super::{EngineCommand, EngineEvent, NodeAction, NodeEvent, Ticket};
use crate::batch::{BLOCK_TOKENS, StateSlot};
use crate::handoff::Piece;
use crate::kv::BlockPool;

/// See the module.
#[derive(Clone, Debug)]
pub struct DecodeRank {
    options: RankOptions,
    desk: Desk<State>,
    pool: BlockPool,
    free_slots: BTreeSet<StateSlot>,
    sequences: BTreeMap<RequestId, Sequence>,
    leaving: BTreeMap<Ticket, Leaving>,
    imports: BTreeMap<Ticket, (RequestId, Attempt)>,
    stepping: Option<Vec<(RequestId, Attempt)>>,
    engine: bool,
    last_step: Span,
    next_ticket: u64,
    next_order: u64,
}

impl DecodeRank {
    /// A rank with an empty engine.
    pub fn new(options: RankOptions) -> Self {
        Self {
            desk: Desk::new(options.lease),
            pool: BlockPool::new(options.blocks as usize),
            free_slots: (0..options.slots).map(StateSlot).collect(),
            sequences: BTreeMap::new(),
            leaving: BTreeMap::new(),
            imports: BTreeMap::new(),
            stepping: None,
            engine: true,
            last_step: Span::ZERO,
            next_ticket: 0,
            next_order: 0,
            options,
        }
    }

    /// Tells the machine something; what it wants done is added to `out`, to be carried out in this order.
    pub fn on_event(&mut self, now: Time, event: NodeEvent, out: &mut Vec<NodeAction>) {
        match event {
            NodeEvent::Message { from, message, payload } => {
                self.desk.leases.heard(&from);
                self.on_message(now, &from, message, payload, out);
            }
            NodeEvent::PeerUp { peer, process } => {
                self.on_holder(now, &peer, true, out);
                self.on_peer_up(&peer, process, out);
            }
            NodeEvent::PeerLost(peer) => {
                self.on_holder(now, &peer, false, out);
                self.desk.leases.lost(now, peer);
            }
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

    /// Its number in the supernode.
    pub fn rank(&self) -> Rank {
        self.options.rank
    }

    /// Whether a sequence of this request is parked here: its fetches go to this rank.
    pub fn parks(&self, request: RequestId) -> bool {
        self.desk.parking.get(request).is_some()
    }

    /// Whether this rank loads or runs the request: its pieces go to this rank.
    pub fn knows(&self, request: RequestId) -> bool {
        self.sequences.contains_key(&request)
    }

    /// Longest sequence that can run here.
    fn limit(&self) -> u32 {
        self.options.context_limit.min(self.options.blocks.saturating_mul(BLOCK_TOKENS as u32))
    }

    fn ticket(&mut self) -> Ticket {
        self.next_ticket += 1;
        Ticket(self.next_ticket)
    }

    fn on_message(
        &mut self,
        now: Time,
        from: &AgentId,
        message: Message,
        payload: Arc<[u8]>,
        out: &mut Vec<NodeAction>,
    ) {
        match message {
            Message::Decode(work) => self.accept(now, from, work, out),
            Message::Cancel { request, attempt } => self.cancel(request, attempt, out),
            Message::FetchKv { request, attempt, only } => {
                self.desk.parking.answer(from, request, attempt, only, out);
            }
            Message::ReleaseKv { request, attempt } => {
                if self.desk.parking.release(request, attempt).is_none() {
                    self.desk.ignore();
                }
            }
            Message::KvPiece { request, attempt, kind, pieces, tokens, crc } => {
                let piece = Piece { kind, pieces, tokens, crc, payload };
                self.on_piece(now, from, (request, attempt), piece, out);
            }
            Message::KvGone { request, attempt } => self.on_gone(from, (request, attempt), out),
            Message::Heartbeat => {}
            _ => self.desk.ignore(),
        }
    }

    fn on_engine(&mut self, now: Time, event: EngineEvent, out: &mut Vec<NodeAction>) {
        match event {
            EngineEvent::StepDone(result) => self.on_step_done(result, out),
            EngineEvent::Exported { ticket, pieces } => self.on_exported(now, ticket, pieces, out),
            EngineEvent::Imported { ticket, fits } => self.on_imported(ticket, fits, out),
            EngineEvent::Lost(failure) => self.on_engine_lost(failure, out),
            EngineEvent::Ready => self.on_engine_ready(out),
            EngineEvent::Checkpointed { .. } | EngineEvent::Restored { .. } => self.desk.ignore(),
        }
    }

    fn on_time(&mut self, now: Time, out: &mut Vec<NodeAction>) {
        self.on_load_time(now, out);
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

    /// Stops everything about this attempt and older ones (PD-9).
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

    /// Gives blocks and slot of a sequence back.
    fn free(&mut self, request: RequestId, out: &mut Vec<NodeAction>) -> Option<Sequence> {
        let sequence = self.sequences.remove(&request)?;
        self.pool.release_all(&sequence.blocks);
        self.free_slots.insert(sequence.slot);
        if let Stage::Importing(ticket) = sequence.stage {
            self.imports.remove(&ticket);
        }
        if self.engine && matches!(sequence.stage, Stage::Importing(_) | Stage::Running) {
            out.push(NodeAction::Engine(EngineCommand::Reset(sequence.slot)));
        }
        Some(sequence)
    }
}
