//! Clients that leave: whatever state their request is in, everything it holds is freed.

use std::sync::atomic::Ordering::Relaxed;

use crate::fleet::FakeFleet;
use crate::setup::{House, body, expected, ids, running_stream, until};

/// SV-010.
#[tokio::test(flavor = "multi_thread")]
async fn streams_that_are_closed_stop_their_requests() {
    let house = House::slow().await;
    let streams = [running_stream(&house, 1, 4096).await, running_stream(&house, 2, 4096).await];
    until("both run", || house.fleet.running() == 2).await;
    drop(streams);
    house.idle().await;
    assert_eq!(house.results("cancelled"), 2.0);
    assert_eq!(ids(&house.client().await.post("/v1/completions", &body(3, 5, false)).await), expected(3, 5));
}

/// SV-011: before the first token nothing is written, and the connection is watched all the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_while_its_request_is_queued_takes_it_out_of_the_queue() {
    for stream in [true, false] {
        let house = House::open().await;
        house.fleet.behaviour.hold_queue.store(true, Relaxed);
        let mut client = house.client().await;
        client.send("POST", "/v1/completions", "", &body(1, 10, stream)).await;
        until("it is queued", || house.fleet.holds() == 1).await;
        drop(client);
        house.idle().await;
        assert_eq!(house.results("cancelled"), 1.0);
    }
}

/// SV-011, second half.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_during_prefill_stops_it() {
    for stream in [true, false] {
        let house = House::open().await;
        house.fleet.behaviour.hold_prefill.store(true, Relaxed);
        let mut client = house.client().await;
        client.send("POST", "/v1/completions", "", &body(1, 10, stream)).await;
        until("it is in prefill", || house.fleet.holds() == 1).await;
        drop(client);
        house.idle().await;
        assert_eq!(house.results("cancelled"), 1.0);
    }
}

/// SV-106.
#[tokio::test(flavor = "multi_thread")]
async fn after_a_hundred_cancelled_at_once_the_gauges_are_at_zero_and_work_goes_on() {
    let house = House::slow().await;
    let mut clients = Vec::new();
    for i in 0..100 {
        clients.push(running_stream(&house, i, 4096).await);
    }
    until("all run", || house.fleet.running() == 100).await;
    assert_eq!(house.metric("deepinfer_requests_running", ""), 100.0);
    drop(clients);
    house.idle().await;
    assert_eq!(ids(&house.client().await.post("/v1/completions", &body(3, 5, false)).await), expected(3, 5));
}

/// SV-107.
#[tokio::test(flavor = "multi_thread")]
async fn streams_closed_by_clients_are_counted_as_cancelled_with_their_tokens() {
    let house = House::slow().await;
    for i in 0..5 {
        drop(running_stream(&house, i, 4096).await);
    }
    house.idle().await;
    assert_eq!(house.results("cancelled"), 5.0);
    assert_eq!(house.metric("deepinfer_request_seconds_count", ""), 5.0);
    assert_eq!(house.metric("deepinfer_prompt_tokens_total", ""), 15.0);
    let engines: u64 = house.fleet.agents.iter().map(|agent| agent.held.lock().unwrap().tokens).sum();
    let counted = house.metric("deepinfer_generated_tokens_total", "");
    // Tokens that were under way when the client left are the engine's only.
    assert!(counted >= 5.0 && counted <= engines as f64, "{counted} of {engines}");
}

/// SV-125, and nothing piles up.
#[tokio::test(flavor = "multi_thread")]
async fn five_hundred_streams_closed_early_leave_nothing_behind() {
    let house = House::with(FakeFleet::start(2).await, |_| {}).await;
    for round in 0..10 {
        let mut clients = Vec::new();
        for i in 0..50 {
            let mut client = house.client().await;
            client.send("POST", "/v1/completions", "", &body(round * 50 + i, 4096, true)).await;
            // Some leave before an answer, some after the head, some after a chunk.
            if i % 3 > 0 {
                assert_eq!(client.head().await.unwrap().status, 200);
            }
            if i % 3 > 1 {
                client.chunk().await.unwrap();
            }
            clients.push(client);
        }
    }
    house.idle().await;
    until("connections are closed", || house.metric("deepinfer_gateway_connections", "") == 0.0).await;
    // One that left before its request was read never became one.
    assert!(house.results("cancelled") <= 500.0);
    assert_eq!(house.results("failed"), 0.0);
    assert_eq!(ids(&house.client().await.post("/v1/completions", &body(3, 5, false)).await), expected(3, 5));
}
