//! The second half of a request's way: the queue of the decode leader, the rank, and back to the queue when the
//! sequence gives way to others.

use deepinfer_protocol::agent_status::Role;
use deepinfer_protocol::message::{Assignment, DecodeWork, Message, Refusal};
use deepinfer_protocol::{AgentId, RankId, RequestId, Span, Time};

use super::GatewayAction;
use super::machine::Gateway;
use super::peers::Which;
use super::request::{Ask, Place, Stage};
use super::resume::Blow;

impl Gateway {
    /// Who can read the request's KV: as its holder said, or as the fleet says of its worker.
    pub(super) fn kv_epoch(&self, id: RequestId) -> Option<String> {
        match &self.records.get(&id)?.stage {
            Stage::Parked { kv_epoch, .. } => Some(kv_epoch.clone()),
            Stage::PrefillRunning { worker, .. } => {
                self.peers.fleet()?.member(worker).map(|m| m.kv_epoch.clone())
            }
            _ => None,
        }
    }

    /// Puts a sequence into the decode leader's queue if that is due.
    pub(super) fn ask_place(&mut self, now: Time, id: RequestId, out: &mut Vec<GatewayAction>) {
        let Some(record) = self.records.get_mut(&id) else { return };
        let Some(Place::Ask(ask)) = record.stage.place_mut() else { return };
        let Some(leader) = self.peers.leader(Which::Decode) else { return ask.abandon(now) };
        if !ask.due(now, &leader.agent, leader.epoch) {
            return;
        }
        let repeat = now + self.options.times.repeat;
        let asked = Ask::Asked { leader: leader.agent.clone(), epoch: leader.epoch, repeat };
        let to = leader.agent.clone();
        let Some(kv_epoch) = self.kv_epoch(id) else { return };
        let Some(record) = self.records.get_mut(&id) else { return };
        let (preempted, parked) = match &record.stage {
            Stage::Parked { preempted, .. } => (*preempted, true),
            _ => (false, false),
        };
        // The first token may have been heard before the sequence is parked.
        let counted = parked || record.stream.next_index() > record.base;
        let entry = record.place_entry(&kv_epoch, preempted, counted);
        if let Some(place) = record.stage.place_mut() {
            *place = Place::Ask(asked);
        }
        out.push(GatewayAction::Send { to, message: Message::Place(entry) });
    }

    pub(super) fn placed(
        &mut self,
        now: Time,
        id: RequestId,
        leader: AgentId,
        assignment: Assignment,
        rank: RankId,
        out: &mut Vec<GatewayAction>,
    ) {
        let Some(record) = self.records.get_mut(&id) else { return };
        if record.last_place == Some(assignment) {
            self.stats.ignored += 1;
            return;
        }
        let fenced = self.peers.leader(Which::Decode).is_some_and(|l| assignment.epoch < l.epoch);
        let late = record.last_place.is_some_and(|last| assignment < last);
        let attempt = record.attempt;
        let dropped = record.dropped.contains(&rank.agent);
        let place = match record.stage.place_mut() {
            Some(place @ Place::Ask(_)) if !fenced && !late => place,
            _ => {
                self.stats.ignored += 1;
                return self.peers.unused(&leader, id, attempt, out);
            }
        };
        if dropped {
            // That agent was told to drop this attempt and will not take it again: there is no other rank.
            return self.fail(now, id, Blow::Failed, None, "no other rank", out);
        }
        if !self.peers.is_up(&rank.agent) {
            *place = Place::Ask(Ask::After(now));
            return self.bounced_place(now, id, rank.agent, out);
        }
        *place = Place::Found { rank, assignment };
        record.last_place = Some(assignment);
        self.start_decode(now, id, out);
    }

    /// Sends a parked sequence to the rank that was found for it.
    pub(super) fn start_decode(&mut self, now: Time, id: RequestId, out: &mut Vec<GatewayAction>) {
        let Some(record) = self.records.get_mut(&id) else { return };
        let Stage::Parked { holder, kv_epoch, place: Place::Found { rank, assignment }, .. } = &record.stage
        else {
            return;
        };
        let (rank, assignment, holder) = (rank.clone(), *assignment, holder.clone());
        let kv_epoch = kv_epoch.clone();
        let work = DecodeWork {
            request: id,
            attempt: record.attempt,
            assignment,
            rank: rank.rank,
            spec: record.spec.clone(),
            tokens: record.context(),
            prompt_tokens: record.prompt_tokens(),
            holder: holder.clone(),
            preemptions: record.preemptions,
        };
        record.touched.insert(rank.agent.clone());
        out.push(GatewayAction::Send { to: rank.agent.clone(), message: Message::Decode(work) });
        let until = now + self.options.times.start;
        self.enter(id, Stage::DecodeLoading { rank, holder, kv_epoch, until });
    }

    pub(super) fn decode_running(&mut self, now: Time, id: RequestId, from: &AgentId) {
        let Some(record) = self.records.get_mut(&id) else { return };
        match &record.stage {
            Stage::DecodeLoading { rank, kv_epoch, .. } if rank.agent == *from => {
                let (rank, kv_epoch) = (rank.clone(), kv_epoch.clone());
                record.refusals = 0;
                record.avoid = None;
                let until = now + self.options.times.progress;
                self.enter(id, Stage::DecodeRunning { rank, kv_epoch, until });
            }
            _ => self.stats.ignored += 1,
        }
    }

    pub(super) fn preempted(
        &mut self,
        now: Time,
        id: RequestId,
        from: &AgentId,
        tokens: u32,
        out: &mut Vec<GatewayAction>,
    ) {
        let Some(record) = self.records.get_mut(&id) else { return };
        let kv_epoch = match &record.stage {
            Stage::DecodeRunning { rank, kv_epoch, .. }
                if rank.agent == *from && record.length() >= tokens =>
            {
                kv_epoch.clone()
            }
            Stage::DecodeRunning { rank, .. } if rank.agent == *from => {
                return self.fail(now, id, Blow::Failed, Some(from), "tokens are missing", out);
            }
            _ => {
                self.stats.ignored += 1;
                return;
            }
        };
        if record.length() > tokens {
            // A repeat of an earlier word: the sequence has gone on since.
            self.stats.ignored += 1;
            return;
        }
        self.stats.preempted += 1;
        record.preemptions += 1;
        record.refusals = 0;
        let (holder, place) = (from.clone(), Place::Ask(Ask::After(now)));
        self.forget_place(id, out);
        self.enter(id, Stage::Parked { holder, kv_epoch, preempted: true, place });
        self.ask_place(now, id, out);
    }

    /// The leader may still answer for the last decision from memory: it forgets before it is asked again.
    fn forget_place(&mut self, id: RequestId, out: &mut Vec<GatewayAction>) {
        let Some(attempt) = self.records.get(&id).map(|r| r.attempt) else { return };
        if let Some(leader) = self.peers.leader(Which::Decode) {
            self.peers.unused(&leader.agent, id, attempt, out);
        }
    }

    /// That rank will not have it; what is parked stays parked, and another is looked for.
    fn bounced_place(&mut self, now: Time, id: RequestId, agent: AgentId, out: &mut Vec<GatewayAction>) {
        self.stats.bounced += 1;
        self.forget_place(id, out);
        let wait = self.refusal_wait(id);
        let Some(record) = self.records.get_mut(&id) else { return };
        record.avoid = Some(agent);
        let stage = match &record.stage {
            Stage::DecodeLoading { holder, kv_epoch, .. } => Stage::Parked {
                holder: holder.clone(),
                kv_epoch: kv_epoch.clone(),
                preempted: record.preemptions > 0,
                place: Place::Ask(Ask::After(now + wait)),
            },
            other => {
                let mut stage = other.clone();
                if let Some(place) = stage.place_mut() {
                    *place = Place::Ask(Ask::After(now + wait));
                }
                stage
            }
        };
        self.enter(id, stage);
    }

    /// A refusal on the second half: of the leader's queue, or of the rank.
    pub(super) fn place_refused(
        &mut self,
        now: Time,
        id: RequestId,
        from: &AgentId,
        reason: Refusal,
        after: Span,
        out: &mut Vec<GatewayAction>,
    ) {
        let Some(record) = self.records.get_mut(&id) else { return };
        if let Stage::DecodeLoading { rank, .. } = &record.stage
            && rank.agent == *from
        {
            let agent = rank.agent.clone();
            record.touched.remove(&agent);
            return match reason {
                Refusal::TooLarge => self.too_large(now, id, out),
                _ => self.bounced_place(now, id, agent, out),
            };
        }
        let worker = record.stage.worker().cloned();
        match record.stage.place_mut() {
            Some(Place::Ask(Ask::Asked { leader, .. })) if leader == from => {}
            _ => {
                self.stats.ignored += 1;
                return;
            }
        }
        match reason {
            Refusal::TooLarge => self.too_large(now, id, out),
            Refusal::KvEpoch => {
                let why = "no rank can read its KV (kv_epoch)";
                self.fail(now, id, Blow::Failed, worker.as_ref(), why, out);
            }
            _ => {
                let wait = self.refusal_wait(id).max(after.min(Span::secs(1)));
                let Some(record) = self.records.get_mut(&id) else { return };
                if let Some(place) = record.stage.place_mut() {
                    *place = Place::Ask(Ask::After(now + wait));
                }
            }
        }
    }

    /// An agent is gone: what this does to a request on its second half.
    pub(super) fn lost_decode(
        &mut self,
        now: Time,
        id: RequestId,
        agent: &AgentId,
        out: &mut Vec<GatewayAction>,
    ) {
        let others = self.peers.serving().any(|m| m.role == Role::Decode && m.name != *agent);
        let led =
            self.peers.fleet().and_then(|f| f.decode_leader.as_ref()).is_some_and(|l| l.agent == *agent);
        let Some(record) = self.records.get_mut(&id) else { return };
        if led {
            // A leader that starts again counts its decisions from the beginning.
            record.last_place = None;
        }
        if let Some(place) = record.stage.place_mut() {
            match place {
                Place::Ask(Ask::Asked { leader, .. }) if leader == agent => {
                    *place = Place::Ask(Ask::After(now));
                }
                Place::Found { rank, .. } if rank.agent == *agent => {
                    *place = Place::Ask(Ask::After(now));
                    self.forget_place(id, out);
                }
                _ => {}
            }
            return;
        }
        match &record.stage {
            // The holder's copy is good: another rank can have it, if there is one elsewhere.
            Stage::DecodeLoading { rank, holder, .. }
                if rank.agent == *agent && others && self.peers.is_up(holder) =>
            {
                record.dropped.insert(agent.clone());
                record.touched.remove(agent);
                let attempt = record.attempt;
                self.peers.cancel(now, agent, id, attempt, out);
                self.bounced_place(now, id, agent.clone(), out);
            }
            Stage::DecodeLoading { rank, .. } if rank.agent == *agent => {
                self.fail(now, id, Blow::Failed, Some(agent), "the rank was lost", out);
            }
            Stage::DecodeRunning { rank, .. } if rank.agent == *agent => {
                record.suspect(agent);
                self.fail(now, id, Blow::Crash, Some(agent), "the rank was lost", out);
            }
            _ => {}
        }
    }
}
