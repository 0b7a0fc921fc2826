//! The handoff of a sequence: from who has it parked in host memory ([`Parking`]) to the rank that runs it next
//! ([`Fetch`]). Nothing reaches an engine before every piece has matched its checksum, and the holder keeps its
//! copy until the rank says that the sequence is in its engine.
//!
//! ```text
//!  holder (Parking)                                  rank (Fetch)
//!  ----------------                                  ------------
//!  park                                              begin: all pieces, or the first WINDOW of a long sequence
//!   |        <------------- FetchKv(only or all) ----- |
//!   |        -------------- KvPiece ----------------->  | checksum good: keep, ask for one more
//!   |                                                   | checksum bad: ask for it again, once  -> else Lost
//!   |                                                   | nothing for the time-out: ask again, once -> else Lost
//!   |        -------------- KvGone ------------------>  | Lost
//!   |                                                   | connection to the holder lost: ask again when it is back,
//!   |                                                   | Lost if it is not back soon
//!   |                                                  all here: Complete -> import
//!  release <--------------- ReleaseKv ---------------- imported
//! ```
//!
//! What is in flight is bounded by the rank ([`WINDOW`]), so the holder needs no queue. A piece names the attempt
//! and the length of its sequence; a piece of another parking, of another holder, or a second one of its kind is
//! ignored. The holder's copy goes with [`Message::ReleaseKv`], a cancellation, a newer attempt or the loss of the
//! gateway that owns it; it never goes for lack of room, because room was checked before the prompt ran.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use deepinfer_protocol::message::{Message, PieceKind};
use deepinfer_protocol::{AgentId, Attempt, RequestId, Span, Time};

use crate::batch::BLOCK_TOKENS;
use crate::node::{NodeAction, Pieces};

/// Pieces that a rank has asked for and not received, at most. With the real shape 32 x 114 kB and a state of 3 MB
/// are under way, a small part of what a connection may queue.
pub const WINDOW: usize = 32;
/// Times that a rank asks for one piece: a second bad checksum is no accident of the wire.
const MAX_ASKS: u32 = 2;
/// Time-outs in a row after which the holder counts as gone.
const MAX_STALLS: u32 = 2;
/// How long a lost holder may take to come back: many times what a connection takes to be made anew.
const HOLDER_BACK: Span = Span::secs(2);

/// A sequence in host memory.
#[derive(Clone, Debug)]
pub struct Parked {
    /// Under which attempt it was made.
    pub attempt: Attempt,
    /// The gateway of the request.
    pub owner: AgentId,
    /// Since when it is here.
    pub since: Time,
    /// Length of the sequence; all tokens but the last have run.
    pub tokens: u32,
    /// Bytes of all pieces.
    pub bytes: u64,
    /// What its gateway was told when it was parked, to be said again if asked again.
    pub announced: Vec<Message>,
    pieces: Vec<(PieceKind, Arc<[u8]>, u32)>,
}

/// Sequences that wait in host memory for a rank.
#[derive(Clone, Debug, Default)]
pub struct Parking {
    held: BTreeMap<RequestId, Parked>,
    bytes: u64,
}

impl Parking {
    /// Keeps a sequence, in place of what was kept for the request before; gives its bytes.
    pub fn park(
        &mut self,
        now: Time,
        (request, attempt): (RequestId, Attempt),
        owner: AgentId,
        tokens: u32,
        pieces: Pieces,
    ) -> u64 {
        self.forget(request);
        let bytes = pieces.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        let pieces = pieces.into_iter().map(|(kind, bytes)| {
            let crc = crc32c::crc32c(&bytes);
            (kind, bytes, crc)
        });
        self.bytes += bytes;
        let pieces = pieces.collect();
        self.held.insert(
            request,
            Parked { attempt, owner, since: now, tokens, bytes, announced: Vec::new(), pieces },
        );
        bytes
    }

    /// Remembers what the gateway is told about a parked sequence.
    pub fn announce(&mut self, request: RequestId, messages: Vec<Message>) {
        if let Some(parked) = self.held.get_mut(&request) {
            parked.announced = messages;
        }
    }

    /// What is kept for a request.
    pub fn get(&self, request: RequestId) -> Option<&Parked> {
        self.held.get(&request)
    }

    /// Everything that is kept, by request.
    pub fn iter(&self) -> impl Iterator<Item = (RequestId, &Parked)> {
        self.held.iter().map(|(&request, parked)| (request, parked))
    }

    /// Sequences kept.
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Whether nothing is kept.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// Bytes kept.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Answers a [`Message::FetchKv`]: the pieces, or that they are not here.
    pub fn answer(
        &self,
        to: &AgentId,
        request: RequestId,
        attempt: Attempt,
        only: Option<PieceKind>,
        out: &mut Vec<NodeAction>,
    ) {
        let before = out.len();
        let parked = self.held.get(&request).filter(|p| p.attempt == attempt);
        for (kind, bytes, crc) in parked.iter().flat_map(|p| &p.pieces) {
            if only.is_none_or(|only| only == *kind) {
                let parked = parked.expect("it has pieces");
                out.push(NodeAction::Send {
                    to: to.clone(),
                    message: Message::KvPiece {
                        request,
                        attempt,
                        kind: *kind,
                        pieces: parked.pieces.len() as u32,
                        tokens: parked.tokens,
                        crc: *crc,
                    },
                    payload: bytes.clone(),
                });
            }
        }
        if out.len() == before {
            send(to, Message::KvGone { request, attempt }, out);
        }
    }

    /// Frees the copy of this attempt; gives it if there was one.
    pub fn release(&mut self, request: RequestId, attempt: Attempt) -> Option<Parked> {
        self.held.get(&request).filter(|p| p.attempt == attempt)?;
        self.forget(request)
    }

    /// Frees the copy of this attempt or an older one.
    pub fn cancel(&mut self, request: RequestId, attempt: Attempt) -> Option<Parked> {
        self.held.get(&request).filter(|p| p.attempt <= attempt)?;
        self.forget(request)
    }

    fn forget(&mut self, request: RequestId) -> Option<Parked> {
        let parked = self.held.remove(&request)?;
        self.bytes -= parked.bytes;
        Some(parked)
    }
}

/// What came of a message to a [`Fetch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fetched {
    /// Taken; more are to come.
    More,
    /// All pieces are here and verified.
    Complete,
    /// Not for this fetch, or known already.
    Ignored,
    /// Damaged; asked for again.
    Damaged,
    /// It cannot be had from this holder.
    Lost,
}

/// One arriving piece: the fields of a [`Message::KvPiece`] and its payload.
#[derive(Clone, Debug)]
pub struct Piece {
    /// Which part.
    pub kind: PieceKind,
    /// Pieces in all.
    pub pieces: u32,
    /// Length of the sequence.
    pub tokens: u32,
    /// CRC32C of the payload as sent.
    pub crc: u32,
    /// The payload as received.
    pub payload: Arc<[u8]>,
}

/// The pieces of one sequence on their way to a rank.
#[derive(Clone, Debug)]
pub struct Fetch {
    request: RequestId,
    attempt: Attempt,
    holder: AgentId,
    tokens: u32,
    pieces: u32,
    unasked: BTreeSet<PieceKind>,
    asked: BTreeMap<PieceKind, u32>,
    here: BTreeMap<PieceKind, Arc<[u8]>>,
    timeout: Span,
    heard: Time,
    stalls: u32,
    away: Option<Time>,
}

impl Fetch {
    /// Asks for a sequence of `tokens` tokens, all but the last of which have run.
    pub fn begin(
        now: Time,
        (request, attempt): (RequestId, Attempt),
        holder: AgentId,
        tokens: u32,
        timeout: Span,
        out: &mut Vec<NodeAction>,
    ) -> Self {
        let blocks = blocks_of(tokens.saturating_sub(1));
        let kinds = (0..blocks).map(PieceKind::Block).chain([PieceKind::State]);
        let mut fetch = Self {
            request,
            attempt,
            holder,
            tokens,
            pieces: blocks + 1,
            unasked: kinds.collect(),
            asked: BTreeMap::new(),
            here: BTreeMap::new(),
            timeout,
            heard: now,
            stalls: 0,
            away: None,
        };
        if fetch.pieces as usize <= WINDOW {
            fetch.asked = std::mem::take(&mut fetch.unasked).into_iter().map(|kind| (kind, 1)).collect();
            fetch.ask(None, out);
        } else {
            fetch.fill_window(out);
        }
        fetch
    }

    /// Who has it.
    pub fn holder(&self) -> &AgentId {
        &self.holder
    }

    /// A piece came.
    pub fn on_piece(
        &mut self,
        now: Time,
        from: &AgentId,
        piece: Piece,
        out: &mut Vec<NodeAction>,
    ) -> Fetched {
        if *from != self.holder || piece.tokens != self.tokens {
            return Fetched::Ignored;
        }
        if piece.pieces != self.pieces {
            return Fetched::Lost;
        }
        let Some(asks) = self.asked.get_mut(&piece.kind) else { return Fetched::Ignored };
        self.heard = now;
        self.stalls = 0;
        self.away = None;
        if crc32c::crc32c(&piece.payload) != piece.crc {
            if *asks >= MAX_ASKS {
                return Fetched::Lost;
            }
            *asks += 1;
            self.ask(Some(piece.kind), out);
            return Fetched::Damaged;
        }
        self.asked.remove(&piece.kind);
        self.here.insert(piece.kind, piece.payload);
        self.fill_window(out);
        if self.asked.is_empty() { Fetched::Complete } else { Fetched::More }
    }

    /// The holder has nothing.
    pub fn on_gone(&self, from: &AgentId) -> Fetched {
        if *from == self.holder && !self.asked.is_empty() { Fetched::Lost } else { Fetched::Ignored }
    }

    /// The connection to the holder is lost: what was under way will not come.
    pub fn on_holder_lost(&mut self, now: Time) {
        self.away.get_or_insert(now);
    }

    /// The holder is back: asks again for what was under way.
    pub fn on_holder_back(&mut self, now: Time, out: &mut Vec<NodeAction>) {
        if self.away.take().is_some() {
            self.heard = now;
            self.ask_again(out);
        }
    }

    /// Time passes.
    pub fn on_tick(&mut self, now: Time, out: &mut Vec<NodeAction>) -> Fetched {
        if self.asked.is_empty() {
            return Fetched::More;
        }
        if let Some(since) = self.away {
            return if now.since(since) < HOLDER_BACK { Fetched::More } else { Fetched::Lost };
        }
        if now.since(self.heard) < self.timeout {
            return Fetched::More;
        }
        self.heard = now;
        self.stalls += 1;
        if self.stalls >= MAX_STALLS {
            return Fetched::Lost;
        }
        self.ask_again(out);
        Fetched::More
    }

    /// The verified pieces in the order of an export; complete only after [`Fetched::Complete`].
    pub fn into_pieces(self) -> Pieces {
        self.here.into_iter().collect()
    }

    fn ask_again(&self, out: &mut Vec<NodeAction>) {
        self.asked.keys().for_each(|&kind| self.ask(Some(kind), out));
    }

    fn fill_window(&mut self, out: &mut Vec<NodeAction>) {
        while self.asked.len() < WINDOW
            && let Some(kind) = self.unasked.pop_first()
        {
            self.asked.insert(kind, 1);
            self.ask(Some(kind), out);
        }
    }

    fn ask(&self, only: Option<PieceKind>, out: &mut Vec<NodeAction>) {
        let (request, attempt) = (self.request, self.attempt);
        send(&self.holder, Message::FetchKv { request, attempt, only }, out);
    }
}

/// Blocks that `rows` positions take.
pub fn blocks_of(rows: u32) -> u32 {
    rows.div_ceil(BLOCK_TOKENS as u32)
}

fn send(to: &AgentId, message: Message, out: &mut Vec<NodeAction>) {
    out.push(NodeAction::Send { to: to.clone(), message, payload: Arc::from([]) });
}
