//! Probes, readiness gates and back-off.

use std::time::{Duration, Instant};

use kube::api::{Patch, PatchParams};
use serde_json::json;

use super::bed::{Bed, condition, first, on_loopback, ready, running, waits};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_decide_when_a_pod_is_ready_and_when_it_is_restarted() {
    let Some(bed) = Bed::start_with(1, on_loopback).await else { return };
    let probe = |file: &str, threshold: u32| json!({"exec": {"command": ["test", "-e", file]}, "periodSeconds": 1, "failureThreshold": threshold});
    bed.pod(
        "probed",
        json!({"containers": [{
            "name": "main", "image": "busybox", "args": ["-c", "rm -f live; sleep 600"],
            "startupProbe": probe("live", 60), "readinessProbe": probe("serving", 1), "livenessProbe": probe("live", 2),
        }]}),
    )
    .await;
    let pod = bed.until("probed", "running", running).await;
    assert_eq!((first(&pod).unwrap().started, ready(&pod)), (Some(false), false));
    let folder = bed.nodes.pod_folder(&bed.namespace, "probed").unwrap();
    bed.until_logged("probed", "").await;
    tokio::fs::write(folder.join("serving"), "").await.unwrap();
    // The script removes the file first; only then may it be made.
    super::bed::eventually("the startup probe passes", async || {
        tokio::fs::write(folder.join("live"), "").await.unwrap();
        let pod = bed.pods().get("probed").await.unwrap();
        first(&pod).unwrap().started == Some(true)
    })
    .await;
    bed.until("probed", "ready", ready).await;
    tokio::fs::remove_file(folder.join("serving")).await.unwrap();
    let pod = bed.until("probed", "unready", |pod| !ready(pod)).await;
    assert_eq!(first(&pod).unwrap().restart_count, 0, "readiness restarts nothing");
    tokio::fs::remove_file(folder.join("live")).await.unwrap();
    let pod = bed.until("probed", "restarted", |pod| first(pod).unwrap().restart_count == 1).await;
    let end = first(&pod).unwrap().last_state.clone().unwrap().terminated.unwrap();
    assert_eq!(end.exit_code, 128 + 15, "it was asked to end");
    assert!(end.message.unwrap().contains("liveness"));
    bed.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ready_waits_for_the_gate_that_somebody_else_opens() {
    let Some(bed) = Bed::start_with(1, on_loopback).await else { return };
    let gate = "deepinfer.io/Routable";
    bed.pod(
        "gated",
        json!({
            "readinessGates": [{"conditionType": gate}],
            "containers": [{"name": "main", "image": "busybox", "args": ["-c", "sleep 600"]}],
        }),
    )
    .await;
    let pod =
        bed.until("gated", "containers ready", |pod| condition(pod, "ContainersReady").0 == "True").await;
    assert_eq!(condition(&pod, "Ready"), ("False", "ReadinessGatesNotReady"));
    for (status, want) in [("True", true), ("False", false), ("True", true)] {
        let condition = json!({"status": {"conditions": [{"type": gate, "status": status}]}});
        let change = Patch::Strategic(&condition);
        bed.pods().patch_status("gated", &PatchParams::default(), &change).await.unwrap();
        let pod = bed.until("gated", status, |pod| ready(pod) == want).await;
        assert_eq!(super::bed::condition(&pod, gate).0, status, "the node leaves the gate alone");
        assert_eq!(super::bed::condition(&pod, "PodScheduled").0, "True");
    }
    bed.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_container_that_fails_again_and_again_waits_longer_each_time() {
    let Some(bed) = Bed::start_with(1, on_loopback).await else { return };
    bed.script("crashing", "Always", "echo run; exit 9").await;
    let pod = bed.until("crashing", "backing off", |pod| waits(pod, "CrashLoopBackOff")).await;
    let status = first(&pod).unwrap();
    assert_eq!(status.last_state.clone().unwrap().terminated.unwrap().exit_code, 9);
    assert!(!status.ready);
    let begin = Instant::now();
    let from = status.restart_count;
    bed.until("crashing", "restarted thrice", |pod| first(pod).unwrap().restart_count >= from + 3).await;
    // 200, 400 and 800 ms, or later ones that are longer.
    assert!(begin.elapsed() > Duration::from_millis(1000), "{:?}", begin.elapsed());
    bed.end().await;
}
