//! Serving: several workers, several supernodes, one of several pods.

use deepinfer_protocol::load::ExpertLoadReport;
use serde_json::Value;

use crate::cluster::{Cluster, Spec};
use crate::load::{Load, questions, undisturbed};
use crate::pods::until;

#[test]
fn several_workers_and_supernodes_one_of_two_pods_give_the_tokens_of_one() {
    let questions = questions(24, 40);
    let alone = Cluster::start(Spec::of(1, &[1], 1));
    let expected = undisturbed(alone.api(0), &questions);
    drop(alone);

    let cluster = Cluster::start(Spec::of(2, &[1, 1, 2], 2));
    let loads = [Load::start(cluster.api(0), &questions), Load::start(cluster.api(1), &questions)];
    loads.into_iter().for_each(|load| load.expect(&expected));

    // Every pod of the wide supernode ran requests, under rank numbers of the whole supernode.
    for (index, name) in ["sn-2-00", "sn-2-01"].iter().enumerate() {
        let status = cluster.status(name);
        assert_eq!((usize::from(status.index), status.fabric.as_str()), (index, "ok"), "{status:?}");
        assert_eq!(status.device_health, "ok");
        assert!(status.steps > 0, "{name} ran nothing");
    }
    let of = |name: &str, query: &str| {
        let answer = cluster.control(name, "GET", &format!("/v1/experts/load?{query}"), &Value::Null);
        assert_eq!(answer.status, 200, "{}", answer.body);
        serde_json::from_str::<ExpertLoadReport>(&answer.body).unwrap()
    };
    // Index 0 speaks for both; nothing runs, so the sums do not move.
    let all = of("sn-2-00", "detail=total");
    let parts = [of("sn-2-00", "detail=total&scope=agent"), of("sn-2-01", "detail=total")];
    assert_eq!(all.by_rank.iter().map(|(rank, _)| rank.0).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(all.rows, parts[0].rows + parts[1].rows);
    assert!(all.missing.is_empty() && !all.spans_change);
    let counts = all.counts.counts.iter().sum::<u64>();
    assert_eq!(counts, u64::from(all.counts.layers * all.top_k) * all.rows);
    cluster.wait_empty(&["p-0", "p-1", "sn-0-00", "sn-1-00", "sn-2-00", "sn-2-01"]);

    let status = cluster.gateway_status(0);
    assert_eq!((&status["ready"], &status["running"], &status["held"]), (&true.into(), &0.into(), &0.into()));
    assert_eq!(status["requests"], 24);
    assert!(status["ttft"]["count"].as_u64() > Some(0) && status["ttft"]["p95Ms"].as_f64() > Some(0.0));
    assert_eq!(status["fleetGeneration"], cluster.operator.view().generation.0);
}

/// OP-046: an autoscaler finds the pod by the label `pod`; the rank is a label of its own.
#[test]
fn metrics_have_the_pods_name_as_it_is_and_a_port_of_their_own() {
    let cluster = Cluster::start(Spec::of(1, &[2], 1));
    let pod = cluster.find("sn-0-01");
    let metrics = cluster.get(pod.port(9811), "/metrics").unwrap();
    assert_eq!(metrics.status, 200);
    assert!(
        metrics.body.contains("deepinfer_rank_requests{pod=\"sn-0-01\",rank=\"1\"} 0"),
        "{}",
        metrics.body
    );
    for line in metrics.body.lines().filter(|line| !line.starts_with('#')) {
        assert!(line.contains("pod=\"sn-0-01\""), "{line}");
    }
    assert!(metrics.body.contains("deepinfer_fleet_age_seconds"), "{}", metrics.body);
    assert!(metrics.body.trim_end().ends_with("# EOF"), "{}", metrics.body);
    for path in ["/v1/status", "/healthz", "/v1/drain"] {
        assert_eq!(cluster.get(pod.port(9811), path).unwrap().status, 404, "{path}");
    }
    assert_eq!(cluster.get(pod.port(9810), "/metrics").unwrap().status, 200, "there as well");
    let gateway = cluster.get(cluster.api(0), "/metrics").unwrap().body;
    assert!(gateway.contains("deepinfer_fleet_generation{pod=\"g-0\"}"), "{gateway}");
}

/// OP-092, OP-122: nothing is ready before it can serve, and says why.
#[test]
fn a_gateway_without_a_fleet_view_and_an_agent_without_its_peers_are_not_ready() {
    let mut cluster = Cluster::empty(Spec::of(0, &[], 0));
    cluster.operator.go_away();
    cluster.gateway("g-0");
    let api = cluster.api(0);
    let answer = until("the gateway answers", || cluster.get(api, "/readyz").ok());
    assert_eq!(answer.status, 503);
    assert!(answer.body.contains("fleet view"), "{}", answer.body);
    let refused = crate::load::ask(api, questions(1, 1)[0]).unwrap_err();
    assert!(refused.starts_with("503"), "{refused}");
    let again = crate::http::Call::new(api, "POST", "/v1/completions")
        .body(&serde_json::json!({"model": "tiny", "prompt": "a"}));
    assert!(again.send().unwrap().head.contains("retry-after: "), "it says when to come back");
    assert_eq!(cluster.gateway_status(0)["ready"], false);

    // Half a supernode: its other pod is in the view and does not answer on its data port.
    cluster.operator.come_back();
    cluster.prefill("p-0");
    cluster.supernode("sn-0", 2);
    cluster.find("sn-0-01").signal("STOP");
    let status = until("the first pod waits for the second", || {
        let answer = cluster.get(cluster.find("sn-0-00").port(9810), "/readyz").ok()?;
        assert_ne!(answer.status, 200, "it is ready without its peer");
        let status = cluster.status("sn-0-00");
        (status.reason_code == "FabricNotReady").then_some(status)
    });
    assert!(!status.accepting && status.reason.contains("fabric"), "{status:?}");
    cluster.find("sn-0-01").signal("CONT");
    cluster.wait_ready();
    assert_eq!(cluster.status("sn-0-00").fabric, "ok");
    assert_eq!(crate::load::ask(api, questions(1, 5)[0]).unwrap().len(), 5);
}
