//! Starting and stopping: ready when it serves, unready at once, streams finish, nothing is left.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use deepinfer_gateway::server::start;

use crate::fleet::FakeFleet;
use crate::http::{Client, ids_of_stream};
use crate::setup::{House, body, expected, options, running_stream, until};

/// SV-104, SV-103.
#[tokio::test(flavor = "multi_thread")]
async fn the_model_is_listed_exactly_when_requests_are_served() {
    for _ in 0..10 {
        let fleet = FakeFleet::hidden(1).await;
        let gateway = start(options(&fleet), fleet.view.subscribe()).await.unwrap();
        let mut client = Client::connect(gateway.addr()).await;
        let ready = client.get("/readyz").await;
        assert_eq!(ready.status(), 503);
        assert_eq!(ready.json()["reason"], "no fleet view has come yet");
        assert_eq!(client.get("/v1/models").await.json()["data"].as_array().unwrap().len(), 0);
        fleet.show();
        let end = tokio::time::Instant::now() + crate::setup::PATIENCE;
        while client.get("/readyz").await.status() != 200 {
            assert!(tokio::time::Instant::now() < end);
        }
        assert_eq!(client.get("/v1/models").await.json()["data"].as_array().unwrap().len(), 1);
        assert_eq!(client.post("/v1/completions", &body(1, 3, false)).await.status(), 200);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_stops_serving_makes_the_gateway_unready_with_a_reason() {
    let mut house = House::open().await;
    house.fleet.agents[1].member.serving = false;
    house.fleet.show();
    until("it is unready", || !house.gateway.ready()).await;
    assert_eq!(house.gateway.unready_reason().unwrap(), "no decode rank serves yet");
    house.fleet.agents[1].member.serving = true;
    house.fleet.show();
    until("it is ready", || house.gateway.ready()).await;
    // An older view changes nothing.
    let old = (**house.fleet.view.borrow()).clone();
    house.fleet.kill("prefill-0");
    house.fleet.kill("decode-0");
    until("it is cut off and unready", || !house.gateway.ready()).await;
    house.fleet.view.send_replace(
        deepinfer_protocol::fleet::FleetView { generation: deepinfer_protocol::Generation(1), ..old }.into(),
    );
    assert_eq!(house.gateway.unready_reason().unwrap(), "no prefill worker is connected");
}

#[tokio::test(flavor = "multi_thread")]
async fn while_it_shuts_down_streams_finish_and_new_requests_are_turned_away() {
    let house = House::slow().await;
    let addr = house.gateway.addr();
    let mut stream = running_stream(&house, 4, 400).await;
    let House { gateway, fleet } = house;
    let stopping = tokio::spawn(gateway.shutdown(Duration::from_secs(50)));
    let end = tokio::time::Instant::now() + crate::setup::PATIENCE;
    while Client::connect(addr).await.get("/readyz").await.status() != 503 {
        assert!(tokio::time::Instant::now() < end);
    }
    let mut client = Client::connect(addr).await;
    let answer = client.post("/v1/completions", &body(1, 3, false)).await;
    assert_eq!(answer.status(), 503);
    assert!(answer.head.header("retry-after").is_some());
    assert_eq!(answer.head.header("connection"), Some("close"));
    fleet.behaviour.step_micros.store(1000, Relaxed);
    let mut text = String::new();
    while let Some(chunk) = stream.chunk().await.unwrap() {
        text.push_str(std::str::from_utf8(&chunk).unwrap());
    }
    let (ids, done) = ids_of_stream(&text);
    assert!(done && expected(4, 400).ends_with(&ids), "{text}");
    assert_eq!(stopping.await.unwrap(), 0);
    assert!(tokio::net::TcpStream::connect(addr).await.is_err());
    assert_eq!(fleet.holds(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn at_the_deadline_what_still_runs_is_cut_and_told_so() {
    let house = House::slow().await;
    let mut stream = running_stream(&house, 4, 8000).await;
    let House { gateway, fleet } = house;
    let cut = gateway.shutdown(Duration::from_millis(200)).await;
    assert_eq!(cut, 1);
    let mut text = String::new();
    while let Ok(Some(chunk)) = stream.chunk().await {
        text.push_str(std::str::from_utf8(&chunk).unwrap());
    }
    assert!(text.contains("\"error\"") && !text.contains("[DONE]"), "{text}");
    until("agents hold nothing", || fleet.holds() == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_that_is_taken_is_named_with_the_flag_that_changes_it() {
    let house = House::open().await;
    let mut options = options(&house.fleet);
    options.listen = house.gateway.addr();
    let error = start(options, house.fleet.view.subscribe()).await.err().unwrap().to_string();
    assert!(error.contains(&house.gateway.addr().to_string()) && error.contains("--listen"), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_that_is_dropped_closes_everything() {
    let house = House::slow().await;
    let addr = house.gateway.addr();
    let mut stream = running_stream(&house, 4, 8000).await;
    let House { gateway, fleet } = house;
    drop(gateway);
    while let Ok(Some(_)) = stream.chunk().await {}
    until("agents hold nothing", || fleet.running() == 0).await;
    let end = tokio::time::Instant::now() + crate::setup::PATIENCE;
    while tokio::net::TcpStream::connect(addr).await.is_ok() {
        assert!(tokio::time::Instant::now() < end);
    }
}
