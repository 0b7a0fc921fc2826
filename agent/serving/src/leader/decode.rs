//! Leader of the decode supernodes: one queue in order of arrival, preempted sequences first, placed one at a time
//! (DR-4) by [`choose`](super::choose::choose).
//!
//! Invariants: a request is in the queue or assigned, never both; its assignment is counted until the rank's report
//! speaks for it. A queue never passes its head: what waits longest is placed next.

use std::collections::BTreeMap;
use std::sync::Arc;

use deepinfer_protocol::fleet::FleetView;
use deepinfer_protocol::message::{Assignment, DecodeReport, Message, PlaceEntry, Refusal};
use deepinfer_protocol::{AgentId, Attempt, Epoch, RankId, RequestId, Span, Time};

use super::choose::{OVERCOMMIT_PERCENT, RankLoad, SequenceNeed, WhyNot, choose};
use super::view::{Assigned, Unseen};
use super::{LeaderAction, LeaderEvent, SETTLE, STALE_REPORT, UNSEEN_ASSIGNMENT, may_serve, retry_after};
use crate::batch::BLOCK_TOKENS;

/// What may be set.
#[derive(Clone, Debug)]
pub struct DecodeLeaderOptions {
    /// Most entries. What waits here was prefilled; workers' parked limits bound it long before.
    pub max_queue: usize,
    /// Output tokens for which room is reserved, unless fewer are wanted (DR-1).
    pub reserve: u32,
}

impl Default for DecodeLeaderOptions {
    fn default() -> Self {
        Self { max_queue: 16_384, reserve: 512 }
    }
}

/// What an unseen assignment weighs at its rank.
#[derive(Clone, Copy, Debug)]
struct DecodeLoad {
    tokens: u64,
    blocks: u32,
}

struct RankView {
    report: DecodeReport,
    heard: Time,
    assigned: Assigned<DecodeLoad>,
}

struct Waiting {
    entry: PlaceEntry,
    gateway: AgentId,
}

/// Preempted first, then arrival.
type Key = (bool, u64);

/// The machine.
pub struct DecodeLeader {
    options: DecodeLeaderOptions,
    epoch: Option<Epoch>,
    since: Time,
    numbers: u64,
    arrivals: u64,
    fleet: Option<Arc<FleetView>>,
    ranks: BTreeMap<RankId, RankView>,
    queue: BTreeMap<Key, Waiting>,
    keys: BTreeMap<RequestId, Key>,
}

impl DecodeLeader {
    /// A leader that does not lead yet.
    pub fn new(options: DecodeLeaderOptions) -> Self {
        Self {
            options,
            epoch: None,
            since: Time::default(),
            numbers: 0,
            arrivals: 0,
            fleet: None,
            ranks: BTreeMap::new(),
            queue: BTreeMap::new(),
            keys: BTreeMap::new(),
        }
    }

    /// The epoch it leads under.
    pub fn epoch(&self) -> Option<Epoch> {
        self.epoch
    }

    /// Sequences that wait for a rank.
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Assignments that no report has acknowledged.
    pub fn unseen(&self) -> usize {
        self.ranks.values().map(|r| r.assigned.len()).sum()
    }

    /// Why the head of the queue is not placed: of each known rank the reason. Empty if nothing waits.
    pub fn explain(&self, now: Time) -> Vec<(RankId, WhyNot)> {
        let Some(head) = self.queue.values().next() else { return Vec::new() };
        let need = self.need(&head.entry);
        self.loads(now, &head.entry)
            .into_iter()
            .filter_map(|load| load.room(need).err().map(|why| (load.id, why)))
            .collect()
    }

    /// One event; what is to be said is pushed to `out`.
    pub fn on_event(&mut self, now: Time, event: LeaderEvent, out: &mut Vec<LeaderAction>) {
        match event {
            LeaderEvent::Lead(epoch) => {
                if self.epoch != Some(epoch) {
                    self.forget(Some(epoch));
                    self.since = now;
                }
            }
            LeaderEvent::Resign => self.forget(None),
            LeaderEvent::Fleet(fleet) => {
                if self.fleet.as_ref().is_none_or(|f| f.generation < fleet.generation) {
                    self.fleet = Some(fleet);
                }
            }
            LeaderEvent::Message { from, message } => self.on_message(now, from, message, out),
            LeaderEvent::PeerLost(peer) => self.peer_lost(&peer),
            LeaderEvent::Tick => {
                for rank in self.ranks.values_mut() {
                    rank.assigned.expire(now, UNSEEN_ASSIGNMENT);
                }
            }
        }
        self.place(now, out);
    }

    fn forget(&mut self, epoch: Option<Epoch>) {
        self.epoch = epoch;
        self.numbers = 0;
        self.ranks.clear();
        self.queue.clear();
        self.keys.clear();
    }

    fn peer_lost(&mut self, peer: &AgentId) {
        self.ranks.retain(|id, _| id.agent != *peer);
        for rank in self.ranks.values_mut() {
            rank.assigned.drop_gateway(peer);
        }
        self.queue.retain(|_, w| w.gateway != *peer);
        let queue = &self.queue;
        self.keys.retain(|_, key| queue.contains_key(key));
    }

    fn on_message(&mut self, now: Time, from: AgentId, message: Message, out: &mut Vec<LeaderAction>) {
        match message {
            Message::Place(entry) => self.enqueue(from, entry, out),
            // A refusal comes from the gateway: the decision was not used.
            Message::Cancel { request, attempt } | Message::Refuse { request, attempt, .. } => {
                self.cancel(request, attempt);
            }
            Message::DecodeReport(report) if self.epoch == Some(report.epoch) => {
                let id = RankId { agent: from, rank: report.rank };
                if let Some(rank) = self.ranks.get_mut(&id) {
                    rank.assigned.acknowledge(&report.seen);
                    (rank.report, rank.heard) = (report, now);
                } else {
                    self.ranks.insert(id, RankView { report, heard: now, assigned: Assigned::default() });
                }
            }
            _ => {}
        }
    }

    fn cancel(&mut self, request: RequestId, attempt: Attempt) {
        if let Some(key) = self.keys.get(&request)
            && self.queue[key].entry.attempt <= attempt
        {
            self.take(request);
        }
        for rank in self.ranks.values_mut() {
            rank.assigned.cancel(request, attempt);
        }
    }

    fn take(&mut self, request: RequestId) -> Option<Waiting> {
        self.keys.remove(&request).and_then(|key| self.queue.remove(&key))
    }

    fn enqueue(&mut self, from: AgentId, entry: PlaceEntry, out: &mut Vec<LeaderAction>) {
        if self.epoch.is_none() {
            return refuse(from, &entry, Refusal::NotLeader, Span::millis(100), out);
        }
        let found = self.ranks.iter().find_map(|(id, r)| r.assigned.find(entry.request).map(|f| (id, f)));
        if let Some((rank, (assignment, unseen))) = found {
            if unseen.attempt == entry.attempt {
                // Said before; the answer may have been lost with a connection.
                return out.push(placed(from, &entry, assignment, rank.clone()));
            }
            if unseen.attempt > entry.attempt {
                return;
            }
            self.cancel(entry.request, unseen.attempt);
        }
        if let Some(key) = self.keys.get(&entry.request) {
            if self.queue[key].entry.attempt >= entry.attempt {
                return;
            }
            self.take(entry.request);
        }
        if self.queue.len() >= self.options.max_queue {
            return refuse(from, &entry, Refusal::QueueFull, retry_after(Span::ZERO), out);
        }
        self.arrivals += 1;
        let key = (!entry.preempted, self.arrivals);
        self.keys.insert(entry.request, key);
        self.queue.insert(key, Waiting { entry, gateway: from });
    }

    /// Places sequences in order until one finds no room.
    fn place(&mut self, now: Time, out: &mut Vec<LeaderAction>) {
        let Some(epoch) = self.epoch else { return };
        let settled = now.since(self.since) >= SETTLE;
        let mut after: Option<Key> = None;
        while let Some((key, waiting)) = self.next(after) {
            let (request, need) = (waiting.entry.request, self.need(&waiting.entry));
            let loads = self.loads(now, &waiting.entry);
            match choose(&loads, need) {
                Ok(index) => {
                    let waiting = self.take(request).expect("it waits");
                    self.give(now, epoch, waiting, need, loads[index].id.clone(), out);
                }
                Err(why) => match never(&why).filter(|_| settled) {
                    Some(reason) => {
                        let waiting = self.take(request).expect("it waits");
                        refuse(waiting.gateway, &waiting.entry, reason, retry_after(Span::ZERO), out);
                    }
                    // No known rank could ever take it: it waits for others, and stops nobody.
                    None if never(&why).is_some() => after = Some(key),
                    None => return,
                },
            }
        }
    }

    fn next(&self, after: Option<Key>) -> Option<(Key, &Waiting)> {
        let mut rest = match after {
            Some(key) => self.queue.range((std::ops::Bound::Excluded(key), std::ops::Bound::Unbounded)),
            None => self.queue.range(..),
        };
        rest.next().map(|(key, waiting)| (*key, waiting))
    }

    fn give(
        &mut self,
        now: Time,
        epoch: Epoch,
        waiting: Waiting,
        need: SequenceNeed,
        rank: RankId,
        out: &mut Vec<LeaderAction>,
    ) {
        self.numbers += 1;
        let assignment = Assignment { epoch, number: self.numbers };
        let blocks = (need.length + 1).div_ceil(BLOCK_TOKENS as u64);
        let unseen = Unseen {
            request: waiting.entry.request,
            attempt: waiting.entry.attempt,
            gateway: waiting.gateway.clone(),
            at: now,
            load: DecodeLoad {
                tokens: need.length + need.growth,
                blocks: u32::try_from(blocks).unwrap_or(u32::MAX),
            },
        };
        let view = self.ranks.get_mut(&rank).expect("loads are made of the ranks");
        view.assigned.add(assignment, unseen);
        out.push(placed(waiting.gateway, &waiting.entry, assignment, rank));
    }

    fn need(&self, entry: &PlaceEntry) -> SequenceNeed {
        SequenceNeed {
            length: u64::from(entry.tokens),
            growth: u64::from(entry.max_tokens.min(self.options.reserve)),
            percent: if entry.preempted { 100 } else { OVERCOMMIT_PERCENT },
        }
    }

    /// What is known of every rank, in the order of their ids, as it looks to this entry.
    fn loads(&self, now: Time, entry: &PlaceEntry) -> Vec<RankLoad> {
        let mut groups: BTreeMap<&str, usize> = BTreeMap::new();
        let mut loads: Vec<RankLoad> = Vec::with_capacity(self.ranks.len());
        for (id, view) in &self.ranks {
            let member = self.fleet.as_deref().and_then(|fleet| fleet.member(&id.agent));
            let name = member.and_then(|m| m.supernode.as_ref()).map_or(id.agent.as_str(), |s| s.as_str());
            let next = groups.len();
            let group = *groups.entry(name).or_insert(next);
            let closed = self.closed(now, id, view, entry);
            loads.push(view.load(id.clone(), group, closed));
        }
        let others = loads.iter().any(|l| l.closed.is_none() && !entry.exclude.contains(&l.id.agent));
        for load in loads.iter_mut().filter(|l| others && entry.exclude.contains(&l.id.agent)) {
            load.closed = load.closed.or(Some(WhyNot::Excluded));
        }
        loads
    }

    fn closed(&self, now: Time, id: &RankId, view: &RankView, entry: &PlaceEntry) -> Option<WhyNot> {
        if view.report.kv_epoch != entry.kv_epoch {
            Some(WhyNot::KvEpoch)
        } else if view.report.draining || !may_serve(self.fleet.as_deref(), &id.agent) {
            Some(WhyNot::Draining)
        } else if now.since(view.heard) > STALE_REPORT {
            Some(WhyNot::Stale)
        } else {
            None
        }
    }
}

impl RankView {
    fn load(&self, id: RankId, group: usize, closed: Option<WhyNot>) -> RankLoad {
        let report = &self.report;
        let assigned = u32::try_from(self.assigned.len()).unwrap_or(u32::MAX);
        let blocks = self.assigned.loads().map(|l| l.blocks).fold(0, u32::saturating_add);
        RankLoad {
            id,
            group,
            closed,
            requests: report.requests.saturating_add(assigned),
            tokens: report.tokens + self.assigned.loads().map(|l| l.tokens).sum::<u64>(),
            free_blocks: report.free_blocks.saturating_sub(blocks),
            total_blocks: report.total_blocks,
            free_slots: report.free_slots.saturating_sub(assigned),
            max_requests: report.max_requests,
        }
    }
}

/// If no known rank could ever take it: why. Without any rank that is not known.
fn never(why: &[WhyNot]) -> Option<Refusal> {
    if why.is_empty() {
        None
    } else if why.iter().all(|w| *w == WhyNot::KvEpoch) {
        Some(Refusal::KvEpoch)
    } else if why.iter().all(|w| matches!(w, WhyNot::TooLarge | WhyNot::KvEpoch)) {
        Some(Refusal::TooLarge)
    } else {
        None
    }
}

fn placed(to: AgentId, entry: &PlaceEntry, assignment: Assignment, rank: RankId) -> LeaderAction {
    let (request, attempt) = (entry.request, entry.attempt);
    LeaderAction { to, message: Message::Placed { request, attempt, assignment, rank } }
}

fn refuse(to: AgentId, entry: &PlaceEntry, reason: Refusal, after: Span, out: &mut Vec<LeaderAction>) {
    let message =
        Message::Refuse { request: entry.request, attempt: entry.attempt, reason, retry_after: after };
    out.push(LeaderAction { to, message });
}
