//! Watches that end, break or fall silent; objects by the thousand.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use deepinfer_controlplane::proxy::{Cut, On, Verb, What, Which};
use futures_util::{StreamExt, stream};
use kube::api::{DeleteParams, ListParams};

use super::rig::{CLUSTER, PATIENCE, Rig, cluster, names, run, until};

/// Deletes the first pod of the only supernode and waits for its successor.
async fn rebuilds(rig: &Rig) -> Result<()> {
    let before = names(&rig.supernodes().await?);
    let pod = format!("{}-00", before.first().context("no supernode")?);
    rig.pods().delete(&pod, &DeleteParams::default().grace_period(0)).await?;
    until(PATIENCE, async || {
        let now = rig.supernodes().await?;
        let serving = now.iter().all(|sn| sn.data["status"]["phase"] == "Serving");
        Ok((now.len() == 1 && serving && names(&now) != before).then_some(()))
    })
    .await
    .with_context(|| format!("{pod} was deleted and {before:?} is not replaced"))
}

/// OP-061: what was deleted while the watch was away is missed by nobody.
#[test]
#[ignore = "one of many that take minutes together: run with -- --ignored"]
fn a_pod_deleted_while_watches_are_cut_is_missed() {
    run("OP-061", async |mut rig: Rig| {
        let _operator = rig.operator().await?;
        rig.apply(&cluster(CLUSTER, 1)).await?;
        rig.ready(CLUSTER).await?;
        for how in [Cut::Broken, Cut::Clean] {
            // New watches are refused while the pod goes, so no event of it can pass.
            let refuse = rig.proxy.inject(On::verbs(&[Verb::Watch]), Which::All, What::status(503));
            ensure!(rig.proxy.cut_watches(&On::any(), how) > 5);
            let before = names(&rig.supernodes().await?);
            let pod = format!("{}-01", before[0]);
            rig.pods().delete(&pod, &DeleteParams::default().grace_period(0)).await?;
            until(PATIENCE, async || Ok(rig.pods().get_opt(&pod).await?.is_none().then_some(()))).await?;
            rig.proxy.remove(refuse);
            until(PATIENCE, async || {
                let now = rig.supernodes().await?;
                let serving = now.iter().all(|sn| sn.data["status"]["phase"] == "Serving");
                Ok((now.len() == 1 && serving && names(&now) != before).then_some(()))
            })
            .await
            .with_context(|| format!("{how:?}: {pod} is gone and nobody noticed"))?;
        }
        Ok(())
    });
}

/// Every watch ends after each third event, all day long.
#[test]
#[ignore = "one of many that take minutes together: run with -- --ignored"]
fn watches_that_never_last_are_enough() {
    run("short watches", async |mut rig: Rig| {
        let on = On::verbs(&[Verb::Watch]);
        rig.proxy.inject(on, Which::All, What::CutWatch { after: 3, how: Cut::Broken });
        let _operator = rig.operator().await?;
        rig.apply(&cluster(CLUSTER, 1)).await?;
        rig.ready(CLUSTER).await?;
        rebuilds(&rig).await?;
        rig.delete(CLUSTER).await?;
        rig.gone(CLUSTER).await
    });
}

/// OP-103, OP-110: a network that swallows everything without a reset. The operator notices by itself, and goes on
/// when the network is back.
#[test]
#[ignore = "one of many that take minutes together: run with -- --ignored"]
fn a_black_hole_is_noticed_and_outlived() {
    run("OP-103, OP-110", async |mut rig: Rig| {
        let operator = rig
            .operator_with(&[
                "--read-idle-seconds=5",
                "--watch-stale-seconds=4",
                // Leadership is lost in a hole; a new process takes over, as in production. Here one process must last.
                "--lease-duration-seconds=120",
                "--lease-renew-seconds=110",
            ])
            .await?;
        rig.apply(&cluster(CLUSTER, 1)).await?;
        rig.ready(CLUSTER).await?;
        rig.proxy.black_hole(true);
        let before = names(&rig.supernodes().await?);
        let pod = format!("{}-00", before[0]);
        rig.pods().delete(&pod, &DeleteParams::default().grace_period(0)).await?;
        tokio::time::sleep(Duration::from_secs(12)).await;
        ensure!(names(&rig.supernodes().await?) == before);
        rig.proxy.black_hole(false);
        until(Duration::from_secs(60), async || {
            let now = rig.supernodes().await?;
            let serving = now.iter().all(|sn| sn.data["status"]["phase"] == "Serving");
            Ok((now.len() == 1 && serving && names(&now) != before).then_some(()))
        })
        .await
        .context("the operator did not come back to life")?;
        ensure!(operator.exit_status().is_none(), "the operator ended");
        Ok(())
    });
}

/// OP-104: a thousand objects come, change and go; each is acted on.
#[test]
#[ignore = "one of many that take minutes together: run with -- --ignored"]
fn a_thousand_objects_churn() {
    run("OP-104", async |mut rig: Rig| {
        let operator = rig.operator().await?;
        // Clusters that are refused cost a status each and no pods: the watch and the queue are what is tested.
        let refused = |n: usize| {
            let mut spec = cluster(&format!("n{n:03}"), 1);
            spec["spec"]["vision"] = serde_json::json!({"replicas": 1});
            spec
        };
        let each = 500;
        stream::iter(0..each)
            .map(|n| {
                let spec = refused(n);
                let rig = &rig;
                async move { rig.apply(&spec).await }
            })
            .buffer_unordered(16)
            .collect::<Vec<_>>()
            .await
            .into_iter()
            .collect::<Result<()>>()?;
        let api = rig.api("DeepInferCluster");
        let seen = async |generation: i64| {
            until(PATIENCE, async || {
                let all = api.list(&ListParams::default()).await?.items;
                let seen = all
                    .iter()
                    .filter(|c| c.data["status"]["observedGeneration"].as_i64() >= Some(generation));
                Ok((seen.count() == each).then_some(()))
            })
            .await
            .with_context(|| format!("not every cluster was looked at in generation {generation}"))
        };
        seen(1).await?;
        stream::iter(0..each)
            .map(|n| {
                let mut spec = refused(n);
                spec["spec"]["gateway"]["replicas"] = serde_json::json!(2);
                let rig = &rig;
                async move { rig.apply(&spec).await }
            })
            .buffer_unordered(16)
            .collect::<Vec<_>>()
            .await
            .into_iter()
            .collect::<Result<()>>()?;
        seen(2).await?;
        api.delete_collection(&DeleteParams::default(), &ListParams::default()).await?;
        until(PATIENCE, async || Ok(api.list(&ListParams::default()).await?.items.is_empty().then_some(())))
            .await
            .context("deleted clusters stay")?;
        ensure!(operator.exit_status().is_none(), "the operator ended");
        Ok(())
    });
}
