//! The operator as a process: what is started in which order, and how it ends.
//!
//! Every replica watches, asks agents and serves the fleet; only the leader looks after clusters. A replica that loses
//! the lease ends at once, with code 1, and is started again.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context;
use deepinfer_planner::{Blueprint, Namespaced, Target};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::agents::Agents;
use crate::args::RunArgs;
use crate::cache::sources::{self, Source};
use crate::cache::watch::Limits;
use crate::cache::watchdog::Watches;
use crate::cache::{Caches, Listener};
use crate::execute::{Executor, Limiter};
use crate::fleet_server::{self, FleetTable};
use crate::gather::{Gatherer, Lessons};
use crate::health::Health;
use crate::keys::{self, ClusterRef};
use crate::lease::{Election, Elector, Permit};
use crate::metrics::Metrics;
use crate::probe::{self, Probed};
use crate::reconcile::Reconciler;
use crate::recorder::Recorder;
use crate::requeue::Queue;
use crate::rest::Rest;
use crate::serve;

/// Running reconciles may finish for so long when the process is asked to end.
const GRACE: Duration = Duration::from_secs(10);
/// Wakes of agents that wait to be taken.
const WAKES: usize = 1024;
/// Pause between two looks whether everything was listed.
const LISTING_PAUSE: Duration = Duration::from_millis(20);

/// What changes in the caches means for the rest of the operator.
struct Followers {
    queue: Arc<Queue<Namespaced>>,
    fleet: Arc<FleetTable>,
    metrics: Arc<Metrics>,
    agents: Arc<Agents>,
    /// Clusters whose blueprint was seen, to forget them under the right UID.
    known: Mutex<BTreeMap<Namespaced, ClusterRef>>,
}

impl Listener for Followers {
    fn wake(&self, cluster: &Namespaced, within: Duration) {
        self.queue.wake(cluster, within);
    }

    fn committed(&self, cluster: &ClusterRef, blueprint: &Blueprint) {
        self.fleet.set(cluster, &blueprint.fleet);
        let key = (cluster.namespace.clone(), cluster.name.clone());
        self.known.lock().expect("no holder panics").insert(key, cluster.clone());
    }

    fn gone(&self, cluster: &Namespaced) {
        self.fleet.remove(&cluster.0, &cluster.1);
        let known = self.known.lock().expect("no holder panics").remove(cluster);
        if let Some(reference) = known {
            self.metrics.forget(&reference);
            self.agents.follow(&reference, Vec::new());
        }
    }
}

/// Everything that runs beside the reconciles.
struct Background {
    watches: Watches,
    fixed: Vec<Source>,
    namespaces: Vec<String>,
    probed: watch::Receiver<Probed>,
    queue: Arc<Queue<Namespaced>>,
    caches: Arc<Caches>,
    metrics: Arc<Metrics>,
    look: Duration,
}

impl Background {
    /// Looks after the watches and follows the probe, until `stop`.
    async fn run(mut self, stop: CancellationToken) {
        let mut look = tokio::time::interval(self.look);
        look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                () = stop.cancelled() => break,
                _ = look.tick() => {
                    self.watches.look_after().await;
                    self.metrics.queue_depth(self.queue.depth());
                }
                Ok(()) = self.probed.changed() => {
                    let apis = self.probed.borrow_and_update().apis.clone();
                    let wanted = sources::optional(&self.namespaces, &apis);
                    self.watches.optional(&wanted, &self.fixed);
                    for cluster in self.caches.clusters() {
                        self.queue.wake(&cluster, Duration::ZERO);
                    }
                }
            }
        }
        self.watches.stop();
    }
}

/// Passes on what agents say: a task of its own, because the watchdog may wait for a server that is away.
async fn pass_on(mut wakes: mpsc::Receiver<ClusterRef>, queue: Arc<Queue<Namespaced>>) {
    while let Some(cluster) = wakes.recv().await {
        queue.wake(&(cluster.namespace, cluster.name), Duration::ZERO);
    }
}

/// Runs until SIGTERM or SIGINT.
///
/// # Errors
/// If something that must be there at the start is not.
pub async fn run(mut args: RunArgs) -> anyhow::Result<()> {
    let stop = CancellationToken::new();
    let mut ends = Ends::new()?;
    let metrics = Metrics::new(&args.release);
    let health = Health::new(args.watch_stale);
    health.missing("caches", "not everything was listed once");
    let listeners = args.listen().await?;
    let target = Target::Kubernetes(args.target()?);
    let client = args.client().await?;
    let mut servers = JoinSet::new();
    servers.spawn(serve::observability(
        listeners.metrics,
        listeners.health,
        metrics.clone(),
        health.clone(),
        stop.clone(),
    ));
    let began = async {
        let keys = keys::obtain(&args.master_key_file, &client, &args.namespace, &health).await?;
        let fleet = FleetTable::new(keys.clone(), args.fleet_waiters, metrics.clone());
        servers.spawn(fleet_server::serve(listeners.fleet, fleet.clone(), stop.clone()));
        let probed = probe::start(client.clone(), args.probe_options(), stop.clone()).await;
        anyhow::Ok((keys, fleet, probed))
    };
    let (keys, fleet, probed) = tokio::select! {
        began = began => began?,
        () = ends.wait() => return Ok(()),
    };

    let (wake, wakes) = tokio::sync::mpsc::channel(WAKES);
    let agents = Agents::start(args.agents.clone(), keys.clone(), metrics.clone(), wake, stop.clone());
    let queue = Arc::new(Queue::default());
    let followers = Followers {
        queue: queue.clone(),
        fleet: fleet.clone(),
        metrics: metrics.clone(),
        agents: agents.clone(),
        known: Mutex::default(),
    };
    let caches = Arc::new(Caches::new(!args.read_nodes, Box::new(followers)));
    let rest = Rest::new(client.clone(), args.request_timeout, metrics.clone());
    let limits = Limits::new(args.watch_stale);
    let mut watches = Watches::new(caches.clone(), rest.clone(), limits, health.clone());
    let fixed = sources::fixed(&args.watch_namespaces, args.read_nodes);
    let optional = sources::optional(&args.watch_namespaces, &probed.borrow().apis);
    fixed.iter().chain(&optional).for_each(|source| watches.start(source));
    let all: Vec<Source> = fixed.iter().chain(&optional).cloned().collect();
    tokio::select! {
        () = listed(&caches, &all, &health) => {}
        () = ends.wait() => return Ok(()),
    }
    fleet.synced();
    health.satisfied("caches");
    tracing::info!(
        objects = caches.sizes().values().sum::<usize>(),
        clusters = caches.clusters().len(),
        "listed"
    );

    let permit = Arc::new(Permit::default());
    let lost = || {
        tracing::error!("the lease ran out: this process ends");
        std::process::exit(1);
    };
    permit.guard(lost).context("the thread that watches the lease")?;
    let lessons = Arc::new(Lessons::default());
    let reconciler = Arc::new(Reconciler {
        gatherer: Gatherer {
            caches: caches.clone(),
            agents: agents.clone(),
            probed: probed.clone(),
            lessons: lessons.clone(),
            rest: rest.clone(),
            resync: args.resync,
        },
        executor: Executor {
            rest: rest.guarded(permit.clone()),
            caches: caches.clone(),
            lessons,
            agents,
            keys,
            recorder: Recorder::start(client, &args.identity, metrics.clone(), stop.clone()),
            metrics: metrics.clone(),
            limiter: Limiter::default(),
        },
        target,
        queue: queue.clone(),
        resync: args.resync,
        placing: tokio::sync::Mutex::default(),
        memory: Mutex::default(),
        looks: AtomicU64::new(0),
    });
    let background = Background {
        watches,
        fixed,
        namespaces: args.watch_namespaces.clone(),
        probed,
        queue: queue.clone(),
        caches: caches.clone(),
        metrics: metrics.clone(),
        look: (args.watch_stale / 10).max(Duration::from_millis(500)),
    };
    let wakes = tokio::spawn(pass_on(wakes, queue));
    let background = tokio::spawn(background.run(stop.clone()));
    lead(&args, rest, permit, reconciler, &mut ends).await;
    stop.cancel();
    wakes.abort();
    let _ = tokio::time::timeout(GRACE, async {
        while servers.join_next().await.is_some() {}
        let _ = background.await;
    })
    .await;
    Ok(())
}

/// Waits for the lease, looks after clusters while it is ours, and lets it go at the end.
async fn lead(args: &RunArgs, rest: Rest, permit: Arc<Permit>, reconciler: Arc<Reconciler>, ends: &mut Ends) {
    let election = Election {
        namespace: args.namespace.clone(),
        name: args.lease_name.clone(),
        identity: args.identity.clone(),
        duration: args.lease_duration,
        renew_deadline: args.lease_renew_deadline,
        retry: args.lease_retry,
    };
    let (resign, pause) = (CancellationToken::new(), CancellationToken::new());
    let (tell, mut elected) = tokio::sync::mpsc::channel(1);
    let elector = Elector::new(election, rest, permit);
    let metrics = reconciler.executor.metrics.clone();
    let mut election = tokio::spawn(elector.run(resign.clone(), move || {
        // The channel holds one, and this is called once.
        let _ = tell.try_send(());
    }));
    let mut workers = JoinSet::new();
    loop {
        tokio::select! {
            Some(()) = elected.recv() => {
                metrics.leader(true);
                for cluster in reconciler.gatherer.caches.clusters() {
                    reconciler.queue.wake(&cluster, Duration::ZERO);
                }
                for _ in 0..args.concurrency {
                    workers.spawn(reconciler.clone().work(pause.clone()));
                }
            }
            lost = &mut election => {
                tracing::error!(err = lost.err().map(|e| e.to_string()), "the lease is lost: this process ends");
                std::process::exit(1);
            }
            Some(ended) = workers.join_next() => {
                // A worker ends only by a panic: a bug. The process ends, and the next leader goes on.
                tracing::error!(err = ended.err().map(|e| e.to_string()), "a worker died: this process ends");
                std::process::exit(1);
            }
            () = ends.wait() => break,
        }
    }
    tracing::info!("asked to end");
    pause.cancel();
    let finished = tokio::time::timeout(GRACE, async { while workers.join_next().await.is_some() {} }).await;
    if finished.is_err() {
        tracing::warn!(seconds = GRACE.as_secs(), "reconciles are cut off");
        workers.abort_all();
    }
    metrics.leader(false);
    resign.cancel();
    let _ = election.await;
}

/// Waits until every source was listed once, and says in `/readyz` what is missing.
async fn listed(caches: &Caches, sources: &[Source], health: &Health) {
    loop {
        let missing = caches.missing(sources);
        if missing.is_empty() {
            return;
        }
        health.missing("caches", format!("not listed yet: {}", missing.join(", ")));
        tokio::time::sleep(LISTING_PAUSE).await;
    }
}

/// The signals that end the process.
struct Ends {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl Ends {
    fn new() -> anyhow::Result<Self> {
        let on = |kind| signal(kind).context("signals of the system");
        Ok(Self { terminate: on(SignalKind::terminate())?, interrupt: on(SignalKind::interrupt())? })
    }

    async fn wait(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
