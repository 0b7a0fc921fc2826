//! The body of an answer on its way: counted, and cut where it is a watch and the test says so.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use super::faults::Cut;
use super::serve::Shared;

/// An open watch, as whoever cuts it sees it.
#[derive(Default)]
pub(super) struct Watch {
    cut: CancellationToken,
    broken: AtomicBool,
}

impl Watch {
    /// Ends the watch.
    pub(super) fn cut(&self, how: Cut) {
        self.broken.store(how == Cut::Broken, Ordering::SeqCst);
        self.cut.cancel();
    }
}

/// Writes into the book what becomes of a request; dropping it ends the request.
pub(super) struct Track {
    pub(super) shared: Arc<Shared>,
    pub(super) number: u64,
    pub(super) started: tokio::time::Instant,
}

impl Drop for Track {
    fn drop(&mut self) {
        let took = self.started.elapsed();
        let mut state = self.shared.state();
        state.book.note(self.number, |entry| entry.took = Some(took));
        state.watches.remove(&self.number);
    }
}

/// An answer's body.
pub(super) struct Relay {
    inner: Incoming,
    track: Track,
    watch: Option<(Arc<Watch>, Pin<Box<WaitForCancellationFutureOwned>>)>,
    /// Lines that still pass before the watch is cut, and how.
    lines: Option<(u64, Cut)>,
    /// A break was announced: what has passed goes out before the connection is closed.
    breaking: bool,
    ended: bool,
}

impl Relay {
    pub(super) fn new(
        inner: Incoming,
        track: Track,
        watch: Option<Arc<Watch>>,
        lines: Option<(u64, Cut)>,
    ) -> Self {
        let watch = watch.map(|watch| {
            let cut = Box::pin(watch.cut.clone().cancelled_owned());
            (watch, cut)
        });
        Self { inner, track, watch, lines, breaking: false, ended: false }
    }

    fn end(&mut self, how: Cut, cx: &Context<'_>) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        if how == Cut::Broken && !self.breaking {
            // The server drops what it has buffered when a body fails; waiting once makes it write that first.
            self.breaking = true;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.ended = true;
        Poll::Ready(match how {
            Cut::Clean => None,
            Cut::Broken => Some(Err(io::Error::other("cut by the test"))),
        })
    }
}

impl Body for Relay {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let this = &mut *self;
        if this.ended {
            return Poll::Ready(None);
        }
        if let Some((watch, cut)) = &mut this.watch
            && (watch.cut.is_cancelled() || cut.as_mut().poll(cx).is_ready())
        {
            let broken = watch.broken.load(Ordering::SeqCst);
            return this.end(if broken { Cut::Broken } else { Cut::Clean }, cx);
        }
        if let Some((0, how)) = this.lines {
            return this.end(how, cx);
        }
        let frame = match ready!(Pin::new(&mut this.inner).poll_frame(cx)) {
            Some(Ok(frame)) => frame,
            Some(Err(error)) => return Poll::Ready(Some(Err(io::Error::other(error)))),
            None => {
                this.ended = true;
                return Poll::Ready(None);
            }
        };
        let frame = match frame.into_data() {
            Ok(data) => {
                let data = up_to_lines(data, &mut this.lines);
                let bytes = data.len() as u64;
                this.track.shared.state().book.note(this.track.number, |entry| entry.bytes_out += bytes);
                Frame::data(data)
            }
            Err(frame) => frame,
        };
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.ended || self.watch.is_none() && self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        if self.watch.is_some() { SizeHint::default() } else { self.inner.size_hint() }
    }
}

/// The part of the data up to the last line that may pass.
fn up_to_lines(mut data: Bytes, lines: &mut Option<(u64, Cut)>) -> Bytes {
    let Some((left, _)) = lines else { return data };
    let ends = data.iter().enumerate().filter(|(_, byte)| **byte == b'\n').map(|(at, _)| at + 1);
    let ends: Vec<usize> = ends.take(usize::try_from(*left).unwrap_or(usize::MAX)).collect();
    *left -= ends.len() as u64;
    if *left == 0 {
        data.truncate(ends.last().copied().unwrap_or(0));
    }
    data
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_ends_with_the_last_line_that_may_pass() {
        let mut lines = Some((3, Cut::Clean));
        assert_eq!(up_to_lines(Bytes::from_static(b"a\nb"), &mut lines), "a\nb");
        assert_eq!(up_to_lines(Bytes::from_static(b"\nc\nd\n"), &mut lines), "\nc\n");
        assert_eq!(lines, Some((0, Cut::Clean)));
        assert_eq!(up_to_lines(Bytes::from_static(b"a\nb"), &mut None), "a\nb");
    }
}
