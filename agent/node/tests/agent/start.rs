//! Starts that go wrong say which flag is to blame; a start can be watched and stopped.

use std::sync::Mutex;

use deepinfer_agent::{AgentArgs, AgentError, AgentOptions, Progress, start};
use deepinfer_protocol::Span;
use deepinfer_protocol::agent_status::{AgentPhase, DrainState};

use crate::fleet::{DEADLINE, Fleet, args, eventually};

async fn refusal(args: AgentArgs) -> String {
    let fleet = Fleet::new();
    let begun = start(AgentOptions::new(args), fleet.watch(), fleet.key.clone(), |_| {});
    let error = tokio::time::timeout(DEADLINE, begun).await.expect("in time").expect_err("refused");
    error.to_string()
}

#[tokio::test]
async fn a_start_that_cannot_be_names_the_flag() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = format!("--control-listen={}", taken.local_addr().unwrap());
    let text =
        refusal(AgentArgs { control_listen: taken.local_addr().ok(), ..args("prefill", "a", &[]) }).await;
    assert!(text.contains("--control-listen") && text.contains(port.split('=').nth(1).unwrap()), "{text}");
    let missing = AgentArgs { checkpoint: "/nonexistent".into(), ..args("prefill", "a", &[]) };
    let text = refusal(missing).await;
    assert!(text.contains("--checkpoint") && text.contains("/nonexistent"), "{text}");
    let text = refusal(args("decode", "a", &["--context-limit=99999"])).await;
    assert!(text.contains("--context-limit"), "{text}");
    let text = refusal(args("decode", "a", &["--ranks=2", "--extra-slots-per-rank=60"])).await;
    assert!(text.contains("--extra-slots-per-rank"), "{text}");
    let text = refusal(args("prefill", "a", &["--backend=cuda"])).await;
    assert!(text.contains("cuda"), "{text}");
    let text = refusal(args("prefill", "a", &["--kv-tokens=100000000000"])).await;
    assert!(text.contains("kv-tokens") || text.contains("memory"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_tells_its_progress_and_answers_probes_meanwhile() {
    static SEEN: Mutex<Vec<Progress>> = Mutex::new(Vec::new());
    let fleet = Fleet::new();
    let options = AgentOptions::new(args("prefill", "a", &[]));
    let handle = start(options, fleet.watch(), fleet.key.clone(), |p| SEEN.lock().unwrap().push(p)).await;
    let handle = handle.expect("it starts");
    let seen = SEEN.lock().unwrap().clone();
    let loaded = seen.iter().any(|p| matches!(p, Progress::Loading { done, total } if done == total));
    assert!(loaded && matches!(seen.last(), Some(Progress::Warming { .. })), "{seen:?}");
    assert!(handle.readiness().is_ok());
    handle.stop().await;
    let address = handle.control_addr();
    eventually("the port is free again", || std::net::TcpListener::bind(address).is_ok()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_is_stopped_while_it_starts_ends() {
    let mut fleet = Fleet::new();
    fleet.add(args("decode", "a", &["--ranks=2"])).await;
    let agent = fleet.agent("a");
    agent.stop().await;
    assert!(matches!(agent.ready().await, Err(AgentError::Stopped | AgentError::Failed(_)) | Ok(())));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_that_is_asked_for_while_it_starts_is_kept_and_can_be_taken_back() {
    let mut fleet = Fleet::new();
    fleet.add(args("decode", "a", &[])).await;
    fleet.add(args("decode", "b", &[])).await;
    let (kept, undone) = (fleet.agent("a"), fleet.agent("b"));
    assert_eq!(kept.drain(Span::secs(600)).state, DrainState::Drained, "it holds nothing");
    undone.drain(Span::secs(600));
    assert_eq!(undone.undrain().unwrap().state, DrainState::Accepting);
    for agent in [kept, undone] {
        tokio::time::timeout(DEADLINE, agent.ready()).await.expect("in time").unwrap();
    }
    assert_eq!(kept.status().phase, AgentPhase::Drained);
    assert_eq!(kept.readiness(), Err("draining".to_owned()));
    assert_eq!(undone.readiness(), Ok(()));
    fleet.stop().await;
}
