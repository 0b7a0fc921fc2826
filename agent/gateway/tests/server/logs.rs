//! What the logs say: one line for each request, with its names, and neither prompts nor keys (SV-113).
//!
//! Everything is in one test: the subscriber is the process's.

use std::io::Write;
use std::sync::{Arc, Mutex};

use tracing_subscriber::fmt::MakeWriter;

use crate::fleet::FakeFleet;
use crate::setup::House;

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// SV-113.
#[tokio::test(flavor = "multi_thread")]
async fn with_every_log_level_on_no_prompt_and_no_key_is_written_anywhere() {
    let log = Log::default();
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_ansi(false)
        .with_writer(log.clone())
        .init();
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys.yaml");
    std::fs::write(&keys, "alpha: canary-key-alpha\n").unwrap();
    let house = House::with(FakeFleet::start(1).await, |o| o.api_keys = Some(keys.clone())).await;
    let good = "authorization: Bearer canary-key-alpha\r\nx-request-id: trace-me\r\n";
    let prompt = r#"{"model":"tiny","prompt":"canary prompt","max_tokens":4}"#;
    let mut bodies = String::new();
    for (headers, body, status) in [
        (good, prompt, 200),
        (good, r#"{"model":"tiny","prompt":"canary prompt","temperature":"canary"}"#, 400),
        (good, r#"{"model":"tiny","prompt":"canary prompt" canary"#, 400),
        ("authorization: Bearer canary-key-wrong\r\n", prompt, 401),
        ("x-api-key: canary-key-alpha\r\n", prompt, 200),
    ] {
        let mut client = house.client().await;
        client.send("POST", "/v1/completions", headers, body).await;
        let answer = client.answer().await.unwrap();
        assert_eq!(answer.status(), status, "{}", answer.text());
        if status != 200 {
            bodies.push_str(&answer.text());
        }
    }
    std::fs::write(&keys, "alpha: [canary-key-broken").unwrap();
    let written = || String::from_utf8_lossy(&log.0.lock().unwrap()).into_owned();
    crate::setup::until("the broken file is reported", || written().contains("stay in force")).await;
    house.idle().await;
    let (log, metrics) = (written(), house.gateway.metrics_text());
    for (place, text) in [("logs", &log), ("errors", &bodies), ("metrics", &metrics)] {
        if let Some(at) = text.find("canary") {
            panic!("in the {place}: {}", &text[at.saturating_sub(300)..(at + 100).min(text.len())]);
        }
    }
    let line = log.lines().find(|line| line.contains("trace-me") && line.contains("result=\"finished\""));
    let line = line.unwrap_or_else(|| panic!("no line for the request in\n{log}"));
    assert!(line.contains("tenant=\"alpha\"") && line.contains("tokens=4"), "{line}");
}
