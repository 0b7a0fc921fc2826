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
use deepinfer_transport::{ClusterKey, Transport, TransportOptions};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::args::{AgentArgs, NumericsChoice, RoleChoice};
use crate::clock::Clock;
use crate::control::{ControlState, serve};
use crate::driver::{Core, CoreSetup, Inputs, lock, run};
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
}

impl AgentOptions {
    /// From flags that were read.
    pub fn new(args: AgentArgs) -> Self {
        Self { args }
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
    let args = options.args;
    let (data, data_addr) = bind("--data-listen", args.data_listen).await?;
    let (control, control_addr) = bind("--control-listen", args.control_listen).await?;
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
        transport: transport.clone(),
        clock,
        failed: failed.clone(),
        serving,
    })));
    let faults = Arc::new(Faults::default());
    let state =
        ControlState { core: core.clone(), key, faults: args.fault_injection.then(|| faults.clone()) };
    let stop = CancellationToken::new();
    let tasks = TaskTracker::new();
    tasks.spawn(serve(control, Arc::new(state), stop.clone()));
    let driver = tokio::spawn(run(core.clone(), Inputs { peers, outputs, fleet }, stop.clone()));
    tasks.spawn(watch_driver(driver, core.clone(), failed.clone()));
    let loading = Loading { args, clock, faults, core: core.clone(), out, failed };
    tasks.spawn_blocking(move || loading.run(&progress));
    Ok(AgentHandle::new(HandleParts {
        name,
        data_addr,
        control_addr,
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
        lock(&core).give_up(reason.clone());
        failed.send_replace(Some(reason));
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
    fn run(&self, progress: &(dyn Fn(Progress) + Sync)) {
        match self.load(progress) {
            Ok((opening, plan)) => {
                let hung = Span::secs(u64::from(self.args.hung_step_seconds));
                let group =
                    RankGroup::start(opening, hung, self.faults.clone(), self.clock, self.out.clone());
                lock(&self.core).open(group, plan);
            }
            Err(error) => {
                let reason = error.to_string();
                tracing::error!(%reason, "the agent does not start");
                lock(&self.core).give_up(reason.clone());
                self.failed.send_replace(Some(reason));
            }
        }
    }

    fn load(&self, progress: &(dyn Fn(Progress) + Sync)) -> Result<(Opening, MachinePlan), AgentError> {
        let args = &self.args;
        Opening::check_backend(args.backend, args.simd)?;
        let checkpoint = Arc::new(Checkpoint::open(&args.checkpoint)?);
        if !checkpoint.ignored_keys.is_empty() {
            tracing::warn!(keys = ?checkpoint.ignored_keys, "config.json keys that are not known and ignored");
        }
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
        let weights_digest = checkpoint.digest();
        let tokenizer_digest = checkpoint.tokenizer_digest()?.unwrap_or_default();
        tracing::info!(agent = %args.name, ?sizing, threads, "engines open");
        progress(Progress::Warming { sizes: describe(&sizing) });
        let plan = MachinePlan {
            name: AgentId::new(args.name.as_str()),
            role: role_of(args),
            supernode: args.supernode.as_deref().map(SupernodeId::from),
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
