//! Leader of the prefill pool: one queue, pulled by workers that have room.
//!
//! Invariants: a request is in the queue or assigned, never both; its assignment is counted until the worker's
//! report speaks for it. Nothing is assigned on a report that is too old to be true.

use std::collections::BTreeMap;
use std::sync::Arc;

use deepinfer_protocol::fleet::FleetView;
use deepinfer_protocol::message::{Assignment, Message, PrefillEntry, PrefillReport, Refusal};
use deepinfer_protocol::{AgentId, Attempt, Epoch, RequestId, Span, Time};

use super::assign::{Pick, PromptNeed, WorkerLoad, pick};
use super::prefill_queue::{PrefillQueue, Queued};
use super::view::{Assigned, Unseen};
use super::{LeaderAction, LeaderEvent, SETTLE, STALE_REPORT, UNSEEN_ASSIGNMENT, may_serve, retry_after};
use crate::batch::BLOCK_TOKENS;

/// How far down the queue one decision looks past prompts that find no blocks.
const LOOK_AHEAD: usize = 64;
/// A remembered rate loses this part with every report.
const RATE_DECAY: u32 = 64;

/// What may be set.
#[derive(Clone, Debug)]
pub struct PrefillLeaderOptions {
    /// Most entries. Gateways bound their own queues (2,048 each); this bounds many gateways together.
    pub max_queue: usize,
    /// A worker with more work than this takes no more: twice the time budget of a chunk.
    pub backlog_limit: Span,
    /// Tokens per second of a worker that has not measured itself yet.
    pub default_rate: u32,
    /// How often a prompt without blocks may be passed by later ones.
    pub max_passes: u32,
    /// And for how long.
    pub max_pass_time: Span,
}

impl Default for PrefillLeaderOptions {
    fn default() -> Self {
        Self {
            max_queue: 16_384,
            backlog_limit: Span::millis(200),
            default_rate: 2_000,
            max_passes: 16,
            max_pass_time: Span::millis(500),
        }
    }
}

/// What an unseen assignment weighs at its worker.
#[derive(Clone, Copy, Debug)]
struct PrefillLoad {
    blocks: u32,
    estimate: Span,
}

struct Worker {
    report: PrefillReport,
    heard: Time,
    /// Tokens per second: the best of recent chunks, as a chunk of a few rows says nothing about long ones.
    rate: u32,
    assigned: Assigned<PrefillLoad>,
}

/// The machine.
pub struct PrefillLeader {
    options: PrefillLeaderOptions,
    epoch: Option<Epoch>,
    since: Time,
    numbers: u64,
    fleet: Option<Arc<FleetView>>,
    workers: BTreeMap<AgentId, Worker>,
    queue: PrefillQueue,
}

impl PrefillLeader {
    /// A leader that does not lead yet.
    pub fn new(options: PrefillLeaderOptions) -> Self {
        Self {
            options,
            epoch: None,
            since: Time::default(),
            numbers: 0,
            fleet: None,
            workers: BTreeMap::new(),
            queue: PrefillQueue::default(),
        }
    }

    /// The epoch it leads under.
    pub fn epoch(&self) -> Option<Epoch> {
        self.epoch
    }

    /// Requests that wait for a worker.
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Assignments that no report has acknowledged.
    pub fn unseen(&self) -> usize {
        self.workers.values().map(|w| w.assigned.len()).sum()
    }

    /// One event; what is to be said is pushed to `out`.
    pub fn on_event(&mut self, now: Time, event: LeaderEvent, out: &mut Vec<LeaderAction>) {
        match event {
            LeaderEvent::Lead(epoch) => self.lead(now, epoch),
            LeaderEvent::Resign => self.forget(None),
            LeaderEvent::Fleet(fleet) => {
                if self.fleet.as_ref().is_none_or(|f| f.generation < fleet.generation) {
                    self.fleet = Some(fleet);
                }
            }
            LeaderEvent::Message { from, message } => self.on_message(now, from, message, out),
            LeaderEvent::PeerLost(peer) => {
                self.workers.remove(&peer);
                self.queue.drop_gateway(&peer);
                for worker in self.workers.values_mut() {
                    worker.assigned.drop_gateway(&peer);
                }
            }
            LeaderEvent::Tick => self.tick(now, out),
        }
        self.assign(now, out);
    }

    fn lead(&mut self, now: Time, epoch: Epoch) {
        if self.epoch != Some(epoch) {
            self.forget(Some(epoch));
            self.since = now;
        }
    }

    fn forget(&mut self, epoch: Option<Epoch>) {
        self.epoch = epoch;
        self.numbers = 0;
        self.workers.clear();
        self.queue.clear();
    }

    fn tick(&mut self, now: Time, out: &mut Vec<LeaderAction>) {
        for worker in self.workers.values_mut() {
            worker.assigned.expire(now, UNSEEN_ASSIGNMENT);
        }
        for late in self.queue.expired(now) {
            let after = retry_after(self.shared(self.queue.total()));
            refuse(late.gateway, &late.entry, Refusal::Deadline, after, out);
        }
    }

    fn on_message(&mut self, now: Time, from: AgentId, message: Message, out: &mut Vec<LeaderAction>) {
        match message {
            Message::Enqueue(entry) => self.enqueue(now, from, entry, out),
            // A refusal comes from the gateway: the decision was not used.
            Message::Cancel { request, attempt } | Message::Refuse { request, attempt, .. } => {
                self.cancel(request, attempt);
            }
            Message::PrefillReport(report) if self.epoch == Some(report.epoch) => {
                self.report(now, from, report);
            }
            _ => {}
        }
    }

    fn report(&mut self, now: Time, from: AgentId, report: PrefillReport) {
        if let Some(worker) = self.workers.get_mut(&from) {
            worker.assigned.acknowledge(&report.seen);
            // Falls by half in about ten seconds of reports without a chunk as good.
            worker.rate = report.tokens_per_second.max(worker.rate - worker.rate / RATE_DECAY);
            (worker.report, worker.heard) = (report, now);
        } else {
            let rate = report.tokens_per_second;
            self.workers.insert(from, Worker { report, heard: now, rate, assigned: Assigned::default() });
        }
    }

    fn cancel(&mut self, request: RequestId, attempt: Attempt) {
        self.queue.cancel(request, attempt);
        for worker in self.workers.values_mut() {
            worker.assigned.cancel(request, attempt);
        }
    }

    fn enqueue(&mut self, now: Time, from: AgentId, entry: PrefillEntry, out: &mut Vec<LeaderAction>) {
        if self.epoch.is_none() {
            return refuse(from, &entry, Refusal::NotLeader, Span::millis(100), out);
        }
        let found =
            self.workers.iter().find_map(|(name, w)| w.assigned.find(entry.request).map(|f| (name, f)));
        if let Some((worker, (assignment, unseen))) = found {
            if unseen.attempt == entry.attempt {
                // Said before; the answer may have been lost with a connection.
                return out.push(assigned(from, entry.request, entry.attempt, assignment, worker.clone()));
            }
            if unseen.attempt > entry.attempt {
                return;
            }
            self.cancel(entry.request, unseen.attempt);
        }
        let estimate = self.estimate(entry.tokens, self.pool_rate());
        if !entry.resumed {
            let longest = self.shared(self.queue.total().plus(self.backlog()));
            if self.queue.len() >= self.options.max_queue {
                return refuse(from, &entry, Refusal::QueueFull, retry_after(longest), out);
            }
            // Only if the whole queue is too long is it worth counting what is ahead.
            if self.measured() && longest.plus(estimate) > entry.deadline {
                let ahead = self.queue.ahead(now, entry.waited, estimate);
                let wait = self.shared(ahead.plus(self.backlog()));
                if wait.plus(estimate) > entry.deadline {
                    return refuse(from, &entry, Refusal::Deadline, retry_after(wait), out);
                }
            }
        }
        self.queue.insert(now, from, entry, estimate);
    }

    /// Gives prompts to workers until none is left that wants one.
    fn assign(&mut self, now: Time, out: &mut Vec<LeaderAction>) {
        let Some(epoch) = self.epoch else { return };
        let mut blocked: Vec<RequestId> = Vec::new();
        while let Some(request) = self.queue.head(blocked.len() + 1).pop().filter(|r| !blocked.contains(r)) {
            let queued = self.queue.get(request).expect("the head is in the queue");
            let blocks = blocks(queued.entry.tokens);
            let mut loads = self.loads(now, queued.entry.tokens);
            let need = PromptNeed {
                blocks,
                exclude: &queued.entry.exclude,
                backlog_limit: self.options.backlog_limit,
            };
            match pick(&loads, need) {
                Pick::Worker(index) => {
                    self.passed(now, &blocked);
                    let worker = loads.swap_remove(index);
                    let queued = self.queue.remove(request).expect("the head is in the queue");
                    self.give(now, epoch, queued, blocks, worker, out);
                }
                Pick::TooLarge if now.since(self.since) >= SETTLE => {
                    let queued = self.queue.remove(request).expect("the head is in the queue");
                    refuse(queued.gateway, &queued.entry, Refusal::TooLarge, Span::ZERO, out);
                }
                Pick::TooLarge | Pick::NoBlocks => {
                    if !self.may_pass(now, request) || blocked.len() >= LOOK_AHEAD {
                        return;
                    }
                    blocked.push(request);
                }
                Pick::Busy => return,
            }
        }
    }

    fn give(
        &mut self,
        now: Time,
        epoch: Epoch,
        queued: Queued,
        blocks: u32,
        load: WorkerLoad,
        out: &mut Vec<LeaderAction>,
    ) {
        self.numbers += 1;
        let assignment = Assignment { epoch, number: self.numbers };
        let unseen = Unseen {
            request: queued.entry.request,
            attempt: queued.entry.attempt,
            gateway: queued.gateway.clone(),
            at: now,
            load: PrefillLoad { blocks, estimate: load.estimate },
        };
        let worker = self.workers.get_mut(&load.name).expect("loads are made of the workers");
        worker.assigned.add(assignment, unseen);
        let entry = queued.entry;
        out.push(assigned(queued.gateway, entry.request, entry.attempt, assignment, load.name));
    }

    /// Whether a later prompt may go before this one, which finds no blocks (PF-6).
    fn may_pass(&mut self, now: Time, request: RequestId) -> bool {
        let (most, longest) = (self.options.max_passes, self.options.max_pass_time);
        let Some(queued) = self.queue.get_mut(request) else { return true };
        let since = *queued.blocked_since.get_or_insert(now);
        queued.passed < most && now.since(since) < longest
    }

    fn passed(&mut self, now: Time, blocked: &[RequestId]) {
        for request in blocked {
            if let Some(queued) = self.queue.get_mut(*request) {
                queued.passed += 1;
                queued.blocked_since.get_or_insert(now);
            }
        }
    }

    fn loads(&self, now: Time, tokens: u32) -> Vec<WorkerLoad> {
        let pool_rate = self.pool_rate();
        self.workers
            .iter()
            .map(|(name, w)| {
                let report = &w.report;
                let assigned = u32::try_from(w.assigned.len()).unwrap_or(u32::MAX);
                let blocks = w.assigned.loads().map(|l| l.blocks).fold(0, u32::saturating_add);
                let rate = if w.rate > 0 { w.rate } else { pool_rate };
                WorkerLoad {
                    name: name.clone(),
                    open: !report.draining
                        && now.since(w.heard) <= STALE_REPORT
                        && may_serve(self.fleet.as_deref(), name),
                    requests: report.requests.saturating_add(assigned),
                    backlog: w.assigned.loads().fold(report.backlog, |sum, l| sum.plus(l.estimate)),
                    free_blocks: report.free_blocks.saturating_sub(blocks),
                    total_blocks: report.total_blocks,
                    free_slots: report.free_slots.saturating_sub(assigned),
                    parked_full: report.parked_bytes >= report.parked_limit,
                    estimate: self.estimate(tokens, rate),
                }
            })
            .collect()
    }

    fn estimate(&self, tokens: u32, rate: u32) -> Span {
        Span(u64::from(tokens) * 1_000_000_000 / u64::from(rate.max(1)))
    }

    /// Mean measured rate of a worker; the default before the first measurement.
    fn pool_rate(&self) -> u32 {
        let rates = self.workers.values().map(|w| w.rate).filter(|rate| *rate > 0);
        let (sum, n) = rates.fold((0u64, 0u64), |(sum, n), rate| (sum + u64::from(rate), n + 1));
        sum.checked_div(n).and_then(|mean| u32::try_from(mean).ok()).unwrap_or(self.options.default_rate)
    }

    fn measured(&self) -> bool {
        self.workers.values().any(|w| w.rate > 0)
    }

    fn backlog(&self) -> Span {
        self.workers
            .values()
            .flat_map(|w| std::iter::once(w.report.backlog).chain(w.assigned.loads().map(|l| l.estimate)))
            .fold(Span::ZERO, Span::plus)
    }

    /// The pool's time for so much work of one worker.
    fn shared(&self, work: Span) -> Span {
        Span(work.0 / (self.workers.len() as u64).max(1))
    }
}

/// Blocks of a whole prompt.
fn blocks(tokens: u32) -> u32 {
    tokens.div_ceil(BLOCK_TOKENS as u32)
}

fn assigned(
    to: AgentId,
    request: RequestId,
    attempt: Attempt,
    assignment: Assignment,
    worker: AgentId,
) -> LeaderAction {
    LeaderAction { to, message: Message::PrefillAssigned { request, attempt, assignment, worker } }
}

fn refuse(to: AgentId, entry: &PrefillEntry, reason: Refusal, after: Span, out: &mut Vec<LeaderAction>) {
    let message =
        Message::Refuse { request: entry.request, attempt: entry.attempt, reason, retry_after: after };
    out.push(LeaderAction { to, message });
}
