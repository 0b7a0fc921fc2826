//! What waits to be written to one connection: bytes of frames, encoded when they were sent.
//!
//! Invariant: never more than [`MAX_QUEUED_BYTES`] own bytes and [`MAX_QUEUED_FRAMES`] frames wait. Senders and
//! the writer swap two buffers, so that steady traffic allocates nothing; long payloads are not copied.

use std::sync::Arc;
use std::sync::Mutex;
use std::sync::PoisonError;

use deepinfer_protocol::frame::{self, FrameError};
use deepinfer_protocol::limits::MAX_FRAME_BYTES;
use deepinfer_protocol::message::Message;

/// Own bytes that may wait: one longest frame and what gathers behind it. Long payloads are counted apart: the
/// sender holds them anyway (parked KV) and bounds them by its own limit.
pub const MAX_QUEUED_BYTES: usize = MAX_FRAME_BYTES + (16 << 20);
/// Frames that may wait: a parked sequence of a million tokens is 8,193 pieces.
pub const MAX_QUEUED_FRAMES: usize = 1 << 16;
/// Payloads from here on are written from where they lie; below, a copy is cheaper.
const SHARED_FROM_BYTES: usize = 16 << 10;
/// A buffer that grew beyond this in a burst is given back.
const KEEP_BYTES: usize = 1 << 20;

/// Frames ready to be written.
#[derive(Debug, Default)]
pub struct Batch {
    /// Heads, and payloads that are short.
    pub bytes: Vec<u8>,
    /// Long payloads, each with the place in `bytes` where it belongs, ascending.
    pub shared: Vec<(usize, Arc<[u8]>)>,
    /// Frames in it.
    pub frames: usize,
}

impl Batch {
    /// Empties it, and gives back what a burst took.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.shared.clear();
        self.frames = 0;
        self.bytes.shrink_to(KEEP_BYTES);
        self.shared.shrink_to(MAX_QUEUED_FRAMES / 64);
    }

    fn push(&mut self, message: &Message, payload: &Arc<[u8]>) -> Result<(), FrameError> {
        frame::encode_head(message, payload.len(), &mut self.bytes)?;
        if payload.len() < SHARED_FROM_BYTES {
            self.bytes.extend_from_slice(payload);
        } else {
            self.shared.push((self.bytes.len(), payload.clone()));
        }
        self.frames += 1;
        Ok(())
    }
}

/// Why a frame was not queued.
#[derive(Debug, PartialEq, Eq)]
pub enum PushError {
    /// The peer does not read.
    Full,
    /// A mistake of the sender.
    Frame(FrameError),
}

/// A bounded queue of frames.
#[derive(Debug, Default)]
pub struct OutQueue {
    waiting: Mutex<Batch>,
}

impl OutQueue {
    /// Appends a frame; `true` if the queue was empty, so that the writer must be woken.
    pub fn push(&self, message: &Message, payload: &Arc<[u8]>) -> Result<bool, PushError> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.frames >= MAX_QUEUED_FRAMES || waiting.bytes.len() >= MAX_QUEUED_BYTES - MAX_FRAME_BYTES {
            return Err(PushError::Full);
        }
        waiting.push(message, payload).map_err(PushError::Frame)?;
        Ok(waiting.frames == 1)
    }

    /// Exchanges the empty batch `out` for what waits; `false` if nothing does.
    pub fn take(&self, out: &mut Batch) -> bool {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if waiting.frames == 0 {
            return false;
        }
        std::mem::swap(&mut *waiting, out);
        true
    }

    /// Whether nothing waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).frames == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_queue_refuses_what_it_cannot_hold() {
        let queue = OutQueue::default();
        let none: Arc<[u8]> = Arc::from([]);
        let mut woken = 0;
        while let Ok(wake) = queue.push(&Message::Heartbeat, &none) {
            woken += usize::from(wake);
        }
        let mut batch = Batch::default();
        assert!(queue.take(&mut batch));
        assert_eq!((batch.frames, woken), (MAX_QUEUED_FRAMES, 1));
        batch.clear();
        assert!(!queue.take(&mut batch));
        let half: Arc<[u8]> = vec![0; SHARED_FROM_BYTES - 1].into();
        let count = (0..).take_while(|_| queue.push(&Message::Heartbeat, &half).is_ok()).count();
        assert!(count * half.len() <= MAX_QUEUED_BYTES, "{count}");
    }

    #[test]
    fn a_frame_that_is_too_long_changes_nothing() {
        let queue = OutQueue::default();
        let long: Arc<[u8]> = vec![0; MAX_FRAME_BYTES].into();
        assert!(matches!(queue.push(&Message::Heartbeat, &long), Err(PushError::Frame(_))));
        assert!(queue.is_empty());
    }
}
