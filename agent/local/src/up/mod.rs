//! `deepinfer up`: a cluster file becomes a served model in this process.
//!
//! ```text
//! session.rs   gather, plan, check, commit, execute      pods.rs      pods become tasks, and say how they are
//! state.rs     the folder, its lock and files            storage.rs   what is written when
//! control.rs   the socket for the other commands         changes.rs   what `apply` checks
//! ```

mod changes;
pub mod control;
mod ending;
mod pods;
mod progress;
mod session;
pub mod state;
mod storage;
mod view;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use deepinfer_agent::host;
use deepinfer_crds::DeepInferCluster;
use deepinfer_gateway::{ChatRenderer, Tokenizer};
use deepinfer_planner::{ModelState, World};
use deepinfer_protocol::fleet::FleetView;
use deepinfer_transport::ClusterKey;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;

use self::control::{Answer, Asked};
use self::pods::{Pods, Surroundings};
use self::progress::Screen;
use self::session::{LOOK_EVERY, Session, wall_clock};
use self::state::StateDir;
use self::storage::Storage;
use crate::cluster::args::UpArgs;
use crate::cluster::file::ClusterFile;
use crate::cluster::plan::notes;
use crate::cluster::pod_args::Extras;
use crate::cluster::rehearsal::rehearse;
use crate::cluster::target::{LocalModel, local_target, memory_share};
use crate::report;

/// Questions of other commands that may wait.
const MAX_QUESTIONS: usize = 16;
/// Time for engines to end once no request is left.
const STOP_TIME: Duration = Duration::from_secs(12);
/// The same when a start has failed or the user does not want to wait.
const HASTY_STOP_TIME: Duration = Duration::from_millis(500);
/// Drain of requests where the spec says nothing, in seconds: the planner's default.
const DRAIN_SECONDS: u32 = 600;

/// Runs a cluster until it is told to stop.
pub fn run(args: UpArgs) -> Result<ExitCode> {
    let (file, manifest) = ClusterFile::open(&args.file)?;
    let cluster = manifest.cluster;
    let name = cluster.metadata.name.clone().unwrap_or_default();
    let root =
        args.state.root().context("--state-dir: give a folder, as neither XDG_STATE_HOME nor HOME is set")?;
    let state = Arc::new(StateDir::open(&root, &name)?);
    let screen = Arc::new(Screen::new());
    screen.log(args.log, args.log_level)?;
    let model = LocalModel::look(&cluster, &file.base);
    if let ModelState::Failed { message, .. } = &model.state {
        bail!("{message}");
    }
    let mut seed = [0; 8];
    getrandom::fill(&mut seed).map_err(|error| anyhow::anyhow!("random names: {error}"))?;
    let mut world = World::new("local", u64::from_le_bytes(seed));
    world.now = wall_clock();
    world.blueprint = state.blueprint();
    world.model = model.state.clone();
    world.user_applies(cluster.clone());
    let target = local_target(&model, args.listen, args.ranks);
    let mut extras =
        Extras { memory: memory_share(host::available_memory(), &cluster), gateway: files(&args) };
    let play = rehearse(&world, &target, &extras, model.sizes.as_ref());
    if let Err(lines) = changes::refused(&play) {
        bail!("{lines}");
    }
    extras.gateway.extend(changes::gateway_flags(&play, &extras, model.sizes.as_ref()));
    eprint!("{}", notes(&play.report));

    let key = ClusterKey::random().context("a key for this cluster")?;
    let memory = world.blueprint.clone();
    let (fleet, followed) = watch::channel(Arc::new(FleetView::default()));
    let around = Surroundings { fleet: followed, key: key.clone(), extras, screen: Arc::clone(&screen) };
    let storage = Storage::new(Arc::clone(&state), memory);
    let session = Session::new(world, target, key, Pods::new(around), storage, fleet);
    let greeting = Greeting::of(&cluster, &model, args.api_keys.is_some(), args.tls_cert.is_some());
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("threads")?;
    let outcome = runtime.block_on(serve(session, &state, &screen, &greeting, &cluster));
    // A thread that reads weights may still be at it.
    runtime.shutdown_timeout(HASTY_STOP_TIME);
    outcome.map(|()| ExitCode::SUCCESS)
}

/// Files of the gateway as its flags.
fn files(args: &UpArgs) -> Vec<String> {
    let files =
        [("--api-keys", &args.api_keys), ("--tls-cert", &args.tls_cert), ("--tls-key", &args.tls_key)];
    let flag = |(name, path): &(&str, &Option<std::path::PathBuf>)| {
        path.as_ref().map(|path| format!("{name}={}", path.display()))
    };
    files.iter().filter_map(flag).collect()
}

/// Signals that end the process.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    fn new() -> Result<Self> {
        let on = |kind| signal(kind).context("signals");
        Ok(Self { interrupt: on(SignalKind::interrupt())?, terminate: on(SignalKind::terminate())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}

async fn serve(
    mut session: Session,
    state: &StateDir,
    screen: &Screen,
    greeting: &Greeting,
    cluster: &DeepInferCluster,
) -> Result<()> {
    let mut signals = Signals::new()?;
    let (ask, mut asked) = tokio::sync::mpsc::channel(MAX_QUESTIONS);
    let socket = state.free_socket().and_then(|path| control::listen(&path, ask));
    socket.with_context(|| format!("--state-dir: {}", state.folder().display()))?;
    loop {
        if let Err(error) = session.turn().await {
            screen.clear();
            session.pods().stop(HASTY_STOP_TIME).await;
            session.close().await;
            return Err(error);
        }
        if let Some(url) = session.newly_serving() {
            screen.clear();
            // Whoever read it may have gone; the cluster serves on.
            let _ = report::print(&greeting.text(&url));
        }
        tokio::select! {
            () = signals.next() => break,
            Some(question) = asked.recv() => answer(&mut session, question).await,
            () = tokio::time::sleep(LOOK_EVERY) => {}
        }
    }
    let drain =
        cluster.spec.decode.drain.as_ref().and_then(|drain| drain.timeout_seconds).unwrap_or(DRAIN_SECONDS);
    let limit = drain_gateway(&mut session, &mut signals, &mut asked, screen, u64::from(drain)).await;
    session.pods().stop(limit).await;
    session.close().await;
    Ok(())
}

/// Lets running requests finish, and answers questions meanwhile. Gives the time that engines have to end.
async fn drain_gateway(
    session: &mut Session,
    signals: &mut Signals,
    asked: &mut tokio::sync::mpsc::Receiver<Asked>,
    screen: &Screen,
    seconds: u64,
) -> Duration {
    let Some(gateway) = session.pods().take_gateway() else { return HASTY_STOP_TIME };
    let stats = gateway.stats();
    let requests = stats.running + stats.waiting;
    if requests > 0 {
        screen.line(&format!(
            "{requests} requests may finish within {seconds} s and no new ones are taken; Ctrl-C again stops at once"
        ));
    }
    let shutdown = gateway.shutdown(Duration::from_secs(seconds));
    tokio::pin!(shutdown);
    loop {
        tokio::select! {
            cut = &mut shutdown => {
                if cut > 0 {
                    screen.line(&format!("{cut} requests were cut"));
                }
                return STOP_TIME;
            }
            () = signals.next() => return HASTY_STOP_TIME,
            Some(question) = asked.recv() => answer(session, question).await,
        }
    }
}

async fn answer(session: &mut Session, (question, reply): Asked) {
    let answer = session.answer(question).await;
    if let Answer::Refused(reason) = &answer {
        tracing::info!(reason, "a question was refused");
    }
    let _ = reply.send(answer);
}

/// What is printed once requests are answered.
struct Greeting {
    model: String,
    chat: bool,
    keys: bool,
    tls: bool,
    /// The cluster's requests think by default.
    thinks: bool,
}

impl Greeting {
    fn of(cluster: &DeepInferCluster, model: &LocalModel, keys: bool, tls: bool) -> Self {
        let tokenizer = Tokenizer::open(model.path.join("tokenizer.json"));
        let chat = tokenizer.is_ok_and(|tokenizer| ChatRenderer::new(Arc::new(tokenizer)).is_ok());
        let thinking = cluster.spec.gateway.as_ref().and_then(|gateway| gateway.default_thinking);
        let thinks = thinking != Some(deepinfer_crds::cluster::Thinking::Off);
        Self { model: cluster.spec.model.name.clone(), chat, keys, tls, thinks }
    }

    fn text(&self, url: &str) -> String {
        let key = if self.keys { " -H 'authorization: Bearer YOUR-KEY'" } else { "" };
        let insecure = if self.tls { " --insecure" } else { "" };
        let (path, body) = if self.chat {
            let messages = r#""messages":[{"role":"user","content":"What is the capital of France?"}]"#;
            let quick = if self.thinks { r#","thinking":false"# } else { "" };
            ("chat/completions", format!(r#"{{"model":"{}",{messages},"temperature":0{quick}}}"#, self.model))
        } else {
            let rest = r#""prompt":"The capital of France is","max_tokens":16,"temperature":0"#;
            ("completions", format!(r#"{{"model":"{}",{rest}}}"#, self.model))
        };
        format!(
            "{} is served at {url}\n\ncurl -s{insecure} {url}/v1/{path}{key} -H 'content-type: application/json' \
             -d '{body}'\n",
            self.model
        )
    }
}
