//! Two replicas: one leads, the other is ready; never two plans.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use deepinfer_controlplane::Operator;
use deepinfer_controlplane::proxy::{On, Proxy, Verb, When};
use kube::api::DeleteParams;

use super::rig::{CLUSTER, PATIENCE, Rig, cluster, names, run, until};

/// Two replicas, each behind a proxy of its own; the leader first.
async fn two(rig: &Rig) -> Result<[(Operator, Proxy); 2]> {
    let mut replicas = Vec::new();
    for name in ["a", "b"] {
        let proxy = Proxy::start(rig.plane.url(), rig.plane.ca_pem().as_bytes(), 3).await?;
        let mut options = rig.options().flag(format!("--identity=replica-{name}"));
        options.via = Some(proxy.url());
        let operator = Operator::start(rig.plane, options).await?;
        operator.wait_ready(PATIENCE).await?;
        replicas.push((operator, proxy));
    }
    until(PATIENCE, async || Ok((replicas[0].0.leads().await != replicas[1].0.leads().await).then_some(())))
        .await
        .context("no leader was elected")?;
    if !replicas[0].0.leads().await {
        replicas.reverse();
    }
    let Ok(pair) = <[_; 2]>::try_from(replicas) else { bail!("two replicas were started") };
    Ok(pair)
}

fn writes() -> On {
    On::writes().not("events")
}

/// OP-112: the leader hangs for longer than its lease. The other one takes over; when the first wakes up it writes
/// nothing and ends with 1.
#[test]
fn a_leader_that_hangs_ends_and_there_is_never_a_second_plan() {
    run("OP-112", async |rig: Rig| {
        let [(old, old_proxy), (new, new_proxy)] = two(&rig).await?;
        rig.apply(&cluster(CLUSTER, 1)).await?;
        rig.ready(CLUSTER).await?;
        ensure!(new_proxy.count(&writes()) == 0, "a follower writes: {:?}", new_proxy.log(&writes()));
        old.stop_signal()?;
        // Work comes while nobody leads.
        let before = names(&rig.supernodes().await?);
        rig.pods().delete(&format!("{}-00", before[0]), &DeleteParams::default().grace_period(0)).await?;
        new.wait_leading(PATIENCE).await?;
        rebuilt(&rig, &before).await?;
        old_proxy.reset();
        old.cont()?;
        let status = old.wait_exit(Duration::from_secs(10)).await.context("the old leader goes on")?;
        ensure!(status.code() == Some(1), "the old leader ended with {status}");
        let late = old_proxy.log(&writes());
        ensure!(late.is_empty(), "the old leader wrote after it lost: {late:#?}");
        rig.ready(CLUSTER).await
    });
}

/// OP-112, the hard case: the leader hangs in the middle of its plan, with a write on its way.
#[test]
fn a_leader_that_hangs_in_the_middle_of_a_plan_makes_no_object_twice() {
    run("OP-112 in a plan", async |rig: Rig| {
        let [(old, old_proxy), (new, new_proxy)] = two(&rig).await?;
        let mut held = old_proxy.hold(On::verbs(&[Verb::Create, Verb::Apply]).kind("pods"), 1, When::Before);
        rig.apply(&cluster(CLUSTER, 1)).await?;
        held.reached(PATIENCE).await?;
        old.stop_signal()?;
        new.wait_leading(PATIENCE).await?;
        rig.ready(CLUSTER).await?;
        // The write that was on its way arrives now, and the old leader wakes up.
        held.release();
        old.cont()?;
        let status = old.wait_exit(Duration::from_secs(10)).await.context("the old leader goes on")?;
        ensure!(status.code() == Some(1), "the old leader ended with {status}");
        ensure!(rig.supernodes().await?.len() == 1, "{:?}", names(&rig.supernodes().await?));
        let pods =
            rig.pods().list(&kube::api::ListParams::default().labels("deepinfer.io/supernode")).await?;
        ensure!(pods.items.len() == 2, "pods: {:?}", names(&pods.items));
        ensure!(new_proxy.count(&writes()) > 0);
        rig.ready(CLUSTER).await
    });
}

/// A leader that is killed is replaced within its lease, and one that is asked to end gives the lease up at once.
#[test]
fn the_follower_takes_over() {
    run("fail-over", async |rig: Rig| {
        let [(first, _first_proxy), (second, _second_proxy)] = two(&rig).await?;
        rig.apply(&cluster(CLUSTER, 1)).await?;
        rig.ready(CLUSTER).await?;
        first.kill9();
        let began = tokio::time::Instant::now();
        second.wait_leading(Duration::from_secs(20)).await?;
        println!(
            "  after kill -9 the follower leads in {:.1} s (lease of 2 s)",
            began.elapsed().as_secs_f64()
        );
        let before = names(&rig.supernodes().await?);
        rig.pods().delete(&format!("{}-01", before[0]), &DeleteParams::default().grace_period(0)).await?;
        rebuilt(&rig, &before).await?;
        let third = Operator::start(rig.plane, rig.options().flag("--identity=replica-c")).await?;
        third.wait_ready(PATIENCE).await?;
        let began = tokio::time::Instant::now();
        second.terminate(Duration::from_secs(20)).await?;
        third.wait_leading(Duration::from_secs(20)).await?;
        println!("  after SIGTERM the follower leads in {:.1} s", began.elapsed().as_secs_f64());
        Ok(())
    });
}

async fn rebuilt(rig: &Rig, before: &[String]) -> Result<()> {
    until(PATIENCE, async || {
        let now = rig.supernodes().await?;
        let serving = now.iter().all(|sn| sn.data["status"]["phase"] == "Serving");
        Ok((now.len() == 1 && serving && names(&now) != before).then_some(()))
    })
    .await
    .with_context(|| format!("{before:?} is not rebuilt"))
}
