//! Writing a pod's status: only what changed, and only what belongs to a kubelet.

use std::sync::atomic::Ordering;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use serde_json::{Value, json};

use super::super::calls::within;
use super::super::node::Link;
use super::context::Context;
use super::status::{Facts, Since, since, status};

/// Changes that come this close together are written at once.
const TOGETHER: Duration = Duration::from_millis(10);

/// After a write that failed.
const AGAIN: Duration = Duration::from_millis(500);

/// What was written last.
pub(crate) struct Published {
    last: Value,
    since: Since,
}

impl Published {
    /// Nothing was written by us yet; the times of conditions are what the server says.
    pub(crate) fn of(pod: &Pod) -> Self {
        Published { last: Value::Null, since: since(pod) }
    }
}

/// Writes the status whenever it changes, while the node has its link. Ends with the pod.
pub(crate) async fn keep_published(context: &Context) {
    let mut board = context.board.subscribe();
    let mut seen = context.seen.clone();
    let mut link = context.node.link.subscribe();
    loop {
        board.borrow_and_update();
        if seen.borrow_and_update().gone || link.wait_for(|link| *link == Link::On).await.is_err() {
            return;
        }
        let again = match publish(context).await {
            Ok(()) => false,
            Err(error) => {
                tracing::debug!(%error, pod = context.name, "a pod status was not written");
                true
            }
        };
        tokio::time::sleep(TOGETHER).await;
        let retry = async {
            match again {
                true => tokio::time::sleep(AGAIN).await,
                false => std::future::pending().await,
            }
        };
        tokio::select! {
            changed = board.changed() => if changed.is_err() { return },
            changed = seen.changed() => if changed.is_err() { return },
            () = retry => {}
        }
    }
}

/// Writes the status if it is not what was written last.
pub(crate) async fn publish(context: &Context) -> kube::Result<()> {
    let mut published = context.published.lock().await;
    let facts = Facts {
        address: context.address.clone(),
        host: context.shared.host.clone(),
        began: context.began,
        over: context.over.load(Ordering::Relaxed),
        now: Timestamp::now(),
    };
    let views = context.board.borrow().clone();
    let mut status = status(&context.pod(), &views, &facts, &mut published.since);
    for container in status.container_statuses.iter_mut().flatten() {
        container.allocated_resources_status = context.node.devices().status(&context.uid, &container.name);
    }
    let mut status = serde_json::to_value(&status).expect("a status is JSON");
    if published.last == status {
        return Ok(());
    }
    let last = status.clone();
    // A list that merges by address would keep the address from before the node was off.
    if let Some(addresses) = status["podIPs"].as_array_mut() {
        addresses.push(json!({"$patch": "replace"}));
    }
    let body = json!({ "metadata": { "uid": context.uid }, "status": status });
    let (api, body) = (context.api(), Patch::Strategic(body));
    match within(api.patch_status(&context.name, &PatchParams::default(), &body)).await {
        Ok(_) => published.last = last,
        // Nobody is left to tell.
        Err(error) if is_gone(&error) => {}
        Err(error) => return Err(error),
    }
    Ok(())
}

/// The object is not there, or another one has its name.
pub(crate) fn is_gone(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 404 || status.code == 409)
}
