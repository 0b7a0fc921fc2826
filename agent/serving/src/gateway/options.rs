//! What may be set of a gateway's machine, and why each default is what it is.

use std::collections::BTreeMap;
use std::sync::Arc;

use deepinfer_protocol::Span;

/// Limits of one tenant. Both count requests of one gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TenantLimits {
    /// Most requests in flight (queued at a leader, or running); others are held back at the gateway, in order.
    pub running: usize,
    /// Most requests that wait for a worker, held back or queued; more are refused with 429.
    pub queued: usize,
}

impl TenantLimits {
    /// No limit but the gateway's own.
    pub const NONE: Self = Self { running: usize::MAX, queued: usize::MAX };
}

/// How long the gateway waits for whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatewayTimes {
    /// For a worker's first chunk after it got the tokens, and for a rank's first step. As long as an engine's
    /// step may take before it counts as hung: a slow one is not a lost one.
    pub start: Span,
    /// For the next word of a running request. Longer than the hung-step limit, whose answer is better.
    pub progress: Span,
    /// For the end of a prompt that runs: a million tokens on a slow machine, in which nothing is heard.
    pub prefill: Span,
    /// For a missing token when later ones have come.
    pub gap: Span,
    /// Entries are said to the leader again after this; it answers repeated ones from memory.
    pub repeat: Span,
    /// First wait before the next try; doubles (PD-10).
    pub backoff: Span,
    /// First wait after a refusal for lack of room; doubles up to a second.
    pub refused: Span,
    /// A leader may be silent for this long before the gateway chooses by itself (DR-5). Named leaders are
    /// replaced after 2 s; requests should not wait for that.
    pub vacancy: Span,
    /// How long a request that has begun waits while no worker, or no rank, serves at all: for a supernode that is
    /// rebuilt (E.6). Before its first token the request's own deadline counts.
    pub resume: Span,
    /// How long a cancel is kept for a peer that might not have got it: the lease, after which nothing is held.
    pub owed: Span,
}

/// Options of a [`Gateway`](super::Gateway).
#[derive(Clone, Debug)]
pub struct GatewayOptions {
    /// Of jitter and of choices without a leader; different in each gateway.
    pub seed: u64,
    /// Most requests that wait for a worker (SV-058).
    pub max_waiting: usize,
    /// Most prompt tokens of these (SV-059).
    pub max_waiting_tokens: u64,
    /// Most requests at all, waiting or running: bounds the records' memory.
    pub max_held: usize,
    /// Tries that may fail once work has begun (PD-10).
    pub max_attempts: u32,
    /// Crashes under a running request after which it is not tried again (poison).
    pub max_crashes: u32,
    /// Requests that one worker may have from this gateway while there is no leader.
    pub vacancy_per_worker: usize,
    /// Requests that one rank may have from this gateway while there is no leader.
    pub vacancy_per_rank: usize,
    /// Limits of tenants that `tenants` does not name.
    pub tenant_default: TenantLimits,
    /// Limits by tenant.
    pub tenants: BTreeMap<Arc<str>, TenantLimits>,
    /// Waits.
    pub times: GatewayTimes,
}

impl Default for GatewayTimes {
    fn default() -> Self {
        Self {
            start: Span::secs(60),
            progress: Span::secs(120),
            prefill: Span::secs(1_800),
            gap: Span::secs(5),
            repeat: Span::secs(10),
            backoff: Span::millis(50),
            refused: Span::millis(20),
            vacancy: Span::millis(500),
            resume: Span::secs(600),
            owed: Span::secs(40),
        }
    }
}

impl Default for GatewayOptions {
    fn default() -> Self {
        Self {
            seed: 0,
            max_waiting: 2_048,
            max_waiting_tokens: 8_000_000,
            max_held: 16_384,
            max_attempts: 3,
            max_crashes: 2,
            vacancy_per_worker: 4,
            vacancy_per_rank: 64,
            tenant_default: TenantLimits::NONE,
            tenants: BTreeMap::new(),
            times: GatewayTimes::default(),
        }
    }
}
