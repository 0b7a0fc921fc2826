//! `trace`: the logs of running pods.

use std::time::{Duration, Instant};

use deepinfer_controlplane::nodes::{NodeOptions, NodeSpec, ProcessNodes};
use serde_json::{Value, json};

use super::kit::{make, plugin, server};

/// Id of the request that is looked for.
const ID: &str = "00ff00ff00ff00ff00ff00ff00ff00ff";

fn pod(name: &str, container: &str, node: &str, script: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "deepinfer", "deepinfer.io/cluster": "v41"}},
        "spec": {
            "nodeName": node, "terminationGracePeriodSeconds": 1,
            "containers": [{"name": container, "image": "busybox", "command": ["sh", "-c", script]}],
        },
    })
}

#[tokio::test]
async fn a_request_is_found_in_the_logs_of_all_pods_in_the_order_of_time() {
    let Some(plane) = server().await else { return };
    let ns = plane.namespace("trace").await.expect("a namespace");
    let options = NodeOptions::default().image("busybox", "/bin/sh");
    let node = format!("{ns}-node");
    let nodes =
        ProcessNodes::start(plane.client(), options, vec![NodeSpec::new(&node)]).await.expect("a node");
    let engine = format!("echo other; echo 'enqueued request={ID}'; exec sleep 600");
    make(plane, &ns, pod("v41-prefill-1", "engine", &node, &engine)).await;
    let line = format!(r#"{{"level":"INFO","fields":{{"message":"request","request":"{ID}","tokens":3}}}}"#);
    let gateway = format!("sleep 1; echo '{line}'; exec sleep 600");
    make(plane, &ns, pod("v41-gateway-1", "gateway", &node, &gateway)).await;
    let id = format!("chatcmpl-{ID}");
    let deadline = Instant::now() + Duration::from_secs(60);
    let said = loop {
        let said = plugin(plane, &["trace", &id, "-n", &ns]).await;
        if said.out.lines().count() == 2 && said.code == Some(0) {
            break said;
        }
        assert!(Instant::now() < deadline, "{said:?}");
        tokio::time::sleep(Duration::from_millis(300)).await;
    };
    let lines: Vec<&str> = said.out.lines().collect();
    assert!(lines[0].contains("v41-prefill-1/engine") && lines[0].contains("enqueued"), "{}", said.out);
    assert!(lines[1].contains("v41-gateway-1/gateway") && lines[1].contains("tokens=3"), "{}", said.out);
    let said = plugin(plane, &["trace", "ffffffffffff", "-n", &ns]).await;
    assert!(said.code == Some(1) && said.out.contains("no log line of 2 pods"), "{said:?}");
    let said = plugin(plane, &["trace", "ffffffffffff", "-n", &ns, "--cluster", "other"]).await;
    assert!(said.code == Some(1) && said.err.contains("no pod of DeepInfer"), "{said:?}");
    nodes.stop().await.expect("the node goes");
}
