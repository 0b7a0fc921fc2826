//! Limits of connections: idle, slow, flooding, too many, too large.

use std::time::Duration;

use deepinfer_gateway::limits::EdgeLimits;
use futures_util::future::join_all;
use tokio::io::AsyncReadExt;

use crate::fleet::FakeFleet;
use crate::setup::{House, body, expected, ids, until};

#[tokio::test(flavor = "multi_thread")]
async fn fifteen_hundred_idle_connections_cost_nobody_anything() {
    idle_connections(1500).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs 20,000 file descriptors: ulimit -n"]
async fn ten_thousand_idle_connections_cost_nobody_anything() {
    idle_connections(9_900).await;
}

async fn idle_connections(count: usize) {
    let house = House::open().await;
    let mut idle = Vec::new();
    for _ in 0..count / 100 {
        idle.extend(join_all((0..100).map(|_| house.client())).await);
    }
    until("all are open", || house.metric("deepinfer_gateway_connections", "") == count as f64).await;
    assert_eq!(
        ids(&house.client().await.post("/v1/completions", &body(1, 20, false)).await),
        expected(1, 20)
    );
    // They are as good as new.
    for client in idle.iter_mut().step_by(97) {
        assert_eq!(client.get("/v1/models").await.status(), 200);
    }
    drop(idle);
    until("all are closed", || house.metric("deepinfer_gateway_connections", "") == 0.0).await;
}

/// SV-124: time to send a header does not run while a connection waits for its next request.
#[tokio::test(flavor = "multi_thread")]
async fn a_pooled_connection_is_good_after_a_gap_longer_than_a_header_may_take() {
    assert!(EdgeLimits::default().idle > Duration::from_secs(120), "pools keep connections for two minutes");
    let house = House::with(FakeFleet::start(1).await, |options| {
        options.limits.header_time = Duration::from_millis(50);
    })
    .await;
    let mut client = house.client().await;
    for i in 0..3 {
        assert_eq!(ids(&client.post("/v1/completions", &body(i, 5, false)).await), expected(i, 5));
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_connections_and_unfinished_headers_are_closed_in_their_time() {
    let house = House::with(FakeFleet::start(1).await, |options| {
        options.limits.header_time = Duration::from_millis(100);
        options.limits.idle = Duration::from_millis(400);
    })
    .await;
    let mut idle = house.client().await;
    assert_eq!(idle.get("/healthz").await.status(), 200);
    let mut slow = house.client().await;
    slow.write(b"GET /healthz HTTP/1.1\r\nhost: te").await.unwrap();
    for client in [&mut idle, &mut slow] {
        let mut rest = Vec::new();
        let _ = client.stream.read_to_end(&mut rest).await;
        assert!(rest.is_empty());
    }
    // A request that runs is neither.
    house.fleet.behaviour.step_micros.store(30_000, std::sync::atomic::Ordering::Relaxed);
    let answer = house.client().await.post("/v1/completions", &body(1, 30, false)).await;
    assert_eq!(ids(&answer), expected(1, 30));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_headers_is_refused() {
    let house = House::open().await;
    let many: String = (0..200).map(|i| format!("x-{i}: y\r\n")).collect();
    let long = format!("x-long: {}\r\n", "y".repeat(100_000));
    for headers in [many, long] {
        let mut client = house.client().await;
        let text = format!("GET /healthz HTTP/1.1\r\nhost: test\r\n{headers}\r\n");
        // The gateway may answer and close before all of it is written.
        let _ = client.write(text.as_bytes()).await;
        if let Ok(head) = client.head().await {
            assert_eq!(head.status, 431);
        }
    }
    assert_eq!(house.client().await.get("/healthz").await.status(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_huge_body_is_refused_before_it_is_read() {
    let house = House::open().await;
    let mut client = house.client().await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n\
                content-length: 5000000000\r\n\r\n";
    client.write(head.as_bytes()).await.unwrap();
    let answer = client.answer().await.unwrap();
    assert_eq!(answer.status(), 413);
    assert_eq!(answer.json()["error"]["code"], "body_too_large");
    assert_eq!(house.metric("deepinfer_refusals_total", "reason=\"body_too_large\""), 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_beyond_the_memory_for_them_are_told_to_come_back() {
    let house =
        House::with(FakeFleet::start(1).await, |options| options.limits.bodies_bytes = 100 << 10).await;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n\
                expect: 100-continue\r\ncontent-length: 90000\r\n\r\n";
    let mut reading = house.client().await;
    reading.write(head.as_bytes()).await.unwrap();
    // It is asked for its body: its bytes are reserved.
    assert_eq!(reading.head().await.unwrap().status, 100);
    let mut client = house.client().await;
    client.write(head.replace("90000", "20000").as_bytes()).await.unwrap();
    let answer = client.answer().await.unwrap();
    assert_eq!(answer.status(), 429);
    assert!(answer.head.header("retry-after").is_some());
    drop(client);
    drop(reading);
    until("there is room again", || house.metric("deepinfer_gateway_connections", "") == 0.0).await;
    assert_eq!(ids(&house.client().await.post("/v1/completions", &body(1, 5, false)).await), expected(1, 5));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_above_the_limit_is_told_so() {
    let house = House::with(FakeFleet::start(1).await, |options| options.limits.connections = 3).await;
    let mut open = Vec::new();
    for _ in 0..3 {
        let mut client = house.client().await;
        assert_eq!(client.get("/healthz").await.status(), 200);
        open.push(client);
    }
    let answer = house.client().await.answer().await.unwrap();
    assert_eq!(answer.status(), 503);
    assert_eq!(answer.json()["error"]["code"], "connections");
    drop(open.pop());
    until("one is closed", || house.metric("deepinfer_gateway_connections", "") == 2.0).await;
    // The place is given back a moment after it was counted out.
    let end = tokio::time::Instant::now() + crate::setup::PATIENCE;
    loop {
        let mut client = house.client().await;
        client.write(b"GET /healthz HTTP/1.1\r\nhost: test\r\n\r\n").await.ok();
        if client.answer().await.is_ok_and(|answer| answer.status() == 200) {
            break;
        }
        assert!(tokio::time::Instant::now() < end);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_and_metrics_answer_without_a_key_and_only_to_get() {
    let house = House::open().await;
    let mut client = house.client().await;
    assert_eq!(client.get("/healthz").await.status(), 200);
    let ready = client.get("/readyz").await;
    assert_eq!((ready.status(), ready.json()["ready"].clone()), (200, true.into()));
    let metrics = client.get("/metrics").await;
    assert!(metrics.head.header("content-type").unwrap().starts_with("application/openmetrics-text"));
    assert!(metrics.text().ends_with("# EOF\n"));
    for path in ["/healthz", "/readyz", "/metrics", "/v1/status"] {
        assert_eq!(client.post(path, "{}").await.status(), 405, "{path}");
    }
    assert_eq!(client.get("/nowhere").await.status(), 404);
}
