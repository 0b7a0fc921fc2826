//! The loop that asks who is due.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, mpsc};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::table::{Lane, Question};
use super::{Agents, unix_seconds};
use crate::keys::ClusterRef;

/// How often the counts of agents are told, at least.
const COUNT_EVERY: Duration = Duration::from_secs(1);
/// Clusters that answers may announce at once; the loop takes them as they come.
const NEWS: usize = 1024;

/// Asks until stopped.
pub(super) async fn run(
    agents: Arc<Agents>,
    concurrency: usize,
    wake: mpsc::Sender<ClusterRef>,
    stop: CancellationToken,
) {
    let lanes = Lane::ALL.map(|lane| (lane, Arc::new(Semaphore::new(concurrency))));
    let (tell, mut news) = tokio::sync::mpsc::channel(NEWS);
    let tasks = TaskTracker::new();
    // Clusters to wake: a set, so that a full channel forgets nothing and repeats nothing.
    let mut to_wake: BTreeSet<ClusterRef> = BTreeSet::new();
    let mut count_at = Instant::now();
    while !stop.is_cancelled() {
        let mut again = Instant::now() + COUNT_EVERY;
        for (lane, places) in &lanes {
            if let Some(due) = ask(&agents, *lane, places, &tasks, &tell) {
                again = again.min(due);
            }
        }
        if Instant::now() >= count_at {
            let (followed, unreachable) = agents.table().counts();
            agents.caller.metrics.agents(followed, unreachable);
            count_at = Instant::now() + COUNT_EVERY;
        }
        tokio::select! {
            () = stop.cancelled() => break,
            () = agents.changed.notified() => {}
            () = tokio::time::sleep_until(again) => {}
            Some(cluster) = news.recv() => { to_wake.insert(cluster); }
            Ok(place) = wake.reserve(), if !to_wake.is_empty() => {
                if let Some(cluster) = to_wake.pop_first() {
                    place.send(cluster);
                }
            }
        }
    }
    tasks.close();
    tasks.wait().await;
}

/// Asks everybody who is due while there are places; when to look again, if known.
fn ask(
    agents: &Arc<Agents>,
    lane: Lane,
    places: &Arc<Semaphore>,
    tasks: &TaskTracker,
    tell: &mpsc::Sender<ClusterRef>,
) -> Option<Instant> {
    loop {
        // Without a place: an answer that frees one wakes the loop.
        let place = Arc::clone(places).try_acquire_owned().ok()?;
        let next = agents.table().next(lane, Instant::now().into_std());
        let question = match next {
            Ok(question) => question,
            Err(due) => return due.map(Instant::from_std),
        };
        let (agents, tell) = (Arc::clone(agents), tell.clone());
        tasks.spawn(async move {
            let matters = answer(&agents, &question).await;
            drop(place);
            agents.changed.notify_one();
            if matters {
                // The loop is gone only when the process ends.
                let _ = tell.send(question.cluster).await;
            }
        });
    }
}

async fn answer(agents: &Agents, question: &Question) -> bool {
    let status = agents.caller.status(&question.target).await;
    let status = match status {
        Ok(status) if status.name == question.target.agent => Some(status),
        Ok(status) => {
            // Another pod has the address now; its own name will be followed.
            tracing::debug!(agent = %question.target.agent, other = %status.name, "another agent answers here");
            None
        }
        Err(error) => {
            tracing::debug!(cluster = %question.cluster, err = %error, "no status");
            None
        }
    };
    let now = Instant::now().into_std();
    agents.table().answered(question, status, now, unix_seconds())
}
