//! What the control port answers.

use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use deepinfer_protocol::Span;
use deepinfer_protocol::agent_status::DrainRequest;
use deepinfer_transport::{ClusterKey, control_auth};
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use serde::{Deserialize, Serialize};

use super::supernode;
use crate::driver::{Core, LoadDetail, lock};
use crate::engine::faults::{Fault, Faults};

/// Longest body of a call.
const MAX_BODY_BYTES: usize = 16 << 10;
/// Time for a call's body.
const BODY_TIME: Duration = Duration::from_secs(10);

/// Which port was called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Face {
    /// Everything.
    Control,
    /// Metrics only.
    Metrics,
}

/// What answers are made from.
pub struct ControlState {
    /// The agent.
    pub core: Arc<Mutex<Core>>,
    /// Of the cluster.
    pub key: ClusterKey,
    /// Faults on request; `None` without `--fault-injection`.
    pub faults: Option<Arc<Faults>>,
}

/// `POST /v1/fault`.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct FaultRequest {
    #[serde(default)]
    rank: usize,
    fault: Fault,
}

/// A message for whoever called.
#[derive(Debug, Serialize)]
struct Refusal<'a> {
    error: &'a str,
}

type Answer = Response<Full<Bytes>>;

/// Answers a call.
pub async fn answer(state: &ControlState, face: Face, request: Request<Incoming>) -> Answer {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path();
    if face == Face::Metrics && (path != "/metrics" || parts.method != Method::GET) {
        return refuse(StatusCode::NOT_FOUND, "this port answers GET /metrics only");
    }
    if parts.method == Method::GET
        && let Some(answer) = open_answer(state, path)
    {
        return answer;
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let header = parts.headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    if let Err(why) = control_auth::check(&state.key, now, parts.method.as_str(), path, header) {
        return refuse(StatusCode::UNAUTHORIZED, why);
    }
    let query = parts.uri.query().unwrap_or("");
    match (parts.method.as_str(), path) {
        ("GET", "/v1/status") => json(StatusCode::OK, &lock(&state.core).status()),
        ("GET", "/v1/drain") => json(StatusCode::OK, &lock(&state.core).drain_status()),
        ("POST", "/v1/drain") => match read::<DrainRequest>(body).await {
            Ok(asked) => drain(state, &asked),
            Err(answer) => answer,
        },
        ("POST", "/v1/undrain") => {
            let undone = lock(&state.core).undrain();
            match undone {
                Ok(status) => json(StatusCode::OK, &status),
                Err(late) => refuse(StatusCode::CONFLICT, &late.to_string()),
            }
        }
        ("GET", "/v1/experts/load") => load(state, query).await,
        ("POST", "/v1/fault") if state.faults.is_some() => match read::<FaultRequest>(body).await {
            Ok(FaultRequest { rank, fault }) => {
                state.faults.iter().for_each(|faults| faults.plan(rank, fault));
                json(StatusCode::ACCEPTED, &FaultRequest { rank, fault })
            }
            Err(answer) => answer,
        },
        (_, "/v1/status" | "/v1/drain" | "/v1/undrain" | "/v1/experts/load") => {
            refuse(StatusCode::METHOD_NOT_ALLOWED, "this path has another method")
        }
        _ => refuse(StatusCode::NOT_FOUND, "no such path; see /v1/status, /v1/drain, /v1/experts/load"),
    }
}

/// Probes and metrics, which need no key.
fn open_answer(state: &ControlState, path: &str) -> Option<Answer> {
    match path {
        "/healthz" => Some(probe(lock(&state.core).health(), "ok")),
        "/readyz" => Some(probe(lock(&state.core).readiness(), "ready")),
        "/metrics" => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            let metrics = lock(&state.core).metrics_text();
            Some(text(StatusCode::OK, kind, metrics))
        }
        _ => None,
    }
}

fn probe(result: Result<(), String>, good: &str) -> Answer {
    let (status, word) = match &result {
        Ok(()) => (StatusCode::OK, good),
        Err(why) => (StatusCode::SERVICE_UNAVAILABLE, why.as_str()),
    };
    text(status, "text/plain; charset=utf-8", format!("{word}\n"))
}

fn drain(state: &ControlState, asked: &DrainRequest) -> Answer {
    if let Some(other) = asked.handoff.as_deref().filter(|&handoff| handoff != "None") {
        let why = format!("handoff {other:?} is not built: leave it out, or None");
        return refuse(StatusCode::BAD_REQUEST, &why);
    }
    tracing::info!(deadline_seconds = asked.deadline_seconds, reason = %asked.reason, "drain");
    let status = lock(&state.core).drain(Span::secs(u64::from(asked.deadline_seconds)));
    json(StatusCode::ACCEPTED, &status)
}

async fn load(state: &ControlState, query: &str) -> Answer {
    let value = |name: &str| query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
    let detail = match value("detail") {
        None | Some("sums") => LoadDetail::Sums,
        Some("steps") => LoadDetail::Steps,
        Some("total") => LoadDetail::Total,
        Some(_) => return refuse(StatusCode::BAD_REQUEST, "detail: expected sums, steps or total"),
    };
    let alone = match value("scope") {
        None | Some("supernode") => false,
        Some("agent") => true,
        Some(_) => return refuse(StatusCode::BAD_REQUEST, "scope: expected supernode or agent"),
    };
    let report = if alone { lock(&state.core).load(detail) } else { supernode::load(state, detail).await };
    match report {
        Some(report) => json(StatusCode::OK, &report),
        None => refuse(StatusCode::NOT_FOUND, "no window of 100 steps has closed yet; detail=total is there"),
    }
}

async fn read<T: for<'de> Deserialize<'de>>(body: Incoming) -> Result<T, Answer> {
    let collected = tokio::time::timeout(BODY_TIME, Limited::new(body, MAX_BODY_BYTES).collect()).await;
    let bytes = match collected {
        Ok(Ok(body)) => body.to_bytes(),
        Ok(Err(_)) => return Err(refuse(StatusCode::PAYLOAD_TOO_LARGE, "the body is too long or broke off")),
        Err(_) => return Err(refuse(StatusCode::REQUEST_TIMEOUT, "the body did not come within 10 s")),
    };
    serde_json::from_slice(&bytes).map_err(|error| refuse(StatusCode::BAD_REQUEST, &format!("body: {error}")))
}

fn refuse(status: StatusCode, error: &str) -> Answer {
    json(status, &Refusal { error })
}

fn json<T: Serialize>(status: StatusCode, value: &T) -> Answer {
    match serde_json::to_string(value) {
        Ok(body) => text(status, "application/json", body),
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", error.to_string()),
    }
}

fn text(status: StatusCode, kind: &'static str, body: String) -> Answer {
    let mut answer = Response::new(Full::new(Bytes::from(body)));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}
