//! Accepts connections: at most so many, each in its own task.
//!
//! Invariants: a connection above the limit is answered 503 at once instead of hanging; running out of file
//! descriptors pauses accepting and never ends it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::connection;
use super::edge::Edge;
use crate::tls::Tls;

/// Connections that the kernel holds for us while we are busy.
const BACKLOG: u32 = 4096;
/// Pause after an error of accepting (mostly: no file descriptor is free).
const PAUSE: Duration = Duration::from_millis(100);
/// What a connection above the limit is told; only as plain HTTP, a TLS handshake would cost what we lack.
const FULL: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\nconnection: close\r\n\
    content-type: application/json\r\ncontent-length: 144\r\n\r\n\
    {\"error\":{\"message\":\"the gateway has as many connections as it takes; close idle ones\",\
    \"type\":\"server_error\",\"param\":null,\"code\":\"connections\"}}";

/// Takes the port.
pub(super) fn bind(listen: SocketAddr) -> std::io::Result<(TcpListener, SocketAddr)> {
    let socket = if listen.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    // A restart must not wait for connections of the last life to time out.
    socket.set_reuseaddr(true)?;
    socket.bind(listen)?;
    let listener = socket.listen(BACKLOG)?;
    let addr = listener.local_addr()?;
    Ok((listener, addr))
}

/// Accepts until `stop`; connections live on in `connections` until they end or `cut`.
pub(super) async fn accept(
    listener: TcpListener,
    tls: Option<Arc<Tls>>,
    edge: Arc<Edge>,
    connections: TaskTracker,
    stop: CancellationToken,
    cut: CancellationToken,
) {
    let room = Arc::new(Semaphore::new(edge.limits().connections));
    loop {
        let accepted = tokio::select! {
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(PAUSE).await;
                continue;
            }
        };
        let Ok(permit) = Arc::clone(&room).try_acquire_owned() else {
            edge.metrics().refused("connections");
            connections.spawn(turn_away(stream, tls.is_none()));
            continue;
        };
        // Tokens are small and must not wait for each other.
        let _ = stream.set_nodelay(true);
        let (edge, tls, cut) = (Arc::clone(&edge), tls.clone(), cut.clone());
        connections.spawn(async move {
            edge.metrics().connections.inc();
            tokio::select! {
                () = cut.cancelled() => {}
                () = serve(stream, tls, &edge) => {}
            }
            edge.metrics().connections.dec();
            drop(permit);
        });
    }
}

async fn serve(stream: TcpStream, tls: Option<Arc<Tls>>, edge: &Arc<Edge>) {
    let Some(tls) = tls else {
        return connection::serve(stream, Arc::clone(edge)).await;
    };
    match tokio::time::timeout(edge.limits().header_time, tls.acceptor().accept(stream)).await {
        Ok(Ok(stream)) => connection::serve(stream, Arc::clone(edge)).await,
        Ok(Err(error)) => tracing::debug!(%error, "a TLS handshake did not succeed"),
        Err(_) => tracing::debug!("a TLS handshake took too long"),
    }
}

async fn turn_away(mut stream: TcpStream, plain: bool) {
    if plain {
        // It fits into an empty socket buffer: this does not wait for the client.
        let _ = tokio::time::timeout(PAUSE, stream.write_all(FULL)).await;
        let _ = stream.shutdown().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_above_the_limit_has_the_length_it_says() {
        let text = std::str::from_utf8(FULL).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.contains(&format!("content-length: {}", body.len())), "{}", body.len());
        assert!(serde_json::from_str::<serde_json::Value>(body).is_ok());
    }
}
