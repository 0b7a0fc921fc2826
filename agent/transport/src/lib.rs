//! Connections of the data ports: handshake with the cluster's key, frames, heartbeats, bounded queues.
//!
//! A driver holds a [`Transport`], names its peers ([`Transport::set_peers`]), sends ([`Transport::send`]) and
//! reads [`PeerEvent`]s. Everything else happens in tasks of this crate: `transport.rs` dials and accepts,
//! `handshake.rs` opens a connection, `link.rs` reads and writes it, `queue.rs` bounds what waits.
//! [`control_auth`] signs calls to control ports with the same [`ClusterKey`], [`call`] makes them.
//!
//! Around that, what agents and gateways need as processes of a cluster: [`key_dir`] reads and follows the keys,
//! [`fleet_client`] follows the FleetView, [`pod`] has their common flags, logs and signals.

pub mod call;
pub mod control_auth;
pub mod fleet_client;
mod handshake;
mod key;
pub mod key_dir;
mod link;
pub mod pod;
mod queue;
mod transport;

use std::sync::Arc;
use std::time::Duration;

use deepinfer_protocol::message::{Message, Peer};
use deepinfer_protocol::{AgentId, Span};

pub use self::key::{ClusterKey, GenerationKey};
pub use self::queue::{MAX_QUEUED_BYTES, MAX_QUEUED_FRAMES};
pub use self::transport::Transport;

/// How a process takes part.
#[derive(Clone, Debug)]
pub struct TransportOptions {
    /// Own name.
    pub name: AgentId,
    /// Own kind.
    pub peer: Peer,
    /// Which process this is: no other that had or gets the name has the same number.
    pub process: u64,
    /// The cluster's keys.
    pub key: ClusterKey,
    /// Interval of heartbeats, 250 ms.
    pub heartbeat: Span,
    /// Missed heartbeats after which a peer is suspect, 3.
    pub missed: u32,
}

impl TransportOptions {
    /// With the default heartbeats: every 250 ms, suspect after 3 missed; the process has a random number.
    ///
    /// # Panics
    /// If the operating system gives no random bytes.
    pub fn new(name: AgentId, peer: Peer, key: ClusterKey) -> Self {
        let process = getrandom::u64().expect("the operating system has random bytes");
        Self { name, peer, process, key, heartbeat: Span::millis(250), missed: 3 }
    }
}

/// What a transport tells its driver.
#[derive(Clone, Debug)]
pub enum PeerEvent {
    /// A connection is open (again).
    Up {
        /// Who.
        peer: AgentId,
        /// As what.
        kind: Peer,
        /// The process behind the name, where the peer opened the connection: another one than before has nothing
        /// to do with what that one left.
        process: Option<u64>,
    },
    /// The connection closed, or the peer is suspect: too many heartbeats were missed. It may come up again.
    Down {
        /// Who.
        peer: AgentId,
    },
    /// A message; heartbeats are not passed on.
    Frame {
        /// Who sent it.
        from: AgentId,
        /// What.
        message: Message,
        /// Raw bytes of a KV piece, else empty.
        payload: Arc<[u8]>,
    },
}

/// Between half and all of the pause, so that many peers of one that died do not come back together.
fn jittered(pause: Duration) -> Duration {
    let mut byte = [0; 1];
    let random = if getrandom::fill(&mut byte).is_ok() { u32::from(byte[0]) } else { 0 };
    pause / 2 + pause * random / 512
}
