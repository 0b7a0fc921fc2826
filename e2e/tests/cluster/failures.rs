//! Pods, nodes, gateways, operators and the API server go away; answers do not.

use std::collections::BTreeSet;
use std::time::Duration;

use deepinfer_controlplane::children::Signal;
use deepinfer_controlplane::nodes::NodeSpec;
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::api::{DeleteParams, ListParams};
use kube::{Api, ResourceExt as _};
use serde_json::json;

use crate::bed::{Bed, SERVES, is, why};
use crate::client::{Load, capital};

/// Two supernodes of one pod each: one may be lost while the other serves.
fn pair() -> serde_json::Value {
    json!({"spec": {
        "prefill": {"replicas": 2},
        "decode": {
            "replicas": 2,
            "supernode": {"nodes": 1, "minReadySeconds": 0},
            "recovery": {"nodeLostGraceSeconds": 0, "backoffSeconds": 1, "maxRestarts": 2},
        },
    }})
}

fn names(supernodes: &[deepinfer_crds::Supernode]) -> BTreeSet<String> {
    supernodes.iter().map(|sn| sn.name_any()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_engine_is_rebuilt_under_another_name_and_no_request_is_lost() {
    let Some(bed) = Bed::cpu(4).await else { return };
    bed.apply(pair()).await.unwrap();
    bed.ready().await.unwrap();
    let before = names(&bed.living().await.unwrap());
    let mut load = Load::start(&bed.gateways().await.unwrap(), 4).await.unwrap();
    load.more(8).await.unwrap();
    let victim = bed.pods_of("decode").await.unwrap()[0].name_any();
    bed.nodes.signal(&bed.namespace, &victim, "engine", Signal::Kill).unwrap();
    load.more(20).await.unwrap();
    bed.wait("another one took its place", SERVES, async || {
        let now = names(&bed.living().await?);
        Ok(now.len() == 2 && now.difference(&before).count() == 1)
    })
    .await
    .unwrap();
    bed.ready().await.unwrap();
    load.more(8).await.unwrap();
    load.finish().await.unwrap();
    bed.delete().await.unwrap();
    bed.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_wait_for_the_successor_of_the_only_supernode() {
    let Some(bed) = Bed::cpu(4).await else { return };
    bed.apply(json!({"spec": {"decode": {"supernode": {"nodes": 1, "minReadySeconds": 0}}}})).await.unwrap();
    bed.ready().await.unwrap();
    let gateway = bed.gateways().await.unwrap().remove(0);
    let ready_since = async || {
        let pods = bed.pods_of("gateway").await.unwrap();
        let since = |pod: &Pod| {
            let conditions = pod.status.as_ref()?.conditions.as_deref()?;
            let ready = conditions.iter().find(|c| c.type_ == "Ready" && c.status == "True")?;
            ready.last_transition_time.clone()
        };
        pods.iter().map(|pod| (pod.name_any(), since(pod))).collect::<Vec<_>>()
    };
    let all = async || Ok(ready_since().await.iter().all(|(_, since)| since.is_some()));
    bed.wait("all gateways are ready", SERVES, all).await.unwrap();
    let before = ready_since().await;
    let mut load = Load::start(std::slice::from_ref(&gateway), 3).await.unwrap();
    load.more(4).await.unwrap();
    let expected = capital(&gateway).await.unwrap();
    let victim = bed.pods_of("decode").await.unwrap()[0].name_any();
    bed.nodes.signal(&bed.namespace, &victim, "engine", Signal::Kill).unwrap();
    // Some come while the old pod is there, some while there is none, some while the new one starts.
    let mut new = tokio::task::JoinSet::new();
    bed.wait("the successor serves", SERVES, async || {
        let gateway = gateway.clone();
        new.spawn(async move { capital(&gateway).await });
        tokio::time::sleep(Duration::from_millis(200)).await;
        let pods = bed.pods_of("decode").await?;
        Ok(pods.iter().any(|pod| pod.name_any() != victim && crate::bed::pod_is_ready(pod)))
    })
    .await
    .unwrap();
    while let Some(answer) = new.join_next().await {
        assert_eq!(answer.unwrap().unwrap(), expected);
    }
    load.more(12).await.unwrap();
    load.finish().await.unwrap();
    assert_eq!(ready_since().await, before, "gateways stay in the Service: they hold requests");
    bed.delete().await.unwrap();
    bed.end().await;
}

/// OP-022, OP-118: names are new, so pods that hang on the dead node block nobody. It never comes back: once somebody
/// says so with the taint for it, nothing is left of them, and the cluster is deleted as any other.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_never_comes_back_does_not_hold_up_its_supernodes_successor() {
    let Some(bed) = Bed::cpu(5).await else { return };
    bed.apply(pair()).await.unwrap();
    bed.ready().await.unwrap();
    let gateways = bed.pods_of("gateway").await.unwrap();
    let node_of = |pod: &Pod| pod.spec.as_ref().and_then(|s| s.node_name.clone());
    // One gateway stays whatever node goes.
    let safe: BTreeSet<Option<String>> = gateways.iter().map(node_of).collect();
    let pods = bed.pods_of("decode").await.unwrap();
    let doomed = pods.iter().find(|pod| safe.len() > 1 || !safe.contains(&node_of(pod))).unwrap();
    let node = node_of(doomed).unwrap();
    let mut load = Load::start(&bed.gateways_off(&node).await.unwrap(), 2).await.unwrap();
    bed.nodes.power_off(&node).await.unwrap();
    bed.wait("the supernode is rebuilt on another node", SERVES, async || {
        let pods = bed.pods_of("decode").await?;
        let serving = pods.iter().filter(|pod| {
            pod.metadata.deletion_timestamp.is_none()
                && pod.spec.as_ref().and_then(|s| s.node_name.as_ref()) != Some(&node)
        });
        Ok(serving.filter(|pod| crate::bed::pod_is_ready(pod)).count() == 2)
    })
    .await
    .unwrap();
    load.more(4).await.unwrap();
    load.finish().await.unwrap();
    let on_it = async || {
        let pods = bed.pods().list(&kube::api::ListParams::default()).await?.items;
        Ok::<_, anyhow::Error>(pods.iter().filter(|pod| node_of(pod).as_ref() == Some(&node)).count())
    };
    assert!(on_it().await.unwrap() > 0, "without a kubelet nothing on it ends");
    let taint = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute";
    bed.plane.kubectl_ok(&["taint", "node", &node, taint]).await.unwrap();
    bed.wait("its pods are given up", SERVES, async || Ok(on_it().await? == 0)).await.unwrap();
    bed.ready().await.unwrap();
    bed.delete().await.unwrap();
    bed.end().await;
}

/// OP-034.
#[tokio::test(flavor = "multi_thread")]
async fn deleting_the_pod_of_index_zero_gives_one_new_incarnation() {
    let Some(bed) = Bed::cpu(4).await else { return };
    bed.apply(json!({})).await.unwrap();
    bed.ready().await.unwrap();
    let before = bed.living().await.unwrap().remove(0);
    let lead = format!("{}-00", before.name_any());
    bed.pods().delete(&lead, &DeleteParams::default()).await.unwrap();
    bed.wait("a new incarnation serves", SERVES, async || {
        let now = bed.living().await?;
        Ok(now.len() == 1 && now[0].name_any() != before.name_any())
    })
    .await
    .unwrap();
    bed.ready().await.unwrap();
    let events = bed
        .plane
        .kubectl_ok(&["get", "events.events.k8s.io", "-n", &bed.namespace, "-o", "json"])
        .await
        .unwrap();
    let events: serde_json::Value = serde_json::from_str(&events).unwrap();
    let made =
        events["items"].as_array().unwrap().iter().filter(|e| e["reason"] == "SupernodeCreated").count();
    assert_eq!(made, 2, "the first one and its successor");
    bed.delete().await.unwrap();
    bed.end().await;
}

/// OP-037, OP-119: an engine that always ends is given up, with its last words kept.
#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_always_ends_is_given_up_and_its_last_failure_kept() {
    let Some(bed) = Bed::cpu(3).await else { return };
    bed.nodes.crash_loop("engine");
    bed.apply(pair()).await.unwrap();
    let cluster = bed
        .wait_cluster("gives up", |cluster| why(cluster, "Stalled").0 == "RetriesExhausted")
        .await
        .unwrap();
    assert!(is(&cluster, "Ready", "False"));
    bed.wait("the failed one is kept, and holds no running pod", SERVES, async || {
        let all = bed.living().await?;
        let failed =
            all.iter().filter_map(|sn| sn.status.as_ref()).filter(|s| s.last_failure.is_some()).count();
        let running = bed
            .pods_of("decode")
            .await?
            .iter()
            .filter(|pod| pod.status.as_ref().and_then(|s| s.phase.as_deref()) == Some("Running"))
            .count();
        Ok(failed >= 1 && running == 0)
    })
    .await
    .unwrap();
    bed.nodes.clear_faults("engine");
    bed.edit(json!({"spec": {"operation": {"restartToken": "mended"}}})).await.unwrap();
    bed.ready().await.unwrap();
    bed.delete().await.unwrap();
    bed.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_gateway_leaves_the_others_serving_and_nothing_behind() {
    let Some(bed) = Bed::cpu(4).await else { return };
    bed.apply(pair()).await.unwrap();
    bed.ready().await.unwrap();
    let pods = bed.pods_of("gateway").await.unwrap();
    let url = |index: usize| {
        format!("http://{}:8000", pods[index].status.as_ref().unwrap().pod_ip.as_ref().unwrap())
    };
    let mut load = Load::start(&[url(1)], 2).await.unwrap();
    let doomed = Load::start(&[url(0)], 3).await.unwrap();
    load.more(3).await.unwrap();
    bed.nodes.signal(&bed.namespace, &pods[0].name_any(), "gateway", Signal::Kill).unwrap();
    assert!(doomed.finish().await.is_err(), "its clients see the connection end");
    load.more(6).await.unwrap();
    load.finish().await.unwrap();
    bed.ready().await.unwrap();
    bed.delete().await.unwrap();
    bed.end().await;
}

/// Invariant 8: serving does not need the control plane; what changed meanwhile is followed afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn serving_goes_on_for_a_minute_without_operator_and_api_server() {
    let Some(mut bed) = Bed::cpu(4).await else { return };
    bed.apply(pair()).await.unwrap();
    bed.ready().await.unwrap();
    let mut load = Load::start(&bed.gateways().await.unwrap(), 2).await.unwrap();
    load.more(2).await.unwrap();
    let pods: BTreeSet<Option<String>> =
        bed.pods_of("decode").await.unwrap().into_iter().map(|pod| pod.metadata.uid).collect();
    bed.operators[0].kill9();
    bed.plane.kill_api_server().unwrap();
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while std::time::Instant::now() < deadline {
        load.more(2).await.unwrap();
    }
    bed.plane.restart_api_server().await.unwrap();
    bed.operators[0].restart().unwrap();
    bed.operators[0].wait_ready(Duration::from_secs(60)).await.unwrap();
    load.more(4).await.unwrap();
    let after: BTreeSet<Option<String>> =
        bed.pods_of("decode").await.unwrap().into_iter().map(|pod| pod.metadata.uid).collect();
    assert_eq!(pods, after, "no pod was made or lost by it");
    bed.edit(json!({"spec": {"decode": {"replicas": 1}}})).await.unwrap();
    bed.wait("the change is followed", SERVES, async || Ok(bed.living().await?.len() == 1)).await.unwrap();
    load.more(4).await.unwrap();
    load.finish().await.unwrap();
    bed.delete().await.unwrap();
    bed.end().await;
}

/// Invariant 1.
#[tokio::test(flavor = "multi_thread")]
async fn an_operator_of_another_release_restarts_no_engine() {
    let Some(mut bed) = Bed::cpu(4).await else { return };
    bed.apply(json!({})).await.unwrap();
    bed.ready().await.unwrap();
    let uids = async |role: &str| -> BTreeSet<Option<String>> {
        bed.pods_of(role).await.unwrap().into_iter().map(|pod| pod.metadata.uid).collect()
    };
    let before = (uids("decode").await, uids("prefill").await);
    bed.operators[0]
        .restart_with(&[
            "--release=99.0.0",
            "--gateway-image=deepinfer-gateway:other",
            "--default=chunk_budget_ms=50",
            "--default=cpu_chunk_budget_ms=50",
            "--default=drain_timeout=77",
            "--default=extra_slots=3",
        ])
        .unwrap();
    bed.operators[0].wait_ready(Duration::from_secs(60)).await.unwrap();
    bed.operators[0].wait_leading(Duration::from_secs(30)).await.unwrap();
    // It has planned once it says so about an edit that shapes no pod.
    bed.edit(json!({"spec": {"availability": {"degradedAfterSeconds": 100}}})).await.unwrap();
    bed.ready().await.unwrap();
    let uids = async |role: &str| -> BTreeSet<Option<String>> {
        bed.pods_of(role).await.unwrap().into_iter().map(|pod| pod.metadata.uid).collect()
    };
    assert_eq!(before, (uids("decode").await, uids("prefill").await));
    bed.delete().await.unwrap();
    bed.end().await;
}

/// OP-007, OP-115.
#[tokio::test(flavor = "multi_thread")]
async fn hand_edited_children_are_set_back_and_an_event_says_so() {
    let Some(bed) = Bed::cpu(3).await else { return };
    bed.apply(json!({})).await.unwrap();
    bed.ready().await.unwrap();
    let ns = bed.namespace.as_str();
    bed.plane.kubectl_ok(&["scale", "dip/quickstart-decode", "-n", ns, "--replicas=3"]).await.unwrap();
    bed.plane
        .kubectl_ok(&["scale", "deployment/quickstart-gateway", "-n", ns, "--replicas=1"])
        .await
        .unwrap();
    bed.wait("both are set back", SERVES, async || {
        let pool = bed.pools().get("quickstart-decode").await?;
        let deployments: Api<k8s_openapi::api::apps::v1::Deployment> = Api::namespaced(bed.client(), ns);
        let gateway = deployments.get("quickstart-gateway").await?;
        Ok(pool.spec.replicas == Some(1) && gateway.spec.and_then(|s| s.replicas) == Some(2))
    })
    .await
    .unwrap();
    bed.wait("events say so", Duration::from_secs(20), async || {
        let events = bed.plane.kubectl_ok(&["get", "events.events.k8s.io", "-n", ns]).await?;
        Ok(events.matches("DriftCorrected").count() >= 2)
    })
    .await
    .unwrap();
    assert_eq!(bed.living().await.unwrap().len(), 1);
    bed.delete().await.unwrap();
    bed.end().await;
}

/// The operator may not read Secrets: that the key of a cluster is gone shows by pods that are held up for want of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_key_comes_back_for_the_pods_that_wait_for_it() {
    let Some(bed) = Bed::cpu(3).await else { return };
    bed.apply(json!({})).await.unwrap();
    bed.ready().await.unwrap();
    let secrets: Api<Secret> = Api::namespaced(bed.client(), &bed.namespace);
    let ours = ListParams::default().labels("deepinfer.io/cluster=quickstart");
    let before = secrets.list(&ours).await.unwrap().items;
    assert_eq!(before.len(), 1, "{:?}", before.iter().map(Secret::name_any).collect::<Vec<_>>());
    let key = before[0].name_any();
    secrets.delete(&key, &DeleteParams::default()).await.unwrap();
    let gateway = bed.pods_of("gateway").await.unwrap()[0].name_any();
    bed.pods().delete(&gateway, &DeleteParams::default()).await.unwrap();
    bed.wait("the key is there again", SERVES, async || Ok(secrets.get_opt(&key).await?.is_some()))
        .await
        .unwrap();
    assert!(secrets.get(&key).await.unwrap().data == before[0].data, "it is another key");
    bed.wait("both gateways are ready", SERVES, async || Ok(bed.gateways().await?.len() == 2)).await.unwrap();
    for gateway in bed.gateways().await.unwrap() {
        assert!(capital(&gateway).await.unwrap().contains("Paris"));
    }
    bed.delete().await.unwrap();
    bed.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn accelerator_gangs_sit_in_one_domain_or_wait_without_holding_anything() {
    let gpu = |name: &str, domain: &str| {
        NodeSpec::new(name).label("nvidia.com/gpu.clique", domain).resource("nvidia.com/gpu", "4")
    };
    let specs = vec![
        gpu("a-0", "rack-a"),
        gpu("a-1", "rack-a"),
        gpu("a-2", "rack-a"),
        gpu("b-0", "rack-b"),
        gpu("b-1", "rack-b"),
        NodeSpec::new("plain-0"),
        NodeSpec::new("plain-1"),
    ];
    let Some(bed) = Bed::start(specs, 1, &[]).await else { return };
    bed.apply(json!({"spec": {
        "accelerator": {"vendor": "nvidia", "acceleratorsPerNode": 4, "topologyProfile": "nvl72", "computeDomain": "Off"},
        "scheduling": {"backend": "Builtin"},
        "prefill": {"replicas": 0},
        "availability": {"minPrefill": 0},
        "decode": {"replicas": 3, "supernode": {"nodes": 2, "minReadySeconds": 0}},
    }}))
    .await
    .unwrap();
    bed.wait("two are placed and one waits", SERVES, async || {
        let all = bed.living().await?;
        let placed = all.iter().filter(|sn| sn.status.as_ref().is_some_and(|s| s.domain.is_some())).count();
        Ok(all.len() == 3 && placed == 2)
    })
    .await
    .unwrap();
    let pods = bed.pods_of("decode").await.unwrap();
    assert_eq!(pods.len(), 4, "the third holds nothing");
    let waiting = bed.living().await.unwrap();
    let waiting = waiting.iter().find(|sn| sn.status.as_ref().is_none_or(|s| s.domain.is_none())).unwrap();
    let placement = waiting.status.clone().unwrap().placement.unwrap();
    let rack_a = placement.candidates.iter().find(|c| c.domain == "rack-a").unwrap();
    assert_eq!((rack_a.nodes, rack_a.free), (3, 1), "{placement:?}");
    // The cluster's status may come a moment after the supernodes'.
    bed.wait_cluster("says what it waits for", |cluster| {
        let waiting = cluster.status.iter().flat_map(|status| &status.waiting);
        waiting.map(|line| line.reason.as_str()).any(|reason| reason == "NotEnoughFree")
    })
    .await
    .unwrap();
    bed.delete().await.unwrap();
    bed.end().await;
}
