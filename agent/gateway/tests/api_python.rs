//! The official `openai` client for Python against the scripted core.
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod common;
mod scripted;

use std::path::Path;
use std::process::Command;

use common::{repository, shipped};
use deepinfer_gateway::core::StreamEvent;
use deepinfer_protocol::generate::FinishReason;
use deepinfer_serving::gateway::{EndedEarly, NewRequest};
use scripted::*;

/// Says hello; knows the words that the script's scripted checks use.
fn script(request: &NewRequest) -> Vec<StreamEvent> {
    // Only the last question counts: the format's own text mentions words too.
    let text = shipped().decode(&request.prompt, true);
    let question = &text[text.len().saturating_sub(40)..];
    let mark = "⟨｜DSML｜⟩";
    if question.contains("weather?") {
        let call = format!(
            "\n\n<{mark} calls>\n<{mark} invoke name=\"weather\">\n<{mark} parameter name=\"city\" string=\"true\">Rome\
             </{mark} parameter>\n</{mark} invoke>\n</{mark} calls>"
        );
        return answer(&ids(&call));
    }
    if question.contains("fail.") {
        let detail = "the engine was lost three times".to_owned();
        return vec![tokens(&ids("so far")), StreamEvent::Ended(EndedEarly::Failed { detail })];
    }
    if question.contains("endless") {
        return vec![tokens(&ids("on and on ")); 100_000];
    }
    let words = ids("Hello from the script, 世界.");
    let limit = request.spec.max_tokens as usize;
    let listed = |ids: &[u32]| ids.iter().map(|id| likely(*id, -0.5, &[(*id, -0.5)])).collect::<Vec<_>>();
    if words.len() < limit {
        let mut events: Vec<_> = listed(&words)
            .into_iter()
            .map(|t| StreamEvent::Tokens { tokens: vec![t], finish: None })
            .collect();
        events.push(last(&[1], FinishReason::Stop));
        return events;
    }
    vec![StreamEvent::Tokens { tokens: listed(&words[..limit]), finish: Some(FinishReason::Length) }]
}

/// A Python with the client, made on first use.
fn python() -> std::path::PathBuf {
    let home = Path::new(env!("CARGO_TARGET_TMPDIR")).join("openai-client");
    let python = home.join("bin/python");
    let has_client = |python: &Path| {
        Command::new(python)
            .args(["-c", "import openai"])
            .output()
            .is_ok_and(|output| output.status.success())
    };
    if !has_client(&python) {
        let run = |command: &mut Command| assert!(command.status().unwrap().success(), "{command:?}");
        run(Command::new("python3").args(["-m", "venv"]).arg(&home));
        let requirements = repository("agent/gateway/tests/python/requirements.txt");
        run(Command::new(&python).args(["-m", "pip", "install", "--quiet", "-r"]).arg(requirements));
    }
    python
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "installs the openai package; run with --ignored"]
async fn the_official_client_streams_calls_tools_and_reads_errors() {
    let server = serve(script).await;
    let url = format!("http://{}/v1", server.address);
    let output = tokio::task::spawn_blocking(move || {
        Command::new(python())
            .arg(repository("agent/gateway/tests/python/conformance.py"))
            .args(["--base-url", &url, "--model", "tiny", "--scripted"])
            .output()
            .unwrap()
    })
    .await
    .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.ends_with("all passed\n"), "{said}");
}
