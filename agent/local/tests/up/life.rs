//! From the start to the end of a cluster.

use std::process::Command;
use std::sync::Arc;

use serde_json::{Value, json};

use crate::harness::{Spec, Up, complete, deepinfer, prompt, until};
use crate::http;

#[test]
fn the_printed_curl_line_answers_and_the_status_is_what_kubectl_would_show() {
    let mut up = Up::start(&Spec { ranks: 2, ..Spec::shipped() });
    let curl = up.greeting.lines().find(|line| line.starts_with("curl ")).expect("a curl line").to_owned();
    match Command::new("sh").args(["-c", &curl]).output() {
        Ok(output) if output.status.code() != Some(127) => {
            let answer: Value = serde_json::from_slice(&output.stdout).expect("JSON");
            assert_eq!(
                answer["choices"][0]["message"]["content"], "The capital of France is Paris.",
                "{curl}"
            );
        }
        _ => println!("there is no curl on this machine"),
    }
    let output = up.run(&["status"]);
    let text = String::from_utf8_lossy(&output.stdout);
    let head = text.lines().next().expect("a line");
    for column in ["NAME", "READY", "PREFILL", "DECODE", "REASON", "REVISION", "AGE"] {
        assert!(head.contains(column), "{head}");
    }
    let row = text.lines().nth(1).expect("a row");
    assert!(
        row.starts_with("test") && row.contains("True") && row.contains("1/1") && row.contains("Serving"),
        "{row}"
    );
    let output = up.run(&["status", "test", "-o", "json"]);
    let status: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(status["cluster"]["status"]["phase"], "Serving");
    assert_eq!(status["url"], format!("http://{}", up.host));
    assert_eq!(status["pods"].as_array().map(Vec::len), Some(3));
    assert_eq!(status["supernodes"][0]["spec"]["acceleratorsPerNode"], 2);
    let output = up.run(&["status", "-o", "yaml"]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("phase: Serving"));

    up.signal("INT");
    assert!(up.end().success());
    let output = up.run(&["status", "test"]);
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stdout).contains("does not run"));
}

#[test]
fn metrics_of_the_gateway_and_of_every_agent_are_one_exposition() {
    let up = Up::start(&Spec::shipped());
    up.complete(&prompt(1, 30), 8);
    let text = up.get("/metrics").body;
    for name in [
        "deepinfer_requests_running",
        "deepinfer_requests_waiting",
        "deepinfer_kv_blocks_used",
        "deepinfer_kv_blocks_total",
        "deepinfer_prompt_tokens_total",
        "deepinfer_cached_tokens_total",
        "deepinfer_generated_tokens_total",
        "deepinfer_queue_seconds",
        "deepinfer_kv_utilization_ratio",
        "deepinfer_decode_slots_used_ratio",
        "deepinfer_prefill_backlog_seconds",
    ] {
        let samples = text.lines().filter(|line| line.starts_with(name)).count();
        assert!(samples > 0, "{name} in {text}");
    }
    // Nothing runs any more; a running sequence shows.
    let value = |text: &str, name: &str| -> f64 {
        let lines = text.lines().filter(|line| line.starts_with(name));
        lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    };
    assert_eq!(value(&text, "deepinfer_decode_slots_used_ratio"), 0.0);
    let host = up.host.clone();
    let running = std::thread::spawn(move || complete(&host, &prompt(2, 30), 1500));
    until("a slot and blocks are in use", || {
        let text = up.get("/metrics").body;
        let used = ["deepinfer_decode_slots_used_ratio", "deepinfer_kv_utilization_ratio"];
        used.iter().all(|name| value(&text, name) > 0.0).then_some(())
    });
    assert_eq!(running.join().expect("no panic").expect("an answer").0.len(), 1500);
    let pods = |role: &str| text.lines().any(|line| line.contains(&format!("pod=\"test-{role}")));
    assert!(pods("prefill") && pods("decode") && pods("gateway"), "{text}");
    assert_eq!(text.matches("# EOF").count(), 1);
    let families: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
    let mut distinct = families.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), families.len(), "each family is described once");
}

#[test]
fn a_second_up_is_refused_and_a_killed_one_leaves_nothing_that_hinders_the_next() {
    let mut up = Up::start(&Spec::shipped());
    let file = up.folder.path().join("c.yaml");
    let second = up.run(&["up", "--listen", "127.0.0.1:0", "-f", file.to_str().expect("UTF-8")]);
    assert_eq!(second.status.code(), Some(1));
    let error = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(
        error.contains(&up.pid().to_string()) && error.contains(up.state().to_str().expect("UTF-8")),
        "{error}"
    );

    let generation = |up: &Up| {
        let text = std::fs::read_to_string(up.state().join("blueprint.json")).expect("a blueprint");
        let blueprint: Value = serde_json::from_str(&text).expect("JSON");
        (
            blueprint["generation"].as_u64().expect("a number"),
            blueprint["decodeEpoch"].as_u64().expect("a number"),
        )
    };
    let before = generation(&up);
    // A client in the middle of a stream sees its connection close.
    let body = json!({"model": "tiny", "prompt": prompt(1, 20), "max_tokens": 3000, "stream": true, "ignore_eos": true});
    let mut stream =
        http::open(&up.host, "POST", "/v1/completions", "", &body.to_string()).expect("a response");
    http::head(&mut stream).expect("a head");
    http::chunk(&mut stream).expect("a first chunk");
    up.signal("KILL");
    up.end();
    while let Ok(Some(_)) = http::chunk(&mut stream) {}

    let up = Up::start_in(Arc::clone(&up.folder), &Spec::shipped(), &[]);
    assert_eq!(up.complete(&prompt(1, 20), 5).0.len(), 5);
    let after = generation(&up);
    assert!(after.0 > before.0 && after.1 > before.1, "generations and epochs go on: {before:?} {after:?}");
}

#[test]
fn an_interrupt_lets_the_stream_finish_and_takes_no_new_request() {
    let mut up = Up::start(&Spec { args: vec!["--fault-injection"], ..Spec::shipped() });
    // Slow enough that the stream is still running when the signal comes.
    up.fault("decode", 0, &json!({"slow_ms": 20}));
    let body = json!({"model": "tiny", "prompt": prompt(1, 20), "max_tokens": 100, "stream": true, "ignore_eos": true});
    let mut stream =
        http::open(&up.host, "POST", "/v1/completions", "", &body.to_string()).expect("a response");
    assert_eq!(http::head(&mut stream).expect("a head").0, 200);
    http::chunk(&mut stream).expect("a first chunk");
    up.signal("INT");
    until("new requests are refused", || {
        match up.post("/v1/completions", &json!({"model": "tiny", "prompt": [30]})) {
            Ok(response) => (response.status == 503).then_some(()),
            Err(_) => Some(()),
        }
    });
    let mut text = String::new();
    while let Some(chunk) = http::chunk(&mut stream).expect("the stream goes on") {
        text.push_str(&String::from_utf8_lossy(&chunk));
    }
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    assert!(up.end().success(), "{}", up.log());
}

#[test]
fn a_second_interrupt_does_not_wait() {
    let mut up = Up::start(&Spec { args: vec!["--fault-injection"], ..Spec::shipped() });
    up.fault("decode", 0, &json!({"slow_ms": 300}));
    let body = json!({"model": "tiny", "prompt": prompt(1, 20), "max_tokens": 3000, "stream": true, "ignore_eos": true});
    let mut stream =
        http::open(&up.host, "POST", "/v1/completions", "", &body.to_string()).expect("a response");
    http::head(&mut stream).expect("a head");
    http::chunk(&mut stream).expect("a first chunk");
    up.signal("INT");
    until("it says so", || up.log().contains("Ctrl-C again stops at once").then_some(()));
    up.signal("INT");
    assert!(up.end().success(), "the 3000 tokens would have taken a quarter of an hour");
}

#[test]
fn logs_are_json_lines_when_asked_for_and_never_hold_a_prompt() {
    let folder = Arc::new(tempfile::tempdir().expect("a folder"));
    let mut up = Up::start_in(folder, &Spec::shipped(), &["--log", "json", "--log-level", "debug"]);
    let canary = "zanzibarquux";
    let body = json!({"model": "tiny", "messages": [{"role": "user", "content": canary}], "max_tokens": 4});
    assert_eq!(up.post("/v1/chat/completions", &body).expect("a response").status, 200);
    up.signal("TERM");
    assert!(up.end().success());
    let log = up.log();
    let lines: Vec<&str> = log.lines().filter(|line| line.starts_with('{')).collect();
    assert!(lines.iter().any(|line| line.contains("gateway")), "{log}");
    for line in lines {
        let event: Value = serde_json::from_str(line).expect("a JSON line");
        assert!(event["level"].is_string() && event["timestamp"].is_string(), "{line}");
    }
    assert!(!log.contains(canary));
}

#[test]
fn status_without_a_cluster_says_how_to_start_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = deepinfer().args(["status", "--state-dir"]).arg(folder.path()).output().expect("runs");
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("deepinfer up -f"), "{output:?}");
}
