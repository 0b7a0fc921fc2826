//! The HTTPS endpoint of the nodes, which the API server asks for logs.

use std::io::SeekFrom;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use bytes::Bytes;
use k8s_openapi::jiff::Timestamp;
use serde::Deserialize;
use tokio::fs::File;
use tokio::io::{AsyncReadExt as _, AsyncSeekExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;
use tokio_rustls::server::TlsStream;

use super::log::split;
use super::node::Link;
use super::pod::context::Context;
use super::pod::view::State as Life;
use super::shared::Shared;

/// How often a followed log is looked at.
const FOLLOW: Duration = Duration::from_millis(100);

/// How long a client may take to greet.
const GREETING: Duration = Duration::from_secs(5);

/// The nodes that an endpoint serves; set when they exist.
pub(crate) type Served = Arc<OnceLock<Weak<Shared>>>;

/// An endpoint that is bound but not yet asked.
pub(crate) struct Endpoint {
    listener: TlsListener,
    served: Served,
}

impl Endpoint {
    /// Binds a free port on loopback, with a certificate of its own.
    pub(crate) async fn bind() -> anyhow::Result<Endpoint> {
        let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned(), "localhost".to_owned()])?;
        let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).map_err(anyhow::Error::msg)?;
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)?;
        let tcp =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.context("no port for the kubelet endpoint")?;
        let listener = TlsListener { tcp, acceptor: TlsAcceptor::from(Arc::new(config)) };
        Ok(Endpoint { listener, served: Served::default() })
    }

    pub(crate) fn port(&self) -> anyhow::Result<u16> {
        Ok(self.listener.tcp.local_addr()?.port())
    }

    /// Answers for these nodes until it is dropped.
    pub(crate) async fn serve(self, shared: &Arc<Shared>) {
        self.served.set(Arc::downgrade(shared)).ok();
        let router = Router::new()
            .route("/healthz", get(async || "ok"))
            .route("/containerLogs/{namespace}/{pod}/{container}", get(logs))
            .fallback(async || (StatusCode::NOT_FOUND, "process nodes answer logs only\n"))
            .with_state(self.served);
        if let Err(error) = axum::serve(self.listener, router).await {
            tracing::warn!(%error, "the kubelet endpoint ended");
        }
    }
}

struct TlsListener {
    tcp: TcpListener,
    acceptor: TlsAcceptor,
}

impl axum::serve::Listener for TlsListener {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let Ok((stream, peer)) = self.tcp.accept().await else {
                tokio::time::sleep(FOLLOW).await;
                continue;
            };
            match tokio::time::timeout(GREETING, self.acceptor.accept(stream)).await {
                Ok(Ok(stream)) => return (stream, peer),
                other => tracing::debug!(failed = other.is_err(), "a client did not greet"),
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<Self::Addr> {
        self.tcp.local_addr()
    }
}

/// The query of a log request, as the API server sends it.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Wanted {
    follow: bool,
    previous: bool,
    timestamps: bool,
    tail_lines: Option<usize>,
    limit_bytes: Option<usize>,
    since_seconds: Option<i64>,
    since_time: Option<String>,
}

impl Wanted {
    /// Lines before this moment are not wanted.
    fn since(&self) -> Option<Timestamp> {
        let ago =
            self.since_seconds.and_then(|s| Timestamp::from_second(Timestamp::now().as_second() - s).ok());
        ago.or_else(|| self.since_time.as_ref()?.parse().ok())
    }

    /// The part of a log that is wanted, given what has been written so far.
    fn pick(&self, bytes: &[u8]) -> Vec<u8> {
        let since = self.since();
        let recent = |line: &&[u8]| {
            let time = || std::str::from_utf8(split(line).0).ok()?.parse::<Timestamp>().ok();
            since.is_none_or(|since| time().is_none_or(|time| time >= since))
        };
        let lines: Vec<_> = bytes.split_inclusive(|b| *b == b'\n').filter(recent).collect();
        let skip = self.tail_lines.map_or(0, |wanted| lines.len().saturating_sub(wanted));
        let mut text = self.dress(&lines[skip..]);
        text.truncate(self.limit_bytes.unwrap_or(usize::MAX));
        text
    }

    fn dress(&self, lines: &[&[u8]]) -> Vec<u8> {
        lines.iter().flat_map(|line| if self.timestamps { line } else { split(line).1 }).copied().collect()
    }
}

type LogPath = Path<(String, String, String)>;

async fn logs(State(served): State<Served>, path: LogPath, Query(wanted): Query<Wanted>) -> Response {
    let Path((namespace, pod, container)) = path;
    let Some(shared) = served.get().and_then(Weak::upgrade) else {
        return (StatusCode::SERVICE_UNAVAILABLE, "the nodes have stopped\n").into_response();
    };
    let Some(context) = shared.pod(&namespace, &pod) else {
        let text = format!("pod {namespace}/{pod} does not run here\n");
        return (StatusCode::NOT_FOUND, text).into_response();
    };
    if *context.node.link.borrow() != Link::On {
        return (StatusCode::SERVICE_UNAVAILABLE, "the node is off\n").into_response();
    }
    match file(&context, &container, wanted.previous) {
        Ok(path) => answer(context, container, path, wanted).await,
        Err((status, text)) => (status, text + "\n").into_response(),
    }
}

/// The log file that is wanted, or why there is none.
fn file(context: &Context, container: &str, previous: bool) -> Result<PathBuf, (StatusCode, String)> {
    let views = context.board.borrow();
    let Some(view) = views.iter().find(|view| view.name == container) else {
        let text = format!("container {container:?} not found in pod {:?}", context.name);
        return Err((StatusCode::NOT_FOUND, text));
    };
    let run = if previous { view.restarts - 1 } else { view.restarts };
    let path = context.log(container, run);
    if path.exists() {
        return Ok(path);
    }
    let reason = match &view.state {
        Life::Waiting { reason, .. } if !previous => format!("is waiting to start: {reason}"),
        _ if previous => "has no previous run".to_owned(),
        _ => "has no log".to_owned(),
    };
    let text = format!("container {container:?} in pod {:?} {reason}", context.name);
    Err((StatusCode::BAD_REQUEST, text))
}

async fn answer(context: Arc<Context>, container: String, path: PathBuf, wanted: Wanted) -> Response {
    let bytes = match tokio::fs::read(&path).await {
        Ok(bytes) => bytes,
        Err(error) => return (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    };
    // What is after the last whole line is read when it is whole.
    let whole = bytes.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
    let first = wanted.pick(&bytes[..whole]);
    if !wanted.follow {
        return Body::from(first).into_response();
    }
    let follow = Follow { context, container, path, wanted, at: whole as u64, first: Some(first) };
    Body::from_stream(futures_util::stream::unfold(follow, Follow::next)).into_response()
}

/// A log that is read while it grows.
struct Follow {
    context: Arc<Context>,
    container: String,
    path: PathBuf,
    wanted: Wanted,
    at: u64,
    first: Option<Vec<u8>>,
}

impl Follow {
    async fn next(mut self) -> Option<(std::io::Result<Bytes>, Follow)> {
        if let Some(first) = self.first.take() {
            return Some((Ok(first.into()), self));
        }
        loop {
            // Asked before reading, so that the last lines before the end are read too.
            let over = !self.still_running();
            match self.read().await {
                Ok(text) if !text.is_empty() => return Some((Ok(text.into()), self)),
                Ok(_) if over => return None,
                Ok(_) => tokio::time::sleep(FOLLOW).await,
                Err(error) => return Some((Err(error), self)),
            }
        }
    }

    fn still_running(&self) -> bool {
        let views = self.context.board.borrow();
        let mine = views.iter().find(|view| view.name == self.container);
        mine.is_some_and(|view| {
            matches!(view.state, Life::Running { .. })
                && self.context.log(&self.container, view.restarts) == self.path
        })
    }

    async fn read(&mut self) -> std::io::Result<Vec<u8>> {
        let mut file = File::open(&self.path).await?;
        file.seek(SeekFrom::Start(self.at)).await?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).await?;
        let whole = bytes.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
        self.at += whole as u64;
        let lines: Vec<_> = bytes[..whole].split_inclusive(|b| *b == b'\n').collect();
        Ok(self.wanted.dress(&lines))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_is_cut_by_lines_time_and_bytes() {
        let log = b"2026-01-01T00:00:00.000000000Z one\n2026-01-01T00:00:09.000000000Z two\n";
        let pick = |wanted: Wanted| String::from_utf8(wanted.pick(log)).unwrap();
        assert_eq!(pick(Wanted::default()), "one\ntwo\n");
        assert_eq!(pick(Wanted { tail_lines: Some(1), ..Wanted::default() }), "two\n");
        assert_eq!(pick(Wanted { tail_lines: Some(0), ..Wanted::default() }), "");
        assert_eq!(pick(Wanted { limit_bytes: Some(2), ..Wanted::default() }), "on");
        let since = Some("2026-01-01T00:00:05Z".to_owned());
        assert_eq!(pick(Wanted { since_time: since, ..Wanted::default() }), "two\n");
        assert!(pick(Wanted { timestamps: true, ..Wanted::default() }).starts_with("2026-01-01T00:00:00.0"));
    }
}
