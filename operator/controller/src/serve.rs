//! Our HTTP ports, within limits: connections are bounded, headers have a time and a size, and stopping lets the
//! present answers end.

use std::convert::Infallible;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::health::{Health, HealthReport};
use crate::metrics::{self, Metrics};

/// Time for a request's header; also how long an idle connection is kept.
const HEADER_TIME: Duration = Duration::from_secs(30);
/// Bytes of a request's header.
const HEADER_BYTES: usize = 16 << 10;
/// Pause after the system refused to accept (too many open files).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Time for the last answers after a stop.
const LAST_ANSWERS: Duration = Duration::from_secs(5);
/// Connections of probes and scrapers.
const OBSERVERS: usize = 64;

/// An answer of ours.
pub type Answer = Response<Full<Bytes>>;

/// Serves until stopped, at most `connections` at once; what comes beyond is closed at once.
pub async fn serve<F, A>(listener: TcpListener, connections: usize, stop: CancellationToken, answer: F)
where
    F: Fn(Request<Incoming>) -> A + Clone + Send + Sync + 'static,
    A: Future<Output = Answer> + Send + 'static,
{
    let places = Arc::new(Semaphore::new(connections));
    let tasks = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(err = %error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else { continue };
        let (answer, stop) = (answer.clone(), stop.clone());
        tasks.spawn(async move {
            connection(stream, answer, stop).await;
            drop(place);
        });
    }
    tasks.close();
    let _ = tokio::time::timeout(LAST_ANSWERS, tasks.wait()).await;
}

async fn connection<F, A>(stream: TcpStream, answer: F, stop: CancellationToken)
where
    F: Fn(Request<Incoming>) -> A,
    A: Future<Output = Answer>,
{
    let _ = stream.set_nodelay(true);
    let service = service_fn(|request| {
        let answer = answer(request);
        async { Ok::<_, Infallible>(answer.await) }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEADER_TIME).max_buf_size(HEADER_BYTES);
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    tokio::select! {
        ended = &mut connection => {
            if let Err(error) = ended {
                tracing::trace!(err = %error, "a connection ended");
            }
            return;
        }
        () = stop.cancelled() => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
}

/// `/metrics` on one port, `/livez` and `/readyz` on another, until stopped.
pub async fn observability(
    metrics_listener: TcpListener,
    health_listener: TcpListener,
    metrics: Arc<Metrics>,
    health: Arc<Health>,
    stop: CancellationToken,
) {
    let of_metrics = Arc::clone(&health);
    let scrapes = serve(metrics_listener, OBSERVERS, stop.clone(), move |request| {
        let answer = scraped(&request, &metrics, &of_metrics);
        async move { answer }
    });
    let probes = serve(health_listener, OBSERVERS, stop, move |request| {
        let answer = probed(&request, &health);
        async move { answer }
    });
    tokio::join!(scrapes, probes);
}

fn scraped<B>(request: &Request<B>, metrics: &Metrics, health: &Health) -> Answer {
    match (request.method(), request.uri().path()) {
        (&Method::GET, "/metrics") => text(StatusCode::OK, metrics::CONTENT_TYPE, metrics.text(health)),
        _ => text(StatusCode::NOT_FOUND, PLAIN, "only GET /metrics is here\n".to_owned()),
    }
}

fn probed<B>(request: &Request<B>, health: &Health) -> Answer {
    match (request.method(), request.uri().path()) {
        (&Method::GET, "/livez") => report(&health.live()),
        (&Method::GET, "/readyz") => report(&health.ready()),
        _ => text(StatusCode::NOT_FOUND, PLAIN, "only GET /livez and GET /readyz are here\n".to_owned()),
    }
}

fn report(report: &HealthReport) -> Answer {
    let status = if report.ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    json(status, report)
}

/// Type of answers for people.
pub(crate) const PLAIN: &str = "text/plain; charset=utf-8";

/// An answer in JSON.
pub(crate) fn json<T: serde::Serialize>(status: StatusCode, value: &T) -> Answer {
    match serde_json::to_string(value) {
        Ok(body) => text(status, "application/json", body),
        Err(error) => text(StatusCode::INTERNAL_SERVER_ERROR, PLAIN, error.to_string()),
    }
}

/// An answer in a text format.
pub(crate) fn text(status: StatusCode, kind: &'static str, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    answer
}
