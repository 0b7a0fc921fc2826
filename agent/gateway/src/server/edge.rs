//! Which path is asked for, and who asks. Everything under `/v1` needs an API key if keys are configured;
//! `/v1/status` needs the cluster's key; probes and metrics need none.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::Body;
use axum::response::{IntoResponse, Response};
use deepinfer_protocol::Span;
use deepinfer_transport::fleet_client::FleetProbe;
use deepinfer_transport::{ClusterKey, control_auth};
use http::header::{AUTHORIZATION, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, StatusCode};
use hyper::body::Incoming;
use serde_json::json;
use tokio::sync::Semaphore;
use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};
use tokio_util::task::TaskTracker;
use tower_service::Service;

use super::body::{EdgeBody, Held, Reserved};
use super::connection::Phase;
use super::{ExtraMetrics, GatewayOptions};
use crate::access::Access;
use crate::core::Caller;
use crate::driver::DriverControl;
use crate::limits::EdgeLimits;
use crate::metrics::{CONTENT_TYPE as METRICS_TYPE, Metrics};
use crate::openai::{Api, ApiError, ErrorCode};
use crate::signals::GatewayStatus;

/// Bytes of the memory for bodies that one permit stands for.
const PERMIT_BYTES: usize = 1024;

/// What all connections share.
pub(super) struct Edge {
    name: String,
    key: ClusterKey,
    limits: EdgeLimits,
    tls: bool,
    routes: Router,
    extra_routes: Option<Router>,
    extra_metrics: Option<ExtraMetrics>,
    fleet_probe: Option<FleetProbe>,
    api: Arc<Api>,
    /// How many ignored fields the metric knows of.
    ignored_seen: AtomicU64,
    access: Arc<Access>,
    metrics: Arc<Metrics>,
    control: DriverControl,
    bodies: Arc<Semaphore>,
    requests: TaskTracker,
    draining: AtomicBool,
    closing: AtomicBool,
    closed: CancellationToken,
    started: Instant,
}

impl Edge {
    pub(super) fn new(
        options: GatewayOptions,
        routes: Router,
        api: Arc<Api>,
        access: Arc<Access>,
        metrics: Arc<Metrics>,
        control: DriverControl,
    ) -> Self {
        Self {
            bodies: Arc::new(Semaphore::new(options.limits.bodies_bytes / PERMIT_BYTES)),
            name: options.name,
            key: options.key,
            limits: options.limits,
            tls: options.tls.is_some(),
            routes,
            extra_routes: options.extra_routes,
            extra_metrics: options.extra_metrics,
            fleet_probe: options.fleet_probe,
            api,
            ignored_seen: AtomicU64::new(0),
            access,
            metrics,
            control,
            requests: TaskTracker::new(),
            draining: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            closed: CancellationToken::new(),
            started: Instant::now(),
        }
    }

    pub(super) fn limits(&self) -> &EdgeLimits {
        &self.limits
    }

    pub(super) fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    pub(super) fn requests(&self) -> &TaskTracker {
        &self.requests
    }

    pub(super) fn speaks_tls(&self) -> bool {
        self.tls
    }

    /// From now on: unready, and new requests are answered 503 on a connection that then closes. Idle connections
    /// stay: a request may be under way on them, and a reset says less than a 503.
    pub(super) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
        self.metrics.ready.set(0);
    }

    /// From now on connections close as soon as they are idle.
    pub(super) fn close(&self) {
        self.closing.store(true, Ordering::Relaxed);
        self.closed.cancel();
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }

    pub(super) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Wakes when [`Edge::close`] was called.
    pub(super) fn closing(&self) -> WaitForCancellationFuture<'_> {
        self.closed.cancelled()
    }

    pub(super) fn unready_reason(&self) -> Option<String> {
        if self.is_draining() {
            return Some("the gateway is shutting down".to_owned());
        }
        self.control.unready_reason()
    }

    pub(super) fn status(&self) -> GatewayStatus {
        let reason = self.unready_reason();
        GatewayStatus {
            name: self.name.clone(),
            ready: reason.is_none(),
            reason: reason.unwrap_or_default(),
            uptime_seconds: self.started.elapsed().as_secs(),
            ..self.control.status()
        }
    }

    pub(super) fn metrics_text(&self) -> String {
        let now = self.api.ignored_fields();
        let before = self.ignored_seen.fetch_max(now, Ordering::Relaxed);
        self.metrics.ignored_fields.inc_by(now.saturating_sub(before));
        let mut others: Vec<String> = self.extra_metrics.iter().map(|text| text()).collect();
        others.extend(self.fleet_probe.iter().map(|probe| probe.families(&self.name) + "# EOF\n"));
        self.metrics.text(&others)
    }

    /// The whole way of a request.
    pub(super) async fn answer(&self, phase: Arc<Phase>, request: Request<Incoming>) -> Response<EdgeBody> {
        let api = request.uri().path().starts_with("/v1/") && request.uri().path() != "/v1/status";
        let held = Held { _request: api.then(|| self.requests.token()), phase };
        let mut response =
            if api { self.answer_api(request).await } else { self.answer_other(request).await };
        let turned_away = matches!(response.status().as_u16(), 401 | 408 | 413 | 415);
        if turned_away && let Some(ErrorCode(code)) = response.extensions().get() {
            self.metrics.refused(code);
        }
        if self.is_draining() {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        response.map(|body| EdgeBody::new(body, held))
    }

    async fn answer_api(&self, mut request: Request<Incoming>) -> Response {
        if self.is_draining() {
            self.metrics.refused("draining");
            return ApiError::unavailable("the gateway is shutting down", Span::secs(1)).into_response();
        }
        match self.access.tenant_of(request.headers()) {
            Ok(tenant) => {
                // From here on nobody sees the key, not even a handler that would log headers.
                request.headers_mut().remove(AUTHORIZATION);
                request.headers_mut().remove("x-api-key");
                request.extensions_mut().insert(Caller { tenant: tenant.name, salt: tenant.salt });
            }
            Err(denied) => return ApiError::unauthorized(denied.to_string()).into_response(),
        }
        let said = request.headers().get(CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
        let chunked = request.headers().contains_key(http::header::TRANSFER_ENCODING);
        let bytes = said.unwrap_or(if chunked { self.limits.body_bytes } else { 0 });
        if bytes > self.limits.body_bytes {
            return ApiError::body_too_large(self.limits.body_bytes).into_response();
        }
        let permits = bytes.div_ceil(PERMIT_BYTES) as u32;
        let Ok(permit) = Arc::clone(&self.bodies).try_acquire_many_owned(permits) else {
            self.metrics.refused("bodies");
            let message = "the gateway is reading as many request bodies as fit its memory";
            return ApiError::overloaded("bodies", message, Span::secs(1)).into_response();
        };
        let request = request.map(|inner| Body::new(Reserved { inner, _permit: permit }));
        let Ok(response) = self.routes.clone().call(request).await;
        response
    }

    async fn answer_other(&self, request: Request<Incoming>) -> Response {
        let path = request.uri().path();
        let ours = matches!(path, "/healthz" | "/readyz" | "/metrics" | "/v1/status");
        if ours && request.method() != Method::GET && request.method() != Method::HEAD {
            return ApiError::method("GET").into_response();
        }
        match path {
            "/healthz" => "ok\n".into_response(),
            "/readyz" => self.readyz(),
            "/metrics" => ([(CONTENT_TYPE, METRICS_TYPE)], self.metrics_text()).into_response(),
            "/v1/status" => self.keyed_status(&request),
            _ => match &self.extra_routes {
                Some(routes) => {
                    let Ok(response) = routes.clone().call(request.map(Body::new)).await;
                    response
                }
                None => ApiError::not_found("no such path; the API is under /v1").into_response(),
            },
        }
    }

    fn readyz(&self) -> Response {
        let reason = self.unready_reason();
        let status = if reason.is_none() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        let body = json!({ "ready": reason.is_none(), "reason": reason.unwrap_or_default() });
        (status, axum::Json(body)).into_response()
    }

    fn keyed_status(&self, request: &Request<Incoming>) -> Response {
        let header = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        match control_auth::check(&self.key, now, request.method().as_str(), "/v1/status", header) {
            Ok(()) => axum::Json(self.status()).into_response(),
            Err(problem) => ApiError::unauthorized(problem).into_response(),
        }
    }
}
