//! What the gateway costs: CPU per streamed token, CPU per whole answer, added time to the first token.
//!
//! The gateway runs in this process; clients and agents (the real frames, canned tokens) in a child, so that the
//! CPU time of this process's threads is the gateway's alone. Figures are CPU time as the kernel counts it, which
//! other load on the machine disturbs little; times to the first token need a quiet machine.
//!
//! ```text
//! cargo bench -p deepinfer-gateway --bench overhead [-- seconds of each scenario, default 4]
//! ```
#![allow(clippy::unwrap_used, reason = "a bench stops at the first surprise")]

#[path = "../../tests/common/mod.rs"]
mod common;
#[path = "../../tests/server/fleet.rs"]
mod fleet;
#[path = "../../tests/server/http.rs"]
mod http;

mod child;
mod scenario;

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use deepinfer_gateway::openai::ModelInfo;
use deepinfer_gateway::server::{GatewayOptions, start};
use deepinfer_protocol::Generation;
use deepinfer_protocol::fleet::FleetView;
use deepinfer_transport::ClusterKey;
use tokio::runtime::Builder;
use tokio::sync::watch;

use self::scenario::{Measured, SCENARIOS, Scenario};

/// Threads of the gateway's runtime.
const WORKERS: usize = 2;

fn main() {
    let words: Vec<String> = std::env::args().collect();
    if words.iter().any(|word| word == "--child") {
        return child::run();
    }
    let seconds = words.iter().find_map(|word| word.parse().ok()).unwrap_or(4.0);
    let mut child =
        Command::new(&words[0]).arg("--child").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut tell = child.stdin.take().unwrap();
    let view: FleetView = serde_json::from_str(&said.next().unwrap().unwrap()).unwrap();

    let runtime = Builder::new_multi_thread().worker_threads(WORKERS).enable_all().build().unwrap();
    let gateway = runtime.block_on(async {
        let tokenizer = common::shipped();
        let model = ModelInfo {
            name: "tiny".to_owned(),
            aliases: Vec::new(),
            context_limit: 8192,
            vocab_size: tokenizer.vocab_size() as u32,
            stop_tokens: vec![1],
            tokenizer,
            default_thinking: false,
            created: 1,
        };
        let key = ClusterKey::new(Generation(1), [9; 32]);
        let options = GatewayOptions::new("gw-0", "127.0.0.1:0".parse().unwrap(), model, key);
        let (views, view) = watch::channel(Arc::new(view));
        let gateway = start(options, view).await.unwrap();
        while !gateway.ready() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        (gateway, views)
    });
    writeln!(tell, "{}", gateway.0.addr()).unwrap();

    println!("{:<44} {:>10} {:>8}   ", "scenario", "measured", "goal");
    let mut order = |scenario: &Scenario, seconds: f64| -> (Measured, Duration) {
        let before = cpu();
        writeln!(tell, "{} {seconds}", serde_json::to_string(scenario).unwrap()).unwrap();
        let line = said.next().unwrap().unwrap();
        (serde_json::from_str(&line).unwrap(), cpu() - before)
    };
    for (name, scenario, goal) in SCENARIOS {
        order(scenario, 0.5);
        let (measured, spent) = order(scenario, seconds);
        println!("{}", report(name, scenario, *goal, &measured, spent));
    }
    drop(tell);
    child.wait().unwrap();
}

fn report(name: &str, scenario: &Scenario, goal: f64, measured: &Measured, spent: Duration) -> String {
    let micros = spent.as_secs_f64() * 1e6;
    let (value, unit) = match scenario {
        Scenario::Stream { .. } => (micros / measured.tokens as f64, "us CPU per token"),
        Scenario::Whole { .. } => (micros / measured.requests as f64, "us CPU per request"),
        Scenario::FirstToken { .. } => {
            (measured.first_token_p50_ms, "ms, p50 of the time to the first token")
        }
    };
    let verdict = if value <= goal { "" } else { "  ABOVE" };
    format!(
        "{name:<44} {value:>10.2} {goal:>8.1}   {unit} ({} requests, {:.0} tokens/s, first token p50 {:.2} ms){verdict}",
        measured.requests,
        measured.tokens as f64 / measured.seconds,
        measured.first_token_p50_ms,
    )
}

/// CPU time of all threads of this process.
fn cpu() -> Duration {
    let threads = std::fs::read_dir("/proc/self/task").expect("this bench reads CPU times from /proc");
    let of = |entry: std::fs::DirEntry| -> u64 {
        // Nanoseconds on a CPU, then two more numbers.
        let text = std::fs::read_to_string(entry.path().join("schedstat")).unwrap_or_default();
        text.split(' ').next().and_then(|word| word.parse().ok()).unwrap_or(0)
    };
    Duration::from_nanos(threads.filter_map(Result::ok).map(of).sum())
}
