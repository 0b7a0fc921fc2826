//! Phases and conditions of made-up pods.

use k8s_openapi::api::core::v1::ContainerStateTerminated;
use serde_json::json;

use super::super::view::views;
use super::*;

fn pod(policy: &str) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "p"},
        "spec": {
            "restartPolicy": policy,
            "readinessGates": [{"conditionType": "deepinfer.io/Routable"}],
            "initContainers": [{"name": "first", "image": "i"}],
            "containers": [{"name": "main", "image": "m"}],
        },
    }))
    .unwrap()
}

fn ended(code: i32) -> State {
    State::Terminated(Box::new(ContainerStateTerminated { exit_code: code, ..Default::default() }))
}

fn ask(pod: &Pod, views: &[View], over: bool) -> (String, Vec<(String, String, Option<String>)>) {
    let now = Timestamp::UNIX_EPOCH;
    let facts = Facts { address: "10.0.0.2".into(), host: "10.0.0.1".into(), began: now, over, now };
    let status = status(pod, views, &facts, &mut Since::new());
    let conditions = status.conditions.unwrap().into_iter().map(|c| (c.type_, c.status, c.reason)).collect();
    (status.phase.unwrap(), conditions)
}

fn condition(conditions: &[(String, String, Option<String>)], kind: &str) -> (String, Option<String>) {
    let found = conditions.iter().find(|(name, ..)| name == kind).unwrap();
    (found.1.clone(), found.2.clone())
}

#[test]
fn a_pod_is_pending_until_its_main_containers_have_started() {
    let pod = pod("Always");
    let mut views = views(&pod);
    let (phase, conditions) = ask(&pod, &views, false);
    assert_eq!(phase, "Pending");
    assert_eq!(condition(&conditions, "Initialized").1.as_deref(), Some("ContainersNotInitialized"));
    (views[0].done, views[0].state) = (Some(true), ended(0));
    let (phase, conditions) = ask(&pod, &views, false);
    assert_eq!((phase.as_str(), condition(&conditions, "Initialized").0.as_str()), ("Pending", "True"));
    views[1].state = State::Running { since: Timestamp::UNIX_EPOCH };
    views[1].began = true;
    let (phase, conditions) = ask(&pod, &views, false);
    assert_eq!(phase, "Running");
    assert_eq!(condition(&conditions, "Ready").1.as_deref(), Some("ContainersNotReady"));
}

#[test]
fn ready_waits_for_the_readiness_gates_of_others() {
    let mut pod = pod("Always");
    let mut views = views(&pod);
    (views[0].done, views[0].state) = (Some(true), ended(0));
    views[1].state = State::Running { since: Timestamp::UNIX_EPOCH };
    (views[1].began, views[1].ready, views[1].started) = (true, true, true);
    let (_, conditions) = ask(&pod, &views, false);
    assert_eq!(condition(&conditions, "ContainersReady").0, "True");
    assert_eq!(condition(&conditions, "Ready"), ("False".into(), Some("ReadinessGatesNotReady".into())));
    let gate = json!({"conditions": [{"type": "deepinfer.io/Routable", "status": "True"}]});
    pod.status = serde_json::from_value(gate).unwrap();
    let (_, conditions) = ask(&pod, &views, false);
    assert_eq!(condition(&conditions, "Ready").0, "True");
    assert!(
        conditions.iter().all(|(kind, ..)| kind != "deepinfer.io/Routable"),
        "the gate is not ours to write"
    );
}

#[test]
fn the_phase_of_an_end_follows_exit_code_and_policy() {
    for (policy, code, done, over, want) in [
        ("Never", 0, Some(true), false, "Succeeded"),
        ("Never", 3, Some(false), false, "Failed"),
        ("OnFailure", 3, None, false, "Running"),
        ("Always", 0, None, false, "Running"),
        ("Always", 0, Some(true), true, "Succeeded"),
        ("Always", 137, Some(false), true, "Failed"),
    ] {
        let pod = pod(policy);
        let mut views = views(&pod);
        (views[0].done, views[0].state) = (Some(true), ended(0));
        (views[1].done, views[1].state, views[1].began) = (done, ended(code), true);
        assert_eq!(ask(&pod, &views, over).0, want, "{policy} {code}");
    }
    let pod = pod("Never");
    let mut views = views(&pod);
    (views[0].done, views[0].state) = (Some(false), ended(1));
    assert_eq!(ask(&pod, &views, false).0, "Failed");
}

#[test]
fn after_a_node_was_off_a_container_that_ran_counts_as_lost() {
    let mut pod = pod("Always");
    let old = json!({"containerStatuses": [{"name": "main", "image": "m", "imageID": "", "ready": true,
        "restartCount": 2, "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}]});
    pod.status = serde_json::from_value(old).unwrap();
    let views = views(&pod);
    assert!(views[1].began && views[1].restarts == 2);
    assert!(matches!(&views[1].state, State::Terminated(end) if end.exit_code == 255), "{views:?}");
    assert!(!views[0].began);
}
