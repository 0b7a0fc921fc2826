//! Starting an agent: ports first, so that a taken one is known at once and probes are answered; then the
//! checkpoint, the engines, the machines.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use deepinfer_engine::exchange::SlotMap;
use deepinfer_engine::sizes::Sizes;
use deepinfer_engine::{Checkpoint, EngineOptions, Numerics};
use deepinfer_protocol::agent_status::Role;
use deepinfer_protocol::fleet::FleetView;
use deepinfer_protocol::message::Peer;
use deepinfer_protocol::{AgentId, Span, SupernodeId};
use deepinfer_transport::fleet_client::FleetProbe;
use deepinfer_transport::{ClusterKey, Transport, TransportOptions};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::args::{AgentArgs, NumericsChoice, RoleChoice};
use crate::clock::Clock;
use crate::control::{ControlState, Face, serve};
use crate::driver::{Core, CoreSetup, Inputs, hex, lock, run};
use crate::engine::faults::Faults;
use crate::engine::group::RankGroup;
use crate::engine::opening::Opening;
use crate::engine::thread::Output;
use crate::error::AgentError;
use crate::handle::{AgentHandle, HandleParts};
use crate::host;
use crate::plan::MachinePlan;
use crate::sizing::{Given, Sizing};

/// Outputs of engines that may wait for the driver; a full channel makes engines wait.
const MAX_WAITING_OUTPUTS: usize = 1024;

/// A rank waits for the others in one layer at least this long, whatever counts as hung.
const EXCHANGE_LIMIT: Duration = Duration::from_secs(60);

/// How an agent is started.
#[derive(Clone, Debug)]
pub struct AgentOptions {
    /// The flags.
    pub args: AgentArgs,
    /// What it is like to be a pod; `None` for an agent among others in one process.
    pub pod: Option<PodOptions>,
}

/// What an agent has as a process of its own.
#[derive(Clone, Debug)]
pub struct PodOptions {
    /// A load that failed for a reason that a restart does not heal is tried again after this; the process stays up.
    pub retry: Duration,
    /// How the following of the fleet goes, for metrics.
    pub probe: FleetProbe,
}

impl AgentOptions {
    /// From flags that were read, for an agent among others in one process: no port for metrics alone, and what does
    /// not load has failed.
    pub fn new(args: AgentArgs) -> Self {
        Self { args, pod: None }
    }
}

/// How far a start has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Weights are read into memory.
    Loading {
        /// Bytes so far.
        done: u64,
        /// Bytes in all.
        total: u64,
    },
    /// Engines open and run a first step.
    Warming {
        /// Sizes that were chosen, for people.
        sizes: String,
    },
}

/// Binds the ports and begins to load; [`AgentHandle::ready`] waits for the rest. `progress` is called from any
/// thread.
///
/// # Errors
/// [`AgentError::Port`].
pub async fn begin(
    options: AgentOptions,
    fleet: watch::Receiver<Arc<FleetView>>,
    key: ClusterKey,
    progress: impl Fn(Progress) + Send + Sync + 'static,
) -> Result<AgentHandle, AgentError> {
    let AgentOptions { args, pod } = options;
    let (data, data_addr) = bind("--data-listen", args.data_address()).await?;
    let (control, control_addr) = bind("--control-listen", args.control_address()).await?;
    let metrics = match pod {
        Some(_) => Some(bind("--metrics-listen", args.metrics_address()).await?),
        None => None,
    };
    let name = AgentId::new(args.name.as_str());
    let clock = Clock::start();
    let transport = TransportOptions {
        heartbeat: Span::millis(u64::from(args.heartbeat_ms)),
        missed: args.missed_heartbeats,
        ..TransportOptions::new(name.clone(), Peer::Agent, key.clone())
    };
    let (transport, peers) = Transport::start(transport, Some(data));
    let (out, outputs) = tokio::sync::mpsc::channel(MAX_WAITING_OUTPUTS);
    let (failed, failed_seen) = watch::channel(None);
    let (serving, serving_seen) = watch::channel(false);
    let core = Arc::new(Mutex::new(Core::new(CoreSetup {
        name: name.clone(),
        role: role_of(&args),
        supernode: args.supernode.as_deref().map(SupernodeId::from),
        index: args.index,
        ranks: args.ranks,
        chunk: Span::millis(u64::from(args.chunk_budget_ms)),
        nodes: args.supernode_nodes,
        fabric: pod.is_some() && args.role == RoleChoice::Decode,
        probe: pod.as_ref().map(|pod| pod.probe.clone()),
        transport: transport.clone(),
        clock,
        failed: failed.clone(),
        serving,
    })));
    let faults = Arc::new(Faults::default());
    let state =
        ControlState { core: core.clone(), key, faults: args.fault_injection.then(|| faults.clone()) };
    let state = Arc::new(state);
    let stop = CancellationToken::new();
    let tasks = TaskTracker::new();
    let metrics_addr = metrics.as_ref().map(|(_, address)| *address);
    if let Some((metrics, _)) = metrics {
        tasks.spawn(serve(metrics, state.clone(), Face::Metrics, stop.clone()));
    }
    tasks.spawn(serve(control, state, Face::Control, stop.clone()));
    let driver = tokio::spawn(run(core.clone(), Inputs { peers, outputs, fleet }, stop.clone()));
    tasks.spawn(watch_driver(driver, core.clone(), failed.clone()));
    let retry = pod.map(|pod| pod.retry);
    let loading = Arc::new(Loading { args, clock, faults, core: core.clone(), out, failed });
    tasks.spawn(load_until(loading, retry, Arc::new(progress), stop.clone()));
    Ok(AgentHandle::new(HandleParts {
        name,
        data_addr,
        control_addr,
        metrics_addr,
        core,
        transport,
        failed: failed_seen,
        serving: serving_seen,
        stop,
        tasks,
    }))
}

/// Like [`begin`], and waits until the agent serves.
///
/// # Errors
/// [`AgentError`]; the agent is stopped then.
pub async fn start(
    options: AgentOptions,
    fleet: watch::Receiver<Arc<FleetView>>,
    key: ClusterKey,
    progress: impl Fn(Progress) + Send + Sync + 'static,
) -> Result<AgentHandle, AgentError> {
    let handle = begin(options, fleet, key, progress).await?;
    match handle.ready().await {
        Ok(()) => Ok(handle),
        Err(error) => {
            handle.stop().await;
            Err(error)
        }
    }
}

async fn bind(flag: &'static str, address: SocketAddr) -> Result<(TcpListener, SocketAddr), AgentError> {
    let port = |source| AgentError::Port { flag, address, source };
    let listener = TcpListener::bind(address).await.map_err(port)?;
    let bound = listener.local_addr().map_err(port)?;
    Ok((listener, bound))
}

/// A driver that panicked is a bug; an agent without one is useless and must be replaced.
async fn watch_driver(
    driver: tokio::task::JoinHandle<()>,
    core: Arc<Mutex<Core>>,
    failed: watch::Sender<Option<String>>,
) {
    if let Err(error) = driver.await {
        let reason = format!("the agent's driver ended: {error}");
        tracing::error!(%reason);
        lock(&core).die(reason.clone());
        failed.send_replace(Some(reason));
    }
}

/// Loads, and again after `retry` while what is in the way may go away without a restart.
async fn load_until<P>(
    loading: Arc<Loading>,
    retry: Option<Duration>,
    progress: Arc<P>,
    stop: CancellationToken,
) where
    P: Fn(Progress) + Send + Sync + 'static,
{
    let mut said = String::new();
    loop {
        let (load, progress) = (loading.clone(), progress.clone());
        let Ok(result) = tokio::task::spawn_blocking(move || load.load(&*progress)).await else { return };
        let error = match result {
            Ok((opening, plan)) => return loading.open(opening, plan),
            Err(error) => error,
        };
        let (reason, code) = (error.to_string(), error.code());
        if reason != said {
            tracing::error!(%reason, code, "the agent does not start");
            said.clone_from(&reason);
        }
        lock(&loading.core).give_up(reason.clone(), code);
        let Some(pause) = retry.filter(|_| !code.is_empty()) else {
            loading.failed.send_replace(Some(reason));
            return;
        };
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
    }
}

fn role_of(args: &AgentArgs) -> Role {
    match args.role {
        RoleChoice::Prefill => Role::Prefill,
        RoleChoice::Decode => Role::Decode,
    }
}

/// What happens on a blocking thread until the engines open.
struct Loading {
    args: AgentArgs,
    clock: Clock,
    faults: Arc<Faults>,
    core: Arc<Mutex<Core>>,
    out: mpsc::Sender<Output>,
    failed: watch::Sender<Option<String>>,
}

impl Loading {
    fn open(&self, opening: Opening, plan: MachinePlan) {
        let hung = Span::secs(u64::from(self.args.hung_step_seconds));
        let group = RankGroup::start(opening, hung, self.faults.clone(), self.clock, self.out.clone());
        lock(&self.core).open(group, plan);
    }

    /// Opens the model, if it can be run and is the one that was asked for. Gives its digest.
    fn checkpoint(&self) -> Result<(Arc<Checkpoint>, [u8; 32]), AgentError> {
        let args = &self.args;
        if args.role == RoleChoice::Prefill && args.nodes_per_worker > 1 {
            let why =
                "--nodes-per-worker: prefill over several pods is not built yet: set nodesPerWorker to 1";
            return Err(AgentError::NotSupported(why));
        }
        Opening::check_backend(args.backend, args.simd)?;
        let checkpoint = Arc::new(Checkpoint::open(&args.checkpoint)?);
        let weights_digest = checkpoint.digest();
        if let Some(expected) = args.model_digest.filter(|expected| *expected != weights_digest) {
            let path = args.checkpoint.display().to_string();
            return Err(AgentError::Digest { path, found: hex(&weights_digest), expected: hex(&expected) });
        }
        if !checkpoint.ignored_keys.is_empty() {
            tracing::warn!(keys = ?checkpoint.ignored_keys, "config.json keys that are not known and ignored");
        }
        Ok((checkpoint, weights_digest))
    }

    fn load(&self, progress: &(dyn Fn(Progress) + Sync)) -> Result<(Opening, MachinePlan), AgentError> {
        let args = &self.args;
        let (checkpoint, weights_digest) = self.checkpoint()?;
        let numerics = numerics_of(args.numerics, &checkpoint);
        let sizes = Sizes::of_checkpoint(&checkpoint, numerics);
        let sizing = Sizing::of(
            args,
            &Given {
                model_context: u32::try_from(checkpoint.shape.max_position_embeddings).unwrap_or(u32::MAX),
                block_bytes: sizes.kv_bytes_per_block,
                state_bytes: sizes.state_bytes_per_slot,
                available: host::available_memory(),
            },
        )?;
        let map = match args.ranks {
            1 => None,
            ranks => Some(Arc::new(
                SlotMap::initial(
                    &checkpoint.shape,
                    usize::from(ranks),
                    usize::from(args.extra_slots_per_rank),
                )
                .map_err(|error| AgentError::Spread(error.to_string()))?,
            )),
        };
        let threads = args.threads.map_or_else(host::cores, usize::from);
        checkpoint.prefault(threads, &|done, total| progress(Progress::Loading { done, total }));
        let tokenizer_digest = checkpoint.tokenizer_digest()?.unwrap_or_default();
        tracing::info!(agent = %args.name, ?sizing, threads, "engines open");
        progress(Progress::Warming { sizes: describe(&sizing) });
        let plan = MachinePlan {
            name: AgentId::new(args.name.as_str()),
            role: role_of(args),
            supernode: args.supernode.as_deref().map(SupernodeId::from),
            first_rank: args.first_rank(),
            sizing,
            chunk: Span::millis(u64::from(args.chunk_budget_ms)),
            min_chunk: args.chunk_min_tokens,
            lease: Span::secs(u64::from(args.lease_seconds)),
            checkpoint: checkpoint.clone(),
            weights_digest,
            tokenizer_digest,
        };
        let opening = Opening {
            checkpoint,
            options: EngineOptions {
                numerics: Some(numerics),
                slots: sizing.requests as usize,
                blocks: sizing.blocks as usize,
                max_rows: sizing.max_rows as usize,
                ..EngineOptions::default()
            },
            map,
            ranks: usize::from(args.ranks),
            threads,
            simd: args.simd,
            // The watchdog decides what is hung; the exchange gives up a little later by itself.
            exchange_limit: Duration::from_secs(u64::from(args.hung_step_seconds) * 2).max(EXCHANGE_LIMIT),
            weights_digest,
            profile: args.role == RoleChoice::Prefill,
        };
        Ok((opening, plan))
    }
}

fn numerics_of(choice: NumericsChoice, checkpoint: &Checkpoint) -> Numerics {
    match choice {
        NumericsChoice::F32 => Numerics::F32,
        NumericsChoice::Quantized => Numerics::Quantized,
        NumericsChoice::Auto if checkpoint.shape.quantized => Numerics::Quantized,
        NumericsChoice::Auto => Numerics::F32,
    }
}

fn describe(sizing: &Sizing) -> String {
    let Sizing { requests, blocks, max_rows, context_limit, .. } = sizing;
    format!(
        "{requests} sequences, {blocks} blocks of 128 tokens, context {context_limit}, {max_rows} rows a step"
    )
}
