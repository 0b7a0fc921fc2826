//! How a pod ends: no new work, what runs finishes within its time, then its tasks and threads end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use deepinfer_agent::AgentHandle;
use deepinfer_gateway::GatewayHandle;
use deepinfer_protocol::agent_status::DrainState;

/// How often a draining agent is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// After its deadline an agent cuts what is left; this is time for it to say so.
const BEYOND_DEADLINE: Duration = Duration::from_secs(2);

/// Drains and stops an agent.
pub async fn agent(handle: Arc<AgentHandle>, drain: Duration) {
    let begun = Instant::now();
    if !drain.is_zero() {
        handle.drain(drain.into());
        while handle.drain_status().state != DrainState::Drained && begun.elapsed() < drain + BEYOND_DEADLINE
        {
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
    let left = handle.drain_status();
    tracing::info!(agent = %handle.name(), inflight = left.inflight, cut = left.cut, "the agent stops");
    handle.stop().await;
}

/// Lets streams finish and closes a gateway.
pub async fn gateway(handle: GatewayHandle, drain: Duration) {
    handle.shutdown(drain).await;
}
