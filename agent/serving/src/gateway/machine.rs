//! The gateway's machine: events in, actions out. Which handler does what: this file admits and ends requests,
//! `timers.rs` watches the time and the peers, `prefill_side.rs` and `decode_side.rs` follow the two halves of a request's way, `resume.rs`
//! decides after failures.
//!
//! Invariants: each request that arrived ends exactly once; a message changes a record only if its attempt is the
//! record's; whoever may hold something of a request is told when it ends.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use deepinfer_protocol::generate::{FinishReason, Token, TokenEvent};
use deepinfer_protocol::message::{Message, Refusal};
use deepinfer_protocol::{AgentId, Attempt, RequestId, Span, Time};

use super::admission::{Question, Sizes};
use super::options::{GatewayOptions, TenantLimits};
use super::peers::{Peers, Which};
use super::request::{Ask, Place, Record, Stage};
use super::resume::{Blow, Tries, Verdict, verdict};
use super::stats::{GatewayStats, Gauges};
use super::stream::Accepted;
use super::vacancy::Dice;
use super::{EndedEarly, GatewayAction, GatewayEvent, NewRequest};

/// Agents that a request remembers to have failed at. More than its tries can name.
const MAX_EXCLUDED: usize = 8;

/// How a request ends.
pub(super) enum End {
    /// The last token came from this agent.
    Finished(AgentId),
    /// The edge has enough.
    Satisfied,
    /// Anything else, said to the edge.
    Early(EndedEarly),
}

/// The machine.
pub struct Gateway {
    pub(super) options: GatewayOptions,
    pub(super) dice: Dice,
    pub(super) peers: Peers,
    pub(super) records: BTreeMap<RequestId, Record>,
    pub(super) gauges: Gauges,
    pub(super) stats: GatewayStats,
    pub(super) sizes: Sizes,
    /// Mean wait for a worker of recent requests.
    pub(super) queue_wait: Span,
    held: BTreeMap<Arc<str>, VecDeque<RequestId>>,
    pub(super) shutdown: Option<Time>,
}

impl Gateway {
    /// A gateway without a fleet.
    pub fn new(options: GatewayOptions) -> Self {
        Self {
            dice: Dice::new(options.seed),
            options,
            peers: Peers::default(),
            records: BTreeMap::new(),
            gauges: Gauges::default(),
            stats: GatewayStats::default(),
            sizes: Sizes::default(),
            queue_wait: Span::ZERO,
            held: BTreeMap::new(),
            shutdown: None,
        }
    }

    /// One event; what is to be done is pushed to `out`.
    pub fn on_event(&mut self, now: Time, event: GatewayEvent, out: &mut Vec<GatewayAction>) {
        match event {
            GatewayEvent::Arrived(new) => self.arrived(now, new, out),
            GatewayEvent::Message { from, message } => self.on_message(now, from, message, out),
            GatewayEvent::PeerUp(agent) => {
                self.peers.up(now, agent, out);
                self.ask_all(now, out);
            }
            GatewayEvent::PeerLost(agent) => self.peer_lost(now, &agent, out),
            GatewayEvent::ClientGone(request) => {
                self.end(now, request, End::Early(EndedEarly::Cancelled), out);
            }
            GatewayEvent::Satisfied(request) => self.end(now, request, End::Satisfied, out),
            GatewayEvent::Fleet(fleet) => {
                if self.peers.follow(now, fleet) {
                    self.sizes = Sizes::default();
                    self.ask_all(now, out);
                }
            }
            GatewayEvent::Shutdown { deadline } => self.shutdown = Some(deadline),
            GatewayEvent::Tick => self.tick(now, out),
        }
    }

    /// Requests that have not ended.
    pub fn holds(&self) -> usize {
        self.records.len()
    }

    /// Gauges and counters.
    pub fn stats(&self) -> GatewayStats {
        GatewayStats {
            running: self.gauges.running,
            waiting: self.gauges.waiting,
            fresh: self.gauges.fresh,
            fresh_tokens: self.gauges.fresh_tokens,
            by_state: self.gauges.by_state.clone(),
            ..self.stats.clone()
        }
    }

    /// Replaces the limits of tenants; requests that are in keep their places.
    pub fn set_tenants(&mut self, default: TenantLimits, tenants: BTreeMap<Arc<str>, TenantLimits>) {
        self.options.tenant_default = default;
        self.options.tenants = tenants;
    }

    /// Recounts everything that is counted along.
    ///
    /// # Errors
    /// The difference, in words: a bug.
    pub fn check(&self) -> Result<(), String> {
        let mut recount = Gauges::default();
        self.records.values().for_each(|r| recount.add(r));
        if recount != self.gauges {
            return Err(format!("gauges {:?}, recounted {recount:?}", self.gauges));
        }
        let held: usize = self.held.values().map(VecDeque::len).sum();
        let in_stage = self.records.values().filter(|r| r.stage == Stage::Held).count();
        if held == in_stage {
            Ok(())
        } else {
            Err(format!("{held} requests in held queues, {in_stage} held"))
        }
    }

    pub(super) fn question(&self) -> Question<'_> {
        Question {
            options: &self.options,
            gauges: &self.gauges,
            held: self.records.len(),
            fleet: self.peers.fleet(),
            shutdown: self.shutdown,
            sizes: self.sizes,
            queue_wait: self.queue_wait,
        }
    }

    fn arrived(&mut self, now: Time, new: NewRequest, out: &mut Vec<GatewayAction>) {
        let (id, tenant) = (new.id, new.tenant.clone());
        if self.records.contains_key(&id) {
            self.stats.ignored += 1;
            return;
        }
        if let Err(why) = self.question().decide(&tenant, new.prompt.len() as u64) {
            self.count_end(&why);
            return out.push(GatewayAction::Ended { request: id, why });
        }
        self.stats.admitted += 1;
        self.stats.prompt_tokens += new.prompt.len() as u64;
        let record = Record::new(now, new);
        self.gauges.add(&record);
        self.records.insert(id, record);
        self.held.entry(tenant.clone()).or_default().push_back(id);
        self.release(now, &tenant, out);
    }

    /// Lets a tenant's held requests go as far as its limit allows.
    fn release(&mut self, now: Time, tenant: &Arc<str>, out: &mut Vec<GatewayAction>) {
        let limit = self.question().limits(tenant).running;
        while self.gauges.tenants.get(tenant).is_none_or(|t| t.in_flight < limit) {
            let Some(queue) = self.held.get_mut(tenant) else { return };
            let next = queue.pop_front();
            if queue.is_empty() {
                self.held.remove(tenant);
            }
            let Some(id) = next else { return };
            self.enter(id, Stage::PrefillQueued(Ask::After(now)));
            self.ask_prefill(now, id, out);
        }
    }

    /// Moves a record to another stage, with its counts.
    pub(super) fn enter(&mut self, id: RequestId, stage: Stage) {
        if let Some(record) = self.records.get_mut(&id) {
            self.gauges.enter(record, stage);
        }
    }

    fn on_message(&mut self, now: Time, from: AgentId, message: Message, out: &mut Vec<GatewayAction>) {
        let (request, attempt) = match message {
            Message::Tokens(events) => {
                return events.into_iter().for_each(|event| self.tokens(now, &from, event, out));
            }
            _ => match message.subject() {
                Some(subject) => subject,
                None => return,
            },
        };
        if self.records.get(&request).is_none_or(|r| r.attempt != attempt) {
            return self.stale(now, &from, request, attempt, &message, out);
        }
        match message {
            Message::PrefillAssigned { assignment, worker, .. } => {
                self.prefill_assigned(now, request, from, assignment, worker, out);
            }
            Message::PrefillProgress { cached_tokens, last_chunk, .. } => {
                self.prefill_progress(now, request, &from, cached_tokens, last_chunk, out);
            }
            Message::PrefillDone { kv_epoch, .. } => {
                self.prefill_done(now, request, &from, kv_epoch, out);
            }
            Message::Placed { assignment, rank, .. } => {
                self.placed(now, request, from, assignment, rank, out);
            }
            Message::DecodeRunning { .. } => self.decode_running(now, request, &from),
            Message::Preempted { tokens, .. } => self.preempted(now, request, &from, tokens, out),
            Message::Refuse { reason, retry_after, .. } => {
                self.refused(now, request, &from, reason, retry_after, out);
            }
            Message::Failed { reason, .. } => self.work_failed(now, request, &from, reason, out),
            _ => self.stats.ignored += 1,
        }
    }

    /// A word about a request that ended, or about an old attempt. Whoever works for it is told to stop.
    fn stale(
        &mut self,
        now: Time,
        from: &AgentId,
        request: RequestId,
        attempt: Attempt,
        message: &Message,
        out: &mut Vec<GatewayAction>,
    ) {
        self.stats.ignored += 1;
        if let Some(record) = self.records.get_mut(&request) {
            record.acquit(from, attempt);
        }
        match message {
            Message::PrefillAssigned { .. } | Message::Placed { .. } => {
                self.peers.unused(from, request, attempt, out);
            }
            Message::PrefillProgress { .. }
            | Message::PrefillDone { .. }
            | Message::DecodeRunning { .. }
            | Message::Preempted { .. } => self.peers.cancel(now, from, request, attempt, out),
            _ => {}
        }
    }

    fn tokens(&mut self, now: Time, from: &AgentId, event: TokenEvent, out: &mut Vec<GatewayAction>) {
        let Some(record) = self.records.get_mut(&event.request).filter(|r| r.attempt == event.attempt) else {
            self.stats.ignored += 1;
            if let Some(record) = self.records.get_mut(&event.request) {
                record.acquit(from, event.attempt);
            }
            // What has ended needs no cancel.
            if event.finish.is_none() {
                self.peers.cancel(now, from, event.request, event.attempt, out);
            }
            return;
        };
        if let Stage::DecodeRunning { until, .. } = &mut record.stage {
            *until = now + self.options.times.progress;
        }
        match record.stream.accept(now, event.index, event.tokens, event.finish) {
            Accepted::Nothing => {}
            Accepted::Next(tokens, finish) => self.forward(now, event.request, from, tokens, finish, out),
            Accepted::Conflict => {
                let detail = format!("request {}: a token came twice and differed", event.request);
                self.end(now, event.request, End::Early(EndedEarly::Failed { detail }), out);
            }
            Accepted::TooEarly => {
                self.fail(now, event.request, Blow::Failed, Some(from), "tokens are missing", out);
            }
        }
    }

    fn forward(
        &mut self,
        now: Time,
        request: RequestId,
        from: &AgentId,
        tokens: Vec<Token>,
        finish: Option<FinishReason>,
        out: &mut Vec<GatewayAction>,
    ) {
        self.stats.tokens += tokens.len() as u64;
        out.push(GatewayAction::Tokens { request, tokens, finish });
        if finish.is_some() {
            self.end(now, request, End::Finished(from.clone()), out);
        }
    }

    /// Work for a request has begun: the limits and deadlines of the queue are behind it.
    pub(super) fn begun(&mut self, now: Time, id: RequestId) {
        let Some(record) = self.records.get_mut(&id).filter(|r| r.fresh) else { return };
        self.gauges.remove(record);
        record.fresh = false;
        self.gauges.add(record);
        // Moves by an eighth: follows a change within a dozen requests and does not jump with one.
        let wait = now.since(record.arrived);
        self.queue_wait = Span((self.queue_wait.0 / 8 * 7).saturating_add(wait.0 / 8));
    }

    /// The one way out: counts, tells everyone who may hold something, and says it to the edge.
    pub(super) fn end(&mut self, now: Time, id: RequestId, how: End, out: &mut Vec<GatewayAction>) {
        let Some(record) = self.records.remove(&id) else { return };
        self.gauges.remove(&record);
        if record.stage == Stage::Held
            && let Some(queue) = self.held.get_mut(&record.tenant)
        {
            queue.retain(|held| *held != id);
            if queue.is_empty() {
                self.held.remove(&record.tenant);
            }
        }
        let mut tell = self.holders(&record);
        match how {
            End::Finished(last) => {
                // It freed everything before it said so.
                tell.remove(&last);
                self.stats.finished += 1;
            }
            End::Satisfied => self.stats.finished += 1,
            End::Early(why) => {
                self.count_end(&why);
                out.push(GatewayAction::Ended { request: id, why });
            }
        }
        for agent in tell {
            self.peers.cancel(now, &agent, id, record.attempt, out);
        }
        self.release(now, &record.tenant, out);
    }

    fn count_end(&mut self, why: &EndedEarly) {
        match why {
            EndedEarly::Overloaded { reason, .. } => *self.stats.refused.entry(*reason).or_default() += 1,
            EndedEarly::TooLarge { .. } => *self.stats.refused.entry(Refusal::TooLarge).or_default() += 1,
            EndedEarly::Unavailable { .. } => self.stats.unavailable += 1,
            EndedEarly::Failed { .. } => self.stats.failed += 1,
            EndedEarly::Cancelled => self.stats.cancelled += 1,
        }
    }

    /// Agents that may hold something of it, the leaders that were asked included.
    fn holders(&self, record: &Record) -> BTreeSet<AgentId> {
        let mut holders = record.touched.clone();
        let place = match &record.stage {
            Stage::PrefillQueued(Ask::Asked { leader, .. }) => {
                holders.insert(leader.clone());
                None
            }
            Stage::PrefillRunning { place, .. } => Some(place),
            Stage::Parked { place, holder, .. } => {
                holders.insert(holder.clone());
                Some(place)
            }
            Stage::DecodeLoading { holder, .. } => {
                holders.insert(holder.clone());
                None
            }
            _ => None,
        };
        match place {
            Some(Place::Ask(Ask::Asked { leader, .. })) => {
                holders.insert(leader.clone());
            }
            Some(Place::Found { .. }) => {
                holders.extend(self.peers.leader(Which::Decode).map(|l| l.agent.clone()));
            }
            _ => {}
        }
        holders
    }

    /// A try came to nothing: again, with what was sent as context, or the end.
    pub(super) fn fail(
        &mut self,
        now: Time,
        id: RequestId,
        blow: Blow,
        culprit: Option<&AgentId>,
        why: &str,
        out: &mut Vec<GatewayAction>,
    ) {
        let Some(record) = self.records.get_mut(&id) else { return };
        record.failures += u32::from(blow != Blow::Harmless);
        record.crashes += u32::from(blow == Blow::Crash);
        if let Some(culprit) = culprit.filter(|c| !record.excluded.contains(c)) {
            record.excluded.push(culprit.clone());
            if record.excluded.len() > MAX_EXCLUDED {
                record.excluded.remove(0);
            }
        }
        let tries = Tries {
            failures: record.failures,
            crashes: record.crashes,
            max_attempts: self.options.max_attempts,
            max_crashes: self.options.max_crashes,
        };
        match verdict(tries, why, self.options.times.backoff, &mut self.dice) {
            Verdict::End(detail) => {
                let detail = format!("request {id}: {detail}");
                self.end(now, id, End::Early(EndedEarly::Failed { detail }), out);
            }
            Verdict::Again(wait) => {
                self.stats.resumed += 1;
                self.drop_attempt(now, id, out);
                self.enter(id, Stage::Backoff(now + wait));
            }
        }
    }

    /// Ends the current attempt everywhere and begins the next.
    pub(super) fn drop_attempt(&mut self, now: Time, id: RequestId, out: &mut Vec<GatewayAction>) {
        let Some(record) = self.records.get(&id) else { return };
        let (attempt, tell) = (record.attempt, self.holders(record));
        for agent in tell {
            self.peers.cancel(now, &agent, id, attempt, out);
        }
        if let Some(record) = self.records.get_mut(&id) {
            record.attempt = attempt.next();
            // The attempt fences off earlier decisions; a leader that starts again counts from the beginning.
            (record.last_prefill, record.last_place) = (None, None);
            record.base = record.stream.next_index();
            record.stream.restart();
            record.touched.clear();
            record.dropped.clear();
            record.avoid = None;
        }
    }
}
