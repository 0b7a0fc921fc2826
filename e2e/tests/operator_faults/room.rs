//! Room that others take while a supernode is being made.

use anyhow::{Context as _, Result, ensure};
use deepinfer_controlplane::proxy::{On, Verb, What, Which};
use deepinfer_crds::DeepInferPool;
use deepinfer_crds::names::label;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::events::v1::Event;
use kube::api::{ListParams, PostParams};
use kube::{Api, ResourceExt};
use serde_json::json;

use super::rig::{CLUSTER, NODES, PATIENCE, Rig, cluster, names, node_name, run, until};

/// Nodes of the supernode: with one node of its domain it cannot do without more than three others.
const WIDTH: usize = 5;
/// Nodes of a domain.
const RACK: usize = NODES / 2;

/// Pods that were made for a domain stay behind their gates when somebody else has taken a node too many of it. With room
/// elsewhere the supernode is made anew there at once; it does not wait for its time-out, and no node is blamed.
#[test]
#[ignore = "one of many that take minutes together: run with -- --ignored"]
fn a_gang_whose_room_is_taken_is_made_anew_where_there_is_room() {
    run("room taken", async |mut rig: Rig| {
        let operator = rig.operator().await?;
        // The last pod cannot be made for a while, and so the gates stay shut.
        let last = On::verbs(&[Verb::Create, Verb::Apply]).kind("pods").name(&format!("*-{:02}", WIDTH - 1));
        let refusal = rig.proxy.inject(last, Which::All, What::status(503));
        let mut wide = cluster(CLUSTER, 1);
        wide["spec"]["decode"]["supernode"]["nodes"] = json!(WIDTH);
        rig.apply(&wide).await?;
        let (first, rack) = until(PATIENCE, async || {
            let pods = gang(&rig).await?;
            let made = pods.len() == WIDTH - 1;
            Ok(if made { Some((supernode(&pods[0])?, rack(&pods[0])?)) } else { None })
        })
        .await
        .context("the gang is not begun")?;
        take(&rig, rack, RACK - WIDTH + 1).await?;
        rig.proxy.remove(refusal);

        rig.ready(CLUSTER).await?;
        let pods = gang(&rig).await?;
        let now = names(&rig.supernodes().await?);
        ensure!(now.len() == 1 && now[0] != first, "{first} was to be replaced: {now:?}");
        ensure!(pods.len() == WIDTH, "pods: {:?}", names(&pods));
        for pod in &pods {
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone()).context("not bound")?;
            ensure!((0..NODES).any(|n| n / RACK != rack && node_name(n) == node), "{node} is in rack {rack}");
        }
        let events: Api<Event> = Api::namespaced(rig.client.clone(), &rig.namespace);
        let told = until(PATIENCE, async || {
            let notes =
                events.list(&ListParams::default()).await?.items.into_iter().filter_map(|event| event.note);
            Ok(notes.into_iter().find(|note| note.contains("RoomTaken")))
        });
        let told = told.await.context("no event says why")?;
        ensure!(told.contains(&format!("rack-{rack}")), "{told}");
        let pools: Api<DeepInferPool> = Api::namespaced(rig.client.clone(), &rig.namespace);
        let pool =
            pools.get(&format!("{CLUSTER}-decode")).await?.status.context("a pool without a status")?;
        ensure!(pool.quarantine.is_empty(), "somebody is blamed: {:?}", pool.quarantine);
        ensure!(rig.incarnations().len() == 2, "{:?}", rig.incarnations());
        ensure!(operator.exit_status().is_none(), "the operator ended");
        Ok(())
    });
}

/// The pods of the cluster's supernodes.
async fn gang(rig: &Rig) -> Result<Vec<Pod>> {
    Ok(rig.pods().list(&ListParams::default().labels(label::SUPERNODE)).await?.items)
}

fn supernode(pod: &Pod) -> Result<String> {
    pod.labels().get(label::SUPERNODE).cloned().context("a pod without a supernode")
}

/// The domain that a pod behind its gate is bound to.
fn rack(pod: &Pod) -> Result<usize> {
    let spec = serde_json::to_string(&pod.spec)?;
    let racks = 0..NODES / RACK;
    racks
        .clone()
        .find(|rack| spec.contains(&format!("rack-{rack}")))
        .with_context(|| format!("no rack: {spec}"))
}

/// Foreign pods take so many free nodes of a rack.
async fn take(rig: &Rig, rack: usize, count: usize) -> Result<()> {
    let bound = rig.pods().list(&ListParams::default()).await?.items;
    let busy: Vec<String> = bound.into_iter().filter_map(|pod| pod.spec?.node_name).collect();
    let all = (rack * RACK..(rack + 1) * RACK).map(node_name);
    for node in all.filter(|node| !busy.contains(node)).take(count) {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"name": format!("foreign-{node}")},
            "spec": {
                "nodeName": node,
                "containers": [{
                    "name": "main", "image": "registry.example/other",
                    "resources": {"limits": {"nvidia.com/gpu": "4"}},
                }],
            },
        }))?;
        rig.pods().create(&PostParams::default(), &pod).await?;
    }
    Ok(())
}
