//! A network that swallows everything: no bytes, no reset, for as long as it is on.

use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// Whether bytes pass.
#[derive(Default)]
pub(super) struct Hole {
    on: AtomicBool,
    waiting: Mutex<Vec<Waker>>,
}

impl Hole {
    /// Opens or closes the hole; what waited goes on where it was.
    pub(super) fn set(&self, on: bool) {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        self.on.store(on, Ordering::SeqCst);
        if !on {
            waiting.drain(..).for_each(Waker::wake);
        }
    }

    fn poll_pass(&self, cx: &Context<'_>) -> Poll<()> {
        if !self.on.load(Ordering::SeqCst) {
            return Poll::Ready(());
        }
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.on.load(Ordering::SeqCst) {
            return Poll::Ready(());
        }
        if !waiting.iter().any(|waker| waker.will_wake(cx.waker())) {
            waiting.push(cx.waker().clone());
        }
        Poll::Pending
    }
}

/// A connection that may fall into the hole.
pub(super) struct Gated {
    pub(super) stream: TcpStream,
    pub(super) hole: Arc<Hole>,
}

impl AsyncRead for Gated {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        ready!(self.hole.poll_pass(cx));
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Gated {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.hole.poll_pass(cx));
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.hole.poll_pass(cx));
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.hole.poll_pass(cx));
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
