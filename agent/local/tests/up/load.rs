//! `deepinfer load` against a running cluster.

use std::fs;

use serde_json::Value;

use crate::harness::{Spec, Up, deepinfer};

fn load(up: &Up, args: &[&str]) -> (bool, Value) {
    let url = format!("http://{}", up.host);
    let output =
        deepinfer().args(["load", "--url", &url, "--json"]).args(args).output().expect("the binary runs");
    let summary = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    (output.status.success(), summary)
}

#[test]
fn a_load_counts_what_it_sent_and_what_came_back() {
    let up = Up::start(&Spec::shipped());
    let args = ["--concurrency", "4", "--requests", "10", "--prompt-tokens", "20", "--output-tokens", "6"];
    let (good, summary) = load(&up, &args);
    assert!(good, "{summary}");
    assert_eq!((summary["requests"].as_u64(), summary["good"].as_u64()), (Some(10), Some(10)));
    assert_eq!((summary["prompt_tokens"].as_u64(), summary["output_tokens"].as_u64()), (Some(200), Some(60)));
    let ms = |field: &str, quantile: &str| summary[field][quantile].as_f64().expect("a number");
    assert!(ms("ttft_ms", "p50") > 0.0 && ms("ttft_ms", "p50") <= ms("ttft_ms", "p99"), "{summary}");
    assert!(ms("request_ms", "p99") >= ms("ttft_ms", "p50"), "{summary}");
    let chat =
        ["--chat", "--concurrency", "2", "--requests", "2", "--prompt-tokens", "5", "--output-tokens", "4"];
    let (good, summary) = load(&up, &chat);
    assert!(good && summary["output_tokens"].as_u64() == Some(8), "{summary}");
}

#[test]
fn traces_are_scaled_to_the_context_and_replayed() {
    let up = Up::start(&Spec::shipped());
    let folder = tempfile::tempdir().expect("a folder");
    let azure = folder.path().join("azure.csv");
    let rows = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,9000,10\n\
                2023-11-16 18:17:04.0319600,3000,12\n2023-11-16 18:17:04.0320000,100,4\n";
    fs::write(&azure, rows).expect("a file");
    let mooncake = folder.path().join("mooncake.jsonl");
    let row = "{\"timestamp\":0,\"input_length\":500,\"output_length\":8,\"hash_ids\":[1]}\n";
    fs::write(&mooncake, row.repeat(3)).expect("a file");
    for (path, format, scale) in [(azure, "azure", "2"), (mooncake, "mooncake", "0.01")] {
        let path = path.to_str().expect("UTF-8");
        let (good, summary) = load(&up, &["--trace", path, "--format", format, "--scale", scale]);
        assert!(good && summary["good"].as_u64() == Some(3), "{format}: {summary}");
    }
}

#[test]
fn a_load_without_a_server_says_so() {
    let output = deepinfer().args(["load", "--url", "http://127.0.0.1:9"]).output().expect("the binary runs");
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("--url"), "{output:?}");
}
