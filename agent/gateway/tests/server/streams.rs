//! Answers arrive whole and in order, alone and among many, over a crash, and beside clients that do not read.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use futures_util::future::join_all;

use crate::fleet::FakeFleet;
use crate::http::ids_of_stream;
use crate::setup::{House, body, expected, ids, running_stream, until};

#[tokio::test(flavor = "multi_thread")]
async fn a_streamed_and_a_whole_answer_have_the_tokens_of_the_engine() {
    let house = House::open().await;
    let mut client = house.client().await;
    assert_eq!(ids(&client.post("/v1/completions", &body(5, 40, false)).await), expected(5, 40));
    let answer = client.post("/v1/completions", &body(6, 40, true)).await;
    assert_eq!(ids_of_stream(&answer.text()), (expected(6, 40), true));
    assert_eq!(answer.head.header("content-type").map(|t| t.starts_with("text/event-stream")), Some(true));
    house.idle().await;
    assert_eq!(house.results("finished"), 2.0);
    assert_eq!(house.metric("deepinfer_generated_tokens_total", ""), 80.0);
    assert_eq!(house.metric("deepinfer_prompt_tokens_total", ""), 6.0);
    assert_eq!(house.metric("deepinfer_ttft_seconds_count", ""), 2.0);
    assert_eq!(house.metric("deepinfer_inter_token_seconds_count", ""), 78.0);
    assert_eq!(house.metric("deepinfer_request_seconds_count", ""), 2.0);
    assert_eq!(house.metric("deepinfer_queue_seconds_count", ""), 2.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_streams_side_by_side_get_their_own_tokens() {
    let house = House::open().await;
    house.fleet.behaviour.step_micros.store(0, Relaxed);
    let streams = (0..100).map(|i| {
        let house = &house;
        async move {
            let mut client = house.client().await;
            let answer = client.post("/v1/completions", &body(i, 64, i % 2 == 0)).await;
            if i % 2 == 0 {
                assert_eq!(ids_of_stream(&answer.text()), (expected(i, 64), true));
            } else {
                assert_eq!(ids(&answer), expected(i, 64));
            }
        }
    });
    join_all(streams).await;
    house.idle().await;
    assert_eq!(house.results("finished"), 100.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rank_that_dies_costs_a_pause_and_no_token() {
    let mut house = House::with(FakeFleet::start(2).await, |_| {}).await;
    // It must not be over before it is killed.
    house.fleet.behaviour.step_micros.store(50_000, Relaxed);
    let mut client = running_stream(&house, 4, 300).await;
    until("it runs", || house.fleet.running() == 1).await;
    // The leader places with itself.
    house.fleet.kill("decode-0");
    house.fleet.behaviour.step_micros.store(1000, Relaxed);
    house.fleet.show();
    let mut text = String::new();
    while let Some(chunk) = client.chunk().await.unwrap() {
        text.push_str(std::str::from_utf8(&chunk).unwrap());
    }
    let (ids, done) = ids_of_stream(&text);
    assert!(done, "{text}");
    let expected = expected(4, 300);
    assert!(expected.ends_with(&ids) && ids.len() >= 299, "{} tokens", ids.len());
    house.idle().await;
    until("the retry is counted", || house.metric("deepinfer_retries_total", "") == 1.0).await;
    assert_eq!(house.results("finished"), 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_never_reads_is_cut_off_and_holds_up_nobody() {
    let fleet = FakeFleet::start(1).await;
    fleet.behaviour.step_micros.store(100, Relaxed);
    let house = House::with(fleet, |options| {
        options.limits.write_stall = Duration::from_millis(300);
    })
    .await;
    // Far more bytes than all buffers on the way take, which never end by themselves in this test.
    let deaf = running_stream(&house, 1, 8000).await;
    let stream = deaf.stream.into_inner();
    let deaf_too = running_stream(&house, 2, 8000).await;
    for i in 0..20 {
        let answer = house.client().await.post("/v1/completions", &body(i, 50, true)).await;
        assert_eq!(ids_of_stream(&answer.text()), (expected(i, 50), true));
    }
    house.idle().await;
    drop((stream, deaf_too));
    // Small kernels' buffers: it was cut; large ones: everything fitted and it finished.
    assert_eq!(house.results("finished") + house.results("cancelled"), 22.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn more_waiting_tokens_than_the_limit_cancel_the_request() {
    let fleet = FakeFleet::start(1).await;
    fleet.behaviour.step_micros.store(0, Relaxed);
    let house = House::with(fleet, |options| {
        options.model.context_limit = 4_000_000;
        options.limits.waiting_tokens = 1000;
    })
    .await;
    let deaf = running_stream(&house, 1, 390_000).await;
    until("the request is cancelled", || house.results("cancelled") == 1.0).await;
    assert_eq!(house.metric("deepinfer_slow_clients_total", ""), 1.0);
    house.idle().await;
    drop(deaf);
}
