//! One request: written down, hurt if a fault hits it, forwarded, held if a test wants it held, answered.

use std::collections::BTreeMap;
use std::future::pending;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Context as _;
use bytes::Bytes;
use http::header::{
    CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HeaderName, RETRY_AFTER, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use serde_json::json;
use tokio::time::Instant;

use super::asked::{Asked, Verb};
use super::book::Book;
use super::faults::{Cut, Rules, What};
use super::hold::{Holds, Stop, When};
use super::on::On;
use super::relay::{Relay, Track, Watch};
use super::upstream::Upstream;

/// Longest body of a request; the API server itself takes 3 MiB.
const MAX_BODY_BYTES: usize = 16 << 20;
/// Headers that belong to a connection and not to a request.
const OF_A_CONNECTION: [HeaderName; 3] = [CONNECTION, TRANSFER_ENCODING, UPGRADE];

/// The answer's body.
pub(super) type Answer = UnsyncBoxBody<Bytes, io::Error>;

/// What all connections share.
pub(super) struct Shared {
    pub(super) upstream: Upstream,
    started: Instant,
    state: Mutex<State>,
}

/// What changes.
pub(super) struct State {
    pub(super) book: Book,
    pub(super) rules: Rules,
    pub(super) holds: Holds,
    /// Open watches by the request's number.
    pub(super) watches: BTreeMap<u64, (Asked, Arc<Watch>)>,
}

impl State {
    /// Cuts the open watches that match; gives how many.
    pub(super) fn cut_watches(&self, on: &On, how: Cut) -> usize {
        let chosen = self.watches.values().filter(|(asked, _)| on.matches(asked));
        chosen.map(|(_, watch)| watch.cut(how)).count()
    }
}

impl Shared {
    pub(super) fn new(upstream: Upstream, seed: u64) -> Self {
        let state = State {
            book: Book::new(),
            rules: Rules::new(seed),
            holds: Holds::default(),
            watches: BTreeMap::new(),
        };
        Self { upstream, started: Instant::now(), state: Mutex::new(state) }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Answers a request; an error closes the connection without an answer.
pub(super) async fn serve(
    shared: Arc<Shared>,
    request: Request<Incoming>,
) -> Result<Response<Answer>, io::Error> {
    let (parts, body) = request.into_parts();
    let body = Limited::new(body, MAX_BODY_BYTES).collect().await.map_err(io::Error::other)?.to_bytes();
    let asked = Asked::of(&parts, &body);
    let started = Instant::now();
    let (number, fault, stop) = {
        let mut state = shared.state();
        let at = started.duration_since(shared.started);
        let number = state.book.arrive(at, &asked, body.len() as u64);
        let fault = state.rules.decide(&asked);
        if let Some(fault) = fault {
            state.book.note(number, |entry| entry.fault = Some(fault.word()));
        }
        (number, fault, state.holds.take(&asked))
    };
    let track = Track { shared: shared.clone(), number, started };
    let stop = wait(stop, When::Before, &asked).await;
    match fault {
        Some(What::Refuse { status, retry_after }) => return Ok(refusal(&track, status, retry_after)),
        Some(What::Silence) => return pending().await,
        Some(What::Drop) => return Err(io::Error::other("dropped by the test")),
        Some(What::Delay(time)) => tokio::time::sleep(time).await,
        Some(What::CutAllWatches(how)) => {
            shared.state().cut_watches(&On::any(), how);
        }
        Some(What::LoseAnswer | What::CutWatch { .. }) | None => {}
    }
    let mut forwarded = Request::new(Full::new(body));
    *forwarded.method_mut() = parts.method;
    *forwarded.uri_mut() = parts.uri;
    *forwarded.headers_mut() = without_connection(parts.headers);
    // A length may have come in chunks; what goes out is whole, and its length is written by the client.
    forwarded.headers_mut().remove(CONTENT_LENGTH);
    let answer = shared.upstream.send(forwarded).await.context("forwarding");
    let answer = answer.map_err(|error| io::Error::other(format!("{error:#}")))?;
    let status = answer.status().as_u16();
    if fault == Some(What::LoseAnswer) {
        // To the end, so that the server has done all it would have done.
        let _ = answer.into_body().collect().await;
        return Err(io::Error::other("answer lost by the test"));
    }
    wait(stop, When::After, &asked).await;
    shared.state().book.note(number, |entry| entry.status = Some(status));
    Ok(relayed(answer, &asked, track, fault))
}

/// Waits where the test holds the request, if it holds it here.
async fn wait(stop: Option<Stop>, when: When, asked: &Asked) -> Option<Stop> {
    match stop {
        Some(stop) if stop.when == when => {
            stop.hold(asked).await;
            None
        }
        other => other,
    }
}

fn relayed(answer: Response<Incoming>, asked: &Asked, track: Track, fault: Option<What>) -> Response<Answer> {
    let (mut parts, body) = answer.into_parts();
    parts.headers = without_connection(parts.headers);
    let streams = asked.verb == Verb::Watch && parts.status.is_success();
    let watch = streams.then(|| Arc::new(Watch::default()));
    let lines = match fault {
        Some(What::CutWatch { after, how }) if streams => Some((after, how)),
        _ => None,
    };
    if let Some(watch) = &watch {
        let mut state = track.shared.state();
        state.watches.insert(track.number, (asked.clone(), watch.clone()));
    }
    Response::from_parts(parts, Relay::new(body, track, watch, lines).boxed_unsync())
}

fn without_connection(mut headers: HeaderMap) -> HeaderMap {
    for name in OF_A_CONNECTION {
        headers.remove(name);
    }
    headers
}

/// The answer of a server that refuses, in the form in which Kubernetes says it.
fn refusal(track: &Track, status: u16, retry_after: Option<u32>) -> Response<Answer> {
    let reason = match status {
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "NotFound",
        409 => "Conflict",
        410 => "Expired",
        429 => "TooManyRequests",
        500 => "InternalError",
        503 => "ServiceUnavailable",
        504 => "Timeout",
        _ => "Unknown",
    };
    let body = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": format!("refused with {status} by the test's proxy"),
        "reason": reason, "code": status,
    });
    let body = Full::new(Bytes::from(body.to_string())).map_err(|never| match never {});
    let mut answer = Response::new(body.boxed_unsync());
    *answer.status_mut() =
        http::StatusCode::from_u16(status).unwrap_or(http::StatusCode::INTERNAL_SERVER_ERROR);
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    if let Some(seconds) = retry_after {
        headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
    }
    track.shared.state().book.note(track.number, |entry| entry.status = Some(status));
    answer
}
