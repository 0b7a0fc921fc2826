//! What goes wrong while the cluster serves: requests resume, and nothing is lost.

use std::fs;
use std::sync::Arc;

use serde_json::json;

use crate::golden::cases;
use crate::harness::{Spec, Up, complete, prompt, until};

/// Runs the recorded prompts at once while `meanwhile` happens; all must give their continuation.
fn serve_through(up: &Up, meanwhile: impl FnOnce()) {
    let host = Arc::new(up.host.clone());
    let threads: Vec<_> = cases()
        .into_iter()
        .map(|case| {
            let host = Arc::clone(&host);
            std::thread::spawn(move || {
                let answer = complete(&host, &case.prompt, case.continuation.len());
                (case, answer)
            })
        })
        .collect();
    meanwhile();
    for thread in threads {
        let (case, answer) = thread.join().expect("no panic");
        let (ids, _) = answer.unwrap_or_else(|error| panic!("{}: {error}\n{}", case.name, up.log()));
        assert_eq!(ids, case.continuation, "{}", case.name);
    }
}

fn spec(ranks: u32) -> Spec {
    let mut spec = Spec::golden(ranks);
    spec.args.push("--fault-injection");
    spec
}

/// Sum of a counter of all agents.
fn counted(up: &Up, field: &str) -> u64 {
    let status = up.status();
    let pods = status["pods"].as_array().expect("pods").iter();
    pods.filter_map(|pod| pod["agent"][field].as_u64()).sum()
}

#[test]
fn an_engine_task_that_panics_is_replaced_and_its_requests_give_the_same_tokens() {
    let up = Up::start(&spec(2));
    up.fault("decode", 0, &json!({"slow_ms": 10}));
    serve_through(&up, || {
        until("requests run", || (up.status()["gateway"]["running"].as_u64() > Some(0)).then_some(()));
        up.fault("decode", 1, &json!("panic_at_next_step"));
    });
    until("the engines are replaced", || (counted(&up, "replacedEngines") > 0).then_some(()));
    up.fault("prefill", 0, &json!("panic_at_next_step"));
    serve_through(&up, || ());
    assert_eq!(counted(&up, "abandonedThreads"), 0);
}

#[test]
fn an_engine_task_that_hangs_is_abandoned_and_its_requests_go_on_elsewhere() {
    let mut spec = spec(1);
    spec.args.push("--hung-step-seconds=1");
    let up = Up::start(&spec);
    up.fault("decode", 0, &json!({"hang_next_step_ms": 60_000}));
    serve_through(&up, || ());
    assert_eq!(counted(&up, "abandonedThreads"), 1, "{}", up.log());
}

#[test]
fn an_agent_that_has_abandoned_three_threads_is_replaced_by_the_planner() {
    let mut spec = spec(1);
    spec.args.push("--hung-step-seconds=1");
    let up = Up::start(&spec);
    let supernode = |up: &Up| up.status()["supernodes"][0]["metadata"]["name"].as_str().map(str::to_owned);
    let first = supernode(&up).expect("a supernode");
    let expected = up.complete(&prompt(1, 30), 12).0;
    for threads in 1..=3 {
        until("the agent serves", || {
            let status = up.status();
            let mut pods = status["pods"].as_array().expect("pods").iter();
            pods.any(|pod| pod["role"] == "decode" && pod["ready"] == true).then_some(())
        });
        up.fault("decode", 0, &json!({"hang_next_step_ms": 60_000}));
        assert_eq!(up.complete(&prompt(1, 30), 12).0, expected, "with {threads} threads abandoned");
    }
    let second = until("another supernode serves", || supernode(&up).filter(|name| *name != first));
    assert_ne!(second, first);
    assert_eq!(up.complete(&prompt(1, 30), 12).0, expected);
    assert!(up.log().contains("SupernodeFailed"), "{}", up.log());
}

#[test]
fn a_state_folder_that_cannot_be_written_stops_nothing_and_is_written_again_later() {
    let up = Up::start(&Spec::shipped());
    // As with a full disk, the next file cannot be made.
    let hindrance = up.state().join("blueprint.json.tmp");
    fs::create_dir(&hindrance).expect("in the way");
    let read = || fs::read_to_string(up.state().join("blueprint.json")).expect("the file before");
    let before = read();
    up.apply(&Spec { prefill: 2, ..Spec::shipped() });
    assert_eq!(up.complete(&prompt(3, 40), 8).0.len(), 8);
    let status = String::from_utf8_lossy(&up.run(&["status"]).stdout).into_owned();
    assert!(status.contains("storage") && status.contains("blueprint.json"), "{status}");
    assert_eq!(read(), before, "the file before is whole");
    assert!(up.log().contains("serving goes on"), "{}", up.log());
    fs::remove_dir(&hindrance).expect("empty");
    until("it is written", || (read() != before).then_some(()));
    until("the status forgets it", || up.status()["storageProblem"].is_null().then_some(()));
}

#[test]
#[cfg(target_os = "linux")]
fn a_log_that_cannot_be_written_stops_nothing() {
    // Every write to it fails as on a full disk.
    let full = fs::OpenOptions::new().write(true).open("/dev/full").expect("Linux has it");
    let folder = Arc::new(tempfile::tempdir().expect("a folder"));
    let up = Up::start_with_log(folder, &Spec::shipped(), &[], full.into());
    assert_eq!(up.complete(&prompt(3, 40), 8).0.len(), 8);
    up.apply(&Spec { prefill: 2, ..Spec::shipped() });
    assert_eq!(up.complete(&prompt(3, 40), 8).0.len(), 8);
    let status = up.run(&["status"]);
    assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stderr));
}
