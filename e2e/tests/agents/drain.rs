//! Drains: by file, by call, by signal. Nothing is lost.

use std::time::{SystemTime, UNIX_EPOCH};

use deepinfer_protocol::agent_status::{AgentPhase, DrainState, DrainStatus};
use serde_json::{Value, json};

use crate::cluster::{Cluster, Spec};
use crate::load::{Load, ask, questions, undisturbed};
use crate::pods::{swap, until};

fn drain_status(cluster: &Cluster, agent: &str) -> DrainStatus {
    let answer = cluster.control(agent, "GET", "/v1/drain", &Value::Null);
    serde_json::from_str(&answer.body).unwrap()
}

fn in_seconds(seconds: u64) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    json!({"deadline": now + seconds, "reason": "maintenance"}).to_string()
}

#[test]
fn a_drain_by_file_needs_no_operator_and_can_be_taken_back_while_something_runs() {
    let mut cluster = Cluster::start(Spec::of(1, &[1, 1], 1));
    let questions = questions(10, 250);
    let expected = undisturbed(cluster.api(0), &questions);
    cluster.slow_decode(25);
    let load = Load::start(cluster.api(0), &questions);
    until("it runs requests", || (cluster.status("sn-1-00").inflight > 1).then_some(()));
    cluster.operator.go_away();
    let file = cluster.path("sn-1-00.drain");
    swap(&file, &in_seconds(600));
    until("it drains", || (cluster.status("sn-1-00").phase == AgentPhase::Draining).then_some(()));
    assert_eq!(cluster.get(cluster.find("sn-1-00").port(9810), "/readyz").unwrap().status, 503);
    // The call says the same again; the empty file takes both back.
    let call = cluster.control("sn-1-00", "POST", "/v1/drain", &json!({"deadlineSeconds": 600}));
    assert_eq!(call.status, 202);
    swap(&file, "");
    until("it serves", || (cluster.status("sn-1-00").phase == AgentPhase::Serving).then_some(()));
    swap(&file, &in_seconds(600));
    load.expect(&expected);
    until("it is drained", || (drain_status(&cluster, "sn-1-00").state == DrainState::Drained).then_some(()));
    assert_eq!(drain_status(&cluster, "sn-1-00").cut, 0);
    let steps = cluster.status("sn-1-00").steps;
    Load::start(cluster.api(0), &questions[..3]).expect(&expected[..3]);
    assert_eq!(cluster.status("sn-1-00").steps, steps, "the other one ran them");
    // Nonsense in the file is named and does nothing.
    swap(&cluster.path("sn-0-00.drain"), "soon");
    until("the file is named", || cluster.find("sn-0-00").log().contains("sn-0-00.drain").then_some(()));
    assert_eq!(cluster.status("sn-0-00").phase, AgentPhase::Serving);
}

#[test]
fn a_drain_by_file_with_a_deadline_that_has_passed_cuts_and_the_requests_resume_elsewhere() {
    let cluster = Cluster::start(Spec::of(1, &[1, 1], 1));
    let questions = questions(8, 150);
    let expected = undisturbed(cluster.api(0), &questions);
    cluster.slow_decode(15);
    let load = Load::start(cluster.api(0), &questions);
    until("it runs requests", || (cluster.status("sn-1-00").inflight > 1).then_some(()));
    swap(&cluster.path("sn-1-00.drain"), "{\"deadline\": 1}");
    load.expect(&expected);
    let status = drain_status(&cluster, "sn-1-00");
    assert!(status.state == DrainState::Drained && status.cut > 0, "{status:?}");
}

#[test]
fn sigterm_of_agents_and_gateways_under_load_loses_nothing() {
    let mut cluster = Cluster::start(Spec::of(2, &[1, 1, 1], 2));
    let questions = questions(12, 120);
    let expected = undisturbed(cluster.api(0), &questions);
    cluster.slow_decode(10);
    // A worker, a rank, and the gateway that half of the requests came through.
    let loads = [Load::start(cluster.api(0), &questions), Load::start(cluster.api(1), &questions)];
    until("requests run", || {
        let busy = cluster.status("sn-1-00").inflight > 1;
        (busy && cluster.gateway_status(1)["running"].as_u64() > Some(5)).then_some(())
    });
    for agent in ["p-1", "sn-1-00"] {
        cluster.find(agent).signal("TERM");
    }
    cluster.gateways[1].signal("TERM");
    until("the gateway turns new requests away", || {
        // It may have ended by now.
        let answer = cluster.get(cluster.api(1), "/readyz");
        answer.map_or(Some(()), |answer| (answer.status == 503).then_some(()))
    });
    loads.into_iter().for_each(|load| load.expect(&expected));
    for agent in ["p-1", "sn-1-00"] {
        assert_eq!(cluster.find_mut(agent).end().code(), Some(0), "{agent}: {}", cluster.find(agent).log());
        assert!(cluster.find(agent).log().contains("\"cut\":0"), "{}", cluster.find(agent).log());
    }
    assert_eq!(cluster.gateways[1].end().code(), Some(0), "{}", cluster.gateways[1].log());
    assert!(ask(cluster.api(0), questions[0]).is_ok());
}

#[test]
fn a_second_signal_ends_at_once() {
    let mut cluster = Cluster::start(Spec::of(1, &[1], 1));
    cluster.slow_decode(50);
    let load = Load::start(cluster.api(0), &questions(2, 2000));
    until("it runs requests", || (cluster.status("sn-0-00").inflight > 1).then_some(()));
    for pod in ["sn-0-00", "g-0"] {
        let pod = if pod == "g-0" { &mut cluster.gateways[0] } else { cluster.agents.last_mut().unwrap() };
        pod.signal("TERM");
        until("it drains", || pod.log().contains("may finish").then_some(()));
        pod.signal("TERM");
        assert_eq!(pod.end().code(), Some(1), "{}", pod.log());
    }
    assert!(load.results().iter().all(Result::is_err));
}
