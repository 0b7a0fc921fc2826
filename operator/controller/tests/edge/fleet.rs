//! `GET /v1/fleet/{namespace}/{cluster}`: who may ask, what is answered when, and who is told to come back.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use deepinfer_operator::fleet_server::{self, FleetTable};
use deepinfer_operator::keys::{ClusterRef, Keys};
use deepinfer_operator::metrics::Metrics;
use deepinfer_protocol::Generation;
use deepinfer_protocol::fleet::FleetView;
use deepinfer_transport::ClusterKey;
use tokio_util::sync::CancellationToken;

use crate::support::{SOON, cluster, get, keys, listener, until};

const PATH: &str = "/v1/fleet/serving/c";

struct Rig {
    table: Arc<FleetTable>,
    address: SocketAddr,
    key: ClusterKey,
    stop: CancellationToken,
}

async fn rig(waiters: usize) -> Rig {
    let table = FleetTable::new(keys(), waiters, Metrics::new("1"));
    let (listener, address) = listener().await;
    let stop = CancellationToken::new();
    tokio::spawn(fleet_server::serve(listener, Arc::clone(&table), stop.clone()));
    Rig { table, address, key: keys().cluster("uid-1"), stop }
}

impl Rig {
    fn set(&self, generation: u64) {
        let view =
            FleetView { generation: Generation(generation), cluster: "c".into(), ..FleetView::default() };
        self.table.set(&cluster(), &view);
    }

    /// A call that waits, and that has begun to.
    async fn waiting(&self, after: u64) -> tokio::task::JoinHandle<crate::support::Got> {
        let (address, key) = (self.address, self.key.clone());
        let before = self.table.waiting();
        let call = tokio::spawn(async move {
            get(address, &format!("{PATH}?after={after}&waitSeconds=30"), Some(&key)).await
        });
        until("a caller waits", || self.table.waiting() > before).await;
        call
    }
}

#[tokio::test]
async fn only_the_clusters_key_opens_its_view_and_only_on_its_path() {
    let rig = rig(10).await;
    rig.set(7);
    assert_eq!(get(rig.address, PATH, Some(&rig.key)).await.status, 503, "not synced: another replica knows");
    rig.table.synced();
    let got = get(rig.address, PATH, Some(&rig.key)).await;
    assert_eq!(got.status, 200, "{got:?}");
    let view: FleetView = serde_json::from_str(&got.body).unwrap();
    assert_eq!((view.generation, view.cluster.as_str()), (Generation(7), "c"));

    let unsigned = get(rig.address, PATH, None).await;
    assert_eq!(unsigned.status, 401);
    assert!(unsigned.body.contains("Authorization: DeepInfer"), "{unsigned:?}");
    let of_another = keys().cluster("uid-2");
    assert_eq!(get(rig.address, PATH, Some(&of_another)).await.status, 401);
    let of_another_master = Keys::new([4; 32]).cluster("uid-1");
    assert_eq!(get(rig.address, PATH, Some(&of_another_master)).await.status, 401);
    assert_eq!(get(rig.address, "/v1/fleet/serving/other", Some(&rig.key)).await.status, 404);
    assert_eq!(get(rig.address, "/v1/fleet", Some(&rig.key)).await.status, 404);
    assert_eq!(get(rig.address, &format!("{PATH}?after=x"), Some(&rig.key)).await.status, 400);
}

#[tokio::test]
async fn a_caller_waits_for_a_newer_generation_and_gets_it_at_once() {
    let rig = rig(10).await;
    rig.table.synced();
    rig.set(1);
    let begun = Instant::now();
    let got = get(rig.address, &format!("{PATH}?after=1&waitSeconds=1"), Some(&rig.key)).await;
    assert_eq!((got.status, got.body.as_str()), (204, ""));
    assert!(begun.elapsed() >= Duration::from_secs(1));
    let at_once = get(rig.address, &format!("{PATH}?after=1"), Some(&rig.key)).await;
    assert_eq!(at_once.status, 204, "no wait was asked for");

    let call = rig.waiting(1).await;
    rig.set(1);
    assert!(!call.is_finished(), "the same again is not news");
    rig.set(2);
    let got = tokio::time::timeout(SOON, call).await.expect("long before its 30 s are over").unwrap();
    assert_eq!(got.status, 200, "{got:?}");
    assert!(got.body.contains("\"generation\":2"), "{}", got.body);
}

#[tokio::test]
async fn a_generation_never_goes_down_for_one_object() {
    let rig = rig(10).await;
    rig.table.synced();
    rig.set(9);
    rig.set(8);
    let got = get(rig.address, PATH, Some(&rig.key)).await;
    assert!(got.body.contains("\"generation\":9"), "{}", got.body);

    // A new object of the name is another cluster with another key; who waited for the old one is told.
    let call = rig.waiting(9).await;
    let successor = ClusterRef { uid: "uid-2".into(), ..cluster() };
    let first = FleetView { generation: Generation(1), ..FleetView::default() };
    rig.table.set(&successor, &first);
    assert_eq!(tokio::time::timeout(SOON, call).await.unwrap().unwrap().status, 404);
    assert_eq!(get(rig.address, PATH, Some(&rig.key)).await.status, 401);
    let key = keys().cluster("uid-2");
    assert_eq!(get(rig.address, PATH, Some(&key)).await.status, 200);
}

#[tokio::test]
async fn who_waits_is_told_when_the_cluster_goes_and_when_the_replica_stops() {
    let rig = rig(10).await;
    rig.table.synced();
    rig.set(1);
    let call = rig.waiting(1).await;
    rig.table.remove("serving", "c");
    assert_eq!(tokio::time::timeout(SOON, call).await.unwrap().unwrap().status, 404);

    rig.set(1);
    let call = rig.waiting(1).await;
    rig.stop.cancel();
    let got = tokio::time::timeout(SOON, call).await.unwrap().unwrap();
    assert_eq!(got.status, 503);
    assert!(got.retry_after.is_some());
}

#[tokio::test]
async fn more_callers_than_places_are_sent_to_another_replica_and_the_others_wait_on() {
    let rig = rig(2).await;
    rig.table.synced();
    rig.set(1);
    let calls = [rig.waiting(1).await, rig.waiting(1).await];
    let third = get(rig.address, &format!("{PATH}?after=1&waitSeconds=30"), Some(&rig.key)).await;
    assert_eq!(third.status, 503, "{third:?}");
    assert!(third.retry_after.is_some() && third.body.contains("another replica"), "{third:?}");
    assert_eq!(get(rig.address, PATH, Some(&rig.key)).await.status, 200, "who does not wait is answered");
    rig.set(2);
    for call in calls {
        assert_eq!(tokio::time::timeout(SOON, call).await.unwrap().unwrap().status, 200);
    }
    until("the places are free again", || rig.table.waiting() == 0).await;
}
