//! Taking work: fences, what can never fit, what does not fit now.

use deepinfer_protocol::message::{DecodeWork, Failure, Message, Refusal};
use deepinfer_protocol::{AgentId, Attempt, Time};

use super::DecodeRank;
use super::room::{Need, admits};
use super::sequence::{Sequence, Stage};
use crate::handoff::Fetch;
use crate::kv::blocks_for;
use crate::node::NodeAction;
use crate::node::desk::{Subject, send};
use crate::node::ledger::Standing;

impl DecodeRank {
    pub(super) fn accept(&mut self, now: Time, from: &AgentId, work: DecodeWork, out: &mut Vec<NodeAction>) {
        self.desk.reporter.heard(work.assignment);
        let subject = Subject { request: work.request, attempt: work.attempt, owner: from.clone() };
        match self.desk.ledger.standing(work.request, work.attempt, work.assignment) {
            Standing::New => {}
            Standing::Taken => return self.repeat(&subject, out),
            Standing::Refused(answer) | Standing::Ended(Some(answer)) => return send(from, answer, out),
            Standing::Ended(None) | Standing::Old => return self.desk.ignore(),
        }
        let active = self.sequences.get(&work.request);
        if active.is_some_and(|s| s.subject.attempt == work.attempt) {
            return self.repeat(&subject, out);
        }
        if let Some(older) = work.attempt.0.checked_sub(1) {
            self.free_all_of(work.request, Attempt(older), out);
        }
        if !is_whole(&work) {
            return self.desk.fail(&subject, Failure::Internal, out);
        }
        match self.room_for(&work) {
            Ok(()) => self.begin(now, subject, work, out),
            Err(reason) => self.desk.refuse(&subject, work.assignment, reason, out),
        }
    }

    /// Says again what was said last about work that was taken.
    fn repeat(&mut self, subject: &Subject, out: &mut Vec<NodeAction>) {
        let Subject { request, attempt, owner } = subject;
        let parked = self.desk.parking.get(*request).filter(|p| p.attempt == *attempt);
        match (self.sequences.get(request), parked) {
            (Some(sequence), _) if sequence.running() => {
                send(owner, Message::DecodeRunning { request: *request, attempt: *attempt }, out);
            }
            (None, Some(parked)) => parked.announced.iter().for_each(|m| send(owner, m.clone(), out)),
            _ => self.desk.ignore(),
        }
    }

    fn room_for(&self, work: &DecodeWork) -> Result<(), Refusal> {
        let length = work.tokens.len();
        if work.rank != self.options.rank {
            return Err(Refusal::WrongTarget);
        }
        if !self.desk.drain.accepts() {
            return Err(Refusal::Draining);
        }
        if length >= self.limit() as usize {
            return Err(Refusal::TooLarge);
        }
        let full = self.sequences.len() >= self.most_requests() as usize || self.free_slots.is_empty();
        if !self.engine || full || blocks_for(length) > self.pool.available() {
            return Err(Refusal::NoRoom);
        }
        let limit = self.limit();
        let emitted = length as u32 - work.prompt_tokens;
        let left = (work.spec.max_tokens - emitted).min(limit - length as u32);
        let new = Need { tokens: length as u32, left, preemptions: work.preemptions };
        let held: Vec<Need> = self.sequences.values().map(|s| s.need(limit)).collect();
        if admits(self.options.blocks, self.options.reserve, &held, new) {
            Ok(())
        } else {
            Err(Refusal::NoRoom)
        }
    }

    fn begin(&mut self, now: Time, subject: Subject, work: DecodeWork, out: &mut Vec<NodeAction>) {
        let (Ok(blocks), Some(slot)) =
            (self.pool.allocate(blocks_for(work.tokens.len())), self.free_slots.pop_first())
        else {
            return self.desk.fail(&subject, Failure::Internal, out);
        };
        self.desk.ledger.take(work.request, work.attempt, work.assignment);
        self.desk.counts.accepted += 1;
        let tokens = work.tokens.len() as u32;
        let id = (work.request, work.attempt);
        let fetch = Fetch::begin(now, id, work.holder.clone(), tokens, self.options.load_timeout, out);
        self.next_order += 1;
        let sequence = Sequence {
            subject,
            assignment: work.assignment,
            spec: work.spec,
            tokens: work.tokens,
            prompt_tokens: work.prompt_tokens,
            preemptions: work.preemptions,
            holder: work.holder,
            order: self.next_order,
            slot,
            blocks,
            stage: Stage::Fetching(fetch),
        };
        self.sequences.insert(work.request, sequence);
    }
}

/// Whether the lengths of the work make sense: a prompt, at least one output token, and more of them wanted.
fn is_whole(work: &DecodeWork) -> bool {
    let Ok(length) = u32::try_from(work.tokens.len()) else { return false };
    let emitted = length.saturating_sub(work.prompt_tokens);
    work.prompt_tokens > 0 && emitted > 0 && emitted < work.spec.max_tokens
}
