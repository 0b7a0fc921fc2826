//! What an engine does with the work that it was assigned: machines of a prefill worker and of a decode rank.
//!
//! A driver feeds [`NodeEvent`]s and carries out [`NodeAction`]s. When the engine is idle it asks the machine for
//! the next step (`poll_step`); a supernode's driver asks all its ranks and steps them together.

pub mod decode;
mod desk;
pub mod drain;
mod ending;
pub mod engine_port;
mod leases;
mod ledger;
pub mod prefill;
mod report;

use std::sync::Arc;

use deepinfer_protocol::fleet::Leader;
use deepinfer_protocol::message::Message;
use deepinfer_protocol::{AgentId, Time};

pub use self::decode::{DecodeRank, RankOptions};
pub use self::desk::{NodeCounts, NodeStatus};
pub use self::drain::DrainTotals;
pub use self::engine_port::{EngineCommand, EngineEvent, Pieces, Sample, StepResult, StepWork, Ticket};
pub use self::prefill::{PrefillWorker, WorkerOptions};
pub use self::report::{REPORT_AFTER, REPORT_LATEST};

/// Something a node's machine is told.
#[derive(Clone, Debug, PartialEq)]
pub enum NodeEvent {
    /// A message that is for this machine.
    Message {
        /// Who sent it.
        from: AgentId,
        /// What.
        message: Message,
        /// Payload of a [`Message::KvPiece`], else empty.
        payload: Arc<[u8]>,
    },
    /// A connection closed, or its peer is silent: what it owns here is freed after the lease, unless it is heard
    /// of before ([`NodeEvent::PeerUp`] or any message).
    PeerLost(AgentId),
    /// A peer is heard of again.
    PeerUp {
        /// Who.
        peer: AgentId,
        /// The process behind the name, where that is known: what a gateway's process before this one owned here
        /// has no owner any more and is freed at once.
        process: Option<u64>,
    },
    /// The engine speaks.
    Engine(EngineEvent),
    /// Take no new work; what runs is cut at the deadline.
    Drain {
        /// When.
        deadline: Time,
    },
    /// Take work again, while something still runs.
    Undrain,
    /// Who to report to.
    Leader(Option<Leader>),
    /// Time passes: at least every 20 ms while there is something to do.
    Tick,
}

/// Something a node's machine wants done.
#[derive(Clone, Debug, PartialEq)]
pub enum NodeAction {
    /// Send a message. To an unknown or unconnected peer: dropped, leases and retries cover it.
    Send {
        /// To whom.
        to: AgentId,
        /// What.
        message: Message,
        /// Payload of a [`Message::KvPiece`], else empty.
        payload: Arc<[u8]>,
    },
    /// Have the engine do something.
    Engine(EngineCommand),
}
