//! Answers as server-sent events.
//!
//! Invariants: exactly one finish reason and one end mark, or exactly one error frame and no end mark; an error
//! before the first byte has its own HTTP status; all steps that are ready go out in one write; a stream that has
//! nothing to say says a comment.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::response::Response;
use bytes::Bytes;
use http::{HeaderValue, header};
use http_body::Frame;
use tokio::time::{Instant, Sleep};

use super::ApiOptions;
use super::answer::{AnswerBuilder, End, Step};
use super::errors::ApiError;
use super::write::{Usage, Writer};
use crate::core::{RequestStream, StreamEvent};

/// A write is not made longer than this by what else is ready.
const WRITE_BYTES: usize = 32 << 10;
/// Room for a chunk of one token.
const CHUNK_BYTES: usize = 512;
/// What a stream says that has nothing to say.
const COMMENT: &[u8] = b": waiting\n\n";

/// An answer that comes in.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) events: RequestStream,
    pub(crate) writer: Writer,
    builder: AnswerBuilder,
    prompt_tokens: u32,
    cached_tokens: u32,
}

impl Answer {
    pub(crate) fn new(events: RequestStream, builder: AnswerBuilder, writer: Writer, prompt: u32) -> Self {
        Self { events, writer, builder, prompt_tokens: prompt, cached_tokens: 0 }
    }

    /// Take an event and append to `step` what it adds. `Some` ends the answer.
    pub(crate) fn take(
        &mut self,
        event: Option<StreamEvent>,
        step: &mut Step,
    ) -> Result<Option<End>, ApiError> {
        match event {
            Some(StreamEvent::Started { cached_tokens }) => {
                self.cached_tokens = cached_tokens;
                Ok(None)
            }
            Some(StreamEvent::Tokens { tokens, finish }) => {
                self.builder
                    .push(tokens, finish, step)
                    .map_err(|error| ApiError::internal(error.to_string()))?;
                let end = self.builder.end();
                if end.is_some() {
                    self.events.satisfied();
                }
                Ok(end)
            }
            Some(StreamEvent::Ended(why)) => Err(ApiError::ended(why)),
            None => Err(ApiError::internal("the gateway lost the request")),
        }
    }

    pub(crate) fn usage(&self) -> Usage {
        Usage {
            prompt: self.prompt_tokens,
            cached: self.cached_tokens.min(self.prompt_tokens),
            completion: self.builder.completion_tokens(),
            reasoning: self.builder.thinks().then(|| self.builder.reasoning_tokens()),
        }
    }
}

/// Wait for the first event, so that an early error gets its status, then answer with a stream.
pub(crate) async fn respond(mut answer: Answer, options: &ApiOptions) -> Result<Response, ApiError> {
    let first = tokio::time::timeout(options.status_wait, answer.events.next()).await;
    let mut events = Events {
        answer,
        step: Step::default(),
        buffer: Vec::new(),
        over: false,
        written: Instant::now(),
        comment_every: options.comment_every,
        alarm: Box::pin(tokio::time::sleep(options.comment_every)),
    };
    events.answer.writer.role_chunk(&mut events.buffer);
    match first {
        Ok(None) => return Err(ApiError::internal("the gateway lost the request")),
        Ok(Some(StreamEvent::Ended(why))) => return Err(ApiError::ended(why)),
        Ok(Some(event)) => events.take(Some(event)),
        Err(_) => events.buffer.extend_from_slice(COMMENT),
    }
    let mut response = Response::new(Body::new(events));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    Ok(response)
}

/// The body.
struct Events {
    answer: Answer,
    step: Step,
    /// Written, but not handed out yet.
    buffer: Vec<u8>,
    over: bool,
    /// When something was handed out last. The alarm is set late, not at each write.
    written: Instant,
    comment_every: Duration,
    alarm: Pin<Box<Sleep>>,
}

impl Events {
    fn take(&mut self, event: Option<StreamEvent>) {
        // The last buffer went out with its bytes; growing a new one in small steps would cost more than the chunk.
        self.buffer.reserve(CHUNK_BYTES);
        self.step.clear();
        let taken = self.answer.take(event, &mut self.step);
        if !self.step.is_empty() {
            self.answer.writer.step_chunks(&self.step, &mut self.buffer);
        }
        match taken {
            Ok(None) => {}
            Ok(Some(end)) => {
                self.over = true;
                let usage = self.answer.usage();
                self.answer.writer.last_chunks(end, usage, &mut self.buffer);
            }
            Err(error) => {
                self.over = true;
                self.buffer.extend_from_slice(b"data: ");
                error.write(&mut self.buffer);
                self.buffer.extend_from_slice(b"\n\n");
            }
        }
    }

    /// Write a comment if it is time; true if one was written.
    fn poll_comment(&mut self, context: &mut Context<'_>) -> bool {
        while self.alarm.as_mut().poll(context).is_ready() {
            let due = self.written + self.comment_every;
            if due <= Instant::now() {
                self.alarm.as_mut().reset(Instant::now() + self.comment_every);
                self.buffer.extend_from_slice(COMMENT);
                return true;
            }
            self.alarm.as_mut().reset(due);
        }
        false
    }
}

impl http_body::Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let events = self.get_mut();
        while !events.over && events.buffer.len() < WRITE_BYTES {
            match events.answer.events.poll_next(context) {
                Poll::Ready(event) => events.take(event),
                Poll::Pending => break,
            }
        }
        if events.buffer.is_empty() && !events.over && !events.poll_comment(context) {
            return Poll::Pending;
        }
        if events.buffer.is_empty() {
            return Poll::Ready(None);
        }
        events.written = Instant::now();
        let bytes = Bytes::from(std::mem::take(&mut events.buffer));
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.over && self.buffer.is_empty()
    }
}
