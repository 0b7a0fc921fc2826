//! Steps: one row of every running sequence; and giving way when blocks run out.

use deepinfer_protocol::generate::{Token, TokenEvent};
use deepinfer_protocol::message::{Failure, Message, Refusal};
use deepinfer_protocol::{AgentId, RequestId, Time};

use super::DecodeRank;
use super::sequence::{Leaving, Sequence, Stage};
use crate::batch::{Running, SequenceStep, choose_victim};
use crate::handoff::blocks_of;
use crate::kv::blocks_for;
use crate::node::desk::{Subject, send, send_tokens};
use crate::node::{EngineCommand, NodeAction, Pieces, StepResult, StepWork, Ticket, ending};

impl DecodeRank {
    /// The next step, if something runs and no step is under way. Asked when the engine, or every rank of the
    /// supernode, is idle; actions given before are carried out first.
    pub fn poll_step(&mut self, _now: Time, _out: &mut Vec<NodeAction>) -> Option<StepWork> {
        if !self.engine || self.stepping.is_some() {
            return None;
        }
        let mut work = StepWork::default();
        let mut stepping = Vec::new();
        let running = self.sequences.values().filter(|s| s.running());
        for sequence in running.take(self.options.max_rows as usize) {
            let length = sequence.length();
            let last = *sequence.tokens.last().expect("a sequence has a prompt");
            work.batch.sequences.push(SequenceStep::text(
                sequence.slot,
                length as usize - 1,
                vec![last],
                sequence.blocks.clone(),
            ));
            let emitted = length - sequence.prompt_tokens;
            work.samples.push(Some(ending::sample(&sequence.spec, length, emitted)));
            stepping.push((sequence.subject.request, sequence.subject.attempt));
        }
        if stepping.is_empty() {
            return None;
        }
        self.stepping = Some(stepping);
        Some(work)
    }

    pub(super) fn on_step_done(&mut self, result: StepResult, out: &mut Vec<NodeAction>) {
        self.last_step = result.elapsed;
        let Some(stepped) = self.stepping.take() else { return };
        self.desk.counts.steps += 1;
        self.desk.counts.rows += stepped.len() as u64;
        let mut events = Vec::with_capacity(stepped.len());
        let mut tokens = result.tokens.into_iter();
        for (request, attempt) in stepped {
            let token = tokens.next().flatten();
            let Some(sequence) = self.sequences.get_mut(&request) else { continue };
            if sequence.subject.attempt != attempt || !sequence.running() {
                continue;
            }
            match token {
                Some(token) => events.push(self.on_token(request, token, out)),
                None => self.fail(request, Failure::Internal, out),
            }
        }
        self.desk.counts.generated_tokens += events.len() as u64;
        send_tokens(events, out);
        self.grow(out);
    }

    /// Adds a drawn token; the sequence is freed if it ends there.
    fn on_token(
        &mut self,
        request: RequestId,
        token: Token,
        out: &mut Vec<NodeAction>,
    ) -> (AgentId, TokenEvent) {
        let limit = self.limit();
        let sequence = self.sequences.get_mut(&request).expect("it was just found");
        let index = sequence.length() - sequence.prompt_tokens;
        sequence.tokens.push(token.id);
        let finish = ending::finish(&sequence.spec, token.id, sequence.length(), index + 1, limit);
        let Subject { attempt, owner, .. } = sequence.subject.clone();
        let event = TokenEvent { request, attempt, index, tokens: vec![token], finish };
        if finish.is_some() {
            self.free(request, out);
            self.desk.finish(&event);
        }
        (owner, event)
    }

    /// Sees to it that every running sequence has the block of its next row, the oldest first.
    fn grow(&mut self, out: &mut Vec<NodeAction>) {
        let short = |s: &&Sequence| s.running() && s.blocks.len() < blocks_for(s.tokens.len());
        let mut wanting: Vec<(u64, RequestId)> =
            self.sequences.values().filter(short).map(|s| (s.order, s.subject.request)).collect();
        wanting.sort_unstable();
        for (_, request) in wanting {
            // Each round frees at least one block or ends the sequence that wants one.
            while self.sequences.contains_key(&request) {
                if let Ok(block) = self.pool.allocate(1) {
                    let sequence = self.sequences.get_mut(&request).expect("it was just found");
                    sequence.blocks.extend(block);
                    break;
                }
                if !self.make_room(out) {
                    // All protected sequences fit to their end (`room::admits`), so this is a bug of ours.
                    self.fail(request, Failure::Internal, out);
                }
            }
        }
    }

    /// Lets one sequence give way; `false` if there is none that may.
    fn make_room(&mut self, out: &mut Vec<NodeAction>) -> bool {
        if let Some(victim) = self.victim() {
            self.preempt(victim, out);
            return true;
        }
        let limit = self.limit();
        let loading = self.sequences.values().filter(|s| !s.running() && !s.need(limit).protected());
        let newest = loading.max_by_key(|s| s.order).map(|s| s.subject.request);
        let Some(sequence) = newest.and_then(|request| self.free(request, out)) else { return false };
        // Its holder keeps the copy until it hears of the import, so it can be placed elsewhere.
        self.desk.refuse(&sequence.subject, sequence.assignment, Refusal::NoRoom, out);
        true
    }

    fn victim(&self) -> Option<RequestId> {
        let limit = self.limit();
        let running: Vec<&Sequence> = self.sequences.values().filter(|s| s.running()).collect();
        let candidates: Vec<Running> = running.iter().map(|s| s.need(limit).candidate(s.order)).collect();
        choose_victim(&candidates).map(|chosen| running[chosen].subject.request)
    }

    /// Copies a sequence out and frees its blocks and slot: they are read before anything that comes later.
    fn preempt(&mut self, request: RequestId, out: &mut Vec<NodeAction>) {
        let ticket = self.ticket();
        let sequence = self.sequences.get(&request).expect("the victim runs here");
        let tokens = sequence.length();
        let filled = blocks_of(tokens - 1) as usize;
        let (slot, blocks) = (sequence.slot, sequence.blocks[..filled].to_vec());
        out.push(NodeAction::Engine(EngineCommand::Export { ticket, slot, blocks }));
        let subject = sequence.subject.clone();
        self.free(request, out);
        self.desk.counts.preempted += 1;
        self.leaving.insert(ticket, Leaving { subject, tokens });
    }

    pub(super) fn on_exported(
        &mut self,
        now: Time,
        ticket: Ticket,
        pieces: Pieces,
        out: &mut Vec<NodeAction>,
    ) {
        let Some(Leaving { subject, tokens }) = self.leaving.remove(&ticket) else {
            return self.desk.ignore();
        };
        let Subject { request, attempt, owner } = subject;
        let parked_bytes = self.desk.parking.park(now, (request, attempt), owner.clone(), tokens, pieces);
        let message = Message::Preempted { request, attempt, tokens, parked_bytes };
        self.desk.parking.announce(request, vec![message.clone()]);
        self.desk.counts.handed_over += 1;
        send(&owner, message, out);
    }

    /// The engine is gone: what was in it or on its way in or out cannot go on. What is still being fetched can.
    pub(super) fn on_engine_lost(&mut self, failure: Failure, out: &mut Vec<NodeAction>) {
        self.engine = false;
        self.stepping = None;
        self.desk.counts.lost_engines += 1;
        let inside = |s: &&Sequence| matches!(s.stage, Stage::Importing(_) | Stage::Running);
        let lost: Vec<RequestId> =
            self.sequences.values().filter(inside).map(|s| s.subject.request).collect();
        lost.into_iter().for_each(|request| self.fail(request, failure, out));
        for Leaving { subject, .. } in std::mem::take(&mut self.leaving).into_values() {
            self.desk.fail(&subject, failure, out);
        }
    }
}
