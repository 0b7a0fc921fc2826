//! Bodies: what a response holds until its last byte, and what a request's body may use of the memory.
//!
//! Invariant: whatever ends a response (its end, a client that left, a connection that is cut) releases what it
//! holds, once.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::body::Body;
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::sync::OwnedSemaphorePermit;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::connection::Phase;

/// Released when a response has ended.
pub(super) struct Held {
    /// Counts the request among those that a shutdown waits for.
    pub(super) _request: Option<TaskTrackerToken>,
    pub(super) phase: Arc<Phase>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.phase.idle();
    }
}

/// A response's body.
pub(super) struct EdgeBody {
    inner: Body,
    held: Option<Held>,
}

impl EdgeBody {
    pub(super) fn new(inner: Body, held: Held) -> Self {
        Self { inner, held: Some(held) }
    }
}

impl HttpBody for EdgeBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(context));
        if frame.is_none() {
            self.held = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

/// A request's body that has reserved its bytes of the memory for bodies.
pub(super) struct Reserved {
    pub(super) inner: hyper::body::Incoming,
    pub(super) _permit: OwnedSemaphorePermit,
}

impl HttpBody for Reserved {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut self.inner).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
