//! One request's way back to its client: what waits until the handler takes it.
//!
//! Invariants: events leave in order (started, tokens, end); the end leaves once; what waits is bounded by its
//! owner through [`Stream::weight`] and [`Stream::stalled_since`].

use std::sync::Arc;

use deepinfer_protocol::Time;
use deepinfer_protocol::generate::{FinishReason, Token};
use deepinfer_serving::gateway::EndedEarly;
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;

use crate::core::StreamEvent;

/// What a hand-over came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Handed {
    /// Nothing waits.
    All,
    /// The end was handed over: nothing follows.
    End,
    /// The handler's buffer is full.
    Stalled,
    /// The handler is gone.
    Gone,
}

/// The end of a stream.
#[derive(Debug)]
pub(super) enum End {
    /// With the last tokens.
    Finish(FinishReason),
    /// Without a finish reason.
    Early(EndedEarly),
}

/// What the driver knows of a request beside the machine's record.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) client_id: Option<Arc<str>>,
    pub(super) tenant: Arc<str>,
    pub(super) prompt_tokens: u32,
    pub(super) cached_tokens: u32,
    pub(super) generated: u32,
    pub(super) arrived: Time,
    pub(super) started: Option<Time>,
    pub(super) first_token: Option<Time>,
    pub(super) last_token: Time,
    /// The machine has said the end; the result was counted.
    pub(super) over: bool,
    /// In the list of streams to hand over.
    pub(super) dirty: bool,
    /// Since when the handler's buffer is full.
    pub(super) stalled_since: Option<Time>,
    events: mpsc::Sender<StreamEvent>,
    say_started: bool,
    tokens: Vec<Token>,
    weight: usize,
    end: Option<End>,
}

impl Stream {
    pub(super) fn new(
        events: mpsc::Sender<StreamEvent>,
        tenant: Arc<str>,
        client_id: Option<Arc<str>>,
        prompt_tokens: u32,
        now: Time,
    ) -> Self {
        Self {
            client_id,
            tenant,
            prompt_tokens,
            cached_tokens: 0,
            generated: 0,
            arrived: now,
            started: None,
            first_token: None,
            last_token: now,
            over: false,
            dirty: false,
            stalled_since: None,
            events,
            say_started: false,
            tokens: Vec::new(),
            weight: 0,
            end: None,
        }
    }

    /// Tokens that wait, an alternative of a log-probability counting as one.
    pub(super) fn weight(&self) -> usize {
        self.weight
    }

    pub(super) fn push_started(&mut self) {
        self.say_started = true;
    }

    pub(super) fn push_tokens(&mut self, mut tokens: Vec<Token>) {
        let of = |token: &Token| 1 + token.logprob.as_ref().map_or(0, |l| 1 + l.top.len());
        self.weight += tokens.iter().map(of).sum::<usize>();
        if self.tokens.is_empty() {
            self.tokens = tokens;
        } else {
            self.tokens.append(&mut tokens);
        }
    }

    pub(super) fn push_end(&mut self, end: End) {
        self.end = Some(end);
    }

    /// Hands over what the handler's buffer takes.
    pub(super) fn hand_over(&mut self, now: Time) -> Handed {
        while self.say_started || !self.tokens.is_empty() || self.end.is_some() {
            let permit = match self.events.try_reserve() {
                Ok(permit) => permit,
                Err(TrySendError::Closed(())) => return Handed::Gone,
                Err(TrySendError::Full(())) => {
                    self.stalled_since.get_or_insert(now);
                    return Handed::Stalled;
                }
            };
            self.stalled_since = None;
            if self.say_started {
                self.say_started = false;
                permit.send(StreamEvent::Started { cached_tokens: self.cached_tokens });
                continue;
            }
            if !self.tokens.is_empty() || matches!(self.end, Some(End::Finish(_))) {
                let tokens = std::mem::take(&mut self.tokens);
                self.weight = 0;
                let finish = match self.end {
                    Some(End::Finish(reason)) => Some(reason),
                    _ => None,
                };
                permit.send(StreamEvent::Tokens { tokens, finish });
                if finish.is_some() {
                    return Handed::End;
                }
                continue;
            }
            if let Some(End::Early(why)) = self.end.take() {
                permit.send(StreamEvent::Ended(why));
                return Handed::End;
            }
        }
        Handed::All
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(id: u32) -> Token {
        Token { id, logprob: None }
    }

    fn stream(buffer: usize) -> (Stream, mpsc::Receiver<StreamEvent>) {
        let (events, received) = tokio::sync::mpsc::channel(buffer);
        (Stream::new(events, "t".into(), None, 3, Time(0)), received)
    }

    #[test]
    fn tokens_of_one_batch_travel_together_and_the_finish_with_the_last() {
        let (mut stream, mut received) = stream(8);
        stream.push_started();
        stream.push_tokens(vec![token(1)]);
        stream.push_tokens(vec![token(2), token(3)]);
        stream.push_end(End::Finish(FinishReason::Stop));
        assert_eq!(stream.hand_over(Time(1)), Handed::End);
        assert_eq!(received.try_recv(), Ok(StreamEvent::Started { cached_tokens: 0 }));
        let tokens = vec![token(1), token(2), token(3)];
        assert_eq!(received.try_recv(), Ok(StreamEvent::Tokens { tokens, finish: Some(FinishReason::Stop) }));
        assert!(received.try_recv().is_err());
    }

    #[test]
    fn a_full_buffer_keeps_the_order_and_loses_nothing() {
        let (mut stream, mut received) = stream(1);
        stream.push_started();
        stream.push_tokens(vec![token(1)]);
        assert_eq!(stream.hand_over(Time(5)), Handed::Stalled);
        stream.push_tokens(vec![token(2)]);
        stream.push_end(End::Early(EndedEarly::Cancelled));
        assert_eq!(stream.hand_over(Time(6)), Handed::Stalled);
        assert_eq!((stream.stalled_since, stream.weight()), (Some(Time(5)), 2));
        assert_eq!(received.try_recv(), Ok(StreamEvent::Started { cached_tokens: 0 }));
        assert_eq!(stream.hand_over(Time(7)), Handed::Stalled);
        let tokens = vec![token(1), token(2)];
        assert_eq!(received.try_recv(), Ok(StreamEvent::Tokens { tokens, finish: None }));
        assert_eq!(stream.hand_over(Time(8)), Handed::End);
        assert_eq!(received.try_recv(), Ok(StreamEvent::Ended(EndedEarly::Cancelled)));
        drop(received);
    }

    #[test]
    fn a_handler_that_is_gone_is_noticed() {
        let (mut stream, received) = stream(1);
        drop(received);
        assert_eq!(stream.hand_over(Time(0)), Handed::All, "nothing to hand over");
        stream.push_tokens(vec![token(1)]);
        assert_eq!(stream.hand_over(Time(0)), Handed::Gone);
    }
}
