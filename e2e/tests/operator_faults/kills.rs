//! The operator is killed at every step of a cluster's life, before a write has gone out and after the server has done
//! it, and another one goes on from what is written.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use deepinfer_controlplane::proxy::{On, When};
use kube::api::DeleteParams;

use super::rig::{CLUSTER, Rig, cluster, run, until};
use super::snapshot;
use super::writes::{same, undisturbed};

/// No write for this long: the operator has nothing more to do.
const QUIET: Duration = Duration::from_secs(4);
/// For one station of a life.
const LIMIT: Duration = Duration::from_secs(600);

/// Events and the operator's own start-up do not count as steps.
fn steps() -> On {
    On::writes().not("events").not("tokenreviews").not("subjectaccessreviews")
}

/// Lets the operator do its work one write at a time, killing it at each: with `After` the write has been done and it
/// does not know; with `Before` one write passes and the next one is lost. Ends when `done` says so; gives the number
/// of kills.
async fn step_by_step(
    rig: &mut Rig,
    when: When,
    mut done: impl AsyncFnMut(&Rig) -> Result<bool>,
) -> Result<u32> {
    let mut kills = 0;
    let nth = if when == When::After { 1 } else { 2 };
    let deadline = tokio::time::Instant::now() + LIMIT;
    loop {
        let mut held = rig.proxy.hold(steps(), nth, when);
        let operator = rig.operator().await?;
        match held.reached(QUIET).await {
            Ok(_) => {
                operator.kill9();
                held.release();
                kills += 1;
                rig.forget_lease().await?;
            }
            Err(_) if done(rig).await? => return Ok(kills),
            Err(_) => {
                // It waits for somebody else (a pod, an agent): let that come, then go on.
                operator.kill9();
                rig.forget_lease().await?;
            }
        }
        let last = rig.proxy.log(&steps()).pop();
        ensure!(
            tokio::time::Instant::now() < deadline,
            "{kills} kills and no end; the last write was {last:#?}"
        );
    }
}

async fn life(mut rig: Rig, when: When) -> Result<()> {
    let expected = undisturbed(&mut rig).await?;
    let is_ready = async |rig: &Rig| {
        let object = rig.api("DeepInferCluster").get(CLUSTER).await?;
        let status = &object.data["status"];
        let mut conditions = status["conditions"].as_array().into_iter().flatten();
        let ready = conditions.any(|c| c["type"] == "Ready" && c["status"] == "True");
        Ok(ready && status["observedGeneration"].as_i64() == object.metadata.generation)
    };
    rig.apply(&cluster(CLUSTER, 1)).await?;
    let created = step_by_step(&mut rig, when, is_ready).await?;
    let served = snapshot::take(&rig).await?;
    rig.apply(&cluster(CLUSTER, 2)).await?;
    let edits = step_by_step(&mut rig, when, is_ready).await?;
    let edited = snapshot::take(&rig).await?;
    same(&[served, edited], &expected)?;
    ensure!(rig.incarnations().len() == 2, "incarnations: {:?}", rig.incarnations());
    rig.delete(CLUSTER).await?;
    let deleted = step_by_step(&mut rig, when, async |rig| {
        Ok(rig.api("DeepInferCluster").get_opt(CLUSTER).await?.is_none())
    })
    .await?;
    rig.gone(CLUSTER).await?;
    println!("  killed {created} times while it created, {edits} while it grew, {deleted} while it deleted");
    Ok(())
}

#[test]
#[ignore = "not proven yet, and takes minutes: run with -- --ignored"]
fn killed_after_every_write_of_create_grow_and_delete() {
    run("killed after every write", |rig| life(rig, When::After));
}

#[test]
#[ignore = "not proven yet, and takes minutes: run with -- --ignored"]
fn killed_before_every_second_write_of_create_grow_and_delete() {
    run("killed before every second write", |rig| life(rig, When::Before));
}

/// OP-034: the loss of one pod makes one new incarnation, whatever the operator's luck.
#[test]
#[ignore = "not proven yet, and takes minutes: run with -- --ignored"]
fn killed_after_every_write_of_a_rebuild() {
    run("killed in a rebuild", async |mut rig: Rig| {
        let operator = rig.operator().await?;
        rig.apply(&cluster(CLUSTER, 1)).await?;
        rig.ready(CLUSTER).await?;
        let before = super::rig::names(&rig.supernodes().await?);
        operator.kill9();
        let pods = rig.pods();
        let of_first = format!("{}-00", before.first().context("no supernode")?);
        pods.delete(&of_first, &DeleteParams::default().grace_period(0)).await?;
        let rebuilt = async |rig: &Rig| {
            let now = rig.supernodes().await?;
            let serving = now.iter().all(|sn| sn.data["status"]["phase"] == "Serving");
            Ok(now.len() == 1 && serving && super::rig::names(&now) != before)
        };
        let kills = step_by_step(&mut rig, When::After, rebuilt).await?;
        let _operator = rig.operator().await?;
        rig.ready(CLUSTER).await?;
        println!("  killed {kills} times");
        ensure!(rig.incarnations().len() == 2, "incarnations: {:?}", rig.incarnations());
        until(super::rig::PATIENCE, async || {
            let pods = pods.list(&kube::api::ListParams::default().labels("deepinfer.io/supernode")).await?;
            Ok((pods.items.len() == 2).then_some(()))
        })
        .await
        .context("pods of the old incarnation stay")
    });
}
