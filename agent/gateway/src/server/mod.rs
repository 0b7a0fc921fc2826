//! The gateway as a whole: the client port, the driver behind it, and the handle that stops both.
//!
//! ```text
//! listener.rs    accepts, bounds, TLS          connection.rs   one connection: HTTP/1.1, times, stalls
//! edge.rs        which path, who asks          body.rs         what must end with a response
//! ```
//!
//! Invariants: nothing listens before keys and certificates are good; shutting down says so first (`/readyz`), lets
//! streams finish until the deadline, and leaves no task behind.

mod body;
mod connection;
mod edge;
mod listener;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use deepinfer_protocol::fleet::FleetView;
use deepinfer_protocol::{AgentId, Span};
use deepinfer_serving::gateway::GatewayOptions as RequestOptions;
use deepinfer_transport::ClusterKey;
use deepinfer_transport::fleet_client::FleetProbe;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use self::edge::Edge;
use crate::access::{Access, KeysError};
use crate::core::CoreHandle;
use crate::driver::{self, DriverControl, DriverOptions};
use crate::limits::EdgeLimits;
use crate::metrics::Metrics;
use crate::openai::{Api, ApiOptions, ModelInfo, router};
use crate::signals::GatewayStatus;
use crate::tls::{Tls, TlsError};

/// How often keys and certificates are looked at again.
const RELOAD_EVERY: Duration = Duration::from_secs(2);
/// What responses that were cut at the deadline may take to reach their clients.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Metrics of others in the same process: an exposition in OpenMetrics text.
pub type ExtraMetrics = Arc<dyn Fn() -> String + Send + Sync>;

/// What a gateway is started with.
#[derive(Clone)]
pub struct GatewayOptions {
    /// Name of its pod: its name among the agents, and the label on its metrics.
    pub name: String,
    /// Client port; port 0 takes a free one.
    pub listen: SocketAddr,
    /// What is served.
    pub model: ModelInfo,
    /// Limits of the API.
    pub api: ApiOptions,
    /// The cluster's keys: for agents and for `GET /v1/status`.
    pub key: ClusterKey,
    /// File or folder of API keys; `None` lets everybody in.
    pub api_keys: Option<PathBuf>,
    /// PEM files of certificate and key; `None` speaks plain HTTP.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// Limits of connections.
    pub limits: EdgeLimits,
    /// Limits of requests: queue, tenants, attempts.
    pub requests: RequestOptions,
    /// Secret behind the tenants' salts; the same in all gateways of a cluster.
    pub salt_secret: [u8; 32],
    /// Merged into `/metrics`.
    pub extra_metrics: Option<ExtraMetrics>,
    /// How the following of the fleet goes, for metrics.
    pub fleet_probe: Option<FleetProbe>,
    /// Interval of heartbeats with agents.
    pub heartbeat: Span,
    /// Missed heartbeats after which an agent is suspect.
    pub missed_heartbeats: u32,
    /// Further paths outside `/v1`, open to everybody who reaches the port.
    pub extra_routes: Option<Router>,
}

impl GatewayOptions {
    /// With defaults: open to everybody, plain HTTP, default limits, salts from the cluster's newest key.
    pub fn new(name: impl Into<String>, listen: SocketAddr, model: ModelInfo, key: ClusterKey) -> Self {
        let salt_secret = key.sign(&[b"tenant salts"]).1;
        Self {
            name: name.into(),
            listen,
            model,
            api: ApiOptions::default(),
            key,
            api_keys: None,
            tls: None,
            limits: EdgeLimits::default(),
            requests: RequestOptions::default(),
            salt_secret,
            extra_metrics: None,
            fleet_probe: None,
            heartbeat: Span::millis(250),
            missed_heartbeats: 3,
            extra_routes: None,
        }
    }
}

/// Why a gateway does not start.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    /// The port cannot be had.
    #[error("cannot listen on {listen}: {source}{}", advice(source))]
    Listen {
        /// Address and port.
        listen: SocketAddr,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The API keys are not good.
    #[error(transparent)]
    Keys(#[from] KeysError),
    /// Certificate or key are not good.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

fn advice(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            "; another process has this port: stop it, or choose another with --listen"
        }
        std::io::ErrorKind::PermissionDenied => {
            "; ports below 1024 need a privilege: choose another with --listen"
        }
        std::io::ErrorKind::AddrNotAvailable => {
            "; this machine does not have the address: choose another with --listen"
        }
        _ => "",
    }
}

/// A running gateway. Dropping it stops everything at once; [`GatewayHandle::shutdown`] does it properly.
pub struct GatewayHandle {
    addr: SocketAddr,
    edge: Arc<Edge>,
    control: DriverControl,
    /// Ends the accept loop and the reloads.
    stop: CancellationToken,
    connections: TaskTracker,
    tasks: Vec<JoinHandle<()>>,
    driver: JoinHandle<()>,
    /// Cuts what is left.
    cut: DropGuard,
}

/// Starts a gateway that follows `fleet`.
///
/// # Errors
/// [`GatewayError`] before anything was started.
pub async fn start(
    options: GatewayOptions,
    fleet: watch::Receiver<Arc<FleetView>>,
) -> Result<GatewayHandle, GatewayError> {
    let access = Arc::new(Access::open(options.api_keys.clone(), options.salt_secret)?);
    let tls =
        options.tls.clone().map(|(certificate, key)| Tls::open(certificate, key)).transpose()?.map(Arc::new);
    let (socket, addr) = listener::bind(options.listen)
        .map_err(|source| GatewayError::Listen { listen: options.listen, source })?;
    if access.is_open() {
        tracing::warn!(listen = %addr, "no API keys are configured: everybody who reaches the port may use it");
    } else {
        let (tenants, keys) = access.counts();
        tracing::info!(tenants, keys, "API keys are in force");
    }

    let metrics = Arc::new(Metrics::new(&options.name));
    let process = driver::process_number();
    let (core, inbox) = CoreHandle::pair(process);
    let mut requests = options.requests.clone();
    // Gateways that draw the same numbers would all choose the same rank.
    requests.seed ^= process;
    let driver_options = DriverOptions {
        name: AgentId::new(options.name.clone()),
        key: options.key.clone(),
        requests,
        waiting_tokens: options.limits.waiting_tokens,
        write_stall: options.limits.write_stall,
        heartbeat: options.heartbeat,
        missed_heartbeats: options.missed_heartbeats,
    };
    let (control, driver) = driver::spawn(driver_options, inbox, fleet, Arc::clone(&metrics));

    let api = Arc::new(Api::new(options.model.clone(), core, options.api.clone()));
    let cut = CancellationToken::new();
    let stop = cut.child_token();
    let edge = Arc::new(Edge::new(
        options,
        router(Arc::clone(&api)),
        api,
        Arc::clone(&access),
        metrics,
        control.clone(),
    ));
    let connections = TaskTracker::new();
    let accept = listener::accept(
        socket,
        tls.clone(),
        Arc::clone(&edge),
        connections.clone(),
        stop.clone(),
        cut.clone(),
    );
    let tasks = vec![tokio::spawn(accept), tokio::spawn(reload(access, tls, stop.clone()))];
    tracing::info!(listen = %addr, "the gateway listens");
    Ok(GatewayHandle { addr, edge, control, stop, connections, tasks, driver, cut: cut.drop_guard() })
}

impl GatewayHandle {
    /// Where clients connect.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// For people and clients, without a path. An unspecified address is shown as the loopback one.
    pub fn url(&self) -> String {
        let scheme = if self.edge.speaks_tls() { "https" } else { "http" };
        let host = match self.addr {
            SocketAddr::V4(a) if a.ip().is_unspecified() => "127.0.0.1".to_owned(),
            SocketAddr::V6(a) if a.ip().is_unspecified() => "[::1]".to_owned(),
            SocketAddr::V4(a) => a.ip().to_string(),
            SocketAddr::V6(a) => format!("[{}]", a.ip()),
        };
        format!("{scheme}://{host}:{}", self.addr.port())
    }

    /// Whether a request would be served now.
    pub fn ready(&self) -> bool {
        self.edge.unready_reason().is_none()
    }

    /// Why not, in one line.
    pub fn unready_reason(&self) -> Option<String> {
        self.edge.unready_reason()
    }

    /// Closes the listening socket, so that another gateway may take the address. Open connections go on.
    pub fn stop_listening(&self) {
        self.stop.cancel();
    }

    /// What `GET /v1/status` says.
    pub fn stats(&self) -> GatewayStatus {
        self.edge.status()
    }

    /// What `/metrics` says.
    pub fn metrics_text(&self) -> String {
        self.edge.metrics_text()
    }

    /// Unready at once; new requests are answered 503; streams finish for at most `deadline`, then they are cut and
    /// told so. Returns the number of requests that were cut.
    pub async fn shutdown(self, deadline: Duration) -> usize {
        tracing::info!(seconds = deadline.as_secs(), "the gateway shuts down: streams may finish");
        self.edge.drain();
        self.control.shut_down(deadline);
        self.edge.requests().close();
        let _ = tokio::time::timeout(deadline, self.edge.requests().wait()).await;
        let cut = self.edge.requests().len();
        let _ = tokio::time::timeout(LAST_WORDS, self.edge.requests().wait()).await;
        self.stop.cancel();
        self.edge.close();
        self.connections.close();
        // Connections without a request close themselves; this waits for last bytes.
        let _ = tokio::time::timeout(LAST_WORDS, self.connections.wait()).await;
        drop(self.cut);
        self.connections.wait().await;
        self.control.stop();
        for task in self.tasks {
            let _ = task.await;
        }
        let _ = self.driver.await;
        tracing::info!(cut, "the gateway has stopped");
        cut
    }
}

/// Looks at keys and certificates from time to time.
async fn reload(access: Arc<Access>, tls: Option<Arc<Tls>>, stop: CancellationToken) {
    let mut said = String::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(RELOAD_EVERY) => {}
        }
        let (access, tls) = (Arc::clone(&access), tls.clone());
        let results = tokio::task::spawn_blocking(move || {
            let keys = access.reload().map(|changed| changed.then(|| access.counts()));
            (keys, tls.map_or(Ok(false), |tls| tls.reload()))
        });
        let Ok((keys, certificate)) = results.await else { return };
        let mut errors = String::new();
        match keys {
            Ok(Some((tenants, keys))) => tracing::info!(tenants, keys, "the API keys have changed"),
            Ok(None) => {}
            Err(error) => errors = error.to_string(),
        }
        match certificate {
            Ok(true) => tracing::info!("the TLS certificate has changed"),
            Ok(false) => {}
            Err(error) => errors = error.to_string(),
        }
        if !errors.is_empty() && errors != said {
            tracing::error!(error = errors, "the old keys and certificates stay in force");
        }
        said = errors;
    }
}
