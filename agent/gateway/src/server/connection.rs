//! One client connection: HTTP/1.1 by hyper, inside limits of time.
//!
//! ```text
//!          first byte           header read            response ended
//!   Idle -------------> Head ----------------> Busy ------------------> Idle
//!    | idle              | header_time           |
//!    v                   v                       | a write that waits: write_stall
//!  closed              closed                    v  (in every phase)
//! ```
//!
//! Invariant: exactly one timer per connection, moved only when the phase changes; a busy stream pays nothing.

use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, sleep_until};

use super::edge::Edge;
use crate::limits::EdgeLimits;

/// Header fields that hyper takes by default.
const HYPER_HEADERS: usize = 100;
/// The least that hyper takes for its buffers.
const MIN_BUFFER: usize = 8192;

const IDLE: u8 = 0;
const HEAD: u8 = 1;
const BUSY: u8 = 2;

/// Where a connection stands; written by its own task only.
#[derive(Debug)]
pub(super) struct Phase {
    opened: Instant,
    phase: AtomicU8,
    /// Microseconds after `opened` at which the phase began.
    since: AtomicU64,
    /// Microseconds at which a write began to wait, plus one; 0 if none waits.
    blocked: AtomicU64,
    /// Counts changes, so that the timer is moved only then.
    changes: AtomicU32,
}

impl Phase {
    fn new() -> Self {
        Self {
            opened: Instant::now(),
            phase: AtomicU8::new(IDLE),
            since: AtomicU64::new(0),
            blocked: AtomicU64::new(0),
            changes: AtomicU32::new(0),
        }
    }

    fn micros(&self) -> u64 {
        self.opened.elapsed().as_micros() as u64
    }

    fn enter(&self, phase: u8) {
        self.phase.store(phase, Relaxed);
        self.since.store(self.micros(), Relaxed);
        self.changes.fetch_add(1, Relaxed);
    }

    /// The header is read.
    pub(super) fn busy(&self) {
        self.enter(BUSY);
    }

    /// The response has ended.
    pub(super) fn idle(&self) {
        self.enter(IDLE);
    }

    fn read_some(&self) {
        if self.phase.load(Relaxed) == IDLE {
            self.enter(HEAD);
        }
    }

    fn write_waits(&self, waits: bool) {
        if (self.blocked.load(Relaxed) != 0) != waits {
            self.blocked.store(if waits { self.micros() + 1 } else { 0 }, Relaxed);
            self.changes.fetch_add(1, Relaxed);
        }
    }

    /// When the connection is to be closed if nothing changes, and why.
    fn deadline(&self, limits: &EdgeLimits) -> Option<(Instant, &'static str)> {
        let after = |micros: u64, limit: Duration| self.opened + Duration::from_micros(micros) + limit;
        let since = self.since.load(Relaxed);
        match (self.blocked.load(Relaxed), self.phase.load(Relaxed)) {
            (0, IDLE) => Some((after(since, limits.idle), "idle")),
            (0, HEAD) => Some((after(since, limits.header_time), "the header took too long")),
            (0, _) => None,
            (blocked, _) => Some((after(blocked - 1, limits.write_stall), "the client does not read")),
        }
    }
}

/// Serves requests until the client leaves, a limit is hit, or the gateway closes.
pub(super) async fn serve<I>(io: I, edge: Arc<Edge>)
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let phase = Arc::new(Phase::new());
    let limits = edge.limits().clone();
    let service = service_fn({
        let (edge, phase) = (Arc::clone(&edge), Arc::clone(&phase));
        move |request| {
            phase.busy();
            edge_answer(Arc::clone(&edge), Arc::clone(&phase), request)
        }
    });
    let mut http = http1::Builder::new();
    // hyper's own default is on the stack and cheaper.
    if limits.headers != HYPER_HEADERS {
        http.max_headers(limits.headers);
    }
    let connection = http
        // Times are kept here, where an idle connection is told from one that sends its header slowly.
        .header_read_timeout(None)
        .max_header_size(limits.header_bytes)
        .max_buf_size(limits.header_bytes.max(MIN_BUFFER))
        .serve_connection(TokioIo::new(Guarded { io, phase: Arc::clone(&phase) }), service);

    let mut connection = pin!(connection);
    let mut closing = pin!(edge.closing());
    let mut timer = pin!(sleep_until(Instant::now() + limits.idle));
    let (mut seen, mut reason, mut told) = (u32::MAX, "", false);
    std::future::poll_fn(|context| {
        if seen == u32::MAX {
            // Registers this task once; from then on the flag is enough (and costs no lock for each token).
            let _ = closing.as_mut().poll(context);
        }
        if !told && edge.is_closing() {
            told = true;
            connection.as_mut().graceful_shutdown();
        }
        if let Poll::Ready(result) = connection.as_mut().poll(context) {
            if let Err(error) = result {
                tracing::debug!(%error, "a connection ended early");
            }
            return Poll::Ready(());
        }
        let changes = phase.changes.load(Relaxed);
        if changes != seen {
            seen = changes;
            let deadline = phase.deadline(&limits);
            reason = deadline.map_or("", |(_, reason)| reason);
            // A busy connection has no deadline of its own.
            let at = deadline.map_or_else(|| Instant::now() + Duration::from_hours(24), |(at, _)| at);
            timer.as_mut().reset(at);
        }
        ready!(timer.as_mut().poll(context));
        tracing::debug!(reason, "a connection is closed");
        Poll::Ready(())
    })
    .await;
}

async fn edge_answer(
    edge: Arc<Edge>,
    phase: Arc<Phase>,
    request: http::Request<hyper::body::Incoming>,
) -> Result<http::Response<super::body::EdgeBody>, std::convert::Infallible> {
    Ok(edge.answer(phase, request).await)
}

/// The socket, watched.
struct Guarded<I> {
    io: I,
    phase: Arc<Phase>,
}

impl<I: AsyncRead + Unpin> AsyncRead for Guarded<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let result = ready!(Pin::new(&mut self.io).poll_read(context, buffer));
        if buffer.filled().len() > before {
            self.phase.read_some();
        }
        Poll::Ready(result)
    }
}

impl<I: AsyncWrite + Unpin> Guarded<I> {
    fn watched<T>(&self, polled: Poll<T>) -> Poll<T> {
        self.phase.write_waits(polled.is_pending());
        polled
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for Guarded<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.io).poll_write(context, bytes);
        self.watched(polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.io).poll_write_vectored(context, slices);
        self.watched(polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.io).poll_flush(context);
        if polled.is_pending() { self.watched(polled) } else { polled }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.io).poll_shutdown(context);
        self.watched(polled)
    }
}
