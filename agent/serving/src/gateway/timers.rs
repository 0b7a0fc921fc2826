//! Time and peers: what is due by now, what is over its limit, and what a peer that comes or goes means for every
//! request.

use deepinfer_protocol::message::Refusal;
use deepinfer_protocol::{AgentId, RequestId, Time};

use super::admission::overloaded;
use super::machine::{End, Gateway};
use super::peers::Which;
use super::request::{Ask, Class, Stage};
use super::resume::Blow;
use super::{EndedEarly, GatewayAction};

impl Gateway {
    pub(super) fn peer_lost(&mut self, now: Time, agent: &AgentId, out: &mut Vec<GatewayAction>) {
        self.peers.lost(now, agent);
        let ids: Vec<RequestId> = self.records.keys().copied().collect();
        for id in ids {
            self.lost_prefill(now, id, agent, out);
            self.lost_decode(now, id, agent, out);
        }
    }

    pub(super) fn tick(&mut self, now: Time, out: &mut Vec<GatewayAction>) {
        self.peers.prune(now, self.options.times.owed);
        let late = self.shutdown.is_some_and(|deadline| deadline <= now);
        let ids: Vec<RequestId> = self.records.keys().copied().collect();
        for id in ids {
            if late {
                self.end(now, id, End::Early(EndedEarly::Cancelled), out);
            } else if !self.shed(now, id, out) && !self.deserted(now, id, out) {
                self.timer(now, id, out);
            }
        }
        self.fill_vacancies(now, out);
    }

    /// Ends a request whose deadline passed before a worker took it (PF-11).
    fn shed(&mut self, now: Time, id: RequestId, out: &mut Vec<GatewayAction>) -> bool {
        let Some(record) = self.records.get(&id) else { return true };
        if !record.fresh || record.stage.class() == Class::Running || record.deadline > now {
            return false;
        }
        let waited = now.since(record.arrived);
        let detail = format!("no worker was free within {} s", waited.0 / 1_000_000_000);
        let why = overloaded(Refusal::Deadline, detail, self.queue_wait);
        self.end(now, id, End::Early(why), out);
        true
    }

    /// Ends a request that has begun and that nobody could go on with for too long.
    fn deserted(&mut self, now: Time, id: RequestId, out: &mut Vec<GatewayAction>) -> bool {
        let Some(record) = self.records.get(&id).filter(|record| !record.fresh) else { return false };
        let (which, who) = match &record.stage {
            Stage::Backoff(_) | Stage::PrefillQueued(_) => (Which::Prefill, "prefill worker"),
            Stage::Parked { .. } => (Which::Decode, "decode rank"),
            _ => return false,
        };
        let limit = self.options.times.resume;
        if self.peers.deserted(which).is_none_or(|since| now.since(since) < limit) {
            return false;
        }
        let detail = format!("request {id}: no {who} has served for {} s", limit.0 / 1_000_000_000);
        self.end(now, id, End::Early(EndedEarly::Failed { detail }), out);
        true
    }

    /// Whatever of this request was due by now.
    fn timer(&mut self, now: Time, id: RequestId, out: &mut Vec<GatewayAction>) {
        let Some(record) = self.records.get(&id) else { return };
        let gap = record.stream.gap_since().is_some_and(|t| now.since(t) >= self.options.times.gap);
        let overdue = match &record.stage {
            Stage::PrefillLoading { worker, until } | Stage::PrefillRunning { worker, until, .. }
                if *until <= now || gap =>
            {
                Some(worker.clone())
            }
            Stage::DecodeLoading { rank, until, .. } | Stage::DecodeRunning { rank, until, .. }
                if *until <= now || gap =>
            {
                Some(rank.agent.clone())
            }
            _ => None,
        };
        if let Some(silent) = overdue {
            return self.fail(now, id, Blow::Failed, Some(&silent), "nothing was heard in time", out);
        }
        match &record.stage {
            Stage::Backoff(until) if *until <= now => {
                self.enter(id, Stage::PrefillQueued(Ask::After(now)));
                self.ask_prefill(now, id, out);
            }
            Stage::PrefillQueued(_) => self.ask_prefill(now, id, out),
            Stage::PrefillRunning { .. } | Stage::Parked { .. } => self.ask_place(now, id, out),
            _ => {}
        }
    }

    /// A leader may be there, or be another one: everything that waits for one asks again where it must.
    pub(super) fn ask_all(&mut self, now: Time, out: &mut Vec<GatewayAction>) {
        let ids: Vec<RequestId> = self.records.keys().copied().collect();
        for id in ids {
            self.ask_prefill(now, id, out);
            self.ask_place(now, id, out);
        }
    }
}
