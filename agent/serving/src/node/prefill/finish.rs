//! The end of a prompt: its first token, and the way into host memory; and what comes back from the engine.

use std::sync::Arc;

use deepinfer_protocol::generate::{Token, TokenEvent};
use deepinfer_protocol::message::{Failure, Message};
use deepinfer_protocol::{AgentId, RequestId, Time};

use super::PrefillWorker;
use super::sequence::{Leaving, Stage};
use crate::kv::Start;
use crate::node::desk::{Subject, send};
use crate::node::{EngineCommand, NodeAction, Pieces, Ticket, ending};

impl PrefillWorker {
    /// Takes the first token and sends the sequence out, unless the token ends it.
    pub(super) fn end_prompt(
        &mut self,
        request: RequestId,
        token: Option<Token>,
        out: &mut Vec<NodeAction>,
    ) -> Option<(AgentId, TokenEvent)> {
        let Some(token) = token else {
            self.fail(request, Failure::Internal, out);
            return None;
        };
        let sequence = self.sequences.get(&request).expect("its last chunk has just run");
        let length = sequence.length() as u32 + 1;
        let index = length - 1 - sequence.work.prompt_tokens;
        let limit = self.options.context_limit;
        let finish = ending::finish(&sequence.work.spec, token.id, length, index + 1, limit);
        let subject = sequence.subject.clone();
        let (slot, blocks) = (sequence.slot, sequence.blocks.clone());
        let event = TokenEvent { request, attempt: subject.attempt, index, tokens: vec![token], finish };
        self.desk.counts.generated_tokens += 1;
        if finish.is_some() {
            self.desk.finish(&event);
        } else {
            let ticket = self.ticket();
            out.push(NodeAction::Engine(EngineCommand::Export { ticket, slot, blocks }));
            let leaving = Leaving { subject: subject.clone(), tokens: length, first: event.clone() };
            self.leaving.insert(ticket, leaving);
        }
        self.free(request, out);
        Some((subject.owner, event))
    }

    pub(super) fn on_exported(
        &mut self,
        now: Time,
        ticket: Ticket,
        pieces: Pieces,
        out: &mut Vec<NodeAction>,
    ) {
        let Some(Leaving { subject, tokens, first }) = self.leaving.remove(&ticket) else {
            return self.desk.ignore();
        };
        let Subject { request, attempt, owner } = subject;
        let parked_bytes = self.desk.parking.park(now, (request, attempt), owner.clone(), tokens, pieces);
        let kv_epoch = self.options.kv_epoch.clone();
        let done = Message::PrefillDone { request, attempt, parked_bytes, kv_epoch };
        self.desk.parking.announce(request, vec![Message::Tokens(vec![first]), done.clone()]);
        self.desk.counts.handed_over += 1;
        send(&owner, done, out);
    }

    pub(super) fn on_checkpointed(&mut self, ticket: Ticket, state: Option<Arc<[u8]>>) {
        if let (Some(key), Some(state)) = (self.cutting.remove(&ticket), state) {
            self.checkpoints.insert(key, state);
        }
    }

    pub(super) fn on_restored(&mut self, ticket: Ticket, fits: bool, out: &mut Vec<NodeAction>) {
        let Some(request) = self.restores.remove(&ticket) else { return self.desk.ignore() };
        let sequence = self.sequences.get_mut(&request).expect("a restore belongs to a sequence");
        if fits {
            sequence.stage = Stage::Running;
            return;
        }
        // A checkpoint that cannot be read is a miss (KV-4): without it there is another way.
        if let Start::Checkpoint { key, .. } = sequence.start {
            self.checkpoints.remove(&key);
        }
        let held = std::mem::take(&mut sequence.blocks);
        let (keys, length) = (sequence.keys.clone(), sequence.length());
        self.pool.release_all(&held);
        match self.blocks_for(&keys, length) {
            Ok((plan, blocks)) => {
                let sequence = self.sequences.get_mut(&request).expect("it was just found");
                sequence.blocks = blocks;
                sequence.stage = Stage::Waiting;
                sequence.adopt(plan);
            }
            Err(reason) => {
                // Nothing was said about it yet, so it can be assigned again.
                if let Some(sequence) = self.free(request, out) {
                    self.desk.refuse(&sequence.subject, sequence.work.assignment, reason, out);
                }
            }
        }
    }

    /// The engine is gone, and with it everything that was in it, the contents of cached blocks too. Parked
    /// sequences are in host memory and stay.
    pub(super) fn on_engine_lost(&mut self, failure: Failure, out: &mut Vec<NodeAction>) {
        self.engine = false;
        self.stepping = None;
        self.restores.clear();
        self.cutting.clear();
        self.desk.counts.lost_engines += 1;
        let lost: Vec<RequestId> = self.sequences.keys().copied().collect();
        lost.into_iter().for_each(|request| self.fail(request, failure, out));
        for Leaving { subject, .. } in std::mem::take(&mut self.leaving).into_values() {
            self.desk.fail(&subject, failure, out);
        }
        self.pool.reset();
        self.checkpoints.clear();
    }

    /// Ends a sequence that cannot go on, with word to its gateway.
    fn fail(&mut self, request: RequestId, reason: Failure, out: &mut Vec<NodeAction>) {
        if let Some(sequence) = self.free(request, out) {
            self.desk.fail(&sequence.subject, reason, out);
        }
    }
}
