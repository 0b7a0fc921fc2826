//! The README's flow.

use serde_json::json;

use crate::bed::{Bed, is, why};
use crate::client::{capital, complete};

#[tokio::test(flavor = "multi_thread")]
async fn apply_serve_delete() {
    let Some(bed) = Bed::cpu(4).await else { return };
    bed.apply(json!({})).await.unwrap();
    let cluster = bed.ready().await.unwrap();
    let summary = cluster.status.clone().unwrap().summary.unwrap();
    assert_eq!(summary.prefill.as_deref(), Some("1/1"));
    assert_eq!(summary.decode.as_deref(), Some("1/1"));
    assert_eq!(summary.gateway.as_deref(), Some("2/2"));
    for gateway in bed.gateways().await.unwrap() {
        let answer = capital(&gateway).await.unwrap();
        assert!(answer.contains("Paris"), "{answer}");
        complete(&gateway, "Once upon a time", 40).await.unwrap();
    }
    let columns = bed.plane.kubectl_ok(&["get", "dic,sn", "-n", &bed.namespace]).await.unwrap();
    assert!(columns.contains("Serving") && columns.contains("2/2"), "{columns}");
    bed.delete().await.unwrap();
    bed.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_missing_is_named_and_heals_when_it_comes() {
    let Some(bed) = Bed::cpu(3).await else { return };
    bed.apply(json!({"spec": {"model": {"source": {"uri": "file:///models/nowhere"}}}})).await.unwrap();
    let cluster = bed
        .wait_cluster("says that the model is missing", |cluster| is(cluster, "ModelReady", "False"))
        .await
        .unwrap();
    let (reason, message) = why(&cluster, "ModelReady");
    assert_eq!(reason, "SourceUnreachable");
    assert!(message.contains("nowhere"), "{message}");
    bed.edit(json!({"spec": {"model": {"source": {"uri": "file:///models/tiny-v41"}}}})).await.unwrap();
    bed.ready().await.unwrap();
    bed.delete().await.unwrap();
    bed.end().await;
}

/// OP-047.
#[tokio::test(flavor = "multi_thread")]
async fn a_missing_pod_template_stalls_and_leaves_what_runs_alone() {
    let Some(bed) = Bed::cpu(3).await else { return };
    bed.apply(json!({})).await.unwrap();
    bed.ready().await.unwrap();
    let before: Vec<String> =
        bed.living().await.unwrap().into_iter().filter_map(|sn| sn.metadata.uid).collect();
    bed.edit(json!({"spec": {"decode": {"pod": {"templateRef": {"name": "nowhere"}}}}})).await.unwrap();
    let cluster = bed.wait_cluster("stalls", |cluster| is(cluster, "Stalled", "True")).await.unwrap();
    let (reason, message) = why(&cluster, "Stalled");
    assert_eq!(reason, "RefNotFound");
    assert!(message.contains("spec.decode.pod.templateRef.name") && message.contains("nowhere"), "{message}");
    let after: Vec<String> =
        bed.living().await.unwrap().into_iter().filter_map(|sn| sn.metadata.uid).collect();
    assert_eq!(before, after);
    let gateways = bed.gateways().await.unwrap();
    assert!(capital(&gateways[0]).await.unwrap().contains("Paris"));
    bed.edit(json!({"spec": {"decode": {"pod": null}}})).await.unwrap();
    bed.wait_cluster("goes on", |cluster| is(cluster, "Stalled", "False")).await.unwrap();
    bed.delete().await.unwrap();
    bed.end().await;
}
