//! One leader, whatever happens to the others.

use std::time::{Duration, Instant};

use deepinfer_controlplane::Operator;
use deepinfer_crds::Supernode;
use deepinfer_operator::commit;
use futures_util::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{ListParams, WatchEvent, WatchParams};

use crate::bed::{Bed, PATIENCE};

/// Index of the replica that leads.
async fn leader(replicas: &[Operator], but: Option<usize>) -> usize {
    let deadline = Instant::now() + PATIENCE;
    loop {
        for (index, replica) in replicas.iter().enumerate() {
            if Some(index) != but && replica.exit_status().is_none() && replica.leads().await {
                return index;
            }
        }
        assert!(Instant::now() < deadline, "nobody leads");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// OP-112: two replicas, the leader is stopped in the middle of its work and goes on much later. Each plan has one
/// successor, nothing is made twice, and the old leader ends without another write.
#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_leader_is_replaced_and_never_acts_again() {
    let Some(bed) = Bed::new("leader").await else { return };
    let mut replicas = Operator::start_replicas(bed.plane, bed.options(), 2).await.unwrap();
    for replica in &replicas {
        replica.wait_ready(PATIENCE).await.unwrap();
    }
    let first = leader(&replicas, None).await;
    let plans = tokio::spawn(watch_plans(bed.api::<ConfigMap>()));
    let names = ["a", "b", "c", "d"];
    for name in names {
        bed.create(name).await.unwrap();
    }
    // Somewhere in the middle: one gang is there, the others are not.
    bed.until("the first pods are made", || async { Ok(!bed.supernode_pods("a").await?.is_empty()) }).await;
    replicas[first].stop_signal().unwrap();
    let stopped = Instant::now();
    let second = leader(&replicas, Some(first)).await;
    println!("measure: another leads {:.1} s after the leader was stopped", stopped.elapsed().as_secs_f64());
    for name in names {
        bed.gang(name, 2).await;
    }
    let before = objects(&bed).await;

    replicas[first].cont().unwrap();
    let status = replicas[first].wait_exit(Duration::from_secs(20)).await.expect("the old leader ends");
    assert_eq!(status.code(), Some(1), "it ends with an error, so that it is started again");
    assert!(replicas[second].leads().await);
    for name in names {
        assert_eq!(bed.supernode_pods(name).await.unwrap().len(), 2, "{name} has its pods once");
    }
    let supernodes = bed.api::<Supernode>().list(&ListParams::default()).await.unwrap();
    assert_eq!(supernodes.items.len(), names.len(), "one supernode for each cluster");
    assert_eq!(objects(&bed).await, before, "what was made is what stays");

    assert!(!plans.is_finished(), "two plans had one parent: see above");
    plans.abort();
    let chains = plans_of(&bed).await;
    assert_eq!(chains.len(), names.len());
    replicas.truncate(0);
}

/// A leader that is asked to end lets the lease go: the other takes over at once and not after the lease has run out.
#[tokio::test(flavor = "multi_thread")]
async fn a_leader_that_ends_hands_over_at_once() {
    let Some(bed) = Bed::new("handover").await else { return };
    let options = bed.options().flag("--lease-duration-seconds=60").flag("--lease-renew-seconds=40");
    let replicas = Operator::start_replicas(bed.plane, options, 2).await.unwrap();
    for replica in &replicas {
        replica.wait_ready(PATIENCE).await.unwrap();
    }
    let first = leader(&replicas, None).await;
    let asked = Instant::now();
    let status = replicas[first].terminate(Duration::from_secs(20)).await.unwrap();
    assert_eq!(status.code(), Some(0));
    leader(&replicas, Some(first)).await;
    let took = asked.elapsed();
    println!("measure: another leads {:.1} s after the leader was asked to end", took.as_secs_f64());
    assert!(took < Duration::from_secs(30), "the lease was let go, not waited for: {took:?}");
}

/// Names, UIDs and generations of everything that plans make.
async fn objects(bed: &Bed) -> Vec<(String, String)> {
    let pods =
        bed.api::<k8s_openapi::api::core::v1::Pod>().list(&ListParams::default()).await.expect("a list");
    let supernodes = bed.api::<Supernode>().list(&ListParams::default()).await.expect("a list");
    let named = |meta: kube::api::ObjectMeta| (meta.name.unwrap_or_default(), meta.uid.unwrap_or_default());
    let ours = pods.items.into_iter().filter(|pod| {
        pod.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key("deepinfer.io/supernode"))
    });
    let mut all: Vec<_> = ours
        .map(|pod| named(pod.metadata))
        .chain(supernodes.items.into_iter().map(|sn| named(sn.metadata)))
        .collect();
    all.sort();
    all
}

/// Every version of every blueprint follows from the one before: two successors of one plan cannot be.
async fn watch_plans(api: kube::Api<ConfigMap>) {
    let mut last = std::collections::BTreeMap::<String, u64>::new();
    let mut version = "0".to_owned();
    loop {
        let Ok(stream) = api.watch(&WatchParams::default().timeout(60), &version).await else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let mut stream = stream.boxed();
        while let Ok(Some(event)) = stream.try_next().await {
            let (WatchEvent::Added(map) | WatchEvent::Modified(map)) = event else { continue };
            version = map.metadata.resource_version.clone().unwrap_or_default();
            let Some(blueprint) = commit::read(&map) else { continue };
            let name = map.metadata.name.unwrap_or_default();
            if let Some(before) = last.get(&name) {
                let parent = blueprint.parent.map(|parent| parent.0);
                assert_eq!(parent, Some(*before), "{name}: plan {:?} follows {before}", blueprint.generation);
            }
            last.insert(name, blueprint.generation.0);
        }
    }
}

async fn plans_of(bed: &Bed) -> Vec<u64> {
    let maps = bed.api::<ConfigMap>().list(&ListParams::default()).await.expect("a list");
    maps.items.iter().filter_map(commit::read).map(|blueprint| blueprint.generation.0).collect()
}
