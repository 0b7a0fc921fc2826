//! The record of one request, and its states (serving.md E.1).
//!
//! ```text
//!            Held ──► PrefillQueued ──► PrefillLoading ──► PrefillRunning ──► Parked ──► DecodeLoading ──► DecodeRunning
//!  (tenant's limit)    ▲   ▲  │refused       │ refused          │ failed        ▲  ▲ refused   │                │   │
//!                      │   └──┴──────────────┘                  ▼               │  └───────────┘                │   │
//!                      └────────────────── Backoff ◄────────────┴─ attempt + 1 ─┼───────────── failed ──────────┘   │
//!                                                                               └───────────── preempted ───────────┘
//! ```
//!
//! Every state may end: FINISHED, CANCELLED, FAILED, SHED (in the states that wait for a worker) or REJECTED
//! (before the first). Invariant: `touched` names every agent that may hold something of any attempt.

use std::collections::BTreeSet;
use std::sync::Arc;

use deepinfer_protocol::generate::GenerateSpec;
use deepinfer_protocol::message::{Assignment, PlaceEntry, PrefillEntry};
use deepinfer_protocol::{AgentId, Attempt, Epoch, RankId, RequestId, Time};

use super::NewRequest;
use super::stream::Stream;

/// A question to a leader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// To be asked as soon as there is whom to ask, but not before this.
    After(Time),
    /// Asked.
    Asked { leader: AgentId, epoch: Epoch, repeat: Time },
}

/// Where a rank for it is looked for, from the last chunk of its prompt on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Not yet: the prompt's end is not near.
    No,
    /// A leader is, or will be, asked.
    Ask(Ask),
    /// Found; used as soon as the sequence is parked.
    Found { rank: RankId, assignment: Assignment },
}

/// Where a request stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// Its tenant has as much in flight as it may.
    Held,
    /// After a failure: the next try begins then.
    Backoff(Time),
    /// P_QUEUED.
    PrefillQueued(Ask),
    /// P_LOADING: the worker has the tokens.
    PrefillLoading { worker: AgentId, until: Time },
    /// P_RUNNING.
    PrefillRunning { worker: AgentId, until: Time, place: Place },
    /// P_DONE and D_QUEUED: its state lies with the holder, `place` says how far the rank is.
    Parked { holder: AgentId, kv_epoch: String, preempted: bool, place: Place },
    /// D_LOADING.
    DecodeLoading { rank: RankId, holder: AgentId, kv_epoch: String, until: Time },
    /// D_RUNNING.
    DecodeRunning { rank: RankId, kv_epoch: String, until: Time },
}

/// What a stage counts as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// Not in flight: held back by its tenant's limit.
    Held,
    /// Waits for a worker.
    Waiting,
    /// A worker or a rank has it, or had it and the next will.
    Running,
}

impl Stage {
    pub(super) fn class(&self) -> Class {
        match self {
            Self::Held => Class::Held,
            Self::PrefillQueued(_) | Self::Backoff(_) => Class::Waiting,
            _ => Class::Running,
        }
    }

    /// Label for metrics.
    pub(super) fn as_str(&self) -> &'static str {
        match self {
            Self::Held => "held",
            Self::Backoff(_) => "backoff",
            Self::PrefillQueued(_) => "prefill_queued",
            Self::PrefillLoading { .. } => "prefill_loading",
            Self::PrefillRunning { .. } => "prefill_running",
            Self::Parked { .. } => "decode_queued",
            Self::DecodeLoading { .. } => "decode_loading",
            Self::DecodeRunning { .. } => "decode_running",
        }
    }

    /// The worker that has the prompt now.
    pub(super) fn worker(&self) -> Option<&AgentId> {
        match self {
            Self::PrefillLoading { worker, .. } | Self::PrefillRunning { worker, .. } => Some(worker),
            _ => None,
        }
    }

    /// The rank that has the sequence now.
    pub(super) fn rank(&self) -> Option<&RankId> {
        match self {
            Self::DecodeLoading { rank, .. } | Self::DecodeRunning { rank, .. } => Some(rank),
            _ => None,
        }
    }

    /// The search for a rank, if one goes on.
    pub(super) fn place_mut(&mut self) -> Option<&mut Place> {
        match self {
            Self::PrefillRunning { place, .. } | Self::Parked { place, .. } => Some(place),
            _ => None,
        }
    }
}

/// The record.
#[derive(Clone, Debug)]
pub(super) struct Record {
    pub id: RequestId,
    pub tenant: Arc<str>,
    pub prompt: Arc<[u32]>,
    pub spec: GenerateSpec,
    pub salt: [u8; 32],
    pub reuse: bool,
    pub arrived: Time,
    /// Of the first token, while no worker has it.
    pub deadline: Time,
    pub attempt: Attempt,
    pub stage: Stage,
    pub stream: Stream,
    /// Tokens that were forwarded when this attempt began.
    pub base: u32,
    /// No worker has taken it yet: limits and deadlines of the queue apply.
    pub fresh: bool,
    /// The client was told how much of its prompt was cached.
    pub started: bool,
    /// Agents where it failed.
    pub excluded: Vec<AgentId>,
    /// An agent that refused it just now.
    pub avoid: Option<AgentId>,
    /// Agents that may hold something of it.
    pub touched: BTreeSet<AgentId>,
    /// Agents that were told to drop the current attempt: it must not come back to them.
    pub dropped: BTreeSet<AgentId>,
    /// Newest decisions that were followed; older ones are late repeats.
    pub last_prefill: Option<Assignment>,
    pub last_place: Option<Assignment>,
    /// Tries that failed after work had begun, crashes among them, and refusals in a row.
    pub failures: u32,
    pub crashes: u32,
    pub refusals: u32,
    /// Agents that were lost while they ran an attempt: crashed, for all that is known.
    pub suspects: Vec<(AgentId, Attempt)>,
    /// Times it gave way to others at a rank.
    pub preemptions: u32,
}

impl Record {
    pub(super) fn new(now: Time, new: NewRequest) -> Self {
        Self {
            id: new.id,
            tenant: new.tenant,
            prompt: new.prompt,
            spec: new.spec,
            salt: new.salt,
            reuse: new.reuse,
            arrived: now,
            deadline: now + new.first_token_deadline,
            attempt: Attempt(0),
            stage: Stage::Held,
            stream: Stream::default(),
            base: 0,
            fresh: true,
            started: false,
            excluded: Vec::new(),
            avoid: None,
            touched: BTreeSet::new(),
            dropped: BTreeSet::new(),
            last_prefill: None,
            last_place: None,
            failures: 0,
            crashes: 0,
            refusals: 0,
            suspects: Vec::new(),
            preemptions: 0,
        }
    }

    /// Prompt and forwarded tokens: what an engine is given (PD-12).
    pub(super) fn context(&self) -> Vec<u32> {
        let sent = self.stream.sent();
        let mut tokens = Vec::with_capacity(self.prompt.len() + sent.len());
        tokens.extend_from_slice(&self.prompt);
        tokens.extend_from_slice(sent);
        tokens
    }

    /// Length of the above.
    pub(super) fn length(&self) -> u32 {
        self.prompt_tokens().saturating_add(self.stream.next_index())
    }

    pub(super) fn prompt_tokens(&self) -> u32 {
        u32::try_from(self.prompt.len()).unwrap_or(u32::MAX)
    }

    /// A decision of the gateway itself, in the numbers of no leader: epoch 0 is never led.
    pub(super) fn own_assignment(&self, number: u64) -> Assignment {
        Assignment { epoch: Epoch(0), number }
    }

    /// An agent that was taken for crashed still speaks of the attempt it ran: it was only out of reach, and that
    /// is no fault of the request.
    pub(super) fn acquit(&mut self, agent: &AgentId, attempt: Attempt) {
        if let Some(at) = self.suspects.iter().position(|(a, t)| a == agent && *t == attempt) {
            self.suspects.remove(at);
            self.crashes = self.crashes.saturating_sub(1);
            self.failures = self.failures.saturating_sub(1);
        }
    }

    /// The agent was lost while it ran the current attempt.
    pub(super) fn suspect(&mut self, agent: &AgentId) {
        self.suspects.push((agent.clone(), self.attempt));
    }

    fn exclude(&self) -> Vec<AgentId> {
        self.excluded.iter().chain(&self.avoid).cloned().collect()
    }

    /// Its line in the queue of prompts.
    pub(super) fn prefill_entry(&self, now: Time) -> PrefillEntry {
        PrefillEntry {
            request: self.id,
            attempt: self.attempt,
            tokens: self.length(),
            max_tokens: self.spec.max_tokens.saturating_sub(self.stream.next_index()),
            waited: now.since(self.arrived),
            deadline: self.deadline.since(now),
            resumed: !self.fresh,
            exclude: self.exclude(),
        }
    }

    /// Its line in the queue of sequences. Before the first token was heard its place is counted already.
    pub(super) fn place_entry(&self, kv_epoch: &str, preempted: bool, parked: bool) -> PlaceEntry {
        let coming = u32::from(!parked);
        PlaceEntry {
            request: self.id,
            attempt: self.attempt,
            tokens: self.length().saturating_add(coming),
            max_tokens: self.spec.max_tokens.saturating_sub(self.stream.next_index() + coming),
            preempted,
            kv_epoch: kv_epoch.to_owned(),
            exclude: self.exclude(),
        }
    }
}
