//! The operator is killed at every step of a cluster's life, before a write has gone out and after the server has done
//! it, and another one goes on from what is written.

use std::collections::BTreeSet;
use std::pin::pin;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use deepinfer_controlplane::proxy::{On, When};
use futures_util::StreamExt;
use kube::ResourceExt;
use kube::api::DeleteParams;
use kube::runtime::watcher::{self, Event, watcher};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::rig::{CLUSTER, PATIENCE, Rig, cluster, names, run, until};
use super::snapshot;
use super::writes::undisturbed;

/// No write for this long: the operator has nothing more to do.
const QUIET: Duration = Duration::from_secs(4);
/// For one station of a life.
const LIMIT: Duration = Duration::from_secs(600);

/// A life has fewer steps than this; with more it does not get on.
const MOST: u32 = 150;

/// What each start does again does not count as a step: events, reviews, and the creation of the key, which the operator
/// may not read.
fn steps() -> On {
    On::writes().not("events").not("tokenreviews").not("subjectaccessreviews").not("secrets")
}

/// Every supernode that there was since the beginning, however short it lived.
#[derive(Clone, Debug, Default)]
struct Seen {
    names: BTreeSet<String>,
    /// Lists: with a second one, something may have come and gone unseen.
    lists: u32,
}

/// Fills a [`Seen`] by a watch of its own.
struct Watch {
    seen: watch::Receiver<Seen>,
    task: JoinHandle<()>,
}

impl Watch {
    async fn start(rig: &Rig) -> Result<Self> {
        let (sender, mut seen) = watch::channel(Seen::default());
        let api = rig.api("Supernode");
        let task = tokio::spawn(async move {
            let mut events = pin!(watcher(api, watcher::Config::default()));
            while let Some(event) = events.next().await {
                match event {
                    Ok(Event::InitApply(object) | Event::Apply(object) | Event::Delete(object)) => {
                        sender.send_modify(|seen| _ = seen.names.insert(object.name_any()));
                    }
                    Ok(Event::InitDone) => sender.send_modify(|seen| seen.lists += 1),
                    Ok(Event::Init) => {}
                    Err(error) => {
                        println!("  the test's watch of supernodes: {error}");
                        tokio::time::sleep(Duration::from_millis(200)).await;
                    }
                }
            }
        });
        tokio::time::timeout(PATIENCE, seen.wait_for(|seen| seen.lists > 0)).await.context("no list")??;
        Ok(Self { seen, task })
    }

    /// All of them, up to those of now.
    async fn all(&mut self, rig: &Rig) -> Result<BTreeSet<String>> {
        let now = names(&rig.supernodes().await?);
        let has = |seen: &Seen| now.iter().all(|name| seen.names.contains(name));
        let Ok(seen) = tokio::time::timeout(PATIENCE, self.seen.wait_for(has)).await else {
            bail!("the watch does not see {now:?}");
        };
        let seen = seen?.clone();
        ensure!(seen.lists == 1, "the watch broke {} times", seen.lists - 1);
        Ok(seen.names)
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Lets the operator do its work one write at a time, killing it at each: with `After` the write has been done and it
/// does not know; with `Before` one write passes and the next one is lost. Who begins with the same write again (the
/// commit of a plan, which draws new names) comes one write further. Ends when `done` says so; gives the number of kills.
async fn step_by_step(
    rig: &mut Rig,
    when: When,
    mut done: impl AsyncFnMut(&Rig) -> Result<bool>,
) -> Result<u32> {
    let mut kills = 0;
    let first = if when == When::After { 1 } else { 2 };
    let (mut nth, mut place) = (first, String::new());
    let deadline = tokio::time::Instant::now() + LIMIT;
    loop {
        let mut held = rig.proxy.hold(steps(), nth, when);
        let operator = rig.operator().await?;
        match held.reached(QUIET).await {
            Ok(asked) => {
                let here = format!("{:?} {}", asked.verb, asked.kind());
                nth = if here == place { nth + 1 } else { first };
                place = here;
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
            tokio::time::Instant::now() < deadline && kills < MOST,
            "{kills} kills and no end; the last write was {last:#?}"
        );
    }
}

async fn life(mut rig: Rig, when: When) -> Result<()> {
    let expected = undisturbed(&mut rig).await?;
    let mut seen = Watch::start(&rig).await?;
    rig.apply(&cluster(CLUSTER, 1)).await?;
    let reaches = async |rig: &Rig, station: usize| Ok(snapshot::take(rig).await? == expected[station]);
    let created = step_by_step(&mut rig, when, async |rig| reaches(rig, 0).await).await?;
    snapshot::reaches(&rig, "serving", &expected[0]).await?;
    rig.apply(&cluster(CLUSTER, 2)).await?;
    let edits = step_by_step(&mut rig, when, async |rig| reaches(rig, 1).await).await?;
    snapshot::reaches(&rig, "edited", &expected[1]).await?;
    rig.delete(CLUSTER).await?;
    let deleted = step_by_step(&mut rig, when, async |rig| {
        Ok(rig.api("DeepInferCluster").get_opt(CLUSTER).await?.is_none())
    })
    .await?;
    rig.gone(CLUSTER).await?;
    let seen = seen.all(&rig).await?;
    ensure!(seen.len() == 2, "incarnations: {seen:?}");
    println!("  killed {created} times while it created, {edits} while it grew, {deleted} while it deleted");
    Ok(())
}

#[test]
#[ignore = "one of many that take minutes together: run with -- --ignored"]
fn killed_after_every_write_of_create_grow_and_delete() {
    run("killed after every write", |rig| life(rig, When::After));
}

#[test]
#[ignore = "one of many that take minutes together: run with -- --ignored"]
fn killed_before_every_second_write_of_create_grow_and_delete() {
    run("killed before every second write", |rig| life(rig, When::Before));
}

/// OP-034: the loss of one pod makes one new incarnation, whatever the operator's luck.
#[test]
#[ignore = "one of many that take minutes together: run with -- --ignored"]
fn killed_after_every_write_of_a_rebuild() {
    run("killed in a rebuild", async |mut rig: Rig| {
        let operator = rig.operator().await?;
        rig.apply(&cluster(CLUSTER, 1)).await?;
        rig.ready(CLUSTER).await?;
        let before = names(&rig.supernodes().await?);
        operator.kill9();
        let pods = rig.pods();
        let of_first = format!("{}-00", before.first().context("no supernode")?);
        pods.delete(&of_first, &DeleteParams::default().grace_period(0)).await?;
        let rebuilt = async |rig: &Rig| {
            let now = rig.supernodes().await?;
            let serving = now.iter().all(|sn| sn.data["status"]["phase"] == "Serving");
            Ok(now.len() == 1 && serving && names(&now) != before)
        };
        let mut seen = Watch::start(&rig).await?;
        let kills = step_by_step(&mut rig, When::After, rebuilt).await?;
        let _operator = rig.operator().await?;
        rig.ready(CLUSTER).await?;
        println!("  killed {kills} times");
        let seen = seen.all(&rig).await?;
        ensure!(seen.len() == 2, "incarnations: {seen:?}");
        until(PATIENCE, async || {
            let pods = pods.list(&kube::api::ListParams::default().labels("deepinfer.io/supernode")).await?;
            Ok((pods.items.len() == 2).then_some(()))
        })
        .await
        .context("pods of the old incarnation stay")
    });
}
