//! How a pod ends: no new work, what runs finishes within its time, then its tasks and threads end.

use std::sync::Arc;
use std::time::Duration;

use deepinfer_agent::AgentHandle;
use deepinfer_gateway::GatewayHandle;

/// Drains and stops an agent.
pub async fn agent(handle: Arc<AgentHandle>, drain: Duration) {
    handle.drain_and_stop(drain).await;
}

/// Lets streams finish and closes a gateway.
pub async fn gateway(handle: GatewayHandle, drain: Duration) {
    handle.shutdown(drain).await;
}
