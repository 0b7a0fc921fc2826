//! The gateway's side of a request: its record, from arrival to one terminal state.
//!
//! The gateway that accepted a request owns its record; only it changes it. Every message that comes back is
//! checked against the record's attempt; tokens reach the client exactly once and in order (PD-11).

mod admission;
mod decode_side;
mod machine;
mod options;
mod peers;
mod prefill_side;
mod request;
mod resume;
mod stats;
mod stream;
mod timers;
mod vacancy;

use std::sync::Arc;

use deepinfer_protocol::fleet::FleetView;
use deepinfer_protocol::generate::{FinishReason, GenerateSpec, Token};
use deepinfer_protocol::message::{Message, Refusal};
use deepinfer_protocol::{AgentId, RequestId, Span, Time};

pub use self::machine::Gateway;
pub use self::options::{GatewayOptions, GatewayTimes, TenantLimits};
pub use self::stats::GatewayStats;
pub use self::stream::{Accepted, Stream};

/// A request that was parsed, tokenized and validated.
#[derive(Clone, Debug, PartialEq)]
pub struct NewRequest {
    /// Chosen by the driver, never seen before.
    pub id: RequestId,
    /// Who asks; limits are per tenant.
    pub tenant: Arc<str>,
    /// Prompt ids, at least one.
    pub prompt: Arc<[u32]>,
    /// How to draw; seed resolved, `max_tokens` clipped to the context limit.
    pub spec: GenerateSpec,
    /// Salt of the tenant's block keys.
    pub salt: [u8; 32],
    /// Blocks may be shared with other requests of the tenant.
    pub reuse: bool,
    /// Longest wait for the first token.
    pub first_token_deadline: Span,
}

/// Something the gateway's machine is told.
#[derive(Clone, Debug, PartialEq)]
pub enum GatewayEvent {
    /// A new request.
    Arrived(NewRequest),
    /// A message from an agent.
    Message {
        /// Who sent it.
        from: AgentId,
        /// What.
        message: Message,
    },
    /// A connection to this agent is open.
    PeerUp(AgentId),
    /// Suspect: missed heartbeats, or the connection closed. No new work; its requests resume elsewhere.
    PeerLost(AgentId),
    /// The client went away: cancel.
    ClientGone(RequestId),
    /// The edge has what it needs (a stop string): stop generating; the request counts as finished.
    Satisfied(RequestId),
    /// A newer view of the fleet. Older ones are ignored.
    Fleet(Arc<FleetView>),
    /// Admit nothing more; what runs is cancelled at the deadline.
    Shutdown {
        /// When.
        deadline: Time,
    },
    /// Time passes: at least every 50 ms.
    Tick,
}

/// Why a request ended without a finish reason of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndedEarly {
    /// Never admitted, or shed from the queue: 429 with Retry-After.
    Overloaded {
        /// Which limit.
        reason: Refusal,
        /// For people: the limit and its value.
        detail: String,
        /// When to try again.
        retry_after: Span,
    },
    /// It can never run here: 400.
    TooLarge {
        /// For people.
        detail: String,
    },
    /// No pool serves: 503 with Retry-After.
    Unavailable {
        /// For people.
        detail: String,
        /// When to try again.
        retry_after: Span,
    },
    /// Retries are used up, or it was running at two crashes (poison): 500 with the id.
    Failed {
        /// For people; no internals of other tenants.
        detail: String,
    },
    /// The client left, or the gateway shut down.
    Cancelled,
}

/// Something the gateway's machine wants done.
#[derive(Clone, Debug, PartialEq)]
pub enum GatewayAction {
    /// Send a message.
    Send {
        /// To whom.
        to: AgentId,
        /// What.
        message: Message,
    },
    /// The first chunk runs; tokens of adopted blocks are known.
    Started {
        /// Whose.
        request: RequestId,
        /// For usage: tokens of the prompt that were not computed again. Said once, from the first attempt.
        cached_tokens: u32,
    },
    /// The next tokens, in order, none repeated.
    Tokens {
        /// Whose.
        request: RequestId,
        /// One or more.
        tokens: Vec<Token>,
        /// Set with the last ones: the terminal state FINISHED.
        finish: Option<FinishReason>,
    },
    /// A terminal state without a finish reason. Exactly one of `finish` or this ends each request; for
    /// [`GatewayEvent::Satisfied`] neither is said.
    Ended {
        /// Whose.
        request: RequestId,
        /// Why.
        why: EndedEarly,
    },
}
