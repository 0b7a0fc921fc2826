//! Changes of a running cluster: one supernode at a time, the new one before the old one, and no request is lost.

use std::collections::BTreeSet;

use kube::ResourceExt as _;
use serde_json::json;

use crate::bed::{Bed, SERVES};
use crate::client::Load;

/// OP-001, OP-005, OP-023: three quick edits end with everything at the last revision, and two of three always serve.
#[tokio::test(flavor = "multi_thread")]
async fn quick_edits_replace_supernodes_one_at_a_time_and_end_at_the_last_revision() {
    let Some(bed) = Bed::cpu(6).await else { return };
    let shape = json!({"spec": {"decode": {"replicas": 2, "supernode": {"nodes": 1, "minReadySeconds": 0}}}});
    bed.apply(shape).await.unwrap();
    bed.ready().await.unwrap();
    let mut load = Load::start(&bed.gateways().await.unwrap(), 2).await.unwrap();
    for token in ["one", "two", "three"] {
        bed.edit(json!({"spec": {"operation": {"restartToken": token}}})).await.unwrap();
        load.more(1).await.unwrap();
    }
    let mut fewest = usize::MAX;
    bed.wait("everything is at the last revision", SERVES, async || {
        let all = bed.living().await?;
        let serving = all.iter().filter(|sn| {
            sn.spec.drain.is_none()
                && sn.status.as_ref().and_then(|s| s.phase) == Some(deepinfer_crds::SupernodePhase::Serving)
        });
        fewest = fewest.min(serving.count());
        let cluster = bed.cluster().await?;
        let revision = cluster.status.as_ref().and_then(|s| s.revision.clone());
        let seen = cluster.status.as_ref().and_then(|s| s.observed_generation) == cluster.metadata.generation;
        let current = all.iter().filter(|sn| Some(&sn.spec.revision) == revision.as_ref()).count();
        Ok(seen && all.len() == 2 && current == 2 && crate::bed::is(&cluster, "Ready", "True"))
    })
    .await
    .unwrap();
    assert!(fewest >= 1, "at least one served all the time");
    load.more(4).await.unwrap();
    load.finish().await.unwrap();
    bed.delete().await.unwrap();
    bed.end().await;
}

/// OP-025, OP-055: the number is no part of the revision.
#[tokio::test(flavor = "multi_thread")]
async fn ten_changes_of_the_number_change_no_revision_and_restart_nobody() {
    let Some(bed) = Bed::cpu(4).await else { return };
    bed.apply(json!({"spec": {"decode": {"supernode": {"nodes": 1, "minReadySeconds": 0}}}})).await.unwrap();
    let revision = bed.ready().await.unwrap().status.unwrap().revision;
    let first = bed.living().await.unwrap()[0].name_any();
    let prefill: BTreeSet<Option<String>> =
        bed.pods_of("prefill").await.unwrap().into_iter().map(|pod| pod.metadata.uid).collect();
    for turn in 0..10 {
        bed.edit(json!({"spec": {"decode": {"replicas": 1 + turn % 2}}})).await.unwrap();
    }
    bed.edit(json!({"spec": {"decode": {"replicas": 2}}})).await.unwrap();
    let cluster = bed.ready().await.unwrap();
    assert_eq!(cluster.status.unwrap().revision, revision);
    let now = bed.living().await.unwrap();
    assert!(now.iter().any(|sn| sn.name_any() == first), "the first one was left alone");
    let after: BTreeSet<Option<String>> =
        bed.pods_of("prefill").await.unwrap().into_iter().map(|pod| pod.metadata.uid).collect();
    assert_eq!(prefill, after);
    bed.delete().await.unwrap();
    bed.end().await;
}

/// OP-002: a change that is taken back keeps those that never left.
#[tokio::test(flavor = "multi_thread")]
async fn a_change_that_is_taken_back_keeps_the_survivors() {
    let Some(bed) = Bed::cpu(6).await else { return };
    let shape = json!({"spec": {"decode": {"replicas": 2, "supernode": {"nodes": 1, "minReadySeconds": 0}}}});
    bed.apply(shape).await.unwrap();
    bed.ready().await.unwrap();
    let before: BTreeSet<String> = bed.living().await.unwrap().iter().map(|sn| sn.name_any()).collect();
    bed.edit(json!({"spec": {"operation": {"restartToken": "b"}}})).await.unwrap();
    bed.wait("the change has begun", SERVES, async || Ok(bed.living().await?.len() > 2)).await.unwrap();
    bed.edit(json!({"spec": {"operation": null}})).await.unwrap();
    bed.ready().await.unwrap();
    let after: BTreeSet<String> = bed.living().await.unwrap().iter().map(|sn| sn.name_any()).collect();
    assert!(after.intersection(&before).count() >= 1, "{before:?} became {after:?}");
    bed.delete().await.unwrap();
    bed.end().await;
}
