//! The seam between the HTTP handlers and the driver that owns the request records.
//!
//! [`CoreHandle`] is the handlers' end: [`CoreHandle::submit`] hands a request over and gives back its
//! [`RequestStream`]. [`CoreInbox`] is the driver's end: requests that came, and those whose client left or is
//! satisfied. A test feeds the same inbox from a script.
//!
//! Invariants: every channel is bounded; leaving never blocks and is never lost (a request leaves at most once, so
//! the list of leavers is bounded by the requests in flight); a stream that was dropped before its end counts as a
//! client that left.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use deepinfer_protocol::generate::{FinishReason, GenerateSpec, Token};
use deepinfer_protocol::message::Refusal;
use deepinfer_protocol::{RequestId, Span};
use deepinfer_serving::gateway::{EndedEarly, NewRequest};
use tokio::sync::{Notify, mpsc};

/// Steps that wait between the driver and a handler. A client that reads keeps it near zero; the driver decides
/// what becomes of one that does not.
pub const EVENT_BUFFER: usize = 256;
/// Requests that wait between the handlers and the driver: more than arrive while it is busy with a batch.
pub const SUBMIT_BUFFER: usize = 1024;

/// Who asks, as access control found out. Put into the extensions of each HTTP request.
#[derive(Clone, Debug)]
pub struct Caller {
    /// Name of the tenant.
    pub tenant: Arc<str>,
    /// Salt of its block keys (KV-7).
    pub salt: [u8; 32],
}

impl Caller {
    /// Everybody, where no API keys are configured.
    #[must_use]
    pub fn open() -> Self {
        Self { tenant: Arc::from("default"), salt: [0; 32] }
    }
}

/// What a handler wants generated.
#[derive(Clone, Debug)]
pub struct Order {
    /// Who asks.
    pub caller: Caller,
    /// Prompt ids, at least one.
    pub prompt: Arc<[u32]>,
    /// How to draw; seed resolved, `max_tokens` clipped to the context limit.
    pub spec: GenerateSpec,
    /// Blocks may be shared with other requests of the tenant.
    pub reuse: bool,
    /// Longest wait for the first token.
    pub first_token_deadline: Span,
    /// The client's own name for the request (`x-request-id`), for logs; not unique.
    pub client_id: Option<Arc<str>>,
}

/// What becomes of a request. The last event is `Tokens` with `finish`, or `Ended`.
#[derive(Clone, Debug, PartialEq)]
pub enum StreamEvent {
    /// The prompt is being processed.
    Started {
        /// Tokens of the prompt that were not computed again.
        cached_tokens: u32,
    },
    /// The next tokens.
    Tokens {
        /// One or more, in order.
        tokens: Vec<Token>,
        /// Set with the last ones.
        finish: Option<FinishReason>,
    },
    /// The end without a finish reason.
    Ended(EndedEarly),
}

impl StreamEvent {
    /// Nothing follows it.
    #[must_use]
    pub fn is_last(&self) -> bool {
        matches!(self, Self::Ended(_) | Self::Tokens { finish: Some(_), .. })
    }
}

/// A request on its way to the driver.
#[derive(Debug)]
pub struct Submitted {
    /// For the machine.
    pub request: NewRequest,
    /// The client's own name for it, for logs.
    pub client_id: Option<Arc<str>>,
    /// Where its events go. Closed once the client left.
    pub events: mpsc::Sender<StreamEvent>,
}

/// Why a handler lets go of a request before its last event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Left {
    /// The client went away.
    Gone(RequestId),
    /// A stop string was found: the request counts as finished.
    Satisfied(RequestId),
}

/// What handlers, streams and the inbox share.
#[derive(Debug)]
struct Shared {
    left: Mutex<Vec<Left>>,
    wake: Notify,
    ready: AtomicBool,
    /// High half of every id: this process.
    process: u64,
    next: AtomicU64,
}

impl Shared {
    fn leave(&self, left: Left) {
        self.left.lock().unwrap_or_else(PoisonError::into_inner).push(left);
        self.wake.notify_one();
    }
}

/// The handlers' end. Cheap to clone.
#[derive(Clone, Debug)]
pub struct CoreHandle {
    submits: mpsc::Sender<Submitted>,
    shared: Arc<Shared>,
}

impl CoreHandle {
    /// Both ends. `process` names this gateway process: random, so that ids never repeat after a restart.
    #[must_use]
    pub fn pair(process: u64) -> (Self, CoreInbox) {
        let (submits, received) = tokio::sync::mpsc::channel(SUBMIT_BUFFER);
        let shared = Arc::new(Shared {
            left: Mutex::default(),
            wake: Notify::new(),
            ready: AtomicBool::new(false),
            process,
            next: AtomicU64::new(1),
        });
        (Self { submits, shared: Arc::clone(&shared) }, CoreInbox { submits: received, shared })
    }

    /// Whether requests would be served now; `/v1/models` lists the model only then.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.shared.ready.load(Ordering::Relaxed)
    }

    /// Hand a request to the driver.
    ///
    /// # Errors
    ///
    /// [`EndedEarly::Overloaded`] if the driver is that far behind, [`EndedEarly::Unavailable`] if it has ended.
    pub fn submit(&self, order: Order) -> Result<RequestStream, EndedEarly> {
        let low = self.shared.next.fetch_add(1, Ordering::Relaxed);
        let id = RequestId(u128::from(self.shared.process) << 64 | u128::from(low));
        let (events, received) = tokio::sync::mpsc::channel(EVENT_BUFFER);
        let request = NewRequest {
            id,
            tenant: order.caller.tenant,
            prompt: order.prompt,
            spec: order.spec,
            salt: order.caller.salt,
            reuse: order.reuse,
            first_token_deadline: order.first_token_deadline,
        };
        let submitted = Submitted { request, client_id: order.client_id, events };
        self.submits.try_send(submitted).map_err(|error| match error {
            mpsc::error::TrySendError::Full(_) => EndedEarly::Overloaded {
                reason: Refusal::QueueFull,
                detail: format!("more than {SUBMIT_BUFFER} requests arrived at once"),
                retry_after: Span::secs(1),
            },
            mpsc::error::TrySendError::Closed(_) => EndedEarly::Unavailable {
                detail: "the gateway is shutting down".to_owned(),
                retry_after: Span::secs(5),
            },
        })?;
        Ok(RequestStream { id, events: received, shared: Arc::clone(&self.shared), over: false })
    }
}

/// What wakes a driver.
#[derive(Debug)]
pub enum Arrival {
    /// A request.
    Request(Box<Submitted>),
    /// Somebody may have left: see [`CoreInbox::take_left`].
    Left,
    /// All handles are gone.
    Closed,
}

/// The driver's end.
#[derive(Debug)]
pub struct CoreInbox {
    submits: mpsc::Receiver<Submitted>,
    shared: Arc<Shared>,
}

impl CoreInbox {
    /// High half of every id.
    pub fn process(&self) -> u64 {
        self.shared.process
    }

    /// A request that is waiting already.
    pub fn try_next(&mut self) -> Option<Submitted> {
        self.submits.try_recv().ok()
    }

    /// Returns once there is a request or somebody may have left. Safe to cancel.
    pub async fn arrival(&mut self) -> Arrival {
        let Self { submits, shared } = self;
        tokio::select! {
            submitted = submits.recv() => submitted.map_or(Arrival::Closed, |s| Arrival::Request(Box::new(s))),
            () = shared.wake.notified() => Arrival::Left,
        }
    }

    /// Everybody who left since the last call, appended to `left`.
    pub fn take_left(&self, left: &mut Vec<Left>) {
        left.append(&mut self.shared.left.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Says whether requests would be served now.
    pub fn set_ready(&self, ready: bool) {
        self.shared.ready.store(ready, Ordering::Relaxed);
    }

    /// Takes no more requests: those that arrive are told that the gateway is shutting down.
    pub fn close(&mut self) {
        self.submits.close();
    }
}

/// The events of one request. Dropping it before the last one cancels the request.
#[derive(Debug)]
pub struct RequestStream {
    id: RequestId,
    events: mpsc::Receiver<StreamEvent>,
    shared: Arc<Shared>,
    /// The last event was seen, or the request was let go of.
    over: bool,
}

impl RequestStream {
    /// The id inside the system.
    #[must_use]
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// The next event; `None` after the last one, or if the driver died. Safe to cancel.
    pub async fn next(&mut self) -> Option<StreamEvent> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// As [`Self::next`].
    pub fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<StreamEvent>> {
        if self.over {
            return Poll::Ready(None);
        }
        let event = std::task::ready!(self.events.poll_recv(context));
        self.over = event.as_ref().is_none_or(StreamEvent::is_last);
        Poll::Ready(event)
    }

    /// The edge has what it needs (a stop string): the request ends here and counts as finished.
    pub fn satisfied(&mut self) {
        if !self.over {
            self.over = true;
            self.shared.leave(Left::Satisfied(self.id));
        }
    }
}

impl Drop for RequestStream {
    fn drop(&mut self) {
        if !self.over {
            self.shared.leave(Left::Gone(self.id));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order() -> Order {
        let spec = GenerateSpec {
            temperature: 0.0,
            top_p: 1.0,
            seed: 0,
            max_tokens: 4,
            min_tokens: 0,
            stop_tokens: Vec::new(),
            logprobs: None,
        };
        Order {
            caller: Caller::open(),
            prompt: Arc::from([1]),
            spec,
            reuse: true,
            first_token_deadline: Span::secs(1),
            client_id: None,
        }
    }

    fn left(inbox: &CoreInbox) -> Vec<Left> {
        let mut left = Vec::new();
        inbox.take_left(&mut left);
        left
    }

    #[test]
    fn a_driver_that_is_too_far_behind_refuses_and_one_that_has_closed_says_so() {
        let (core, mut inbox) = CoreHandle::pair(1);
        let streams: Vec<_> = (0..SUBMIT_BUFFER).map(|_| core.submit(order()).unwrap()).collect();
        let refused = core.submit(order()).unwrap_err();
        assert!(matches!(refused, EndedEarly::Overloaded { reason: Refusal::QueueFull, .. }), "{refused:?}");
        assert!(inbox.try_next().is_some());
        assert!(core.submit(order()).is_ok());
        inbox.close();
        assert!(matches!(core.submit(order()).unwrap_err(), EndedEarly::Unavailable { .. }));
        drop(streams);
    }

    #[test]
    fn each_request_leaves_at_most_once_and_not_after_its_end() {
        let (core, mut inbox) = CoreHandle::pair(1);
        let mut streams: Vec<_> = (0..4).map(|_| core.submit(order()).unwrap()).collect();
        let ids: Vec<_> = streams.iter().map(RequestStream::id).collect();
        let senders: Vec<_> =
            std::iter::from_fn(|| inbox.try_next()).map(|submitted| submitted.events).collect();
        let mut context = Context::from_waker(std::task::Waker::noop());
        // The first is satisfied, the second ends, the third loses its driver, the fourth goes.
        streams[0].satisfied();
        streams[0].satisfied();
        senders[1].try_send(StreamEvent::Ended(EndedEarly::Cancelled)).unwrap();
        assert!(matches!(streams[1].poll_next(&mut context), Poll::Ready(Some(event)) if event.is_last()));
        drop(senders);
        assert_eq!(streams[2].poll_next(&mut context), Poll::Ready(None));
        drop(streams);
        assert_eq!(left(&inbox), [Left::Satisfied(ids[0]), Left::Gone(ids[3])]);
        assert_eq!(left(&inbox), []);
    }

    #[test]
    fn ids_name_the_process_and_never_repeat() {
        let (core, _inbox) = CoreHandle::pair(5);
        let ids: Vec<_> = (0..3).map(|_| core.submit(order()).unwrap().id().0).collect();
        assert!(ids.iter().all(|id| id >> 64 == 5));
        assert!(ids.windows(2).all(|pair| pair[0] < pair[1]));
    }
}
