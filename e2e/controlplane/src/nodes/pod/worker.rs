//! A pod from its volumes to its end: init containers in order, sidecars, main containers, and the way out.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use kube::api::{DeleteParams, Preconditions};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use super::super::calls::within;
use super::super::node::Link;
use super::container::{Order, Runner};
use super::context::Context;
use super::publish::{is_gone, keep_published, publish};
use super::status::lets_others_start;
use super::view::{Role, View};
use super::volumes::materialise;

/// What sidecars get at least, after the others have used up the time.
const SIDECAR_GRACE: Duration = Duration::from_secs(2);

/// After a call that failed.
const AGAIN: Duration = Duration::from_millis(500);

/// A container that was started.
struct Started {
    index: usize,
    role: Role,
    order: watch::Sender<Order>,
}

struct Worker {
    context: Arc<Context>,
    started: Vec<Started>,
    tasks: JoinSet<()>,
}

/// Works on a pod until it is gone, or the node goes off. Afterwards none of its processes runs.
pub(crate) async fn work(context: Arc<Context>, off: CancellationToken) {
    let mut worker = Worker { context: context.clone(), started: Vec::new(), tasks: JoinSet::new() };
    tokio::select! {
        biased;
        () = off.cancelled() => {}
        () = worker.run() => {}
    }
    // Dropping a container's task kills its process group.
    worker.tasks.shutdown().await;
    context.shared.network.detach(&context.network).await;
    context.node.devices().release(&context.uid);
}

impl Worker {
    async fn run(&mut self) {
        let context = self.context.clone();
        let phase = context.pod().status.as_ref().and_then(|status| status.phase.clone());
        let over = matches!(phase.as_deref(), Some("Succeeded" | "Failed"));
        if !over {
            let published = context.clone();
            self.tasks.spawn(async move { keep_published(&published).await });
            let left = tokio::select! {
                biased;
                () = context.leaving() => true,
                () = self.live() => false,
            };
            match left {
                true => self.end(|_| true).await,
                false => self.end(|role| role == Role::Sidecar).await,
            }
            context.over.store(true, Ordering::Relaxed);
            self.last_status().await;
        }
        context.leaving().await;
        self.delete().await;
        // Finalizers of others may keep the object for a while; its processes are gone.
        context.seen.clone().wait_for(|seen| seen.gone).await.ok();
        std::fs::remove_dir_all(&context.folder).ok();
    }

    /// Runs all containers until the main ones will not run again.
    async fn live(&mut self) {
        let context = self.context.clone();
        let pod = context.pod();
        let Some(spec) = &pod.spec else { return };
        for container in spec.containers.iter().chain(spec.init_containers.iter().flatten()) {
            context.node.devices().allocate(&context.uid, container);
        }
        volumes(&context).await;
        let refreshed = context.clone();
        self.tasks.spawn(async move { keep_volumes_fresh(&refreshed).await });

        let views = context.board.borrow().clone();
        let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
        for (index, (container, view)) in containers.zip(&views).enumerate() {
            let (order, orders) = watch::channel(Order::Run);
            let role = view.role;
            let runner =
                Runner { context: context.clone(), container: container.clone(), index, role, order: orders };
            self.started.push(Started { index, role, order });
            self.tasks.spawn(runner.run());
            if role == Role::Main {
                continue;
            }
            let settled = |views: &Vec<View>| {
                views[index].done.is_some() || (role == Role::Sidecar && lets_others_start(&views[index]))
            };
            self.wait(settled).await;
            if role == Role::Init && context.board.borrow()[index].done != Some(true) {
                return;
            }
        }
        self.wait(|views| views.iter().all(|v| v.role != Role::Main || v.done.is_some())).await;
    }

    async fn wait(&self, until: impl FnMut(&Vec<View>) -> bool) {
        self.context.board.subscribe().wait_for(until).await.expect("the board lives as long as its pod");
    }

    /// Ends containers: first the main and init ones, then the sidecars from the last to the first.
    async fn end(&self, which: impl Fn(Role) -> bool) {
        let mut seen = self.context.seen.clone();
        let began = Instant::now();
        let (mains, sidecars): (Vec<_>, Vec<_>) =
            self.started.iter().filter(|s| which(s.role)).partition(|s| s.role != Role::Sidecar);
        self.end_these(&mains, &mut seen, |grace| began + grace).await;
        for sidecar in sidecars.into_iter().rev() {
            let least = Instant::now() + SIDECAR_GRACE;
            let until = |grace: Duration| if grace.is_zero() { began } else { (began + grace).max(least) };
            self.end_these(&[sidecar], &mut seen, until).await;
        }
    }

    /// Tells containers to end and waits until they have. A delete with a shorter grace makes it shorter.
    async fn end_these(
        &self,
        which: &[&Started],
        seen: &mut watch::Receiver<super::context::Seen>,
        until: impl Fn(Duration) -> Instant,
    ) {
        let indices: Vec<_> = which.iter().map(|started| started.index).collect();
        let done = self.wait(|views| indices.iter().all(|index| views[*index].done.is_some()));
        let mut done = std::pin::pin!(done);
        loop {
            let grace = seen.borrow_and_update().grace();
            for started in which {
                started.order.send_replace(Order::EndBy(until(grace)));
            }
            tokio::select! {
                () = &mut done => return,
                changed = seen.changed() => if changed.is_err() { return done.await },
            }
        }
    }

    /// Writes how it ended, as soon as the server can be reached.
    async fn last_status(&self) {
        let mut link = self.context.node.link.subscribe();
        while !self.context.seen.borrow().gone && link.wait_for(|link| *link == Link::On).await.is_ok() {
            match publish(&self.context).await {
                Ok(()) => return,
                Err(error) => {
                    tracing::debug!(%error, pod = self.context.name, "the last status was not written")
                }
            }
            sleep(AGAIN).await;
        }
    }

    /// Tells the server that nothing of this pod runs any more.
    async fn delete(&self) {
        let mut link = self.context.node.link.subscribe();
        while !self.context.seen.borrow().gone && link.wait_for(|link| *link == Link::On).await.is_ok() {
            let uid = Some(self.context.uid.clone());
            let mine = Preconditions { uid, resource_version: None };
            let params = DeleteParams::default().grace_period(0).preconditions(mine);
            match within(self.context.api().delete(&self.context.name, &params)).await {
                Ok(_) => return,
                Err(error) if is_gone(&error) => return,
                Err(error) => tracing::debug!(%error, pod = self.context.name, "a pod was not deleted"),
            }
            sleep(AGAIN).await;
        }
    }
}

/// Makes the volumes, however long their sources take to appear.
async fn volumes(context: &Context) {
    let mut told = String::new();
    let mut changes = context.shared.sources.changes();
    loop {
        match materialise(context, &context.pod()).await {
            Ok(folders) => {
                *context.folders.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = folders;
                return;
            }
            Err(error) => {
                let message = format!("MountVolume.SetUp failed: {error:#}");
                if message != told {
                    context.warn("FailedMount", &message);
                    told = message;
                }
            }
        }
        tokio::select! {
            () = sleep(context.shared.options.retry_period) => {}
            _ = changes.recv() => {}
        }
    }
}

/// Brings the files of the volumes up to date when the pod or something in its namespace changes.
async fn keep_volumes_fresh(context: &Context) {
    let mut changes = context.shared.sources.changes();
    let mut seen = context.seen.clone();
    let words = |pod: &Pod| (pod.labels().clone(), pod.annotations().clone());
    let mut known = words(&context.pod());
    loop {
        let touched = tokio::select! {
            change = changes.recv() => match change {
                Ok(namespace) => namespace == context.namespace,
                Err(RecvError::Lagged(_)) => true,
                Err(RecvError::Closed) => return,
            },
            changed = seen.changed() => match changed {
                // The status changes often, and no file says it.
                Ok(()) => {
                    let before = std::mem::replace(&mut known, words(&seen.borrow_and_update().pod));
                    before != known
                }
                Err(_) => return,
            },
            // Tokens grow old.
            () = sleep(Duration::from_secs(60)) => true,
        };
        if touched && let Err(error) = materialise(context, &context.pod()).await {
            tracing::debug!(error = format!("{error:#}"), pod = context.name, "volumes stay as they are");
        }
    }
}
