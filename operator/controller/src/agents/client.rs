//! One signed call to an agent's control port.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use deepinfer_planner::AgentCall;
use deepinfer_protocol::AgentId;
use deepinfer_protocol::agent_status::{AgentStatus, DrainRequest};
use deepinfer_transport::{ClusterKey, control_auth};
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};

use super::{AgentOptions, unix_seconds};
use crate::metrics::{CallKind, Metrics};

/// Longest answer: a status has about one kilobyte.
const MAX_ANSWER_BYTES: usize = 64 << 10;
/// Idle connections to one agent.
const IDLE_CONNECTIONS: usize = 1;
/// How long an idle connection is kept: longer than the pause between two questions to index 0.
const IDLE_TIME: Duration = Duration::from_secs(20);
/// Which pod a call is for, where all calls go to one address.
const POD_HEADER: &str = "x-deepinfer-pod";

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum CallError {
    /// Nobody of this name is followed.
    #[error("agent {0} is not known: its pod has no address or is gone")]
    Unknown(AgentId),
    /// No answer.
    #[error("agent {agent} at {address} does not answer: {message}")]
    Unreachable {
        /// Who.
        agent: AgentId,
        /// Where.
        address: SocketAddr,
        /// What the network said.
        message: String,
    },
    /// No answer in time.
    #[error("agent {agent} at {address} did not answer within {seconds} s")]
    Timeout {
        /// Who.
        agent: AgentId,
        /// Where.
        address: SocketAddr,
        /// The limit.
        seconds: f64,
    },
    /// It said no.
    #[error("agent {agent} at {address} answered {status}: {message}")]
    Refused {
        /// Who.
        agent: AgentId,
        /// Where.
        address: SocketAddr,
        /// HTTP status.
        status: u16,
        /// What it said.
        message: String,
    },
}

/// Whom to call, and the key that opens the port.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) agent: AgentId,
    pub(super) control: SocketAddr,
    pub(super) key: Arc<ClusterKey>,
}

/// Calls agents over kept connections.
#[derive(Debug)]
pub(super) struct Caller {
    client: Client<HttpConnector, Full<Bytes>>,
    proxy: Option<SocketAddr>,
    timeout: Duration,
    pub(super) metrics: Arc<Metrics>,
}

impl Caller {
    pub(super) fn new(options: &AgentOptions, metrics: Arc<Metrics>) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(options.timeout));
        let idle = if options.proxy.is_some() { 2 * options.concurrency } else { IDLE_CONNECTIONS };
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_TIME)
            .pool_max_idle_per_host(idle)
            .build(connector);
        Self { client, proxy: options.proxy, timeout: options.timeout, metrics }
    }

    /// `GET /v1/status`.
    pub(super) async fn status(&self, target: &Target) -> Result<AgentStatus, CallError> {
        let body = self.bounded(target, CallKind::Status, Method::GET, "/v1/status", Bytes::new()).await?;
        serde_json::from_slice(&body)
            .map_err(|error| unreachable_agent(target, format!("its status is not readable: {error}")))
    }

    /// What a plan wants said.
    pub(super) async fn tell(&self, target: &Target, call: &AgentCall) -> Result<(), CallError> {
        let (kind, path, body) = match call {
            AgentCall::Drain { deadline_seconds, reason } => {
                let asked = DrainRequest {
                    deadline_seconds: *deadline_seconds,
                    handoff: None,
                    reason: reason.clone(),
                };
                let body = serde_json::to_vec(&asked)
                    .map_err(|error| unreachable_agent(target, error.to_string()))?;
                (CallKind::Drain, "/v1/drain", Bytes::from(body))
            }
            AgentCall::Undrain => (CallKind::Undrain, "/v1/undrain", Bytes::new()),
        };
        self.bounded(target, kind, Method::POST, path, body).await.map(drop)
    }

    /// A call within its time, counted.
    async fn bounded(
        &self,
        target: &Target,
        kind: CallKind,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Bytes, CallError> {
        let begun = Instant::now();
        let answer = tokio::time::timeout(self.timeout, self.send(target, method, path, body)).await;
        self.metrics.called(kind, begun.elapsed());
        answer.unwrap_or_else(|_| {
            let (agent, address) = (target.agent.clone(), target.control);
            Err(CallError::Timeout { agent, address, seconds: self.timeout.as_secs_f64() })
        })
    }

    async fn send(
        &self,
        target: &Target,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Bytes, CallError> {
        let now = u64::try_from(unix_seconds()).unwrap_or(0);
        let signed = control_auth::authorization(&target.key, now, method.as_str(), path);
        let address = self.proxy.unwrap_or(target.control);
        let request = Request::builder()
            .method(method)
            .uri(format!("http://{address}{path}"))
            .header(HOST, target.control.to_string())
            .header(POD_HEADER, target.agent.as_str())
            .header(AUTHORIZATION, signed)
            .header(CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|error| unreachable_agent(target, error.to_string()))?;
        let answer = self.client.request(request).await;
        let answer = answer.map_err(|error| unreachable_agent(target, causes(&error)))?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), MAX_ANSWER_BYTES).collect().await;
        let body = body.map_err(|error| unreachable_agent(target, error.to_string()))?.to_bytes();
        if status == StatusCode::OK || status == StatusCode::ACCEPTED {
            return Ok(body);
        }
        let message: String = String::from_utf8_lossy(&body).chars().take(200).collect();
        let (agent, address) = (target.agent.clone(), target.control);
        Err(CallError::Refused { agent, address, status: status.as_u16(), message })
    }
}

fn unreachable_agent(target: &Target, message: String) -> CallError {
    CallError::Unreachable { agent: target.agent.clone(), address: target.control, message }
}

/// An error with what is behind it: the HTTP client's own text says only that it failed.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}
