//! What others wrote: their objects are not touched, our fields are set back, our memory may be lost.

use std::collections::BTreeMap;

use deepinfer_crds::condition::kind;
use deepinfer_crds::{DeepInferCluster, Supernode};
use deepinfer_operator::commit;
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{ConfigMap, ResourceQuota, Service};
use k8s_openapi::api::events::v1::Event;
use kube::api::{ListParams, ObjectMeta, Patch, PatchParams, PostParams};
use serde_json::json;

use crate::bed::{Bed, manifest};

/// An object of the name that is not ours is never adopted; the status names it, and everything goes on once it is
/// gone.
#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_object_of_our_name_is_left_alone_and_named() {
    let Some(bed) = Bed::new("foreign").await else { return };
    let services = bed.api::<Service>();
    let theirs: Service = serde_json::from_value(json!({
        "metadata": {"name": "c-gateway", "labels": {"app": "theirs"}},
        "spec": {"selector": {"app": "theirs"}, "ports": [{"port": 80}]},
    }))
    .unwrap();
    let theirs = services.create(&PostParams::default(), &theirs).await.unwrap();
    let _operator = bed.operator().await.unwrap();
    bed.create("c").await.unwrap();
    let clusters = bed.api::<DeepInferCluster>();
    bed.until("the status names the collision", || async {
        let status = serde_json::to_string(&clusters.get("c").await?.status)?;
        Ok(status.contains("NameCollision") && status.contains("c-gateway"))
    })
    .await;
    bed.gang("c", 2).await;
    let now = services.get("c-gateway").await.unwrap();
    assert_eq!(now.metadata.uid, theirs.metadata.uid);
    assert_eq!(now.spec.unwrap().selector, theirs.spec.unwrap().selector, "nothing of it was changed");
    services.delete("c-gateway", &Default::default()).await.unwrap();
    bed.until("our service takes the name", || async {
        let service = services.get_opt("c-gateway").await?;
        Ok(service.is_some_and(|s| s.metadata.labels.is_some_and(|l| l.contains_key("deepinfer.io/cluster"))))
    })
    .await;
}

/// OP-007: what a user changes in a child is set back within one reconcile, and an event names who changed it.
#[tokio::test(flavor = "multi_thread")]
async fn a_hand_edit_of_a_child_is_undone_and_said() {
    let Some(bed) = Bed::new("drift").await else { return };
    let _operator = bed.operator().await.unwrap();
    bed.create("c").await.unwrap();
    bed.wait_for::<Deployment>("c-gateway").await;
    let deployments = bed.api::<Deployment>();
    let edit = Patch::Merge(json!({"spec": {"replicas": 5}}));
    deployments
        .patch(
            "c-gateway",
            &PatchParams { field_manager: Some("by-hand".into()), ..PatchParams::default() },
            &edit,
        )
        .await
        .unwrap();
    bed.until("the count is set back", || async {
        Ok(deployments.get("c-gateway").await?.spec.and_then(|spec| spec.replicas) == Some(2))
    })
    .await;
    let events = bed.api::<Event>();
    bed.until("an event says so", || async {
        let all = events.list(&ListParams::default()).await?;
        Ok(all.items.iter().any(|event| {
            event.reason.as_deref() == Some("DriftCorrected")
                && event.note.as_deref().is_some_and(|note| note.contains("by-hand"))
        }))
    })
    .await;
}

/// The committed memory may be lost or damaged under load: no pod changes, and it is there again.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_or_damaged_blueprint_costs_no_pod() {
    let Some(bed) = Bed::new("memory").await else { return };
    let _operator = bed.operator().await.unwrap();
    bed.create("c").await.unwrap();
    let pods = bed.gang("c", 2).await;
    let maps = bed.api::<ConfigMap>();
    let name = commit::name("c");
    let readable = |map: Option<ConfigMap>| map.is_some_and(|map| commit::read(&map).is_some());
    bed.until("the plan is committed", || async { Ok(readable(maps.get_opt(&name).await?)) }).await;
    let before = maps.get(&name).await.unwrap();
    maps.delete(&name, &Default::default()).await.unwrap();
    bed.until("it is made anew", || async {
        let now = maps.get_opt(&name).await?;
        Ok(now.as_ref().is_some_and(|now| now.metadata.uid != before.metadata.uid) && readable(now))
    })
    .await;
    let rubbish = Patch::Merge(json!({"data": {commit::ITEM: "{"}}));
    maps.patch(&name, &PatchParams::default(), &rubbish).await.unwrap();
    bed.until("it is readable again", || async { Ok(readable(maps.get_opt(&name).await?)) }).await;
    assert_eq!(bed.supernode_pods("c").await.unwrap(), pods);
    assert_eq!(bed.api::<Supernode>().list(&ListParams::default()).await.unwrap().items.len(), 1);
}

/// A quota that is used up stops nothing else, is said, and once it is raised the rest is made without anybody's help.
#[tokio::test(flavor = "multi_thread")]
async fn a_used_up_quota_is_said_and_heals() {
    let Some(bed) = Bed::new("quota").await else { return };
    let quotas = bed.api::<ResourceQuota>();
    let quota = |pods: &str| -> ResourceQuota {
        let hard = BTreeMap::from([("pods".to_owned(), deepinfer_crds::Quantity(pods.to_owned()))]);
        ResourceQuota {
            metadata: ObjectMeta { name: Some("few".into()), ..ObjectMeta::default() },
            spec: Some(k8s_openapi::api::core::v1::ResourceQuotaSpec {
                hard: Some(hard),
                ..Default::default()
            }),
            ..ResourceQuota::default()
        }
    };
    quotas.create(&PostParams::default(), &quota("0")).await.unwrap();
    bed.until("the quota is in force", || async {
        Ok(quotas.get("few").await?.status.is_some_and(|status| status.hard.is_some()))
    })
    .await;
    let _operator = bed.operator().await.unwrap();
    bed.create("c").await.unwrap();
    let clusters = bed.api::<DeepInferCluster>();
    bed.until("the status names the quota", || async {
        let status = serde_json::to_string(&clusters.get("c").await?.status)?;
        Ok(status.contains("QuotaExceeded") && status.contains("few"))
    })
    .await;
    bed.wait_for::<Deployment>("c-gateway").await;
    quotas
        .patch("few", &PatchParams::default(), &Patch::Merge(json!({"spec": {"hard": {"pods": "50"}}})))
        .await
        .unwrap();
    bed.gang("c", 2).await;
}

/// Fields that are not built stop the cluster with a word for each, and nothing is made.
#[tokio::test(flavor = "multi_thread")]
async fn a_spec_that_cannot_be_followed_makes_nothing() {
    let Some(bed) = Bed::new("refused").await else { return };
    let _operator = bed.operator().await.unwrap();
    let mut cluster = serde_json::to_value(manifest("c")).unwrap();
    cluster["spec"]["model"]["source"]["uri"] = json!("hf://somebody/something");
    let cluster: DeepInferCluster = serde_json::from_value(cluster).unwrap();
    let clusters = bed.api::<DeepInferCluster>();
    clusters.create(&PostParams::default(), &cluster).await.unwrap();
    bed.until("it is stalled", || async {
        let status = clusters.get("c").await?.status.unwrap_or_default();
        Ok(deepinfer_crds::condition::is_true(&status.conditions, kind::STALLED))
    })
    .await;
    let made =
        bed.api::<ConfigMap>().list(&ListParams::default().labels("deepinfer.io/cluster")).await.unwrap();
    assert!(made.items.is_empty(), "not even memory is kept");
    assert!(bed.api::<Deployment>().list(&ListParams::default()).await.unwrap().items.is_empty());
}
