//! The other process: agents and clients.

use std::io::stdin;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use tokio::runtime::Builder;
use tokio::task::JoinSet;

use crate::fleet::{Behaviour, FakeFleet};
use crate::http::Client;
use crate::scenario::{Measured, Scenario};

/// Says the fleet's view, then answers one scenario a line until the input ends.
pub fn run() {
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let fleet = FakeFleet::start(1).await;
        println!("{}", serde_json::to_string(&**fleet.view.borrow()).unwrap());
        let (lines, mut orders) = tokio::sync::mpsc::channel(1);
        std::thread::spawn(move || {
            for line in stdin().lines().map_while(Result::ok) {
                if lines.blocking_send(line).is_err() {
                    return;
                }
            }
        });
        let gateway: SocketAddr = orders.recv().await.unwrap().parse().unwrap();
        while let Some(line) = orders.recv().await {
            let (scenario, seconds) = line.rsplit_once(' ').unwrap();
            let scenario = serde_json::from_str(scenario).unwrap();
            let length = Duration::from_secs_f64(seconds.parse().unwrap());
            let measured = load(&fleet.behaviour, gateway, scenario, length).await;
            println!("{}", serde_json::to_string(&measured).unwrap());
        }
    });
}

async fn load(
    behaviour: &Arc<Behaviour>,
    gateway: SocketAddr,
    scenario: Scenario,
    length: Duration,
) -> Measured {
    let (clients, step, tokens, stream, words) = match scenario {
        Scenario::Stream { clients, step_micros } => (clients, step_micros, 64, true, 8),
        Scenario::Whole { clients } => (clients, 0, 16, false, 8),
        Scenario::FirstToken { words } => (1, 0, 2, true, words),
    };
    behaviour.step_micros.store(step, Relaxed);
    let prompt: String = (0..words).map(|i| format!("word{} of a prompt ", i % 97)).collect();
    let body: Arc<str> = format!(
        r#"{{"model":"tiny","messages":[{{"role":"user","content":"{prompt}"}}],"max_tokens":{tokens},"temperature":0,"stream":{stream}}}"#
    )
    .into();
    let began = Instant::now();
    let end = began + length;
    let mut tasks = JoinSet::new();
    for _ in 0..clients {
        let body = Arc::clone(&body);
        tasks.spawn(async move { client(gateway, &body, end).await });
    }
    let mut firsts: Vec<Duration> = tasks.join_all().await.into_iter().flatten().collect();
    firsts.sort_unstable();
    Measured {
        requests: firsts.len() as u64,
        tokens: firsts.len() as u64 * tokens,
        seconds: began.elapsed().as_secs_f64(),
        first_token_p50_ms: firsts.get(firsts.len() / 2).map_or(0.0, |first| first.as_secs_f64() * 1e3),
    }
}

/// One request after the other on one connection; times to the first bytes of content.
async fn client(gateway: SocketAddr, body: &str, end: Instant) -> Vec<Duration> {
    let mut client = Client::connect(gateway).await;
    let mut firsts = Vec::new();
    while Instant::now() < end {
        let sent = Instant::now();
        client.send("POST", "/v1/chat/completions", "", body).await;
        let head = client.head().await.unwrap();
        assert_eq!(head.status, 200);
        let streams = head.header("content-length").is_none();
        let mut first = None;
        while let Some(chunk) = client.chunk().await.unwrap() {
            // The role's chunk comes before any token.
            if first.is_none() && (!streams || has_content(&chunk)) {
                first = Some(sent.elapsed());
            }
            if !streams {
                break;
            }
        }
        firsts.push(first.unwrap_or_else(|| sent.elapsed()));
    }
    firsts
}

/// Whether a chunk of a stream has text of the answer.
fn has_content(chunk: &[u8]) -> bool {
    let empty = br#""content":"""#;
    let content = br#""content":""#;
    let has = |needle: &[u8]| chunk.windows(needle.len()).filter(|window| *window == needle).count();
    has(content) > has(empty)
}
