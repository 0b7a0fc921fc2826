//! A transport in a test: short heartbeats, and waiting for events with a generous deadline.
#![allow(dead_code, reason = "each test file uses its part")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use deepinfer_protocol::message::{Message, Peer};
use deepinfer_protocol::{AgentId, Attempt, Generation, RequestId, Span};
use deepinfer_transport::{ClusterKey, PeerEvent, Transport, TransportOptions};
use tokio::net::TcpListener;
use tokio::sync::mpsc;

pub const DEADLINE: Duration = Duration::from_secs(60);

pub struct Side {
    pub name: AgentId,
    pub transport: Transport,
    pub events: mpsc::Receiver<PeerEvent>,
    pub address: Option<SocketAddr>,
}

pub fn key() -> ClusterKey {
    ClusterKey::new(Generation(4), [42; 32])
}

pub fn options(name: &str, peer: Peer) -> TransportOptions {
    TransportOptions { heartbeat: Span::millis(50), ..TransportOptions::new(name.into(), peer, key()) }
}

pub async fn agent(name: &str) -> Side {
    listening(options(name, Peer::Agent)).await
}

pub async fn listening(options: TransportOptions) -> Side {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = Some(listener.local_addr().unwrap());
    let name = options.name.clone();
    let (transport, events) = Transport::start(options, Some(listener));
    Side { name, transport, events, address }
}

pub fn gateway(name: &str) -> Side {
    let options = options(name, Peer::Gateway);
    let name = options.name.clone();
    let (transport, events) = Transport::start(options, None);
    Side { name, transport, events, address: None }
}

impl Side {
    pub fn peer(&self) -> (AgentId, SocketAddr) {
        (self.name.clone(), self.address.unwrap())
    }

    pub async fn next(&mut self) -> PeerEvent {
        tokio::time::timeout(DEADLINE, self.events.recv()).await.expect("an event").expect("a transport")
    }

    pub async fn up(&mut self, who: &str) -> Peer {
        self.up_as(who).await.0
    }

    /// Kind and process of a peer that comes up.
    pub async fn up_as(&mut self, who: &str) -> (Peer, Option<u64>) {
        loop {
            if let PeerEvent::Up { peer, kind, process } = self.next().await
                && peer.as_str() == who
            {
                return (kind, process);
            }
        }
    }

    pub async fn down(&mut self, who: &str) {
        loop {
            if matches!(self.next().await, PeerEvent::Down { peer } if peer.as_str() == who) {
                return;
            }
        }
    }

    pub async fn frame(&mut self) -> (AgentId, Message, Arc<[u8]>) {
        loop {
            if let PeerEvent::Frame { from, message, payload } = self.next().await {
                return (from, message, payload);
            }
        }
    }
}

pub fn cancel(number: u128) -> Message {
    Message::Cancel { request: RequestId(number), attempt: Attempt(0) }
}

pub fn nothing() -> Arc<[u8]> {
    Arc::from([])
}

/// Waits until a condition holds.
pub async fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let waiting = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(DEADLINE, waiting).await.unwrap_or_else(|_| panic!("never: {what}"));
}
