//! The first half of a request's way: the queue of the prefill leader, the worker, the parked sequence.

use deepinfer_protocol::message::{Assignment, Failure, Message, PrefillWork, Refusal};
use deepinfer_protocol::{AgentId, Epoch, RequestId, Span, Time};

use super::admission::overloaded;
use super::machine::{End, Gateway};
use super::peers::Which;
use super::request::{Ask, Place, Stage};
use super::resume::{Blow, blow};
use super::{EndedEarly, GatewayAction};

/// After a leader said that it is none: the view that names the right one is on its way.
const NOT_LEADER_WAIT: Span = Span::millis(100);

impl Ask {
    /// Whether this leader is to be asked now: for the first time, after a change, or again.
    pub(super) fn due(&self, now: Time, agent: &AgentId, of: Epoch) -> bool {
        match self {
            Self::After(time) => *time <= now,
            Self::Asked { leader, epoch, repeat } => leader != agent || *epoch != of || *repeat <= now,
        }
    }

    /// There is no leader any more: an answer will not come.
    pub(super) fn abandon(&mut self, now: Time) {
        if matches!(self, Self::Asked { .. }) {
            *self = Self::After(now);
        }
    }
}

impl Gateway {
    /// Puts a queued request into the leader's queue if that is due.
    pub(super) fn ask_prefill(&mut self, now: Time, id: RequestId, out: &mut Vec<GatewayAction>) {
        let Some(record) = self.records.get_mut(&id) else { return };
        let Stage::PrefillQueued(ask) = &mut record.stage else { return };
        let Some(leader) = self.peers.leader(Which::Prefill) else { return ask.abandon(now) };
        if !ask.due(now, &leader.agent, leader.epoch) {
            return;
        }
        let repeat = now + self.options.times.repeat;
        *ask = Ask::Asked { leader: leader.agent.clone(), epoch: leader.epoch, repeat };
        let message = Message::Enqueue(record.prefill_entry(now));
        out.push(GatewayAction::Send { to: leader.agent.clone(), message });
    }

    pub(super) fn prefill_assigned(
        &mut self,
        now: Time,
        id: RequestId,
        leader: AgentId,
        assignment: Assignment,
        worker: AgentId,
        out: &mut Vec<GatewayAction>,
    ) {
        let Some(record) = self.records.get(&id) else { return };
        if record.last_prefill == Some(assignment) {
            self.stats.ignored += 1;
            return;
        }
        let fenced = self.peers.leader(Which::Prefill).is_some_and(|l| assignment.epoch < l.epoch);
        let waits = matches!(record.stage, Stage::PrefillQueued(_));
        if fenced || !waits || record.last_prefill.is_some_and(|last| assignment < last) {
            self.stats.ignored += 1;
            return self.peers.unused(&leader, id, record.attempt, out);
        }
        if !self.peers.is_up(&worker) {
            self.peers.unused(&leader, id, record.attempt, out);
            return self.bounced_prefill(now, id, worker, out);
        }
        self.start_prefill(now, id, assignment, worker, out);
    }

    pub(super) fn start_prefill(
        &mut self,
        now: Time,
        id: RequestId,
        assignment: Assignment,
        worker: AgentId,
        out: &mut Vec<GatewayAction>,
    ) {
        let Some(record) = self.records.get_mut(&id) else { return };
        record.last_prefill = Some(assignment);
        record.touched.insert(worker.clone());
        let work = PrefillWork {
            request: id,
            attempt: record.attempt,
            assignment,
            spec: record.spec.clone(),
            tokens: record.context(),
            prompt_tokens: record.prompt_tokens(),
            salt: record.salt,
            reuse: record.reuse,
        };
        out.push(GatewayAction::Send { to: worker.clone(), message: Message::Prefill(work) });
        self.enter(id, Stage::PrefillLoading { worker, until: now + self.options.times.start });
    }

    /// The worker holds nothing: back to the queue, to another one if there is another.
    fn bounced_prefill(&mut self, now: Time, id: RequestId, worker: AgentId, out: &mut Vec<GatewayAction>) {
        self.stats.bounced += 1;
        if let Some(record) = self.records.get_mut(&id) {
            // Nothing to cancel there, and a new attempt, so that its answer is never taken for the next one's.
            record.touched.remove(&worker);
        }
        self.drop_attempt(now, id, out);
        let wait = self.refusal_wait(id);
        if let Some(record) = self.records.get_mut(&id) {
            record.avoid = Some(worker);
        }
        self.enter(id, Stage::PrefillQueued(Ask::After(now + wait)));
    }

    /// How long to wait after one more refusal in a row: doubles, up to a second.
    pub(super) fn refusal_wait(&mut self, id: RequestId) -> Span {
        let Some(record) = self.records.get_mut(&id) else { return Span::ZERO };
        let wait = self.options.times.refused.times(1 << record.refusals.min(10));
        record.refusals = record.refusals.saturating_add(1);
        wait.min(Span::secs(1))
    }

    pub(super) fn prefill_progress(
        &mut self,
        now: Time,
        id: RequestId,
        from: &AgentId,
        cached: u32,
        last_chunk: bool,
        out: &mut Vec<GatewayAction>,
    ) {
        let until = now + self.options.times.prefill;
        let Some(record) = self.records.get_mut(&id) else { return };
        if record.stage.worker() != Some(from) {
            self.stats.ignored += 1;
            return;
        }
        record.refusals = 0;
        if !record.started {
            record.started = true;
            let cached_tokens = cached.min(record.prompt_tokens());
            self.stats.cached_tokens += u64::from(cached_tokens);
            out.push(GatewayAction::Started { request: id, cached_tokens });
        }
        self.begun(now, id);
        let Some(record) = self.records.get_mut(&id) else { return };
        let searched = match &record.stage {
            Stage::PrefillRunning { place, .. } => place.clone(),
            _ => Place::No,
        };
        let place = match searched {
            Place::No if last_chunk => Place::Ask(Ask::After(now)),
            other => other,
        };
        self.enter(id, Stage::PrefillRunning { worker: from.clone(), until, place });
        self.ask_place(now, id, out);
    }

    pub(super) fn prefill_done(
        &mut self,
        now: Time,
        id: RequestId,
        from: &AgentId,
        kv_epoch: String,
        out: &mut Vec<GatewayAction>,
    ) {
        let Some(record) = self.records.get_mut(&id) else { return };
        if record.stage.worker() != Some(from) {
            self.stats.ignored += 1;
            return;
        }
        if record.stream.next_index() <= record.base {
            return self.fail(now, id, Blow::Failed, Some(from), "the first token is missing", out);
        }
        let place = match record.stage.place_mut() {
            Some(place) if *place != Place::No => std::mem::replace(place, Place::No),
            _ => Place::Ask(Ask::After(now)),
        };
        self.begun(now, id);
        self.enter(id, Stage::Parked { holder: from.clone(), kv_epoch, preempted: false, place });
        self.ask_place(now, id, out);
        self.start_decode(now, id, out);
    }

    /// A refusal: of the leader's queue, or of the worker.
    pub(super) fn refused(
        &mut self,
        now: Time,
        id: RequestId,
        from: &AgentId,
        reason: Refusal,
        after: Span,
        out: &mut Vec<GatewayAction>,
    ) {
        let Some(record) = self.records.get_mut(&id) else { return };
        match &record.stage {
            Stage::PrefillQueued(Ask::Asked { leader, .. }) if leader == from => {
                self.leader_refused(now, id, reason, after, out);
            }
            Stage::PrefillLoading { worker, .. } if worker == from => {
                if let Some(leader) = self.peers.leader(Which::Prefill) {
                    self.peers.unused(&leader.agent, id, record.attempt, out);
                }
                if reason == Refusal::TooLarge {
                    // The leader does not know yet how small this worker is; it will say so of all.
                    record.excluded.push(from.clone());
                    record.failures += 1;
                    if record.failures >= self.options.max_attempts {
                        return self.too_large(now, id, out);
                    }
                }
                self.bounced_prefill(now, id, from.clone(), out);
            }
            _ => self.place_refused(now, id, from, reason, after, out),
        }
    }

    fn leader_refused(
        &mut self,
        now: Time,
        id: RequestId,
        reason: Refusal,
        after: Span,
        out: &mut Vec<GatewayAction>,
    ) {
        let fresh = self.records.get(&id).is_some_and(|r| r.fresh);
        match reason {
            Refusal::TooLarge => self.too_large(now, id, out),
            Refusal::QueueFull | Refusal::Deadline if fresh => {
                let detail = match reason {
                    Refusal::QueueFull => "the queue of the prefill pool is full",
                    _ => "the first token would come too late",
                };
                let why = overloaded(reason, detail.to_owned(), after);
                self.end(now, id, End::Early(why), out);
            }
            Refusal::NotLeader => self.enter(id, Stage::PrefillQueued(Ask::After(now + NOT_LEADER_WAIT))),
            _ => {
                let wait = self.refusal_wait(id).max(after.min(Span::secs(1)));
                self.enter(id, Stage::PrefillQueued(Ask::After(now + wait)));
            }
        }
    }

    /// No pool has the memory for it. What was sent stays sent.
    pub(super) fn too_large(&mut self, now: Time, id: RequestId, out: &mut Vec<GatewayAction>) {
        let Some(record) = self.records.get(&id) else { return };
        let length = record.length();
        let detail = format!("a sequence of {length} tokens needs more KV memory than there is");
        let why = if record.stream.sent().is_empty() {
            self.sizes.refused = Some(self.sizes.refused.map_or(length, |known| known.min(length)));
            EndedEarly::TooLarge { detail: format!("{detail}: shorten the prompt") }
        } else {
            EndedEarly::Failed { detail: format!("request {id}: {detail}") }
        };
        self.end(now, id, End::Early(why), out);
    }

    /// Work that had begun cannot go on.
    pub(super) fn work_failed(
        &mut self,
        now: Time,
        id: RequestId,
        from: &AgentId,
        reason: Failure,
        out: &mut Vec<GatewayAction>,
    ) {
        let Some(record) = self.records.get_mut(&id) else { return };
        let in_engine = match &record.stage {
            Stage::PrefillLoading { worker, .. } if worker == from => false,
            Stage::PrefillRunning { worker, .. } if worker == from => true,
            Stage::Parked { holder, .. } if holder == from => false,
            Stage::DecodeLoading { rank, .. } if rank.agent == *from => false,
            Stage::DecodeRunning { rank, .. } if rank.agent == *from => true,
            _ => {
                self.stats.ignored += 1;
                return;
            }
        };
        self.fail(now, id, blow(reason, in_engine), Some(from), reason.as_str(), out);
    }

    /// An agent is gone: what this does to a request on its first half.
    pub(super) fn lost_prefill(
        &mut self,
        now: Time,
        id: RequestId,
        agent: &AgentId,
        out: &mut Vec<GatewayAction>,
    ) {
        let Some(record) = self.records.get_mut(&id) else { return };
        match &mut record.stage {
            Stage::PrefillQueued(ask) => {
                if matches!(ask, Ask::Asked { leader, .. } if leader == agent) {
                    *ask = Ask::After(now);
                }
            }
            Stage::PrefillLoading { worker, .. } if worker == agent => {
                self.fail(now, id, Blow::Failed, Some(agent), "the worker was lost", out);
            }
            Stage::PrefillRunning { worker, .. } if worker == agent => {
                record.suspect(agent);
                self.fail(now, id, Blow::Crash, Some(agent), "the worker was lost", out);
            }
            Stage::Parked { holder, .. } if holder == agent => {
                self.fail(now, id, Blow::Harmless, Some(agent), "the holder was lost", out);
            }
            _ => {}
        }
    }
}
