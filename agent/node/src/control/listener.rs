//! Connections to the control port, within limits: strangers can reach it before they show a key.

use std::sync::Arc;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::answers::{ControlState, Face, answer};

/// Connections at once: an operator, probes, scrapers and people.
const MAX_CONNECTIONS: usize = 256;
/// Time for a request's header.
const HEADER_TIME: Duration = Duration::from_secs(10);
/// A connection is closed after this long, whatever it does; clients come back.
const CONNECTION_TIME: Duration = Duration::from_secs(300);
/// Bytes of a request's header.
const HEADER_BYTES: usize = 16 << 10;
/// Pause after the system refused to accept (too many open files).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves until stopped; then waits for the connections to end, each at once after its present answer.
pub async fn serve(listener: TcpListener, state: Arc<ControlState>, face: Face, stop: CancellationToken) {
    let connections = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    let tasks = TaskTracker::new();
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => break,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, ?face, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        // A full port closes what comes new: probes of a healthy agent are short and find room soon.
        let Ok(permit) = connections.clone().try_acquire_owned() else { continue };
        let (state, stop) = (state.clone(), stop.clone());
        tasks.spawn(async move {
            connection(stream, state, face, stop).await;
            drop(permit);
        });
    }
    tasks.close();
    tasks.wait().await;
}

async fn connection(stream: TcpStream, state: Arc<ControlState>, face: Face, stop: CancellationToken) {
    let _ = stream.set_nodelay(true);
    let service = service_fn(move |request| {
        let state = state.clone();
        async move { Ok::<_, std::convert::Infallible>(answer(&state, face, request).await) }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEADER_TIME).max_buf_size(HEADER_BYTES);
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let mut stopping = false;
    let deadline = tokio::time::sleep(CONNECTION_TIME);
    tokio::pin!(deadline);
    loop {
        tokio::select! {
            ended = &mut connection => {
                if let Err(error) = ended {
                    tracing::debug!(%error, "a control connection ended");
                }
                return;
            }
            () = &mut deadline => return,
            () = stop.cancelled(), if !stopping => {
                stopping = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}
