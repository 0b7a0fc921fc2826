//! What the agents say: each is asked for `GET /v1/status` as often as it matters, and told to drain when a plan says so.
//!
//! ```text
//! table.rs   who is followed, when each is due, what a new word means: pure, no clock
//! poll.rs    the loop that asks who is due                       client.rs  one signed call
//! ```
//!
//! Invariants: a cluster is woken by what plans look at (phase, readiness, reasons, the last request gone, silence), never
//! by counters; calls are bounded in number and time; leaders do not wait behind others.

mod client;
mod poll;
mod table;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Args;
use deepinfer_planner::{AgentCall, AgentWord};
use deepinfer_protocol::AgentId;
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

pub use self::client::CallError;
use self::client::Caller;
use self::table::Table;
use crate::args::{positive, seconds};
use crate::keys::{ClusterRef, Keys};
use crate::metrics::Metrics;

/// How agents are asked.
#[derive(Clone, Debug, Args)]
pub struct AgentOptions {
    /// Pause between two questions to a leader that the FleetView names
    #[arg(id = "agent-leader-seconds", long, value_name = "S", default_value = "1", value_parser = seconds)]
    pub leader_interval: Duration,
    /// The same for index 0 of a supernode and for prefill workers
    #[arg(id = "agent-first-seconds", long, value_name = "S", default_value = "5", value_parser = seconds)]
    pub first_interval: Duration,
    /// The same for agents that start or drain
    #[arg(id = "agent-starting-seconds", long, value_name = "S", default_value = "1", value_parser = seconds)]
    pub starting_interval: Duration,
    /// The same for all others
    #[arg(id = "agent-other-seconds", long, value_name = "S", default_value = "60", value_parser = seconds)]
    pub other_interval: Duration,
    /// Questions a second to agents that start, at most: while there are more of them, each is asked less often
    #[arg(id = "agent-starting-rate", long, value_name = "N", default_value_t = 1000, value_parser = positive)]
    pub starting_rate: usize,
    /// Longest call to an agent
    #[arg(id = "agent-timeout-seconds", long, value_name = "S", default_value = "2", value_parser = seconds)]
    pub timeout: Duration,
    /// Calls to agents at once; leaders, and agents that start, have as many again each for themselves
    #[arg(id = "agent-concurrency", long, value_name = "N", default_value_t = 256, value_parser = positive)]
    pub concurrency: usize,
    /// Send all calls to agents here, with the agent's address in the Host header: for tests at scale
    #[arg(id = "agent-proxy", long, value_name = "ADDR", hide = true)]
    pub proxy: Option<SocketAddr>,
}

impl Default for AgentOptions {
    fn default() -> Self {
        Self {
            leader_interval: Duration::from_secs(1),
            first_interval: Duration::from_secs(5),
            starting_interval: Duration::from_secs(1),
            starting_rate: 1000,
            other_interval: Duration::from_secs(60),
            timeout: Duration::from_secs(2),
            concurrency: 256,
            proxy: None,
        }
    }
}

/// How often an agent is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cadence {
    /// Leads prefill or decode by the committed FleetView.
    Leader,
    /// Starts: its next word changes what happens. There may be very many.
    Starting,
    /// Drains, and something waits for that.
    Draining,
    /// Index 0 of a supernode, or a prefill worker.
    First,
    /// Any other: its pod and its index 0 tell of it.
    Other,
}

/// Where an agent is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentAddress {
    /// Its name: its pod's.
    pub pod: AgentId,
    /// Address of its pod.
    pub ip: IpAddr,
    /// Control port.
    pub control: u16,
    /// Data port.
    pub data: u16,
    /// How often it is asked.
    pub cadence: Cadence,
}

/// All agents of all clusters.
#[derive(Debug)]
pub struct Agents {
    table: Mutex<Table>,
    changed: Notify,
    caller: Caller,
    keys: Arc<Keys>,
}

impl Agents {
    /// Starts asking; `wake` gets a cluster when a plan may come out differently. Ends with `stop`.
    pub fn start(
        options: AgentOptions,
        keys: Arc<Keys>,
        metrics: Arc<Metrics>,
        wake: mpsc::Sender<ClusterRef>,
        stop: CancellationToken,
    ) -> Arc<Self> {
        let agents = Arc::new(Self {
            table: Mutex::new(Table::new(&options)),
            changed: Notify::new(),
            caller: Caller::new(&options, metrics),
            keys,
        });
        tokio::spawn(poll::run(Arc::clone(&agents), options.concurrency, wake, stop));
        agents
    }

    /// These are the agents of a cluster from now on; none forgets it. Cheap if nothing changed.
    pub fn follow(&self, cluster: &ClusterRef, agents: Vec<AgentAddress>) {
        let key = || self.keys.cluster(&cluster.uid);
        let now = tokio::time::Instant::now().into_std();
        let changed = self.table().follow(cluster, agents, key, now, unix_seconds());
        if changed {
            self.changed.notify_one();
        }
    }

    /// Last words of a cluster's agents.
    pub fn words(&self, cluster: &ClusterRef) -> BTreeMap<AgentId, AgentWord> {
        self.table().words(cluster)
    }

    /// Every agent of the first round was asked, whether it answered or not. Before that, after a start, a plan would take
    /// silence for absence; the cluster is woken when it becomes true. It stays true: later agents are new to everybody.
    pub fn settled(&self, cluster: &ClusterRef) -> bool {
        self.table().settled(cluster)
    }

    /// Tells an agent.
    ///
    /// # Errors
    /// [`CallError`].
    pub async fn call(
        &self,
        cluster: &ClusterRef,
        agent: &AgentId,
        call: &AgentCall,
    ) -> Result<(), CallError> {
        let target = self.table().target(cluster, agent).ok_or_else(|| CallError::Unknown(agent.clone()))?;
        self.caller.tell(&target, call).await?;
        // What it says now is news.
        self.table().hurry(cluster, agent, tokio::time::Instant::now().into_std());
        self.changed.notify_one();
        Ok(())
    }

    /// A thread that panicked while it held the lock left whole values behind.
    fn table(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Wall clock, as worlds count it.
fn unix_seconds() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_secs()).unwrap_or(i64::MAX)
}
