//! The kubelet of one machine: a pod that appears in the world starts an agent or the gateway as a task; one that goes
//! is drained, then stopped, and only then it is gone.
//!
//! Invariant: a pod has at most one task, and the world is told only what the task says.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use deepinfer_agent::{AgentArgs, AgentHandle, AgentOptions, begin};
use deepinfer_gateway::args::GatewayArgs;
use deepinfer_gateway::{GatewayError, GatewayHandle};
use deepinfer_planner::{AgentWord, Key, Kind, Object, World, has_ended};
use deepinfer_protocol::AgentId;
use deepinfer_protocol::fleet::FleetView;
use deepinfer_transport::ClusterKey;
use k8s_openapi::api::core::v1::{Pod, PodCondition, PodStatus};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::ending;
use super::progress::Screen;
use crate::cluster::pod_args::{Container, Extras, container, is_gateway, pod_name};

/// Seconds that a pod has beyond its drain, as the planner writes them into its grace period.
const BEYOND_DRAIN: i64 = 60;
/// First wait before a worker that failed is started again; doubles.
const RESTART_WAIT: Duration = Duration::from_secs(1);
/// Longest such wait.
const MAX_RESTART_WAIT: Duration = Duration::from_secs(60);

/// A gateway that hands over closes its socket within a moment; this often it is looked whether it has.
const HAND_OVER_WAIT: Duration = Duration::from_millis(20);
/// Looks before the address counts as taken by somebody else.
const HAND_OVER_TRIES: u32 = 250;

/// Agents by pod name, for metrics.
type Agents = Arc<Mutex<BTreeMap<String, Arc<AgentHandle>>>>;

/// What every pod is started with.
pub struct Surroundings {
    /// Who exists.
    pub fleet: watch::Receiver<Arc<FleetView>>,
    /// Between agents and gateway; random for each process.
    pub key: ClusterKey,
    /// What only this machine knows.
    pub extras: Extras,
    /// Where progress is shown.
    pub screen: Arc<Screen>,
}

/// See the module.
pub struct Pods {
    around: Surroundings,
    live: BTreeMap<String, Live>,
    agents: Agents,
    /// By whether it is the gateway: failures in a row, and when the next start may be.
    holds: BTreeMap<bool, (u32, Instant)>,
    /// Address that the gateway got: the next one takes the same.
    bound: Option<SocketAddr>,
}

/// What runs for a pod.
enum Live {
    Agent {
        handle: Arc<AgentHandle>,
        ending: Option<JoinHandle<()>>,
    },
    Gateway {
        handle: GatewayHandle,
        url: String,
    },
    /// The gateway finishes its streams.
    Closing(JoinHandle<()>),
    /// Has ended by itself.
    Failed(String),
}

impl Pods {
    /// Nothing runs yet.
    pub fn new(around: Surroundings) -> Self {
        Self { around, live: BTreeMap::new(), agents: Agents::default(), holds: BTreeMap::new(), bound: None }
    }

    /// What only this machine knows.
    pub fn extras(&self) -> &Extras {
        &self.around.extras
    }

    /// Agents that run, by pod name.
    pub fn agents(&self) -> BTreeMap<String, Arc<AgentHandle>> {
        self.agents.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The gateway, while it takes requests.
    pub fn gateway(&self) -> Option<&GatewayHandle> {
        self.live.values().find_map(|live| match live {
            Live::Gateway { handle, .. } => Some(handle),
            _ => None,
        })
    }

    /// Where clients connect.
    pub fn url(&self) -> Option<&str> {
        self.live.values().find_map(|live| match live {
            Live::Gateway { url, .. } => Some(url.as_str()),
            _ => None,
        })
    }

    /// Why a pod has ended by itself; empty if none has.
    pub fn failure(&self) -> Option<&str> {
        self.live.values().find_map(|live| match live {
            Live::Failed(reason) => Some(reason.as_str()),
            _ => None,
        })
    }

    /// Whether a pod is being drained.
    pub fn is_ending(&self, name: &str) -> bool {
        matches!(self.live.get(name), Some(Live::Agent { ending: Some(_), .. } | Live::Closing(_)))
    }

    /// Makes tasks follow the pods of the world. Tells whether pods are gone from the world.
    pub async fn follow(&mut self, world: &mut World) -> bool {
        let mut pods: Vec<Pod> = world.pods().cloned().collect();
        // The address first: one that is taken is known before weights load.
        pods.sort_by_key(|pod| (!is_gateway(pod), pod_name(pod).to_owned()));
        let mut gone = false;
        for pod in &pods {
            let name = pod_name(pod);
            let deleted = pod.metadata.deletion_timestamp.is_some();
            if deleted || (has_ended(pod) && is_of_deployment(pod)) {
                gone |= self.end(name, world, grace(pod));
            } else if !self.live.contains_key(name) && !has_ended(pod) {
                self.start(pod).await;
            }
        }
        let orphans = self.live.keys().filter(|name| world.get(Kind::Pod, name).is_none());
        for name in orphans.cloned().collect::<Vec<_>>() {
            self.end(&name, world, Duration::ZERO);
        }
        gone
    }

    /// Ends what runs for a pod; once it has ended, takes the pod out of the world.
    fn end(&mut self, name: &str, world: &mut World, drain: Duration) -> bool {
        match self.live.remove(name) {
            Some(Live::Agent { handle, ending: None }) => {
                tracing::info!(pod = name, "the agent drains");
                let ending = Some(tokio::spawn(ending::agent(Arc::clone(&handle), drain)));
                self.live.insert(name.to_owned(), Live::Agent { handle, ending });
                return false;
            }
            Some(Live::Gateway { handle, .. }) => {
                let closing = tokio::spawn(ending::gateway(handle, drain));
                self.live.insert(name.to_owned(), Live::Closing(closing));
                return false;
            }
            Some(Live::Agent { handle, ending: Some(ending) }) if !ending.is_finished() => {
                self.live.insert(name.to_owned(), Live::Agent { handle, ending: Some(ending) });
                return false;
            }
            Some(Live::Closing(closing)) if !closing.is_finished() => {
                self.live.insert(name.to_owned(), Live::Closing(closing));
                return false;
            }
            _ => {}
        }
        tracing::info!(pod = name, "the pod is gone");
        self.agents.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
        world.agents.remove(&AgentId::from(name));
        world.pod_ended(name);
        true
    }

    async fn start(&mut self, pod: &Pod) {
        let name = pod_name(pod).to_owned();
        if is_of_deployment(pod)
            && self.holds.get(&is_gateway(pod)).is_some_and(|(_, at)| Instant::now() < *at)
        {
            return;
        }
        let started = match container(pod, &self.around.extras) {
            Ok(Container::Agent(args)) => self.start_agent(*args).await,
            Ok(Container::Gateway(args)) => self.start_gateway(*args, grace(pod)).await,
            Err(reason) => Err(reason),
        };
        let live = started.unwrap_or_else(|reason| self.failed(pod, reason));
        self.live.insert(name, live);
    }

    /// Remembers a failure and when the next start may be.
    fn failed(&mut self, pod: &Pod, reason: String) -> Live {
        tracing::error!(pod = pod_name(pod), %reason, "the pod has failed");
        if is_of_deployment(pod) {
            let hold = self.holds.entry(is_gateway(pod)).or_insert((0, Instant::now()));
            let wait = RESTART_WAIT.saturating_mul(1 << hold.0.min(16)).min(MAX_RESTART_WAIT);
            *hold = (hold.0 + 1, Instant::now() + wait);
        }
        Live::Failed(reason)
    }

    async fn start_agent(&self, args: AgentArgs) -> Result<Live, String> {
        let (name, screen) = (args.name.clone(), Arc::clone(&self.around.screen));
        let shown = name.clone();
        let progress = move |progress| screen.agent(&shown, &progress);
        let (fleet, key) = (self.around.fleet.clone(), self.around.key.clone());
        let handle = begin(AgentOptions::new(args), fleet, key, progress).await;
        let handle = Arc::new(handle.map_err(|error| error.to_string())?);
        tracing::info!(agent = %name, data = %handle.data_addr(), control = %handle.control_addr(), "an agent starts");
        let mut agents = self.agents.lock().unwrap_or_else(PoisonError::into_inner);
        agents.insert(name, Arc::clone(&handle));
        Ok(Live::Agent { handle, ending: None })
    }

    /// There is one address: a gateway that has it closes its socket, finishes its streams, and makes room for the
    /// next one. Gives whether there was one.
    fn hand_over(&mut self, drain: Duration) -> bool {
        let name = self.live.iter().find(|(_, live)| matches!(live, Live::Gateway { .. }));
        let Some(name) = name.map(|(name, _)| name.clone()) else { return false };
        if let Some(Live::Gateway { handle, .. }) = self.live.remove(&name) {
            handle.stop_listening();
            self.live.insert(name, Live::Closing(tokio::spawn(ending::gateway(handle, drain))));
        }
        true
    }

    async fn start_gateway(&mut self, args: GatewayArgs, drain: Duration) -> Result<Live, String> {
        let mut listen = args.listen_address();
        if let Some(bound) = self.bound.filter(|_| listen.port() == 0) {
            listen = bound;
        }
        let key = self.around.key.clone();
        let options =
            tokio::task::spawn_blocking(move || args.options(key).map_err(|error| error.to_string()));
        let mut options = options.await.map_err(|error| error.to_string())??;
        options.listen = listen;
        let agents = Arc::clone(&self.agents);
        options.extra_metrics = Some(Arc::new(move || metrics_of(&agents)));
        let mut patience = if self.hand_over(drain) { HAND_OVER_TRIES } else { 0 };
        let handle = loop {
            match deepinfer_gateway::start(options.clone(), self.around.fleet.clone()).await {
                Ok(handle) => break handle,
                Err(GatewayError::Listen { source, .. })
                    if patience > 0 && source.kind() == std::io::ErrorKind::AddrInUse =>
                {
                    patience -= 1;
                    tokio::time::sleep(HAND_OVER_WAIT).await;
                }
                Err(error) => return Err(error.to_string()),
            }
        };
        self.bound = Some(handle.addr());
        let url = handle.url();
        Ok(Live::Gateway { handle, url })
    }

    /// Writes into the world what the tasks say.
    pub fn observe(&mut self, world: &mut World) {
        let names: Vec<String> = self.live.keys().cloned().collect();
        for name in names {
            let failed = match self.live.get(&name) {
                Some(Live::Agent { handle, ending: None }) => handle.failed().borrow().clone(),
                _ => None,
            };
            if let Some(reason) = failed {
                self.give_up(&name, reason, world);
            }
            let (ready, word, failed) = match &self.live[&name] {
                Live::Agent { handle, ending } => {
                    (ending.is_none() && handle.readiness().is_ok(), Some(word(handle, world.now)), None)
                }
                Live::Gateway { handle, .. } => (handle.ready(), None, None),
                Live::Closing(_) => (false, None, None),
                Live::Failed(reason) => (false, None, Some(reason.clone())),
            };
            let id = AgentId::from(name.as_str());
            match word {
                Some(word) => world.agents.insert(id, word),
                None => world.agents.remove(&id),
            };
            if let Some(Object::Pod(pod)) = world.objects.get_mut(&Key::new(Kind::Pod, &name)) {
                pod.status = Some(pod_status(ready, failed));
            }
            if ready {
                let gateway = matches!(self.live[&name], Live::Gateway { .. });
                self.holds.remove(&gateway);
            }
        }
    }

    /// An agent whose engines do not come back.
    fn give_up(&mut self, name: &str, reason: String, world: &World) {
        let Some(Live::Agent { handle, .. }) = self.live.remove(name) else { return };
        tokio::spawn(async move { handle.stop().await });
        self.agents.lock().unwrap_or_else(PoisonError::into_inner).remove(name);
        let live = match world.get(Kind::Pod, name) {
            Some(Object::Pod(pod)) => self.failed(pod, reason),
            _ => Live::Failed(reason),
        };
        self.live.insert(name.to_owned(), live);
    }

    /// Tells an agent to drain, or to take work again.
    pub fn call(&self, agent: &AgentId, call: &deepinfer_planner::AgentCall) {
        use deepinfer_planner::AgentCall;
        let agents = self.agents.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(handle) = agents.get(agent.as_str()) else { return };
        match call {
            AgentCall::Drain { deadline_seconds, .. } => {
                handle.drain(deepinfer_protocol::Span::secs(u64::from(*deadline_seconds)));
            }
            AgentCall::Undrain => {
                if let Err(late) = handle.undrain() {
                    tracing::warn!(%agent, %late, "the agent does not take work again");
                }
            }
        }
    }

    /// Takes the gateway out, to be shut down.
    pub fn take_gateway(&mut self) -> Option<GatewayHandle> {
        let name = self.live.iter().find(|(_, live)| matches!(live, Live::Gateway { .. }))?.0.clone();
        match self.live.remove(&name) {
            Some(Live::Gateway { handle, .. }) => Some(handle),
            _ => None,
        }
    }

    /// Stops everything without waiting for requests; what does not end within `limit` is left to the end of the
    /// process.
    pub async fn stop(&mut self, limit: Duration) {
        self.take_gateway();
        let mut tasks = Vec::new();
        for live in std::mem::take(&mut self.live).into_values() {
            match live {
                Live::Agent { handle, .. } => tasks.push(tokio::spawn(async move { handle.stop().await })),
                Live::Closing(closing) => closing.abort(),
                Live::Gateway { .. } | Live::Failed(_) => {}
            }
        }
        let ended = async {
            for task in tasks {
                let _ = task.await;
            }
        };
        if tokio::time::timeout(limit, ended).await.is_err() {
            tracing::warn!("an engine does not end; the process ends without it");
        }
        self.agents.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

/// Time for the drain of a pod.
fn grace(pod: &Pod) -> Duration {
    let seconds = pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds).unwrap_or(0);
    Duration::from_secs(u64::try_from(seconds - BEYOND_DRAIN).unwrap_or(0))
}

fn is_of_deployment(pod: &Pod) -> bool {
    let owners = pod.metadata.owner_references.as_deref().unwrap_or_default();
    owners.iter().any(|owner| owner.kind == "Deployment")
}

fn word(handle: &AgentHandle, now: i64) -> AgentWord {
    AgentWord {
        data: handle.data_addr(),
        control: handle.control_addr(),
        status: Some(handle.status()),
        heard: now,
        silent_since: None,
    }
}

fn pod_status(ready: bool, failed: Option<String>) -> PodStatus {
    let phase = if failed.is_some() { "Failed" } else { "Running" };
    PodStatus {
        phase: Some(phase.to_owned()),
        reason: failed.as_ref().map(|_| "AgentFailed".to_owned()),
        message: failed,
        conditions: Some(vec![PodCondition {
            type_: "Ready".to_owned(),
            status: if ready { "True" } else { "False" }.to_owned(),
            ..PodCondition::default()
        }]),
        ..PodStatus::default()
    }
}

/// Metrics of all agents; the gateway merges them with its own.
fn metrics_of(agents: &Agents) -> String {
    let handles: Vec<_> = agents.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect();
    let texts: Vec<String> = handles.iter().map(|handle| handle.metrics_text()).collect();
    deepinfer_gateway::metrics::merge_metrics(&texts.iter().map(String::as_str).collect::<Vec<_>>())
}
