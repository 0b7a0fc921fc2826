//! Everything that travels on data ports. Requests carry `(request, attempt)`: a receiver ignores attempts older
//! than the newest it has seen of a request, and answers repeated messages from memory (idempotent).
//!
//! ```text
//! gateway                 prefill leader      worker              decode leader        rank
//!   Enqueue ----------------->|
//!   <---- PrefillAssigned ----|  (when a worker has credits)
//!   Prefill ------------------------------------>|  P_LOADING, P_RUNNING
//!   <------------- PrefillProgress (last chunk)--|
//!   Place ---------------------------------------------------------->|
//!   <------------- Tokens (the first) -----------|
//!   <------------- PrefillDone ------------------|  P_DONE: parked in host memory
//!   <--------------------------------- Placed -----------------------|
//!   Decode ----------------------------------------------------------------------------->|  D_LOADING
//!                                                |<------------------------ FetchKv -----|
//!                                                |------------ KvPiece (one or more) --->|  verified: D_RUNNING
//!                                                |<------------------------ ReleaseKv ---|
//!   <------------------------------------------------------------------------- Tokens ---|
//! ```
//!
//! A preempted sequence is parked by its rank in the same way as by a prefill worker, and placed again.

use serde::{Deserialize, Serialize};

use crate::generate::{GenerateSpec, TokenEvent};
use crate::ids::{AgentId, Attempt, Epoch, Generation, Rank, RankId, RequestId};
use crate::time::Span;

/// What kind of process speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Peer {
    /// Owns requests.
    Gateway,
    /// Runs engines.
    Agent,
}

/// A leader's decision, to be acknowledged in the reports of who received the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Assignment {
    /// Of the leadership.
    pub epoch: Epoch,
    /// Counts within the epoch.
    pub number: u64,
}

/// Why work was turned away. Closed set: a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Refusal {
    /// A queue is full (requests or tokens).
    QueueFull,
    /// It would miss its first-token deadline.
    Deadline,
    /// It waits for no free blocks or slots here.
    NoRoom,
    /// Needs more blocks than there are: never fits.
    TooLarge,
    /// The agent drains.
    Draining,
    /// This agent does not lead, or leads under another epoch.
    NotLeader,
    /// Prefill and decode cannot read each other's KV.
    KvEpoch,
    /// The agent does not run this rank or role.
    WrongTarget,
}

impl Refusal {
    /// Label for metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::QueueFull => "queue_full",
            Self::Deadline => "deadline",
            Self::NoRoom => "no_room",
            Self::TooLarge => "too_large",
            Self::Draining => "draining",
            Self::NotLeader => "not_leader",
            Self::KvEpoch => "kv_epoch",
            Self::WrongTarget => "wrong_target",
        }
    }
}

/// Why work that had begun cannot go on here. The gateway resumes it elsewhere (E.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Failure {
    /// The engine died under a step of this request.
    EngineLost,
    /// The engine hung and was abandoned.
    EngineHung,
    /// KV pieces did not come, or did not match their checksums.
    KvLost,
    /// The gateway was not heard of for the lease.
    LeaseExpired,
    /// The drain's deadline passed.
    DrainDeadline,
    /// A broken promise between our own parts; a bug.
    Internal,
}

impl Failure {
    /// Label for metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::EngineLost => "engine_lost",
            Self::EngineHung => "engine_hung",
            Self::KvLost => "kv_lost",
            Self::LeaseExpired => "lease_expired",
            Self::DrainDeadline => "drain_deadline",
            Self::Internal => "internal",
        }
    }
}

/// What a leader of prefill needs to know of a request; its tokens do not pass through leaders.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrefillEntry {
    /// Whose.
    pub request: RequestId,
    /// Which try.
    pub attempt: Attempt,
    /// Length of the sequence to prefill: prompt and, after a resume, what was emitted.
    pub tokens: u32,
    /// Output tokens that are still wanted at most.
    pub max_tokens: u32,
    /// How long it has waited already (on a resume or after a change of leader).
    pub waited: Span,
    /// First-token deadline from now.
    pub deadline: Span,
    /// Goes to the head of the queue: it was admitted before (E.6).
    pub resumed: bool,
    /// Workers that it must not go to (it failed there).
    pub exclude: Vec<AgentId>,
}

/// Work for a prefill worker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrefillWork {
    /// Whose.
    pub request: RequestId,
    /// Which try.
    pub attempt: Attempt,
    /// The leader's decision.
    pub assignment: Assignment,
    /// How to draw.
    pub spec: GenerateSpec,
    /// The prompt, and after a resume the tokens emitted so far: forced context (PD-12).
    pub tokens: Vec<u32>,
    /// Length of the client's prompt, the beginning of `tokens`.
    pub prompt_tokens: u32,
    /// Salt of the tenant, part of every block key (KV-7).
    pub salt: [u8; 32],
    /// The prompt's blocks may be reused by others of the same salt, and theirs by this one.
    pub reuse: bool,
}

/// Asks a leader of decode for a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlaceEntry {
    /// Whose.
    pub request: RequestId,
    /// Which try.
    pub attempt: Attempt,
    /// Length of the sequence when decode starts.
    pub tokens: u32,
    /// Output tokens that are still wanted at most.
    pub max_tokens: u32,
    /// It ran before and goes to the front.
    pub preempted: bool,
    /// Who can read its KV.
    pub kv_epoch: String,
    /// Agents that it must not go to (it failed or was refused there).
    pub exclude: Vec<AgentId>,
}

/// Work for a rank: a sequence whose KV another agent has parked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DecodeWork {
    /// Whose.
    pub request: RequestId,
    /// Which try.
    pub attempt: Attempt,
    /// The leader's decision.
    pub assignment: Assignment,
    /// The rank at this agent.
    pub rank: Rank,
    /// How to draw.
    pub spec: GenerateSpec,
    /// Prompt and emitted tokens, the last of which the model has not run.
    pub tokens: Vec<u32>,
    /// Length of the client's prompt.
    pub prompt_tokens: u32,
    /// Who has its KV.
    pub holder: AgentId,
    /// Times it gave way so far ([`Message::Preempted`]), at any rank: a rank protects who gave way often (B.2).
    pub preemptions: u32,
}

/// Which part of a parked sequence a [`Message::KvPiece`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum PieceKind {
    /// Compressed entries of the block with this ordinal in the sequence.
    Block(u32),
    /// Window rings, open groups and history.
    State,
}

/// A prefill worker's word to the leader (PF-9): every 20 ms if something changed, else with heartbeats.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PrefillReport {
    /// Of the leadership it follows.
    pub epoch: Epoch,
    /// Estimated time to finish everything it has.
    pub backlog: Span,
    /// Tokens not yet prefilled.
    pub tokens: u64,
    /// Requests not yet prefilled.
    pub requests: u32,
    /// Blocks that are free or can be evicted.
    pub free_blocks: u32,
    /// Blocks in all.
    pub total_blocks: u32,
    /// Free state slots.
    pub free_slots: u32,
    /// Bytes parked for decode, and how many may be.
    pub parked_bytes: u64,
    /// Limit of the above.
    pub parked_limit: u64,
    /// Tokens per second of recent chunks; 0 before the first.
    pub tokens_per_second: u32,
    /// Takes no more work.
    pub draining: bool,
    /// Who can read its KV.
    pub kv_epoch: String,
    /// Assignments seen (taken or refused) since the last report.
    pub seen: Vec<Assignment>,
}

/// A rank's word to the leader of decode (B.1).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct DecodeReport {
    /// Of the leadership it follows.
    pub epoch: Epoch,
    /// The rank.
    pub rank: Rank,
    /// Requests that load or run.
    pub requests: u32,
    /// Sum of their lengths and reserved growth.
    pub tokens: u64,
    /// Free blocks.
    pub free_blocks: u32,
    /// Blocks in all.
    pub total_blocks: u32,
    /// Free state slots.
    pub free_slots: u32,
    /// Most requests at once.
    pub max_requests: u32,
    /// Last step's duration.
    pub step: Span,
    /// Takes no more work.
    pub draining: bool,
    /// Whose KV it can read.
    pub kv_epoch: String,
    /// Assignments seen (taken or refused) since the last report.
    pub seen: Vec<Assignment>,
}

/// Everything that travels. The payload of [`KvPiece`](Message::KvPiece) follows the message in its frame.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Message {
    // ---- connection
    /// First word of who accepts a connection: a number to sign.
    Challenge {
        /// To be signed.
        nonce: [u8; 32],
    },
    /// Answer of who connects.
    Hello {
        /// [`crate::limits::PROTOCOL_VERSION`].
        version: u32,
        /// Who speaks.
        name: AgentId,
        /// As what.
        peer: Peer,
        /// Which process speaks under this name: random, new with each start, and the high half of the ids of all
        /// requests that a gateway makes. What an earlier process owned has no owner any more.
        process: u64,
        /// A number for the other side to sign.
        nonce: [u8; 32],
        /// Generation of the key that signed.
        key: Generation,
        /// HMAC-SHA256(key, "hello" || challenge nonce || process, little-endian || name).
        mac: [u8; 32],
    },
    /// The connection is open.
    Welcome {
        /// Who accepts.
        name: AgentId,
        /// HMAC-SHA256(key, "welcome" || hello nonce || name).
        mac: [u8; 32],
    },
    /// The connection is refused and will be closed.
    Refused {
        /// Why, for the log of the other side.
        reason: String,
    },
    /// Sent every 250 ms in both directions; also renews the leases of what the sender owns.
    Heartbeat,

    // ---- gateway and leader of prefill
    /// Queue this.
    Enqueue(PrefillEntry),
    /// A worker with credits was found.
    PrefillAssigned {
        /// Whose.
        request: RequestId,
        /// Which try.
        attempt: Attempt,
        /// The decision.
        assignment: Assignment,
        /// Where.
        worker: AgentId,
    },

    // ---- gateway and leader of decode
    /// Find a rank.
    Place(PlaceEntry),
    /// A rank with room was found.
    Placed {
        /// Whose.
        request: RequestId,
        /// Which try.
        attempt: Attempt,
        /// The decision.
        assignment: Assignment,
        /// Where.
        rank: RankId,
    },

    /// Either leader: it will not be served; or a worker or rank: not here.
    Refuse {
        /// Whose.
        request: RequestId,
        /// Which try.
        attempt: Attempt,
        /// Why.
        reason: Refusal,
        /// Worth trying again after this.
        retry_after: Span,
    },

    // ---- gateway and worker
    /// Prefill this.
    Prefill(PrefillWork),
    /// It runs: blocks and slot are held.
    PrefillProgress {
        /// Whose.
        request: RequestId,
        /// Which try.
        attempt: Attempt,
        /// Tokens of adopted blocks.
        cached_tokens: u32,
        /// The chunk that ends the prompt has started: time to find a rank (PD-5).
        last_chunk: bool,
    },
    /// The prompt has run and the sequence is parked in host memory (P_DONE). Its first token went ahead in
    /// [`Message::Tokens`]; if that token ended the sequence, nothing is parked and this is not sent.
    PrefillDone {
        /// Whose.
        request: RequestId,
        /// Which try.
        attempt: Attempt,
        /// Bytes parked.
        parked_bytes: u64,
        /// Who can read them.
        kv_epoch: String,
    },

    // ---- gateway and rank
    /// Decode this.
    Decode(DecodeWork),
    /// All pieces were verified: the sequence is in the next step (D_RUNNING).
    DecodeRunning {
        /// Whose.
        request: RequestId,
        /// Which try.
        attempt: Attempt,
    },
    /// Tokens of one step.
    Tokens(Vec<TokenEvent>),
    /// The sequence gave way (B.2) and is parked at the sender: place it again.
    Preempted {
        /// Whose.
        request: RequestId,
        /// Which try.
        attempt: Attempt,
        /// Length: every token up to here was sent, and all but the last have run.
        tokens: u32,
        /// Bytes parked.
        parked_bytes: u64,
    },

    /// Work that had begun here cannot go on.
    Failed {
        /// Whose.
        request: RequestId,
        /// Which try.
        attempt: Attempt,
        /// Why.
        reason: Failure,
    },

    // ---- from the gateway to whoever holds something
    /// Stop and free everything; accepted in any state, wins against everything but the end (PD-9).
    Cancel {
        /// Whose.
        request: RequestId,
        /// This attempt and older ones.
        attempt: Attempt,
    },

    // ---- rank and holder
    /// Send the parked sequence.
    FetchKv {
        /// Whose.
        request: RequestId,
        /// Which try.
        attempt: Attempt,
        /// One piece again, or all.
        only: Option<PieceKind>,
    },
    /// A piece; its bytes are the frame's payload.
    KvPiece {
        /// Whose.
        request: RequestId,
        /// Which try.
        attempt: Attempt,
        /// Which part.
        kind: PieceKind,
        /// Pieces in all.
        pieces: u32,
        /// Length of the sequence: with the attempt it names one parking, so that a late piece of an earlier
        /// one is not taken for this.
        tokens: u32,
        /// CRC32C of the payload.
        crc: u32,
    },
    /// Nothing is parked under this id (any more).
    KvGone {
        /// Whose.
        request: RequestId,
        /// Which try.
        attempt: Attempt,
    },
    /// The pieces were verified: the holder frees its copy.
    ReleaseKv {
        /// Whose.
        request: RequestId,
        /// Which try.
        attempt: Attempt,
    },

    // ---- worker or rank and leader
    /// A worker's state.
    PrefillReport(PrefillReport),
    /// A rank's state.
    DecodeReport(DecodeReport),
}

impl Message {
    /// The request it is about, and the attempt.
    pub fn subject(&self) -> Option<(RequestId, Attempt)> {
        match self {
            Self::Challenge { .. }
            | Self::Hello { .. }
            | Self::Welcome { .. }
            | Self::Refused { .. }
            | Self::Heartbeat
            | Self::Tokens(_)
            | Self::PrefillReport(_)
            | Self::DecodeReport(_) => None,
            Self::Enqueue(e) => Some((e.request, e.attempt)),
            Self::Place(e) => Some((e.request, e.attempt)),
            Self::Prefill(w) => Some((w.request, w.attempt)),
            Self::Decode(w) => Some((w.request, w.attempt)),
            Self::PrefillAssigned { request, attempt, .. }
            | Self::Placed { request, attempt, .. }
            | Self::Refuse { request, attempt, .. }
            | Self::PrefillProgress { request, attempt, .. }
            | Self::PrefillDone { request, attempt, .. }
            | Self::DecodeRunning { request, attempt }
            | Self::Preempted { request, attempt, .. }
            | Self::Failed { request, attempt, .. }
            | Self::Cancel { request, attempt }
            | Self::FetchKv { request, attempt, .. }
            | Self::KvPiece { request, attempt, .. }
            | Self::KvGone { request, attempt }
            | Self::ReleaseKv { request, attempt } => Some((*request, *attempt)),
        }
    }
}
