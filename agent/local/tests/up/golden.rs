//! Greedy output through HTTP equals what the oracle recorded.

use std::fs;
use std::sync::Arc;

use serde_json::{Value, json};

use crate::harness::{Spec, Up, complete, prompt, root};

/// A prompt of the oracle and what greedy decoding goes on with.
pub struct Case {
    pub name: String,
    pub prompt: Vec<u32>,
    pub continuation: Vec<u32>,
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().expect("ids").iter();
    ids.map(|id| u32::try_from(id.as_u64().expect("an id")).expect("an id")).collect()
}

fn read(path: &str) -> Value {
    let text = fs::read_to_string(root().join(path)).expect("a fixture").replace("Infinity", "null");
    serde_json::from_str(&text).expect("JSON")
}

/// All recorded cases of the golden model in float32.
pub fn cases() -> Vec<Case> {
    let continuations = read("e2e/golden/continuations.json");
    let mut cases: Vec<Case> = continuations["cases"]
        .as_array()
        .expect("cases")
        .iter()
        .map(|case| Case {
            name: case["name"].as_str().expect("a name").to_owned(),
            prompt: ids(&case["prompt"]),
            continuation: ids(&case["continuation"]),
        })
        .collect();
    let manifest = read("e2e/golden/vectors/manifest.json");
    for entry in manifest.as_array().expect("entries") {
        if entry["kind"] == "greedy_decode" && entry["checkpoint"] == "tiny-bf16" {
            let (prompt, continuation) = (ids(&entry["tokens"]), ids(&entry["generated"]));
            cases.push(Case { name: "greedy_decode".to_owned(), prompt, continuation });
        }
    }
    assert!(cases.len() >= 4, "{} cases", cases.len());
    cases
}

/// Each case twice: without cache, and with what the first left.
#[track_caller]
fn follow(up: &Up) {
    for case in cases() {
        let mut cached = Vec::new();
        for _ in 0..2 {
            let (ids, hit) = up.complete(&case.prompt, case.continuation.len());
            assert_eq!(ids, case.continuation, "{} with {hit} cached tokens", case.name);
            cached.push(hit);
        }
        if case.prompt.len() >= 600 {
            assert!(cached[1] > 0, "{}: {cached:?} of {} tokens", case.name, case.prompt.len());
        }
    }
}

#[test]
fn one_rank_gives_the_golden_continuations_also_with_a_prefix_hit() {
    let up = Up::start(&Spec::golden(1));
    follow(&up);
}

#[test]
fn four_ranks_give_the_golden_continuations_also_with_a_prefix_hit() {
    let up = Up::start(&Spec::golden(4));
    follow(&up);
    let status = up.status();
    assert_eq!(status["supernodes"][0]["spec"]["acceleratorsPerNode"], 4);
}

#[test]
fn small_chunks_and_few_blocks_change_no_token() {
    let mut spec = Spec::golden(2);
    spec.args.extend(["--kv-tokens=1536", "--max-rows=160"]);
    let up = Up::start(&spec);
    // All at once: more than the cache holds, so somebody waits or is moved.
    let host = Arc::new(up.host.clone());
    let threads: Vec<_> = (0..3)
        .flat_map(|_| cases())
        .map(|case| {
            let host = Arc::clone(&host);
            std::thread::spawn(move || {
                let answer = complete(&host, &case.prompt, case.continuation.len());
                (case, answer)
            })
        })
        .collect();
    for thread in threads {
        let (case, answer) = thread.join().expect("no panic");
        assert_eq!(answer.expect("an answer").0, case.continuation, "{}", case.name);
    }
}

#[test]
fn a_sequence_that_is_preempted_goes_on_with_the_same_tokens() {
    let mut spec = Spec::golden(1);
    // Two of 1,160 tokens at the end begin in a cache of 1,280 (each asks for 512 tokens of growth); one must give way.
    spec.args.extend(["--kv-tokens=1280"]);
    let up = Up::start(&spec);
    let (length, tokens) = (60, 1100);
    let alone: Vec<Vec<u32>> = (0..3).map(|n| up.complete(&prompt(n, length), tokens).0).collect();
    let threads: Vec<_> = (0..3_u32)
        .map(|n| {
            let host = up.host.clone();
            std::thread::spawn(move || complete(&host, &prompt(n, length), tokens))
        })
        .collect();
    for (thread, alone) in threads.into_iter().zip(alone) {
        assert_eq!(thread.join().expect("no panic").expect("an answer").0, alone);
    }
    let text = up.get("/metrics").body;
    let preempted = text.lines().filter(|line| line.starts_with("deepinfer_engine_preemptions_total"));
    let preempted: f64 = preempted.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum();
    assert!(preempted > 0.0, "{text}");
}

#[test]
fn a_tokenizer_without_the_tokens_of_the_recipe_serves_completions_and_names_them_in_chat() {
    let up = Up::start(&Spec::golden(1));
    assert!(up.greeting.contains("/v1/completions"), "the printed line is one that works: {}", up.greeting);
    let body = json!({"model": "tiny", "messages": [{"role": "user", "content": "a"}]});
    let response = up.post("/v1/chat/completions", &body).expect("a response");
    assert_eq!(response.status, 400, "{}", response.body);
    assert!(response.body.contains("tokenizer"), "{}", response.body);
}
