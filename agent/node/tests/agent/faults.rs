//! Engines that panic or hang: requests resume, nothing is lost or said twice, the agent lives.

use std::time::Duration;

use deepinfer_protocol::agent_status::AgentPhase;

use crate::control::Client;
use crate::edge::Edge;
use crate::fleet::{DEADLINE, Fleet, args, eventually};
use crate::oracle::{alone, prompt, spec};

async fn a_panic_in_decode(decode: &[&str], rank: usize) {
    let fleet = Fleet::pair(&[], decode).await;
    let mut edge = Edge::new(&fleet);
    let wanted: Vec<_> = (0..3).map(|i| (prompt(150 + 31 * i, i as u32), spec(60))).collect();
    let ids: Vec<_> = wanted.iter().map(|(prompt, spec)| edge.submit(prompt, spec.clone())).collect();
    edge.reach(ids[0], 5).await;
    let client = Client::new(&fleet, "sn-0-0");
    let fault = format!("{{\"rank\":{rank},\"fault\":\"panic_at_next_step\"}}");
    assert_eq!(client.post("/v1/fault", &fault).await.0, 202);
    let agent = fleet.agent("sn-0-0");
    edge.until("the engine is lost", |_| !agent.status().accepting || agent.status().replaced_engines > 0)
        .await;
    edge.finish(&ids).await;
    for (id, (prompt, spec)) in ids.iter().zip(&wanted) {
        assert_eq!(edge.records[id].ids(), alone(prompt, spec));
    }
    let status = agent.status();
    assert_eq!(status.replaced_engines, u32::from(status.ranks));
    assert_eq!((status.abandoned_threads, status.phase), (0, AgentPhase::Serving));
    fleet.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_resume_after_the_engine_of_the_only_rank_panicked() {
    a_panic_in_decode(&[], 0).await;
}

/// SV-098: a panic of one rank ends the step on all, and the requests are tried again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_of_one_rank_replaces_the_engines_of_all() {
    a_panic_in_decode(&["--ranks=3"], 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_whose_worker_panicked_is_prefilled_again() {
    let fleet = Fleet::pair(&[], &[]).await;
    let mut edge = Edge::new(&fleet);
    let client = Client::new(&fleet, "p-0");
    assert_eq!(client.post("/v1/fault", "{\"fault\":\"panic_at_next_step\"}").await.0, 202);
    let text = prompt(400, 8);
    let id = edge.submit(&text, spec(10));
    edge.finish(&[id]).await;
    assert_eq!(edge.records[&id].ids(), alone(&text, &spec(10)));
    assert_eq!(fleet.agent("p-0").status().replaced_engines, 1);
    fleet.stop().await;
}

/// SV-103: readiness follows the step thread, and comes back after recovery.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hung_engine_is_abandoned_and_its_requests_resume() {
    let fleet = Fleet::pair(&[], &["--hung-step-seconds=1"]).await;
    let mut edge = Edge::new(&fleet);
    let text = prompt(90, 2);
    let id = edge.submit(&text, spec(80));
    edge.reach(id, 4).await;
    let client = Client::new(&fleet, "sn-0-0");
    // Longer than the test waits for the replacement: the thread is really left behind.
    assert_eq!(client.post("/v1/fault", "{\"fault\":{\"hang_next_step_ms\":20000}}").await.0, 202);
    let agent = fleet.agent("sn-0-0");
    edge.until("it is not ready", |_| agent.readiness().is_err()).await;
    assert_eq!(client.get("/healthz").await.0, 200);
    edge.until("it is ready again", |_| agent.readiness().is_ok()).await;
    assert_eq!(client.get("/readyz").await.0, 200);
    edge.finish(&[id]).await;
    assert_eq!(edge.records[&id].ids(), alone(&text, &spec(80)));
    assert_eq!(agent.status().abandoned_threads, 1);
    fleet.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_three_abandoned_threads_the_agent_gives_up() {
    let fleet = Fleet::pair(&[], &["--hung-step-seconds=1"]).await;
    let mut edge = Edge::new(&fleet);
    let client = Client::new(&fleet, "sn-0-0");
    let agent = fleet.agent("sn-0-0");
    let mut failed = agent.failed();
    for hang in 1..=3 {
        edge.until("it is ready", |_| agent.readiness().is_ok()).await;
        assert_eq!(client.post("/v1/fault", "{\"fault\":{\"hang_next_step_ms\":60000}}").await.0, 202);
        let id = edge.submit(&prompt(30 + hang, 1), spec(5));
        edge.until("it hangs", |_| agent.status().abandoned_threads >= hang as u32).await;
        edge.cancel(id);
    }
    let reason = tokio::time::timeout(Duration::from_secs(60), failed.wait_for(Option::is_some)).await;
    let reason = reason.expect("it fails").expect("a handle").clone().unwrap_or_default();
    assert!(reason.contains('3'), "{reason}");
    assert_eq!(agent.status().phase, AgentPhase::Failed);
    eventually("not ready", || agent.readiness().is_err()).await;
}

/// An agent that goes, the leader of decode at that: its requests go on at the other supernode.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_an_agent_that_is_gone_resume_at_another() {
    let mut fleet = Fleet::pair(&[], &[]).await;
    fleet.add(args("decode", "sn-1-0", &["--supernode=sn-1"])).await;
    let second = fleet.agent("sn-1-0");
    tokio::time::timeout(DEADLINE, second.ready()).await.expect("in time").expect("ready");
    fleet.publish();
    let mut edge = Edge::new(&fleet);
    let wanted: Vec<_> = (0..4).map(|i| (prompt(60 + 90 * i, i as u32), spec(120))).collect();
    let ids: Vec<_> = wanted.iter().map(|(prompt, spec)| edge.submit(prompt, spec.clone())).collect();
    for id in &ids {
        edge.reach(*id, 3).await;
    }
    let first = fleet.agents.remove(1);
    assert_eq!(first.name().as_str(), "sn-0-0");
    first.stop().await;
    fleet.publish();
    edge.finish(&ids).await;
    for (id, (prompt, spec)) in ids.iter().zip(&wanted) {
        assert_eq!(edge.records[id].ids(), alone(prompt, spec));
    }
    fleet.stop().await;
}
