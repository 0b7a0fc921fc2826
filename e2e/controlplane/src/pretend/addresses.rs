//! Makes kwok's pool of pod addresses before anybody needs it.
//!
//! kwok (0.7.0, `PodController.ipPool`) makes the pool of a CIDR when the first pod of it starts, by a look and a store
//! that are not one step. Two pods that start together as the first ones get a pool each, and both get its first address.
//! So one pod starts alone, on a node of its own, before there is any other node.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use k8s_openapi::api::core::v1::{Node, Pod, Taint};
use kube::api::{DeleteParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::time::Instant;

use super::nodes::object;
use super::{BEHAVIOUR, Behaviour, DELAY};
use crate::nodes::NodeSpec;

/// Name of the node and of the pod.
const FIRST: &str = "pretend-first-address";
/// kwok answers within a second of its start, where the machine has time for it.
const WITHIN: Duration = Duration::from_secs(120);
const POLL: Duration = Duration::from_millis(100);

/// Starts one pod alone and removes it and its node again.
///
/// # Errors
/// The API server refuses, or kwok gives no address within two minutes.
pub(super) async fn prepare(client: &Client) -> Result<()> {
    let nodes: Api<Node> = Api::all(client.clone());
    let pods: Api<Pod> = Api::namespaced(client.clone(), "default");
    let taint = Taint { key: FIRST.to_owned(), effect: "NoSchedule".to_owned(), ..Taint::default() };
    let node = NodeSpec { taints: vec![taint], ..NodeSpec::new(FIRST) };
    let node: Node = serde_json::from_value(object(&node))?;
    // A killed run may have left them in a cluster that lives on.
    remove(&pods, &nodes).await?;
    nodes.create(&PostParams::default(), &node).await.with_context(|| format!("registering {FIRST}"))?;
    let addressed = first_address(&pods).await;
    remove(&pods, &nodes).await?;
    addressed
}

async fn remove(pods: &Api<Pod>, nodes: &Api<Node>) -> Result<()> {
    let now = DeleteParams::default().grace_period(0);
    for gone in [
        pods.delete(FIRST, &now).await.map(drop),
        nodes.delete(FIRST, &DeleteParams::default()).await.map(drop),
    ] {
        match gone {
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            other => other.with_context(|| format!("removing {FIRST}"))?,
        }
    }
    Ok(())
}

async fn first_address(pods: &Api<Pod>) -> Result<()> {
    let deadline = Instant::now() + WITHIN;
    loop {
        match pods.create(&PostParams::default(), &pod()?).await {
            Ok(_) => break,
            // A namespace's service account comes a moment after a new control plane.
            Err(kube::Error::Api(status)) if status.code == 403 && Instant::now() < deadline => {}
            Err(error) => return Err(error).with_context(|| format!("making the pod {FIRST}")),
        }
        tokio::time::sleep(POLL).await;
    }
    loop {
        let pod = pods.get(FIRST).await?;
        if pod.status.and_then(|status| status.pod_ip).is_some() {
            return Ok(());
        }
        if Instant::now() > deadline {
            bail!("kwok gave the pod {FIRST} no address within {} s", WITHIN.as_secs());
        }
        tokio::time::sleep(POLL).await;
    }
}

fn pod() -> Result<Pod> {
    let annotations = json!({BEHAVIOUR: Behaviour::Ready.word(), DELAY: "1ms"});
    Ok(serde_json::from_value(json!({
        "metadata": {"name": FIRST, "annotations": annotations},
        "spec": {
            "nodeName": FIRST,
            "automountServiceAccountToken": false,
            "tolerations": [{"operator": "Exists"}],
            "containers": [{"name": "first", "image": "pretend"}],
        },
    }))?)
}
