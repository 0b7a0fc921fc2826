//! More than can be served: every request gets an answer, and the answer says overload.

use std::sync::atomic::Ordering::Relaxed;

use deepinfer_gateway::server::start;
use deepinfer_protocol::Span;
use futures_util::future::join_all;

use crate::fleet::FakeFleet;
use crate::setup::{House, body, options, until};

/// SV-058.
#[tokio::test(flavor = "multi_thread")]
async fn of_a_thousand_requests_at_once_each_is_served_or_told_when_to_come_back() {
    let house = House::with(FakeFleet::start(1).await, |options| options.requests.max_waiting = 96).await;
    house.fleet.behaviour.hold_queue.store(true, Relaxed);
    let asked = (0..1000).map(|i| {
        let house = &house;
        async move {
            let mut client = house.client().await;
            client.post("/v1/completions", &body(i, 2, i % 2 == 0)).await
        }
    });
    let let_go = async {
        until("the rest is refused", || house.results("refused") == 904.0).await;
        assert_eq!(house.gateway.stats().waiting, 96);
        // The leader forgets its queue, as one that dies does; another takes over.
        house.fleet.behaviour.hold_queue.store(false, Relaxed);
        house.fleet.agents[0].held.lock().unwrap().queued.clear();
        house.fleet.behaviour.later_epochs.store(1, Relaxed);
        house.fleet.view.send_modify(|view| {
            let mut next = (**view).clone();
            next.generation = next.generation.next();
            next.prefill_leader.as_mut().unwrap().epoch = deepinfer_protocol::Epoch(2);
            *view = next.into();
        });
    };
    let (answers, ()) = tokio::join!(join_all(asked), let_go);
    let served = answers.iter().filter(|answer| answer.status() == 200).count();
    for refused in answers.iter().filter(|answer| answer.status() != 200) {
        assert_eq!(refused.status(), 429, "{}", refused.text());
        assert!(refused.head.header("retry-after").is_some());
        assert_eq!(refused.json()["error"]["code"], "queue_full");
    }
    assert_eq!(served, 96);
    house.idle().await;
    assert_eq!(house.metric("deepinfer_refusals_total", "reason=\"queue_full\""), 904.0);
}

/// SV-059: in requests and in prompt tokens.
#[tokio::test(flavor = "multi_thread")]
async fn a_stalled_pool_fills_the_queue_to_its_limits_and_no_further() {
    let house = House::with(FakeFleet::start(1).await, |options| {
        options.requests.max_waiting = 500;
        options.requests.max_waiting_tokens = 20_000;
    })
    .await;
    house.fleet.behaviour.hold_queue.store(true, Relaxed);
    let prompt = vec!["7"; 4000].join(",");
    let body = format!(r#"{{"model":"tiny","prompt":[{prompt}],"max_tokens":2}}"#);
    let mut waiting = Vec::new();
    for _ in 0..5 {
        let mut client = house.client().await;
        client.send("POST", "/v1/completions", "", &body).await;
        waiting.push(client);
    }
    until("five wait", || house.gateway.stats().waiting_tokens == 20_000).await;
    for _ in 0..200 {
        let answer = house.client().await.post("/v1/completions", &body).await;
        assert_eq!(answer.status(), 429);
    }
    assert_eq!(house.gateway.stats().waiting, 5);
    drop(waiting);
    house.idle().await;
}

/// SV-116.
#[tokio::test(flavor = "multi_thread")]
async fn full_workers_are_answered_429_and_a_missing_pool_503() {
    let house = House::with(FakeFleet::start(1).await, |options| {
        options.api.first_token_deadline = Span::millis(400);
    })
    .await;
    house.fleet.behaviour.no_room.store(true, Relaxed);
    let answer = house.client().await.post("/v1/completions", &body(1, 2, false)).await;
    assert_eq!(answer.status(), 429, "{}", answer.text());
    assert!(answer.head.header("retry-after").is_some());
    assert_eq!((house.results("refused"), house.results("failed")), (1.0, 0.0));

    let empty = FakeFleet::hidden(0).await;
    let gateway = start(options(&empty), empty.view.subscribe()).await.unwrap();
    let answer =
        crate::http::Client::connect(gateway.addr()).await.post("/v1/completions", &body(1, 2, false)).await;
    assert_eq!(answer.status(), 503, "{}", answer.text());
    assert!(answer.head.header("retry-after").is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_at_its_limit_does_not_stop_another() {
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys.yaml");
    std::fs::write(&keys, "alpha: key-of-alpha\nbeta: key-of-beta0\n").unwrap();
    let house = House::with(FakeFleet::start(1).await, |options| {
        options.api_keys = Some(keys.clone());
        let limits = deepinfer_serving::gateway::TenantLimits { running: 1, queued: 2 };
        options.requests.tenants.insert("alpha".into(), limits);
    })
    .await;
    house.fleet.behaviour.hold_queue.store(true, Relaxed);
    let mut waiting = Vec::new();
    for _ in 0..2 {
        let mut client = house.client().await;
        client
            .send("POST", "/v1/completions", "authorization: Bearer key-of-alpha\r\n", &body(1, 2, false))
            .await;
        waiting.push(client);
    }
    until("two wait", || house.gateway.stats().waiting == 2).await;
    let mut client = house.client().await;
    client
        .send("POST", "/v1/completions", "authorization: Bearer key-of-alpha\r\n", &body(1, 2, false))
        .await;
    assert_eq!(client.answer().await.unwrap().status(), 429);
    house.fleet.behaviour.hold_queue.store(false, Relaxed);
    client
        .send("POST", "/v1/completions", "authorization: Bearer key-of-beta0\r\n", &body(1, 2, false))
        .await;
    assert_eq!(client.answer().await.unwrap().status(), 200);
    drop(waiting);
    house.idle().await;
}
