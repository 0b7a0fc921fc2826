//! Connections over real sockets: who dials, order of frames, peers that vanish, hang or come back.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;

use std::sync::Arc;

use common::{agent, cancel, eventually, gateway, nothing, options};
use deepinfer_protocol::message::{Message, Peer, PieceKind};
use deepinfer_protocol::{AgentId, Attempt, RequestId, Span};
use deepinfer_transport::{MAX_QUEUED_FRAMES, PeerEvent, Transport};
use tokio::net::TcpListener;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frames_arrive_in_order_with_their_payloads() {
    let mut worker = agent("worker").await;
    let mut edge = gateway("edge");
    edge.transport.set_peers(&[worker.peer()]);
    assert_eq!(edge.up("worker").await, Peer::Agent);
    assert_eq!(worker.up("edge").await, Peer::Gateway);
    // Lengths around the border between copied and shared payloads, and one longer than a read buffer.
    let lengths = [0, 1, 16_383, 16_384, 16_385, 70_000, 3_000_000];
    let count = 600u32;
    for number in 0..count {
        let length = lengths[number as usize % lengths.len()];
        let payload: Arc<[u8]> = (0..length).map(|i| (i as u32 * 7 + number) as u8).collect();
        let message = Message::KvPiece {
            request: RequestId(9),
            attempt: Attempt(1),
            kind: PieceKind::Block(number),
            pieces: count,
            crc: number,
            tokens: 0,
        };
        assert!(edge.transport.send(&worker.name, &message, payload));
        if number % 100 == 99 {
            // Room for the next hundred: the queue is bounded.
            for expected in number - 99..=number {
                let (from, message, payload) = worker.frame().await;
                assert_eq!(from.as_str(), "edge");
                assert!(matches!(message, Message::KvPiece { crc, .. } if crc == expected));
                let length = lengths[expected as usize % lengths.len()];
                assert_eq!(payload.len(), length);
                assert!(payload.iter().enumerate().all(|(i, &b)| b == (i as u32 * 7 + expected) as u8));
            }
        }
    }
    assert!(worker.transport.send(&edge.name, &cancel(5), nothing()));
    assert_eq!(edge.frame().await.1, cancel(5));
}

#[tokio::test]
async fn of_two_agents_the_smaller_name_dials() {
    let (mut a, mut b) = (agent("a").await, agent("b").await);
    b.transport.set_peers(&[a.peer(), b.peer()]);
    a.transport.set_peers(&[a.peer(), b.peer()]);
    a.up("b").await;
    b.up("a").await;
    assert!(b.transport.send(&a.name, &cancel(1), nothing()));
    assert_eq!(a.frame().await.1, cancel(1));
    assert_eq!((a.transport.connected(), b.transport.connected()), (vec!["b".into()], vec!["a".into()]));
}

#[tokio::test]
async fn a_message_to_somebody_unknown_is_not_queued() {
    let edge = gateway("edge");
    assert!(!edge.transport.send(&AgentId::new("nobody"), &cancel(1), nothing()));
}

#[tokio::test]
async fn a_killed_peer_is_down_and_is_found_again_at_the_same_address() {
    let mut worker = agent("worker").await;
    let mut edge = gateway("edge");
    edge.transport.set_peers(&[worker.peer()]);
    edge.up("worker").await;
    worker.up("edge").await;
    let address = worker.address.unwrap();
    drop(worker);
    edge.down("worker").await;
    eventually("the connection is forgotten", || edge.transport.connected().is_empty()).await;
    assert!(!edge.transport.send(&"worker".into(), &cancel(1), nothing()));
    let listener = rebind(address).await;
    let (_again, mut events) = Transport::start(options("worker", Peer::Agent), Some(listener));
    edge.up("worker").await;
    assert!(edge.transport.send(&"worker".into(), &cancel(2), nothing()));
    loop {
        if let PeerEvent::Frame { message, .. } = events.recv().await.unwrap() {
            assert_eq!(message, cancel(2));
            break;
        }
    }
}

async fn rebind(address: std::net::SocketAddr) -> TcpListener {
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return listener,
            Err(_) => tokio::time::sleep(std::time::Duration::from_millis(20)).await,
        }
    }
}

#[tokio::test]
async fn the_newest_connection_of_a_pair_wins() {
    let mut worker = agent("worker").await;
    let mut first = gateway("edge");
    first.transport.set_peers(&[worker.peer()]);
    let (_, one) = worker.up_as("edge").await;
    first.up("worker").await;
    let mut second = gateway("edge");
    second.transport.set_peers(&[worker.peer()]);
    worker.down("edge").await;
    // It stays dead: the older process must not take the connection back while the newer one is to be seen.
    first.transport.set_peers(&[]);
    second.up("worker").await;
    let (_, other) = worker.up_as("edge").await;
    assert!(one.is_some() && other.is_some() && one != other, "another process under the same name");
    eventually("the newer connection carries frames", || {
        second.transport.send(&worker.name, &cancel(3), nothing())
    })
    .await;
    assert_eq!(worker.frame().await.1, cancel(3));
}

#[tokio::test]
async fn an_idle_connection_stays_up_for_many_heartbeats() {
    let mut worker = agent("worker").await;
    let mut edge = gateway("edge");
    edge.transport.set_peers(&[worker.peer()]);
    edge.up("worker").await;
    worker.up("edge").await;
    // Suspicion may come and go on a loaded machine, but the connection never closes: the same link answers.
    tokio::time::sleep(std::time::Duration::from_millis(500)).await;
    assert!(edge.transport.send(&worker.name, &cancel(4), nothing()));
    assert_eq!(worker.frame().await.1, cancel(4));
}

#[tokio::test]
async fn a_silent_peer_is_suspect_and_up_again_when_heard() {
    // The worker's heartbeats come too rarely for the edge; its frames do come.
    let slow = deepinfer_transport::TransportOptions {
        heartbeat: Span::secs(1),
        missed: 100,
        ..options("worker", Peer::Agent)
    };
    let mut worker = common::listening(slow).await;
    let mut edge = gateway("edge");
    edge.transport.set_peers(&[worker.peer()]);
    edge.up("worker").await;
    worker.up("edge").await;
    edge.down("worker").await;
    assert!(edge.transport.send(&worker.name, &cancel(1), nothing()), "suspect, but still connected");
    assert_eq!(worker.frame().await.1, cancel(1));
    assert!(worker.transport.send(&edge.name, &cancel(2), nothing()));
    edge.up("worker").await;
    assert_eq!(edge.frame().await.1, cancel(2));
    edge.down("worker").await;
}

#[tokio::test]
async fn a_peer_that_never_reads_is_dropped_and_nobody_else_waits() {
    let mut stuck = agent("stuck").await;
    let mut good = agent("good").await;
    let mut edge = gateway("edge");
    edge.transport.set_peers(&[stuck.peer(), good.peer()]);
    stuck.up("edge").await;
    good.up("edge").await;
    eventually("both are connected", || edge.transport.connected().len() == 2).await;
    // The driver of `stuck` takes no events: its reader stops, sockets fill, then the queue does.
    let payload: Arc<[u8]> = vec![1; 8000].into();
    let piece = |n: u32| Message::KvPiece {
        request: RequestId(1),
        attempt: Attempt(0),
        kind: PieceKind::Block(n),
        pieces: 1,
        crc: 0,
        tokens: 0,
    };
    let mut sent = 0;
    while edge.transport.send(&stuck.name, &piece(sent), payload.clone()) {
        sent += 1;
        assert!((sent as usize) < 4 * MAX_QUEUED_FRAMES, "the queue is not bounded");
        if sent % 64 == 0 {
            tokio::task::yield_now().await;
        }
    }
    assert!(edge.transport.send(&good.name, &cancel(7), nothing()));
    assert_eq!(good.frame().await.1, cancel(7));
    edge.down("stuck").await;
}

#[tokio::test]
async fn closing_writes_what_was_queued() {
    let mut worker = agent("worker").await;
    let mut edge = gateway("edge");
    edge.transport.set_peers(&[worker.peer()]);
    edge.up("worker").await;
    for number in 0..200 {
        assert!(edge.transport.send(&worker.name, &cancel(number), nothing()));
    }
    edge.transport.close(common::DEADLINE).await;
    for number in 0..200 {
        assert_eq!(worker.frame().await.1, cancel(number));
    }
    worker.down("edge").await;
    assert_eq!(edge.transport.tasks(), 0);
}

/// SV-122 in small: peers that come and go leave no task and no connection behind.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ten_thousand_changes_of_the_peer_list_leave_nothing_behind() {
    let mut worker = agent("worker").await;
    let edge = gateway("edge");
    // Nobody listens at the second address: its dialing is cut short again and again.
    let vacant = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let both = [worker.peer(), ("vacant".into(), vacant)];
    let before = edge.transport.tasks();
    let reading = tokio::spawn(async move {
        while worker.events.recv().await.is_some() {}
        worker
    });
    let mut events = edge.events;
    let draining = tokio::spawn(async move { while events.recv().await.is_some() {} });
    for cycle in 0..10_000u32 {
        edge.transport.set_peers(&both);
        if cycle % 16 == 0 {
            tokio::task::yield_now().await;
        }
        edge.transport.set_peers(&[]);
    }
    eventually("the tasks of removed peers end", || edge.transport.tasks() == before).await;
    assert!(edge.transport.connected().is_empty());
    drop(edge.transport);
    draining.await.unwrap();
    reading.abort();
}
