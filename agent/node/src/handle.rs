//! A running agent, as the process around it sees it.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use deepinfer_protocol::agent_status::{AgentStatus, DrainState, DrainStatus};
use deepinfer_protocol::load::ExpertLoadReport;
use deepinfer_protocol::{AgentId, Span};
use deepinfer_transport::Transport;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::driver::{Core, LoadDetail, UndrainTooLate, lock};
use crate::error::AgentError;

/// Time for last messages to leave when an agent stops.
const FLUSH: Duration = Duration::from_millis(500);
/// Time for engine threads to end; a step of a large model takes seconds.
const THREADS_END: Duration = Duration::from_secs(10);

/// How often a draining agent is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// After its deadline an agent cuts what is left; this is time for it to say so.
const BEYOND_DEADLINE: Duration = Duration::from_secs(2);

/// What a handle holds.
pub(crate) struct HandleParts {
    pub name: AgentId,
    pub data_addr: SocketAddr,
    pub control_addr: SocketAddr,
    pub metrics_addr: Option<SocketAddr>,
    pub core: Arc<Mutex<Core>>,
    pub transport: Transport,
    pub failed: watch::Receiver<Option<String>>,
    pub serving: watch::Receiver<bool>,
    pub stop: CancellationToken,
    pub tasks: TaskTracker,
}

/// See the module. Dropping it stops the agent without waiting.
pub struct AgentHandle(HandleParts);

impl fmt::Debug for AgentHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AgentHandle")
            .field("name", &self.0.name)
            .field("data", &self.0.data_addr)
            .field("control", &self.0.control_addr)
            .finish_non_exhaustive()
    }
}

impl Drop for AgentHandle {
    fn drop(&mut self) {
        self.0.stop.cancel();
        lock(&self.0.core).close();
    }
}

impl AgentHandle {
    pub(crate) fn new(parts: HandleParts) -> Self {
        Self(parts)
    }

    /// Name in the fleet.
    pub fn name(&self) -> &AgentId {
        &self.0.name
    }

    /// Where the data port listens.
    pub fn data_addr(&self) -> SocketAddr {
        self.0.data_addr
    }

    /// Where the control port listens.
    pub fn control_addr(&self) -> SocketAddr {
        self.0.control_addr
    }

    /// Where the port for metrics alone listens; only as a pod.
    pub fn metrics_addr(&self) -> Option<SocketAddr> {
        self.0.metrics_addr
    }

    /// Waits until the agent serves.
    ///
    /// # Errors
    /// [`AgentError::Failed`] if it never will.
    pub async fn ready(&self) -> Result<(), AgentError> {
        let (mut serving, mut failed) = (self.0.serving.clone(), self.0.failed.clone());
        tokio::select! {
            ready = serving.wait_for(|serving| *serving) => {
                ready.map(|_| ()).map_err(|_| AgentError::Stopped)
            }
            reason = failed.wait_for(Option::is_some) => match reason {
                Ok(reason) => Err(AgentError::Failed(reason.clone().unwrap_or_default())),
                Err(_) => Err(AgentError::Stopped),
            },
        }
    }

    /// Becomes a reason once the engines do not come back and what could be drained is: the process is to exit
    /// non-zero, or in one process with others this agent is to be replaced.
    pub fn failed(&self) -> watch::Receiver<Option<String>> {
        self.0.failed.clone()
    }

    /// What it says about itself.
    pub fn status(&self) -> AgentStatus {
        lock(&self.0.core).status()
    }

    /// Whether it takes new work.
    ///
    /// # Errors
    /// Why not.
    pub fn readiness(&self) -> Result<(), String> {
        lock(&self.0.core).readiness()
    }

    /// Which experts were chosen; `None` before the first window has closed, or before it serves.
    pub fn load(&self, detail: LoadDetail) -> Option<ExpertLoadReport> {
        lock(&self.0.core).load(detail)
    }

    /// Takes no new work; what runs is cut after `deadline`.
    pub fn drain(&self, deadline: Span) -> DrainStatus {
        lock(&self.0.core).drain(deadline)
    }

    /// Takes work again, if something of the drain is left.
    ///
    /// # Errors
    /// [`UndrainTooLate`].
    pub fn undrain(&self) -> Result<DrainStatus, UndrainTooLate> {
        lock(&self.0.core).undrain()
    }

    /// Where a drain stands.
    pub fn drain_status(&self) -> DrainStatus {
        lock(&self.0.core).drain_status()
    }

    /// Its metrics in the OpenMetrics format, each series with the label `pod`.
    pub fn metrics_text(&self) -> String {
        lock(&self.0.core).metrics_text()
    }

    /// Drains for at most `drain`, then stops: nothing is lost if what runs ends in time; what is cut resumes elsewhere.
    pub async fn drain_and_stop(&self, drain: Duration) {
        let begun = Instant::now();
        if !drain.is_zero() {
            self.drain(drain.into());
            while self.drain_status().state != DrainState::Drained
                && begun.elapsed() < drain + BEYOND_DEADLINE
            {
                tokio::time::sleep(LOOK_EVERY).await;
            }
        }
        let left = self.drain_status();
        tracing::info!(agent = %self.0.name, inflight = left.inflight, cut = left.cut, "the agent stops");
        self.stop().await;
    }

    /// Stops: last messages leave, ports close, engine threads end. Drain first to lose nothing.
    pub async fn stop(&self) {
        self.0.stop.cancel();
        let beats = lock(&self.0.core).close();
        self.0.transport.close(FLUSH).await;
        self.0.tasks.close();
        let ended = async {
            self.0.tasks.wait().await;
            while !beats.iter().all(|beat| beat.ended()) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        if tokio::time::timeout(THREADS_END, ended).await.is_err() {
            tracing::warn!(agent = %self.0.name, "stopped without waiting for an engine that does not end");
        }
    }
}
