//! A gateway with its agents, and waiting for conditions.

use std::time::Duration;

use deepinfer_gateway::openai::ModelInfo;
use deepinfer_gateway::server::{GatewayHandle, GatewayOptions, start};

use crate::common::shipped;
use crate::fleet::FakeFleet;
use crate::http::{Answer, Client};

/// Longer than anything takes on a loaded machine; only a failure waits for it.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until a condition holds.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = tokio::time::Instant::now() + PATIENCE;
    while !holds() {
        assert!(tokio::time::Instant::now() < end, "still not: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub fn model() -> ModelInfo {
    ModelInfo {
        name: "tiny".to_owned(),
        aliases: vec!["small".to_owned()],
        context_limit: 8192,
        vocab_size: shipped().vocab_size() as u32,
        stop_tokens: vec![1],
        tokenizer: shipped(),
        default_thinking: false,
        created: 1,
    }
}

pub fn options(fleet: &FakeFleet) -> GatewayOptions {
    GatewayOptions::new("gw-0", "127.0.0.1:0".parse().unwrap(), model(), fleet.key.clone())
}

/// A gateway and its agents.
pub struct House {
    pub fleet: FakeFleet,
    pub gateway: GatewayHandle,
}

impl House {
    /// With one prefill and one decode agent, ready.
    pub async fn open() -> Self {
        Self::with(FakeFleet::start(1).await, |_| {}).await
    }

    /// Whose streams do not end while a test does something, on the slowest machine.
    pub async fn slow() -> Self {
        let house = Self::open().await;
        house.fleet.behaviour.step_micros.store(100_000, std::sync::atomic::Ordering::Relaxed);
        house
    }

    pub async fn with(fleet: FakeFleet, change: impl FnOnce(&mut GatewayOptions)) -> Self {
        let mut options = options(&fleet);
        change(&mut options);
        let gateway = start(options, fleet.view.subscribe()).await.unwrap();
        let house = Self { fleet, gateway };
        until("the gateway is ready", || house.gateway.ready()).await;
        house
    }

    pub async fn client(&self) -> Client {
        Client::connect(self.gateway.addr()).await
    }

    /// The value of a metric with these labels (as they stand in the text, without `pod`).
    pub fn metric(&self, name: &str, labels: &str) -> f64 {
        let series = match labels {
            "" => format!("{name}{{pod=\"gw-0\"}} "),
            _ => format!("{name}{{pod=\"gw-0\",{labels}}} "),
        };
        let text = self.gateway.metrics_text();
        let line = text.lines().find(|line| line.starts_with(&series));
        line.map_or(0.0, |line| line[series.len()..].parse().unwrap())
    }

    pub fn results(&self, result: &str) -> f64 {
        self.metric("deepinfer_requests_total", &format!("result=\"{result}\""))
    }

    /// Nothing runs, nothing waits, no agent holds anything.
    pub async fn idle(&self) {
        until("agents hold nothing", || self.fleet.holds() == 0).await;
        until("nothing runs and nothing waits", || {
            let status = self.gateway.stats();
            status.running + status.waiting + status.waiting_tokens == 0
        })
        .await;
        assert_eq!(self.metric("deepinfer_requests_running", ""), 0.0);
        assert_eq!(self.metric("deepinfer_requests_waiting", ""), 0.0);
    }
}

/// A request for `tokens` tokens after the prompt `[first, 8, 9]`.
pub fn body(first: u32, tokens: u32, stream: bool) -> String {
    format!(
        r#"{{"model":"tiny","prompt":[{first},8,9],"max_tokens":{tokens},"temperature":0,"stream":{stream},"return_token_ids":true}}"#
    )
}

/// The tokens that such a request must give.
pub fn expected(first: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|index| crate::fleet::token(first, index)).collect()
}

/// The token ids of a whole answer.
pub fn ids(answer: &Answer) -> Vec<u32> {
    assert_eq!(answer.status(), 200, "{}", answer.text());
    let json = answer.json();
    let ids = json["choices"][0]["token_ids"].as_array().unwrap_or_else(|| panic!("{json}")).clone();
    ids.iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Opens a stream and waits for its first chunk.
pub async fn running_stream(house: &House, first: u32, tokens: u32) -> Client {
    let mut client = house.client().await;
    client.send("POST", "/v1/completions", "", &body(first, tokens, true)).await;
    assert_eq!(client.head().await.unwrap().status, 200);
    assert!(client.chunk().await.unwrap().is_some());
    client
}
