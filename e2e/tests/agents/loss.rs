//! Processes that die or stop: what ran there resumes elsewhere with the same tokens, and nothing is left held.

use std::time::{Duration, Instant};

use serde_json::json;

use crate::cluster::{Cluster, Spec};
use crate::load::{Load, Question, ask, questions, undisturbed};
use crate::pods::until;

/// Waits until an agent runs requests.
fn runs(cluster: &Cluster, agent: &str) {
    until(&format!("{agent} runs requests"), || (cluster.status(agent).inflight > 1).then_some(()));
}

#[test]
fn kill_9_of_agents_under_load_loses_no_request_and_changes_no_token() {
    let mut cluster = Cluster::start(Spec::of(2, &[1, 1, 2], 1));
    let questions = questions(16, 120);
    let expected = undisturbed(cluster.api(0), &questions);
    cluster.slow_decode(15);
    // The leader of decode, then a pod of the wide supernode, then the leader of prefill.
    for victim in ["sn-0-00", "sn-2-01", "p-0"] {
        let load = Load::start(cluster.api(0), &questions);
        if victim.starts_with("sn") {
            runs(&cluster, victim);
        }
        cluster.find_mut(victim).kill();
        load.expect(&expected);
        cluster.operator.remove(victim);
    }
    cluster.wait_empty(&["p-1", "sn-1-00", "sn-2-00"]);
}

/// E.6: the only copy is lost; what runs waits for the new one, with another name, and goes on.
#[test]
fn requests_wait_for_a_supernode_that_is_rebuilt_and_finish() {
    let mut cluster = Cluster::start(Spec::of(1, &[1], 1));
    let questions = questions(6, 150);
    let expected = undisturbed(cluster.api(0), &questions);
    cluster.slow_decode(15);
    let load = Load::start(cluster.api(0), &questions);
    runs(&cluster, "sn-0-00");
    cluster.find_mut("sn-0-00").kill();
    cluster.operator.remove("sn-0-00");
    let running = || cluster.gateway_status(0)["running"].as_u64();
    until("the gateway is not ready", || {
        (cluster.get(cluster.api(0), "/readyz").ok()?.status == 503).then_some(())
    });
    assert!(running() > Some(0), "they wait");
    cluster.agents.retain(|pod| pod.name != "sn-0-00");
    cluster.supernode("sn-1", 1);
    load.expect(&expected);
    cluster.wait_empty(&["p-0", "sn-1-00"]);
}

#[test]
fn requests_of_a_supernode_that_does_not_come_back_fail_after_the_limit() {
    let mut spec = Spec::of(1, &[1], 1);
    spec.gateway_flags.push("--resume-wait-seconds=1");
    let mut cluster = Cluster::start(spec);
    cluster.slow_decode(30);
    let load = Load::start(cluster.api(0), &questions(2, 200));
    runs(&cluster, "sn-0-00");
    cluster.find_mut("sn-0-00").kill();
    cluster.operator.remove("sn-0-00");
    for result in load.results() {
        let error = result.expect_err("nobody serves");
        assert!(error.contains("no decode rank has served for 1 s"), "{error}");
    }
    cluster.wait_empty(&["p-0"]);
}

#[test]
fn kill_9_of_one_of_two_gateways_leaves_nothing_held_and_the_other_serves_on() {
    let mut spec = Spec::of(2, &[1, 1], 2);
    spec.agent_flags.push("--lease-seconds=2");
    let mut cluster = Cluster::start(spec);
    let questions = questions(10, 150);
    let expected = undisturbed(cluster.api(0), &questions);
    cluster.slow_decode(15);
    let (lost, kept) = (Load::start(cluster.api(1), &questions), Load::start(cluster.api(0), &questions));
    until("both gateways run requests", || {
        let running = |gateway| cluster.gateway_status(gateway)["running"].as_u64() > Some(4);
        (running(0) && running(1)).then_some(())
    });
    cluster.gateways[1].kill();
    assert!(lost.results().iter().all(Result::is_err), "their clients are told by the connection");
    kept.expect(&expected);
    let agents = ["p-0", "p-1", "sn-0-00", "sn-1-00"];
    cluster.wait_empty(&agents);
    assert_eq!(ask(cluster.api(0), questions[0]).as_ref(), Ok(&expected[0]));
    // The same pod name again: a new process, whose requests are not taken for the old one's.
    cluster.gateways[1].restart();
    cluster.wait_ready();
    Load::start(cluster.api(1), &questions).expect(&expected);
    cluster.wait_empty(&agents);
}

/// With the default heartbeats, a quarter of a second and three of them: a process that stands still, and one that
/// drains, get no more work after a second.
#[test]
fn traffic_to_a_stopped_or_draining_agent_ends_within_a_second() {
    let spec = Spec { agent_flags: Vec::new(), gateway_flags: Vec::new(), ..Spec::of(2, &[1, 1, 1], 1) };
    let cluster = Cluster::start(spec);
    let question = |number| Question { number, prompt: 30, tokens: 4 };
    let retries = || {
        let text = cluster.get(cluster.api(0), "/metrics").unwrap().body;
        let line = text.lines().find(|line| line.starts_with("deepinfer_retries_total{")).map(str::to_owned);
        line.and_then(|line| line.split(' ').nth(1)?.parse::<f64>().ok()).expect("the metric")
    };
    // Not the leaders: these are followed by name.
    cluster.find("sn-1-00").signal("STOP");
    let stopped = Instant::now();
    while stopped.elapsed() < Duration::from_secs(1) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let before = retries();
    for number in 0..20 {
        assert_eq!(ask(cluster.api(0), question(number)).map(|ids| ids.len()), Ok(4));
    }
    assert_eq!(retries(), before, "none of them was sent to the stopped agent");
    cluster.find("sn-1-00").signal("CONT");
    cluster.wait_serving("sn-1-00");

    let drain = json!({"deadlineSeconds": 600, "reason": "test"});
    assert_eq!(cluster.control("sn-2-00", "POST", "/v1/drain", &drain).status, 202);
    let drained = Instant::now();
    while drained.elapsed() < Duration::from_secs(1) {
        std::thread::sleep(Duration::from_millis(10));
    }
    let steps = cluster.status("sn-2-00").steps;
    for number in 20..40 {
        assert_eq!(ask(cluster.api(0), question(number)).map(|ids| ids.len()), Ok(4));
    }
    let status = cluster.status("sn-2-00");
    assert_eq!((status.steps, status.inflight), (steps, 0), "it got no more work");
}
