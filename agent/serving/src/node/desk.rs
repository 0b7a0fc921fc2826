//! What a prefill worker and a decode rank have in common: fences, leases, parked sequences, the drain, reports and
//! counters. Each machine keeps its running sequences itself.

use std::collections::BTreeMap;
use std::sync::Arc;

use deepinfer_protocol::generate::TokenEvent;
use deepinfer_protocol::message::{Assignment, Failure, Message, Refusal};
use deepinfer_protocol::{AgentId, Attempt, RequestId, Span};

use super::NodeAction;
use super::drain::Drain;
use super::leases::Leases;
use super::ledger::Ledger;
use super::report::Reporter;
use crate::handoff::{Parked, Parking};
use crate::kv::{CheckpointCounts, PoolCounts};

/// When a refused request is worth another try: a few steps later something has ended.
const RETRY_AFTER: Span = Span::millis(100);
/// Longest stay in host memory. Gateways fetch or cancel what they own long before (a first token is due after 600 s
/// at most); this frees what a gateway has forgotten.
pub(super) const PARKED_LONGEST: Span = Span::secs(1_800);

/// Events since the start, for metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeCounts {
    /// Work taken.
    pub accepted: u64,
    /// Work turned away, by reason.
    pub refused: BTreeMap<Refusal, u64>,
    /// Work that had begun and could not go on, by reason.
    pub failed: BTreeMap<Failure, u64>,
    /// Sequences that ended here with a finish reason.
    pub finished: u64,
    /// Sequences parked for another rank: prompts that were run, or preempted sequences.
    pub handed_over: u64,
    /// Sequences that gave way to others (B.2).
    pub preempted: u64,
    /// Messages about nothing that is here: late, repeated, of an older attempt.
    pub ignored: u64,
    /// Steps run.
    pub steps: u64,
    /// Token rows run in them.
    pub rows: u64,
    /// Rows of these that were replayed to rebuild state after a prefix hit.
    pub replayed_rows: u64,
    /// Prompt tokens taken.
    pub prompt_tokens: u64,
    /// Prompt tokens of adopted blocks.
    pub cached_tokens: u64,
    /// Tokens drawn and sent.
    pub generated_tokens: u64,
    /// Pieces of sequences that came damaged.
    pub damaged_pieces: u64,
    /// Engines lost with what ran on them.
    pub lost_engines: u64,
}

/// Where a machine stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeStatus {
    /// Requests held: waiting, loading, running, on their way out, or parked.
    pub inflight: u32,
    /// Of these: with blocks and slot, before their first row here.
    pub loading: u32,
    /// Of these: in steps.
    pub running: u32,
    /// Of these: being copied out of the engine.
    pub leaving: u32,
    /// Of these: in host memory, without blocks or slot.
    pub parked: u32,
    /// Bytes of the parked.
    pub parked_bytes: u64,
    /// Blocks by use.
    pub blocks: PoolCounts,
    /// Window checkpoints; zeros for a rank.
    pub checkpoints: CheckpointCounts,
    /// State slots that are free.
    pub free_slots: u32,
    /// State slots in all.
    pub total_slots: u32,
    /// Predicted time to prefill what has not run; zero for a rank.
    pub backlog: Span,
    /// The engine is there.
    pub engine: bool,
    /// Takes no more work.
    pub draining: bool,
    /// Requests cut by drains.
    pub cut: u32,
    /// Events since the start.
    pub counts: NodeCounts,
}

/// See the module. `S` is the part of the report that is compared for changes.
#[derive(Clone, Debug)]
pub(super) struct Desk<S> {
    pub ledger: Ledger,
    pub leases: Leases,
    pub parking: Parking,
    pub drain: Drain,
    pub reporter: Reporter<S>,
    pub counts: NodeCounts,
}

/// A request under one of its attempts, and who owns it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Subject {
    pub request: RequestId,
    pub attempt: Attempt,
    pub owner: AgentId,
}

impl<S: PartialEq> Desk<S> {
    pub fn new(lease: Span) -> Self {
        Self {
            ledger: Ledger::default(),
            leases: Leases::new(lease),
            parking: Parking::default(),
            drain: Drain::default(),
            reporter: Reporter::default(),
            counts: NodeCounts::default(),
        }
    }

    /// Turns work away; another decision about the same attempt may come.
    pub fn refuse(
        &mut self,
        subject: &Subject,
        assignment: Assignment,
        reason: Refusal,
        out: &mut Vec<NodeAction>,
    ) {
        let Subject { request, attempt, .. } = *subject;
        let answer = Message::Refuse { request, attempt, reason, retry_after: RETRY_AFTER };
        self.ledger.refuse(request, attempt, assignment, answer.clone());
        *self.counts.refused.entry(reason).or_default() += 1;
        send(&subject.owner, answer, out);
    }

    /// Says that work which had begun cannot go on here.
    pub fn fail(&mut self, subject: &Subject, reason: Failure, out: &mut Vec<NodeAction>) {
        let Subject { request, attempt, .. } = *subject;
        let answer = Message::Failed { request, attempt, reason };
        self.ledger.end(request, attempt, Some(answer.clone()));
        *self.counts.failed.entry(reason).or_default() += 1;
        send(&subject.owner, answer, out);
    }

    /// A sequence ended here with its last tokens.
    pub fn finish(&mut self, event: &TokenEvent) {
        self.counts.finished += 1;
        let answer = Message::Tokens(vec![event.clone()]);
        self.ledger.end(event.request, event.attempt, Some(answer));
    }

    /// Frees what is parked and chosen, with word to the gateways; gives how many sequences that were.
    pub fn drop_parked(
        &mut self,
        which: impl Fn(&Subject, &Parked) -> bool,
        reason: Failure,
        out: &mut Vec<NodeAction>,
    ) -> u32 {
        let all = self.parking.iter().map(|(request, parked)| {
            let (attempt, owner) = (parked.attempt, parked.owner.clone());
            (Subject { request, attempt, owner }, parked)
        });
        let chosen: Vec<Subject> =
            all.filter(|(subject, parked)| which(subject, parked)).map(|(subject, _)| subject).collect();
        for subject in &chosen {
            self.parking.release(subject.request, subject.attempt);
            self.fail(subject, reason, out);
        }
        chosen.len() as u32
    }

    /// A message about nothing that is here.
    pub fn ignore(&mut self) {
        self.counts.ignored += 1;
    }
}

/// The process that made an id: its high half.
pub(super) fn process_of(request: RequestId) -> u64 {
    (request.0 >> 64) as u64
}

/// Sends a message without payload.
pub(super) fn send(to: &AgentId, message: Message, out: &mut Vec<NodeAction>) {
    out.push(NodeAction::Send { to: to.clone(), message, payload: Arc::from([]) });
}

/// Sends the tokens of one step: one message to each gateway, in the order of their names.
pub(super) fn send_tokens(events: Vec<(AgentId, TokenEvent)>, out: &mut Vec<NodeAction>) {
    let mut by_owner: BTreeMap<AgentId, Vec<TokenEvent>> = BTreeMap::new();
    for (owner, event) in events {
        by_owner.entry(owner).or_default().push(event);
    }
    for (owner, events) in by_owner {
        send(&owner, Message::Tokens(events), out);
    }
}
