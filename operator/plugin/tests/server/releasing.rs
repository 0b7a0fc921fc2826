//! `release` of a cluster whose operator is gone.

use kube::api::DeleteParams;
use serde_json::{Value, json};

use super::kit::{api, make, plugin, server};
use super::objects;

#[tokio::test]
async fn a_cluster_that_hangs_in_deletion_is_let_go_after_a_warning() {
    let Some(plane) = server().await else { return };
    let ns = plane.namespace("release").await.expect("a namespace");
    let mut cluster = objects::cluster();
    cluster["metadata"]["finalizers"] = json!(["deepinfer.io/teardown"]);
    let made = make(plane, &ns, cluster.clone()).await;
    let mut child = objects::placing();
    child["metadata"]["ownerReferences"] = json!([{
        "apiVersion": "deepinfer.io/v1alpha1", "kind": "DeepInferCluster", "name": "v41", "uid": made.metadata.uid,
        "controller": true, "blockOwnerDeletion": true,
    }]);
    make(plane, &ns, child.clone()).await;

    let said = plugin(plane, &["release", "v41", "-n", &ns, "--yes"]).await;
    assert!(said.code == Some(1) && said.err.contains("is not being deleted"), "{said:?}");
    let clusters = api(plane, &cluster, &ns);
    clusters.delete("v41", &DeleteParams::background()).await.expect("deleted");
    let said = plugin(plane, &["release", "v41", "-n", &ns]).await;
    assert!(said.code == Some(1) && said.out.contains("Run again with --yes"), "{said:?}");
    assert!(clusters.get_opt("v41").await.expect("an answer").is_some(), "nothing has been changed");
    let said = plugin(plane, &["release", "v41", "-n", &ns, "--yes"]).await;
    assert_eq!(said.code, Some(0), "{said:?}");
    assert!(clusters.get_opt("v41").await.expect("an answer").is_none());
    gone(plane, &child, &ns).await;
    let said = plugin(plane, &["release", "v41", "-n", &ns, "--yes"]).await;
    assert!(said.err.contains("nothing of DeepInferCluster v41"), "{said:?}");
}

/// The garbage collector takes children of a cluster that is gone.
async fn gone(plane: &deepinfer_controlplane::ControlPlane, child: &Value, namespace: &str) {
    let children = api(plane, child, namespace);
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while children.get_opt("v41-decode-x4k2b").await.expect("an answer").is_some() {
        assert!(std::time::Instant::now() < deadline, "the supernode is still there");
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }
}
