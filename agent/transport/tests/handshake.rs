//! Who may connect: keys, generations, versions, and strangers that send anything or nothing.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use common::{DEADLINE, agent, cancel, eventually, gateway, key, nothing, options};
use deepinfer_protocol::frame;
use deepinfer_protocol::limits::{MAX_FRAME_BYTES, PROTOCOL_VERSION};
use deepinfer_protocol::message::{Message, Peer};
use deepinfer_protocol::{AgentId, Generation};
use deepinfer_transport::{ClusterKey, Transport, TransportOptions};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// A peer made by hand.
struct Raw(TcpStream);

impl Raw {
    async fn connect(side: &common::Side) -> Self {
        Self(TcpStream::connect(side.address.unwrap()).await.unwrap())
    }

    async fn write(&mut self, message: &Message) {
        let mut bytes = Vec::new();
        frame::encode(message, b"", &mut bytes);
        self.0.write_all(&bytes).await.unwrap();
    }

    /// The next message; `None` once the other side has closed.
    async fn read(&mut self) -> Option<Message> {
        let mut bytes = Vec::new();
        loop {
            if let Some((frame, _)) = frame::decode(&bytes, MAX_FRAME_BYTES).unwrap() {
                return Some(frame.message);
            }
            let mut byte = [0];
            let read = tokio::time::timeout(DEADLINE, self.0.read(&mut byte)).await.expect("an answer");
            match read {
                Ok(1) => bytes.push(byte[0]),
                _ => return None,
            }
        }
    }

    async fn challenge(&mut self) -> [u8; 32] {
        match self.read().await {
            Some(Message::Challenge { nonce }) => nonce,
            other => panic!("expected a challenge, found {other:?}"),
        }
    }
}

/// The process behind every raw hello.
const PROCESS: u64 = 7;

/// The proof that a hello carries.
fn sign(key: &ClusterKey, challenge: &[u8; 32], name: &str) -> (Generation, [u8; 32]) {
    key.sign(&[b"hello", challenge, &PROCESS.to_le_bytes(), name.as_bytes()])
}

fn hello(version: u32, name: &str, (generation, mac): (Generation, [u8; 32])) -> Message {
    Message::Hello {
        version,
        name: name.into(),
        peer: Peer::Gateway,
        process: PROCESS,
        nonce: [1; 32],
        key: generation,
        mac,
    }
}

async fn refusal(side: &common::Side, make: impl FnOnce([u8; 32]) -> Message) -> String {
    let mut raw = Raw::connect(side).await;
    let challenge = raw.challenge().await;
    raw.write(&make(challenge)).await;
    let reason = match raw.read().await {
        Some(Message::Refused { reason }) => reason,
        other => panic!("expected a refusal, found {other:?}"),
    };
    assert_eq!(raw.read().await, None, "closed after the refusal");
    reason
}

#[tokio::test]
async fn strangers_are_refused_with_a_reason() {
    let worker = agent("worker").await;
    let sign = |key: &ClusterKey, challenge: &[u8; 32]| sign(key, challenge, "edge");
    let other = ClusterKey::new(Generation(4), [7; 32]);
    let old = ClusterKey::new(Generation(2), [42; 32]);
    let reason = refusal(&worker, |c| hello(PROTOCOL_VERSION + 1, "edge", sign(&key(), &c))).await;
    assert!(reason.contains("version 3"), "{reason}");
    let reason = refusal(&worker, |c| hello(PROTOCOL_VERSION, "edge", sign(&other, &c))).await;
    assert!(reason.contains("signature"), "{reason}");
    let reason = refusal(&worker, |c| hello(PROTOCOL_VERSION, "edge", sign(&old, &c))).await;
    assert!(reason.contains("generation 2"), "{reason}");
    let reason = refusal(&worker, |c| hello(PROTOCOL_VERSION, "egde", sign(&key(), &c))).await;
    assert!(reason.contains("signature"), "a signature names its signer: {reason}");
    let reason = refusal(&worker, |_| hello(PROTOCOL_VERSION, "edge", sign(&key(), &[0; 32]))).await;
    assert!(reason.contains("signature"), "a signature answers one challenge: {reason}");
    let another = |c: [u8; 32]| match hello(PROTOCOL_VERSION, "edge", sign(&key(), &c)) {
        Message::Hello { version, name, peer, nonce, key, mac, .. } => {
            Message::Hello { version, name, peer, process: PROCESS + 1, nonce, key, mac }
        }
        other => other,
    };
    let reason = refusal(&worker, another).await;
    assert!(reason.contains("signature"), "a signature names its process: {reason}");
    let long = "x".repeat(254);
    let reason = refusal(&worker, |c| hello(PROTOCOL_VERSION, &long, self::sign(&key(), &c, &long))).await;
    assert!(reason.contains("name"), "{reason}");
    assert!(worker.transport.connected().is_empty());
}

#[tokio::test]
async fn a_signed_hello_opens_and_is_answered_with_a_proof() {
    let mut worker = agent("worker").await;
    let mut raw = Raw::connect(&worker).await;
    let challenge = raw.challenge().await;
    raw.write(&hello(PROTOCOL_VERSION, "edge", sign(&key(), &challenge, "edge"))).await;
    let Some(Message::Welcome { name, mac }) = raw.read().await else { panic!("a welcome") };
    assert_eq!(name, AgentId::new("worker"));
    assert!(key().verify(Generation(4), &[b"welcome", &[1; 32], b"worker"], &mac));
    assert_eq!(worker.up("edge").await, Peer::Gateway);
    raw.write(&cancel(8)).await;
    assert_eq!(worker.frame().await.1, cancel(8));
}

#[tokio::test]
async fn frames_before_the_hello_are_short_and_are_hellos() {
    let mut worker = agent("worker").await;
    for bytes in [
        // 5 kB announced before anything is known.
        [5000u32.to_le_bytes(), 4990u32.to_le_bytes()].concat(),
        u32::MAX.to_le_bytes().to_vec(),
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        {
            let mut bytes = Vec::new();
            frame::encode(&cancel(1), b"", &mut bytes);
            bytes
        },
    ] {
        let mut raw = Raw::connect(&worker).await;
        raw.challenge().await;
        raw.0.write_all(&bytes).await.unwrap();
        assert_eq!(raw.read().await, None, "{bytes:?}");
    }
    // After all this the port still serves.
    let edge = gateway("edge");
    edge.transport.set_peers(&[worker.peer()]);
    worker.up("edge").await;
}

#[tokio::test]
async fn an_oversized_frame_ends_an_open_connection() {
    let mut worker = agent("worker").await;
    let mut raw = Raw::connect(&worker).await;
    let challenge = raw.challenge().await;
    raw.write(&hello(PROTOCOL_VERSION, "edge", sign(&key(), &challenge, "edge"))).await;
    worker.up("edge").await;
    raw.0.write_all(&(MAX_FRAME_BYTES as u32 + 1).to_le_bytes()).await.unwrap();
    worker.down("edge").await;
    eventually("the connection is forgotten", || worker.transport.connected().is_empty()).await;
}

#[tokio::test]
async fn a_key_of_the_generation_before_is_accepted_both_ways() {
    let (old, new) = ([1; 32], [2; 32]);
    let both = ClusterKey::of(vec![(Generation(8), new), (Generation(7), old)]);
    let rolled = TransportOptions { key: both, ..options("worker", Peer::Agent) };
    let mut worker = common::listening(rolled).await;
    let behind =
        TransportOptions { key: ClusterKey::new(Generation(7), old), ..options("edge", Peer::Gateway) };
    let (edge, _events) = Transport::start(behind, None);
    edge.set_peers(&[worker.peer()]);
    worker.up("edge").await;
    eventually("frames go out", || worker.transport.send(&"edge".into(), &cancel(1), nothing())).await;
}

#[tokio::test]
async fn a_dialer_does_not_talk_to_an_impostor() {
    let wrong =
        TransportOptions { key: ClusterKey::new(Generation(4), [9; 32]), ..options("worker", Peer::Agent) };
    let impostor = common::listening(wrong).await;
    let other = agent("somebody-else").await;
    let edge = gateway("edge");
    edge.transport.set_peers(&[
        ("worker".into(), impostor.address.unwrap()),
        ("second".into(), other.address.unwrap()),
    ]);
    let mut good = agent("good").await;
    edge.transport.set_peers(&[
        ("worker".into(), impostor.address.unwrap()),
        ("second".into(), other.address.unwrap()),
        good.peer(),
    ]);
    good.up("edge").await;
    eventually("the good one is connected", || edge.transport.connected() == ["good".into()]).await;
}
