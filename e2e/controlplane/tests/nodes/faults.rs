//! What a test can break, and what the cluster then sees.

use std::time::{Duration, Instant};

use deepinfer_controlplane::children::Signal;
use deepinfer_controlplane::{ControlPlane, Options};
use k8s_openapi::api::core::v1::{Node, Pod, Secret};
use kube::Api;
use kube::api::PostParams;
use serde_json::json;

use super::bed::{Bed, alive, eventually, first, on_loopback, phase, ready, running, waits};

fn restarts(pod: &Pod) -> i32 {
    first(pod).map_or(0, |container| container.restart_count)
}

async fn node_is_ready(bed: &Bed<'_>, name: &str) -> bool {
    let node = Api::<Node>::all(bed.client.clone()).get(name).await.unwrap();
    let conditions = node.status.and_then(|status| status.conditions).unwrap_or_default();
    conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True")
}

/// OP-022, OP-118: the start of each such story. The pod of a dead node stays, whatever is asked of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_of_a_node_without_power_stay_until_it_comes_back() {
    let Some(bed) = Bed::start(1).await else { return };
    bed.script("kept", "Always", "echo up; exec sleep 600").await;
    bed.script("doomed", "Always", "echo up; exec sleep 600").await;
    for name in ["kept", "doomed"] {
        bed.until(name, "ready", ready).await;
    }
    let (pid, node) = (bed.pid("kept"), bed.node(0));
    bed.nodes.power_off(&node).await.unwrap();
    assert!(!alive(pid), "dead when the call returns");
    assert_eq!(bed.nodes.pid_of(&bed.namespace, "kept", "main"), None);
    eventually("the node is not ready", async || !node_is_ready(&bed, &node).await).await;
    bed.until("kept", "unready in the eyes of the control plane", |pod| {
        !ready(pod) && phase(pod) == "Running"
    })
    .await;
    bed.delete("doomed").await;
    bed.until("doomed", "terminating", |pod| pod.metadata.deletion_timestamp.is_some()).await;

    bed.nodes.power_on(&node).unwrap();
    eventually("the node is ready again", async || node_is_ready(&bed, &node).await).await;
    bed.until_gone("doomed").await;
    let pod = bed.until("kept", "ready after the boot", ready).await;
    let status = first(&pod).unwrap();
    assert_eq!((status.restart_count, running(&pod)), (1, true));
    assert_eq!(pod.status.as_ref().unwrap().pod_ips.as_ref().unwrap().len(), 1, "only the new address");
    assert!(alive(bed.pid("kept")));
    bed.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_run_on_and_restart_while_the_api_server_is_away() {
    if deepinfer_controlplane::skipped() {
        return;
    }
    let plane = ControlPlane::start(Options::default()).await.unwrap();
    let bed = Bed::on(&plane, 1, on_loopback).await;
    let secrets = Api::<Secret>::namespaced(bed.client.clone(), &bed.namespace);
    let secret = json!({"metadata": {"name": "key"}, "stringData": {"k": "from memory"}});
    secrets.create(&PostParams::default(), &serde_json::from_value(secret).unwrap()).await.unwrap();
    let env = json!([{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "key", "key": "k"}}}]);
    let container = json!({"name": "main", "image": "busybox", "env": env,
        "args": ["-c", "echo $KEY; exec sleep 600"]});
    bed.pod("steady", json!({"containers": [container]})).await;
    bed.until("steady", "ready", ready).await;
    plane.kill_api_server().unwrap();
    bed.nodes.signal(&bed.namespace, "steady", "main", Signal::Kill).unwrap();
    bed.until_logged("steady", "from memory\nfrom memory\n").await;
    plane.restart_api_server().await.unwrap();
    let pod = bed.until("steady", "seen again", |pod| ready(pod) && restarts(pod) == 1).await;
    assert!(running(&pod));
    bed.script("later", "Always", "exec sleep 600").await;
    bed.until("later", "running", running).await;
    bed.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_of_containers_come_and_go() {
    let Some(bed) = Bed::start_with(1, on_loopback).await else { return };
    let name = |pod: &str| format!("{}/{pod}", bed.namespace);
    bed.nodes.slow_start(&name("slow"), Duration::from_secs(2));
    bed.nodes.image_pull_error(&name("unpulled"));
    bed.nodes.crash_loop(&name("broken"));
    let begin = Instant::now();
    for pod in ["slow", "unpulled", "broken"] {
        bed.script(pod, "Always", "echo up; exec sleep 600").await;
    }
    bed.until("unpulled", "not pulled", |pod| waits(pod, "ErrImagePull")).await;
    bed.until("broken", "crashing", |pod| waits(pod, "CrashLoopBackOff")).await;
    bed.until("slow", "running", running).await;
    assert!(begin.elapsed() >= Duration::from_secs(2));
    for pod in ["unpulled", "broken"] {
        bed.nodes.clear_faults(&name(pod));
        bed.until(pod, "healed", ready).await;
    }
    bed.nodes.signal(&bed.namespace, "slow", "main", Signal::Kill).unwrap();
    let pod = bed.until("slow", "restarted", |pod| restarts(pod) == 1).await;
    assert_eq!(first(&pod).unwrap().last_state.clone().unwrap().terminated.unwrap().exit_code, 137);
    bed.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_device_is_offered_no_more_and_named_in_the_pod() {
    let Some(bed) = Bed::start_with(1, on_loopback).await else { return };
    let gpu = "nvidia.com/gpu";
    let container = |count: &str| {
        json!({"name": "main", "image": "busybox", "args": ["-c", "exec sleep 600"],
            "resources": {"limits": {gpu: count}}})
    };
    bed.pod("holder", json!({"containers": [container("6")]})).await;
    bed.until("holder", "running", running).await;
    bed.nodes.device_unhealthy(&bed.node(0), gpu).unwrap();
    eventually("the node offers one less", async || {
        let node = Api::<Node>::all(bed.client.clone()).get(&bed.node(0)).await.unwrap();
        let status = node.status.unwrap();
        let amount = |of: Option<std::collections::BTreeMap<_, _>>| {
            of.unwrap()
                .get(gpu)
                .map(|q: &k8s_openapi::apimachinery::pkg::api::resource::Quantity| q.0.clone())
        };
        amount(status.allocatable).as_deref() == Some("7") && amount(status.capacity).as_deref() == Some("8")
    })
    .await;
    bed.until("holder", "told of its device", |pod| {
        let devices = first(pod).and_then(|c| c.allocated_resources_status.clone()).unwrap_or_default();
        let healths = devices.iter().flat_map(|d| d.resources.iter().flatten());
        healths.filter(|h| h.health.as_deref() == Some("Unhealthy")).count() == 1
    })
    .await;
    let too_big = bed.unplaced("too-big", &json!({"containers": [container("2")]})).await;
    bed.nodes.device_healthy(&bed.node(0), gpu).unwrap();
    bed.until(&too_big, "placed", running).await;

    bed.nodes.cordon(&bed.node(0), true).await.unwrap();
    let plain = json!({"name": "main", "image": "busybox", "args": ["-c", "exec sleep 600"]});
    let late = bed.unplaced("late", &json!({"containers": [plain]})).await;
    bed.nodes.cordon(&bed.node(0), false).await.unwrap();
    bed.until(&late, "placed", running).await;
    bed.end().await;
}
