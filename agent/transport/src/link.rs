//! One open connection: a task that reads and a task that writes.
//!
//! Invariant: a link says `Up` before its first frame and `Down` after its last; a newer connection of the same
//! peer begins only when the older one has said so.

use std::io::IoSlice;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use deepinfer_protocol::frame;
use deepinfer_protocol::limits::MAX_FRAME_BYTES;
use deepinfer_protocol::message::Message;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Notify, mpsc};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::PeerEvent;
use crate::handshake::Remote;
use crate::queue::{Batch, OutQueue};

/// Intervals of silence after which a connection is given up and made anew: a path that lost its state without a
/// word would otherwise stay suspect until the kernel notices, a quarter of an hour later.
const GIVE_UP_AFTER: u32 = 40;
/// Room that a reader asks for at least.
const READ_BYTES: usize = 64 << 10;
/// A read buffer that grew beyond this is given back once it is empty.
const KEEP_BYTES: usize = 1 << 20;
/// Slices of one vectored write; more brings nothing.
const MAX_SLICES: usize = 64;

/// Times of heartbeats.
#[derive(Clone, Copy, Debug)]
pub struct Pulse {
    /// Interval of heartbeats.
    pub interval: Duration,
    /// Missed ones after which a peer is suspect.
    pub missed: u32,
}

/// What senders and the two tasks of a connection share.
#[derive(Debug)]
pub struct Link {
    /// Frames to be written.
    pub queue: OutQueue,
    /// Wakes the writer.
    pub wake: Notify,
    /// Closes the connection.
    pub closed: CancellationToken,
    /// Both tasks have ended, and `Down` was said.
    pub finished: CancellationToken,
    /// A batch was taken and is not written yet.
    writing: AtomicBool,
}

impl Link {
    /// A link that is about to run.
    pub fn new(parent: &CancellationToken) -> Self {
        Self {
            queue: OutQueue::default(),
            wake: Notify::new(),
            closed: parent.child_token(),
            finished: CancellationToken::new(),
            writing: AtomicBool::new(false),
        }
    }

    /// Whether everything that was sent has been given to the socket.
    pub fn idle(&self) -> bool {
        self.closed.is_cancelled() || (self.queue.is_empty() && !self.writing.load(Ordering::SeqCst))
    }
}

/// Runs both directions until one ends. Says `Up` first and `Down` last.
pub async fn run(
    link: &Link,
    remote: &Remote,
    (read, write): (OwnedReadHalf, OwnedWriteHalf),
    early: Vec<u8>,
    events: &mpsc::Sender<PeerEvent>,
    pulse: Pulse,
) {
    if events.send(up(remote)).await.is_err() {
        link.finished.cancel();
        return;
    }
    let mut reader = Reader {
        read,
        buffer: BytesMut::from(&early[..]),
        events,
        remote,
        empty: Arc::from([]),
        suspect: false,
        pulse,
    };
    let why = tokio::select! {
        () = link.closed.cancelled() => "closed by this side".to_owned(),
        why = reader.run() => why,
        why = writer(link, write, pulse.interval) => why,
    };
    link.closed.cancel();
    tracing::debug!(peer = %remote.name, %why, "connection closed");
    if !reader.suspect {
        let _ = events.send(PeerEvent::Down { peer: remote.name.clone() }).await;
    }
    link.finished.cancel();
}

fn up(remote: &Remote) -> PeerEvent {
    PeerEvent::Up { peer: remote.name.clone(), kind: remote.peer, process: remote.process }
}

struct Reader<'a> {
    read: OwnedReadHalf,
    buffer: BytesMut,
    events: &'a mpsc::Sender<PeerEvent>,
    remote: &'a Remote,
    empty: Arc<[u8]>,
    suspect: bool,
    pulse: Pulse,
}

impl Reader<'_> {
    /// Reads until the connection ends; gives the reason.
    async fn run(&mut self) -> String {
        let silence = self.pulse.interval * self.pulse.missed;
        let give_up = self.pulse.interval * GIVE_UP_AFTER.max(self.pulse.missed);
        let alarm = tokio::time::sleep(silence);
        tokio::pin!(alarm);
        let mut heard = Instant::now();
        loop {
            if let Err(why) = self.deliver().await {
                return why;
            }
            self.buffer.reserve(READ_BYTES);
            tokio::select! {
                biased;
                got = self.read.read_buf(&mut self.buffer) => match got {
                    Ok(0) => return "the peer closed it".to_owned(),
                    Ok(_) => {
                        heard = Instant::now();
                        if self.suspect {
                            if !self.say(true).await {
                                return "nobody listens any more".to_owned();
                            }
                            alarm.as_mut().reset(heard + silence);
                        }
                    }
                    Err(error) => return error.to_string(),
                },
                () = &mut alarm => {
                    let quiet = heard.elapsed();
                    if quiet >= give_up {
                        return format!("silent for {} s", quiet.as_secs());
                    }
                    if quiet >= silence && !self.suspect && !self.say(false).await {
                        return "nobody listens any more".to_owned();
                    }
                    let next = if self.suspect { give_up } else { silence };
                    alarm.as_mut().reset(heard + next);
                }
            }
        }
    }

    async fn say(&mut self, up: bool) -> bool {
        let event =
            if up { self::up(self.remote) } else { PeerEvent::Down { peer: self.remote.name.clone() } };
        let said = self.events.send(event).await.is_ok();
        // Only now: if this was cut short, the word was not given.
        self.suspect = !up;
        said
    }

    /// Hands on every whole frame in the buffer.
    async fn deliver(&mut self) -> Result<(), String> {
        loop {
            let (event, used) = match frame::decode(&self.buffer, MAX_FRAME_BYTES) {
                Ok(None) => break,
                Err(error) => {
                    tracing::warn!(peer = %self.remote.name, %error, "the peer sends what is not a frame");
                    return Err(error.to_string());
                }
                Ok(Some((frame, used))) => (self.event(frame), used),
            };
            self.buffer.advance(used);
            if let Some(event) = event
                && self.events.send(event).await.is_err()
            {
                return Err("nobody listens any more".to_owned());
            }
        }
        if self.buffer.is_empty() && self.buffer.capacity() > KEEP_BYTES {
            self.buffer = BytesMut::new();
        }
        Ok(())
    }

    fn event(&self, frame: frame::Frame<'_>) -> Option<PeerEvent> {
        match frame.message {
            Message::Heartbeat
            | Message::Challenge { .. }
            | Message::Hello { .. }
            | Message::Welcome { .. }
            | Message::Refused { .. } => None,
            message => {
                let payload =
                    if frame.payload.is_empty() { self.empty.clone() } else { Arc::from(frame.payload) };
                Some(PeerEvent::Frame { from: self.remote.name.clone(), message, payload })
            }
        }
    }
}

/// Writes what is queued, many frames at once, and heartbeats when there is nothing else.
async fn writer(link: &Link, mut write: OwnedWriteHalf, interval: Duration) -> String {
    let mut batch = Batch::default();
    let mut ticks = tokio::time::interval_at(Instant::now() + interval, interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let empty: Arc<[u8]> = Arc::from([]);
    let mut wrote = false;
    loop {
        link.writing.store(true, Ordering::SeqCst);
        while link.queue.take(&mut batch) {
            if let Err(error) = write_batch(&mut write, &batch).await {
                return error.to_string();
            }
            batch.clear();
            wrote = true;
        }
        link.writing.store(false, Ordering::SeqCst);
        tokio::select! {
            () = link.wake.notified() => {}
            _ = ticks.tick() => {
                // Any frame renews what a heartbeat renews.
                if !wrote {
                    let _ = link.queue.push(&Message::Heartbeat, &empty);
                }
                wrote = false;
            }
        }
    }
}

async fn write_batch(write: &mut OwnedWriteHalf, batch: &Batch) -> std::io::Result<()> {
    if batch.shared.is_empty() {
        return write.write_all(&batch.bytes).await;
    }
    let mut parts: Vec<&[u8]> = Vec::with_capacity(batch.shared.len() * 2 + 1);
    let mut from = 0;
    for (at, payload) in &batch.shared {
        parts.push(&batch.bytes[from..*at]);
        parts.push(payload);
        from = *at;
    }
    parts.push(&batch.bytes[from..]);
    parts.retain(|part| !part.is_empty());
    let mut first = 0;
    while first < parts.len() {
        let upto = parts.len().min(first + MAX_SLICES);
        let slices: Vec<IoSlice<'_>> = parts[first..upto].iter().map(|part| IoSlice::new(part)).collect();
        let mut wrote = write.write_vectored(&slices).await?;
        if wrote == 0 {
            return Err(std::io::ErrorKind::WriteZero.into());
        }
        while first < parts.len() && wrote >= parts[first].len() {
            wrote -= parts[first].len();
            first += 1;
        }
        if wrote > 0 {
            parts[first] = &parts[first][wrote..];
        }
    }
    Ok(())
}
