//! Getting sequences in: pieces from their holder, then into the engine.

use deepinfer_protocol::message::{Failure, Message};
use deepinfer_protocol::{AgentId, Attempt, RequestId, Time};

use super::DecodeRank;
use super::sequence::Stage;
use crate::handoff::{Fetch, Fetched, Piece, blocks_of};
use crate::node::desk::send;
use crate::node::{EngineCommand, NodeAction, Pieces, Ticket};

impl DecodeRank {
    pub(super) fn on_piece(
        &mut self,
        now: Time,
        from: &AgentId,
        (request, attempt): (RequestId, Attempt),
        piece: Piece,
        out: &mut Vec<NodeAction>,
    ) {
        let Some(fetch) = self.fetch(request, attempt) else { return self.desk.ignore() };
        let fetched = fetch.on_piece(now, from, piece, out);
        self.on_fetched(request, fetched, out);
    }

    pub(super) fn on_gone(
        &mut self,
        from: &AgentId,
        (request, attempt): (RequestId, Attempt),
        out: &mut Vec<NodeAction>,
    ) {
        let Some(fetch) = self.fetch(request, attempt) else { return self.desk.ignore() };
        let fetched = fetch.on_gone(from);
        self.on_fetched(request, fetched, out);
    }

    /// A peer was lost or is heard of again: what comes from there is waited for, or asked for again.
    pub(super) fn on_holder(&mut self, now: Time, peer: &AgentId, back: bool, out: &mut Vec<NodeAction>) {
        for sequence in self.sequences.values_mut() {
            match &mut sequence.stage {
                Stage::Fetching(fetch) if fetch.holder() == peer && back => fetch.on_holder_back(now, out),
                Stage::Fetching(fetch) if fetch.holder() == peer => fetch.on_holder_lost(now),
                _ => {}
            }
        }
    }

    pub(super) fn on_load_time(&mut self, now: Time, out: &mut Vec<NodeAction>) {
        let mut lost = Vec::new();
        for (request, sequence) in &mut self.sequences {
            if let Stage::Fetching(fetch) = &mut sequence.stage
                && fetch.on_tick(now, out) == Fetched::Lost
            {
                lost.push(*request);
            }
        }
        lost.into_iter().for_each(|request| self.fail(request, Failure::KvLost, out));
    }

    pub(super) fn on_imported(&mut self, ticket: Ticket, fits: bool, out: &mut Vec<NodeAction>) {
        let Some((request, _)) = self.imports.remove(&ticket) else { return self.desk.ignore() };
        let sequence = self.sequences.get_mut(&request).expect("an import belongs to a sequence");
        sequence.stage = Stage::Running;
        if !fits {
            return self.fail(request, Failure::KvLost, out);
        }
        let attempt = sequence.subject.attempt;
        send(&sequence.holder, Message::ReleaseKv { request, attempt }, out);
        send(&sequence.subject.owner, Message::DecodeRunning { request, attempt }, out);
    }

    /// Ends a sequence that cannot go on, with word to its gateway.
    pub(super) fn fail(&mut self, request: RequestId, reason: Failure, out: &mut Vec<NodeAction>) {
        if let Some(sequence) = self.free(request, out) {
            self.desk.fail(&sequence.subject, reason, out);
        }
    }

    /// Puts what has arrived into an engine that is there again.
    pub(super) fn on_engine_ready(&mut self, out: &mut Vec<NodeAction>) {
        self.engine = true;
        let mut waiting = Vec::new();
        for (request, sequence) in &mut self.sequences {
            if let Stage::Fetched(pieces) = &mut sequence.stage {
                waiting.push((*request, std::mem::take(pieces)));
            }
        }
        waiting.into_iter().for_each(|(request, pieces)| self.import(request, pieces, out));
    }

    fn fetch(&mut self, request: RequestId, attempt: Attempt) -> Option<&mut Fetch> {
        let sequence = self.sequences.get_mut(&request).filter(|s| s.subject.attempt == attempt)?;
        match &mut sequence.stage {
            Stage::Fetching(fetch) => Some(fetch),
            _ => None,
        }
    }

    fn on_fetched(&mut self, request: RequestId, fetched: Fetched, out: &mut Vec<NodeAction>) {
        match fetched {
            Fetched::More => {}
            Fetched::Ignored => self.desk.ignore(),
            Fetched::Damaged => self.desk.counts.damaged_pieces += 1,
            Fetched::Lost => self.fail(request, Failure::KvLost, out),
            Fetched::Complete => {
                let sequence = self.sequences.get_mut(&request).expect("its fetch was just asked");
                let stage = std::mem::replace(&mut sequence.stage, Stage::Fetched(Pieces::new()));
                let Stage::Fetching(fetch) = stage else { unreachable!("its fetch was just asked") };
                let pieces = fetch.into_pieces();
                if self.engine {
                    self.import(request, pieces, out);
                } else {
                    sequence.stage = Stage::Fetched(pieces);
                }
            }
        }
    }

    fn import(&mut self, request: RequestId, pieces: Pieces, out: &mut Vec<NodeAction>) {
        let ticket = self.ticket();
        let sequence = self.sequences.get_mut(&request).expect("only what is held is imported");
        sequence.stage = Stage::Importing(ticket);
        self.imports.insert(ticket, (request, sequence.subject.attempt));
        let filled = blocks_of(sequence.length() - 1) as usize;
        let (slot, blocks) = (sequence.slot, sequence.blocks[..filled].to_vec());
        out.push(NodeAction::Engine(EngineCommand::Import { ticket, slot, blocks, pieces }));
    }
}
