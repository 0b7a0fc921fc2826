//! Taking prompts: fences, what can never fit, what does not fit now, and what need not be computed.

use deepinfer_protocol::message::{Failure, PrefillWork, Refusal};
use deepinfer_protocol::{AgentId, Attempt, Time};

use super::PrefillWorker;
use super::sequence::{Sequence, Stage};
use crate::batch::BlockId;
use crate::kv::{BlockKey, PrefixPlan, Start, blocks_for, chain, plan_prefix};
use crate::node::NodeAction;
use crate::node::desk::{Subject, send};
use crate::node::ledger::Standing;

impl PrefillWorker {
    pub(super) fn accept(&mut self, now: Time, from: &AgentId, work: PrefillWork, out: &mut Vec<NodeAction>) {
        self.desk.reporter.heard(work.assignment);
        let subject = Subject { request: work.request, attempt: work.attempt, owner: from.clone() };
        match self.desk.ledger.standing(work.request, work.attempt, work.assignment) {
            Standing::New => {}
            Standing::Taken => return self.repeat(&subject, out),
            Standing::Refused(answer) | Standing::Ended(Some(answer)) => return send(from, answer, out),
            Standing::Ended(None) | Standing::Old => return self.desk.ignore(),
        }
        if self.holds(&subject) {
            return self.repeat(&subject, out);
        }
        if let Some(older) = work.attempt.0.checked_sub(1) {
            self.free_all_of(work.request, Attempt(older), out);
        }
        if !is_whole(&work) {
            return self.desk.fail(&subject, Failure::Internal, out);
        }
        let keys = self.keys(&work);
        let assignment = work.assignment;
        let blocks = self.room_for(&work).and_then(|()| self.blocks_for(&keys, work.tokens.len()));
        match blocks {
            Ok((plan, blocks)) => self.begin(now, subject, work, keys, plan, blocks),
            Err(reason) => self.desk.refuse(&subject, assignment, reason, out),
        }
    }

    /// Whether this attempt is at work or parked here already.
    fn holds(&self, subject: &Subject) -> bool {
        let same = |other: &Subject| other.request == subject.request && other.attempt == subject.attempt;
        self.sequences.get(&subject.request).is_some_and(|s| same(&s.subject))
            || self.leaving.values().any(|l| same(&l.subject))
            || self.desk.parking.get(subject.request).is_some_and(|p| p.attempt == subject.attempt)
    }

    /// Says again what was said last about work that was taken.
    fn repeat(&mut self, subject: &Subject, out: &mut Vec<NodeAction>) {
        let Subject { request, attempt, owner } = subject;
        let parked = self.desk.parking.get(*request).filter(|p| p.attempt == *attempt);
        match (self.sequences.get(request), parked) {
            (Some(sequence), _) if sequence.started => send(owner, sequence.progress(), out),
            (None, Some(parked)) => parked.announced.iter().for_each(|m| send(owner, m.clone(), out)),
            _ => self.desk.ignore(),
        }
    }

    fn room_for(&self, work: &PrefillWork) -> Result<(), Refusal> {
        let length = work.tokens.len();
        if !self.desk.drain.accepts() {
            return Err(Refusal::Draining);
        }
        if length >= self.options.context_limit as usize || blocks_for(length) > self.options.blocks as usize
        {
            return Err(Refusal::TooLarge);
        }
        let parked_full = self.desk.parking.bytes() >= self.options.parked_bytes;
        if !self.engine || self.free_slots.is_empty() || parked_full {
            return Err(Refusal::NoRoom);
        }
        Ok(())
    }

    /// Keys of the full blocks, none if it shares nothing.
    fn keys(&self, work: &PrefillWork) -> Vec<BlockKey> {
        if !work.reuse {
            return Vec::new();
        }
        // There is no adapter yet.
        chain(&self.options.domain.root("", &work.salt), &work.tokens)
    }

    /// Adopted blocks and new ones for the rest, all or none.
    pub(super) fn blocks_for(
        &mut self,
        keys: &[BlockKey],
        length: usize,
    ) -> Result<(PrefixPlan, Vec<BlockId>), Refusal> {
        let replay = self.options.replay_tokens as usize;
        let plan = plan_prefix(&mut self.pool, &mut self.checkpoints, keys, length, replay);
        match self.pool.allocate(blocks_for(length) - plan.adopt.len()) {
            Ok(rest) => {
                let blocks = plan.adopt.iter().copied().chain(rest).collect();
                Ok((plan, blocks))
            }
            Err(_) => {
                self.pool.release_all(&plan.adopt);
                Err(Refusal::NoRoom)
            }
        }
    }

    fn begin(
        &mut self,
        now: Time,
        subject: Subject,
        work: PrefillWork,
        keys: Vec<BlockKey>,
        plan: PrefixPlan,
        blocks: Vec<BlockId>,
    ) {
        self.desk.ledger.take(work.request, work.attempt, work.assignment);
        self.desk.counts.accepted += 1;
        let slot = self.free_slots.pop_first().expect("a free slot was asked for");
        let mut sequence = Sequence {
            subject,
            arrived: now,
            slot,
            blocks,
            keys,
            start: Start::Fresh,
            resume_from: 0,
            next: 0,
            sealed: 0,
            started: false,
            told_last: false,
            stage: Stage::Waiting,
            work,
        };
        sequence.adopt(plan);
        self.sequences.insert(sequence.subject.request, sequence);
    }
}

/// Whether the lengths of the work make sense: a prompt, and more output tokens wanted than there are.
fn is_whole(work: &PrefillWork) -> bool {
    let Ok(length) = u32::try_from(work.tokens.len()) else { return false };
    let Some(emitted) = length.checked_sub(work.prompt_tokens) else { return false };
    work.prompt_tokens > 0 && emitted < work.spec.max_tokens
}
