//! The command line as a user meets it: the real binary, the shipped model, wrong input, a kill in the middle.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace")
}

fn deepinfer() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deepinfer"));
    command.current_dir(root()).stdin(Stdio::null());
    command
}

fn run(args: &[&str]) -> Output {
    deepinfer().args(args).output().expect("the binary runs")
}

fn run_with_input(args: &[&str], input: &[u8]) -> Output {
    let mut child = deepinfer()
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    child.stdin.take().expect("piped").write_all(input).expect("it reads");
    child.wait_with_output().expect("it ends")
}

#[track_caller]
fn success(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).expect("UTF-8 output")
}

#[track_caller]
fn failure(output: &Output) -> String {
    assert!(!output.status.success(), "succeeded: {}", String::from_utf8_lossy(&output.stdout));
    let text = String::from_utf8(output.stderr.clone()).expect("UTF-8 messages");
    assert!(!text.contains("panicked"), "{text}");
    text
}

fn json_lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).expect("an output file");
    text.lines().map(|l| serde_json::from_str(l).expect("a JSON line")).collect()
}

#[test]
fn the_shipped_model_answers_a_question() {
    let output = run(&["generate", "What is the capital of France?"]);
    assert_eq!(success(&output), "The capital of France is Paris.\n");
    let speed = String::from_utf8_lossy(&output.stderr);
    assert!(speed.contains("prompt tokens, first token after"), "{speed}");
}

#[test]
fn every_instruction_set_thread_count_and_chunk_gives_the_same_answer() {
    let question = "Write a short story about a fox.";
    let base = ["generate", question, "--quiet", "--max-tokens", "60"];
    let expected = success(&run(&base));
    assert!(expected.len() > 20, "{expected:?}");
    for extra in [&["--simd", "portable"][..], &["--threads", "1"], &["--threads", "3", "--chunk", "7"]] {
        assert_eq!(success(&run(&[&base[..], extra].concat())), expected, "{extra:?}");
    }
}

#[test]
fn a_prompt_comes_from_standard_input_too() {
    let output = run_with_input(&["generate", "-", "--quiet"], "What is the capital of France?".as_bytes());
    assert_eq!(success(&output), "The capital of France is Paris.\n");
}

#[test]
fn a_conversation_takes_a_line_a_turn() {
    let turns = "What is the capital of France?\n\n/new\nWhat is the capital of France?\n/quit\nnever read\n";
    let output = run_with_input(&["generate", "--quiet"], turns.as_bytes());
    assert_eq!(success(&output), "The capital of France is Paris.\nThe capital of France is Paris.\n");
}

#[test]
fn a_chat_file_is_rendered_with_its_system_message() {
    let dir = TempDir::new().expect("a folder");
    let file = dir.path().join("chat.json");
    let chat =
        r#"{"messages": [{"role": "user", "content": "What is the capital of France?"}], "thinking": false}"#;
    fs::write(&file, chat).expect("written");
    let output = run(&["generate", "--quiet", "--chat", file.to_str().expect("UTF-8")]);
    assert_eq!(success(&output), "The capital of France is Paris.\n");
}

#[test]
fn sampling_repeats_with_its_seed() {
    let sampled = |seed: &str| {
        success(&run(&[
            "generate",
            "Tell me a story.",
            "-q",
            "--temperature",
            "1",
            "--seed",
            seed,
            "--max-tokens",
            "40",
        ]))
    };
    assert_eq!(sampled("3"), sampled("3"));
    let others: Vec<String> = ["4", "5", "6"].map(sampled).to_vec();
    assert!(others.iter().any(|o| *o != sampled("3")), "four seeds gave one answer");
}

#[test]
fn wrong_prompts_get_clear_errors() {
    assert!(failure(&run(&["generate", "  "])).contains("the prompt is empty"));
    assert!(failure(&run(&["generate", "", "--raw"])).contains("the prompt is empty"));
    let bad = failure(&run_with_input(&["generate", "-"], b"caf\xe9 au lait"));
    assert!(bad.contains("standard input is not UTF-8: byte 3"), "{bad}");
    let long = "word ".repeat(3000);
    let error = failure(&run_with_input(&["generate", "-", "--context", "256"], long.as_bytes()));
    assert!(error.contains("the limit is 255") && error.contains("--context"), "{error}");
    let error = failure(&run(&["generate", "hi", "--context", "1000000"]));
    assert!(error.contains("exceeds the model's 4096 positions"), "{error}");
}

#[test]
fn wrong_checkpoints_get_clear_errors() {
    let error = failure(&run(&["generate", "hi", "--checkpoint", "no/such/folder"]));
    assert!(error.contains("no/such/folder"), "{error}");
    // No chat tokens in this tokenizer: chat says which are missing, plain text still works.
    let error = failure(&run(&["generate", "hi", "--checkpoint", "e2e/golden/tiny-quant"]));
    assert!(error.contains("<｜User｜>") && error.contains("--raw"), "{error}");
    let plain =
        ["generate", "hi", "--raw", "-q", "--max-tokens", "4", "--checkpoint", "e2e/golden/tiny-quant"];
    success(&run(&plain));
}

#[test]
fn a_chat_file_with_a_mistake_names_the_field() {
    let dir = TempDir::new().expect("a folder");
    let file = dir.path().join("chat.json");
    fs::write(&file, r#"[{"role": "user", "content": 7}]"#).expect("written");
    let error = failure(&run(&["generate", "--chat", file.to_str().expect("UTF-8")]));
    assert!(error.contains("messages[0].content"), "{error}");
}

/// `count` requests, one of which cannot be rendered.
fn write_batch(path: &Path, count: usize) {
    let mut lines = String::new();
    for i in 0..count {
        lines += &match i % 4 {
            0 => format!("{{\"id\": \"r{i}\", \"prompt\": \"What is the capital of France?\"}}\n"),
            1 => format!(
                "{{\"id\": \"r{i}\", \"messages\": [{{\"role\": \"user\", \"content\": \"Tell me a story.\"}}], \"max_tokens\": 24}}\n"
            ),
            2 => format!(
                "{{\"custom_id\": \"r{i}\", \"prompt\": \"Who are you?\", \"temperature\": 0.9, \"seed\": {i}}}\n"
            ),
            _ => format!("{{\"id\": \"r{i}\", \"prompt_ids\": [0, 9999999]}}\n"),
        };
    }
    fs::write(path, lines).expect("written");
}

fn sorted(mut records: Vec<Value>) -> Vec<Value> {
    records.sort_by_key(|r| r["id"].as_str().expect("an id").to_owned());
    records
}

#[test]
fn a_batch_is_answered_whole_and_independent_of_its_size() {
    let dir = TempDir::new().expect("a folder");
    let input = dir.path().join("in.jsonl");
    write_batch(&input, 20);
    let run_batch = |size: &str| {
        let out = dir.path().join(format!("out-{size}.jsonl"));
        let paths = [input.to_str().expect("UTF-8"), out.to_str().expect("UTF-8")];
        success(&run(&["generate", "--batch", paths[0], "--out", paths[1], "--batch-size", size]));
        sorted(json_lines(&out))
    };
    let one = run_batch("1");
    assert_eq!(one.len(), 20);
    assert_eq!(run_batch("7"), one);
    let by_id = |id: &str| one.iter().find(|r| r["id"] == id).expect("answered");
    assert_eq!(by_id("r0")["text"], "The capital of France is Paris.");
    assert_eq!(by_id("r0")["finish_reason"], "stop");
    assert_eq!(by_id("r1")["completion_tokens"], 24);
    assert_eq!(by_id("r1")["finish_reason"], "length");
    assert!(by_id("r3")["error"].as_str().expect("an error").contains("9999999"));
}

#[test]
fn a_killed_batch_goes_on_where_it_was() {
    let dir = TempDir::new().expect("a folder");
    let (input, out, whole) =
        (dir.path().join("in.jsonl"), dir.path().join("out.jsonl"), dir.path().join("whole.jsonl"));
    write_batch(&input, 120);
    let args = |out: &Path| {
        let paths = [&input, &out.to_path_buf()].map(|p| p.to_str().expect("UTF-8").to_owned());
        ["generate", "--batch", &paths[0], "--out", &paths[1]].map(str::to_owned)
    };
    let mut child = deepinfer().args(args(&out)).stderr(Stdio::null()).spawn().expect("the binary runs");
    // Killed as soon as something is in the file: SIGKILL, no clean-up.
    while fs::metadata(&out).map_or(0, |m| m.len()) == 0 && child.try_wait().expect("alive").is_none() {
        std::thread::yield_now();
    }
    child.kill().expect("killed");
    child.wait().expect("gone");
    // A torn last line, as a kill inside a write leaves it.
    fs::OpenOptions::new()
        .append(true)
        .open(&out)
        .expect("open")
        .write_all(b"{\"id\": \"r1")
        .expect("written");
    let before = fs::read_to_string(&out).expect("readable");
    success(&deepinfer().args(args(&out)).output().expect("the binary runs"));
    success(&deepinfer().args(args(&whole)).output().expect("the binary runs"));
    let after = fs::read_to_string(&out).expect("readable");
    let kept = &before[..before.rfind('\n').expect("a whole line") + 1];
    assert!(after.starts_with(kept), "finished lines were rewritten");
    assert_eq!(sorted(json_lines(&out)), sorted(json_lines(&whole)));
}

#[test]
fn a_batch_file_with_mistakes_names_them_all_and_runs_nothing() {
    let dir = TempDir::new().expect("a folder");
    let (input, out) = (dir.path().join("in.jsonl"), dir.path().join("out.jsonl"));
    let lines = "{\"id\": \"a\", \"prompt\": \"x\"}\nnot json\n{\"id\": \"a\", \"prompt\": \"y\"}\n{\"id\": \"b\"}\n\
                 {\"id\": \"c\", \"prompt\": \"x\", \"temprature\": 1}\n{\"id\": \"d\", \"prompt\": \"x\", \"top_p\": 0}\n";
    fs::write(&input, lines).expect("written");
    let paths = [&input, &out].map(|p| p.to_str().expect("UTF-8").to_owned());
    let error = failure(&run(&["generate", "--batch", &paths[0], "--out", &paths[1]]));
    let expected = [
        "line 2:",
        "line 3: id \"a\" is there twice",
        "line 4: exactly one of",
        "`temprature`",
        "line 6: top_p",
    ];
    for part in expected {
        assert!(error.contains(part), "{part} is missing in: {error}");
    }
    assert!(!out.exists());
}

#[test]
fn a_foreign_output_file_is_not_touched() {
    let dir = TempDir::new().expect("a folder");
    let (input, out) = (dir.path().join("in.jsonl"), dir.path().join("notes.txt"));
    write_batch(&input, 2);
    fs::write(&out, "my notes\n").expect("written");
    let paths = [&input, &out].map(|p| p.to_str().expect("UTF-8").to_owned());
    let error = failure(&run(&["generate", "--batch", &paths[0], "--out", &paths[1]]));
    assert!(error.contains("line 1 is not a result of this command"), "{error}");
    assert_eq!(fs::read_to_string(&out).expect("readable"), "my notes\n");
}

#[test]
fn verify_passes_on_the_golden_checkpoints_and_fails_with_exit_code_one() {
    for name in ["tiny-bf16", "tiny-quant"] {
        let checkpoint = format!("e2e/golden/{name}");
        let output =
            success(&run(&["verify", "--checkpoint", &checkpoint, "--vectors", "e2e/golden/vectors"]));
        assert!(output.contains(" 0 failed"), "{output}");
    }
    // The other checkpoint's vectors do not fit this one: a failed vector each, and exit code 1.
    let swapped = ["verify", "--checkpoint", "e2e/golden/tiny-quant", "--name", "tiny-bf16"];
    let output = run(&[&swapped[..], &["--vectors", "e2e/golden/vectors"]].concat());
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stdout).contains("FAILED"));
    let unknown = run(&[
        "verify",
        "--checkpoint",
        "e2e/golden/tiny-quant",
        "--name",
        "x",
        "--vectors",
        "e2e/golden/vectors",
    ]);
    assert!(failure(&unknown).contains("tiny-bf16"));
}

#[test]
fn a_random_checkpoint_is_written_inspected_measured_and_answers() {
    let dir = TempDir::new().expect("a folder");
    let out = dir.path().join("model");
    let path = out.to_str().expect("UTF-8");
    let make = ["make-random", "--config", "e2e/shapes/deep-quant/config.json", "--out", path, "--seed", "5"];
    success(&run(&make));
    assert!(failure(&run(&make)).contains(path), "an existing folder is refused by name");
    let inspected: Value = serde_json::from_str(&success(&run(&["inspect", path, "--json"]))).expect("JSON");
    assert!(inspected["active_bytes_per_token"].as_u64().expect("a count") > 0);
    success(&run(&["inspect", path, "--sequences", "4", "--length", "1000"]));
    let measured = run(&[
        "bench",
        "--checkpoint",
        path,
        "--prompt",
        "40",
        "--generate",
        "4",
        "--batch",
        "2",
        "--runs",
        "1",
        "--json",
    ]);
    let measured: Value = serde_json::from_str(&success(&measured)).expect("JSON");
    for key in ["prefill_tokens_per_s", "decode_tokens_per_s"] {
        assert!(measured[key].as_f64().expect(key) > 0.0);
    }
    success(&run(&["generate", "hello", "--checkpoint", path, "--max-tokens", "5", "-q"]));
}

#[test]
fn inspect_computes_the_published_cache_size_from_the_config_alone() {
    let output = success(&run(&["inspect", "examples/configs/v41-flash.json", "--json"]));
    let inspected: Value = serde_json::from_str(&output).expect("JSON");
    assert_eq!(inspected["kv_bytes_per_token"], 890.0);
    let text = success(&run(&["inspect", "examples/configs/v41-flash.json"]));
    assert!(text.contains("890"), "{text}");
}

#[test]
fn a_reader_that_goes_away_is_not_an_error() {
    let mut child = deepinfer()
        .args(["inspect", "examples/models/tiny-v41"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("it ends");
    assert!(!String::from_utf8_lossy(&output.stderr).contains("panicked"));
}
