//! Exactly once, in order (PD-11): token `i` of the response is forwarded when all before it were.
//!
//! Invariant: what was forwarded is never withdrawn, and a token that comes again must be the same one.

use std::collections::BTreeMap;

use deepinfer_protocol::Time;
use deepinfer_protocol::generate::{FinishReason, Token};
use deepinfer_protocol::limits::MAX_EARLY_TOKENS;

/// What became of an event.
#[derive(Clone, Debug, PartialEq)]
pub enum Accepted {
    /// To be forwarded: one token or more, and the end if this is it.
    Next(Vec<Token>, Option<FinishReason>),
    /// Seen before, or kept for later.
    Nothing,
    /// A token came again and differs from what was forwarded.
    Conflict,
    /// More tokens than may be kept came ahead of one that is missing.
    TooEarly,
}

/// The tokens of one response.
#[derive(Clone, Debug, Default)]
pub struct Stream {
    sent: Vec<u32>,
    early: BTreeMap<u32, (Token, Option<FinishReason>)>,
    gap_since: Option<Time>,
}

impl Stream {
    /// Ids that were forwarded, in order.
    pub fn sent(&self) -> &[u32] {
        &self.sent
    }

    /// Index of the next token.
    pub fn next_index(&self) -> u32 {
        u32::try_from(self.sent.len()).unwrap_or(u32::MAX)
    }

    /// Since when a token is missing that later ones wait for.
    pub fn gap_since(&self) -> Option<Time> {
        self.gap_since
    }

    /// A new attempt begins after what was forwarded; what came early belongs to the old one.
    pub fn restart(&mut self) {
        self.early.clear();
        self.gap_since = None;
    }

    /// Tokens of one event, the first of which has this index.
    pub fn accept(
        &mut self,
        now: Time,
        index: u32,
        tokens: Vec<Token>,
        finish: Option<FinishReason>,
    ) -> Accepted {
        if index == self.next_index() && self.early.is_empty() && !tokens.is_empty() {
            self.sent.extend(tokens.iter().map(|t| t.id));
            return Accepted::Next(tokens, finish);
        }
        let last = tokens.len().saturating_sub(1);
        for (offset, token) in tokens.into_iter().enumerate() {
            let Some(at) = u32::try_from(offset).ok().and_then(|o| index.checked_add(o)) else {
                return Accepted::Conflict;
            };
            let known = self.sent.get(at as usize).copied().or(self.early.get(&at).map(|(t, _)| t.id));
            match known {
                Some(id) if id != token.id => return Accepted::Conflict,
                Some(_) => {}
                None => {
                    self.early.insert(at, (token, finish.filter(|_| offset == last)));
                }
            }
        }
        self.forward(now)
    }

    fn forward(&mut self, now: Time) -> Accepted {
        let mut next = Vec::new();
        let mut finish = None;
        while let Some((token, end)) = self.early.remove(&self.next_index()) {
            self.sent.push(token.id);
            next.push(token);
            finish = finish.or(end);
        }
        self.gap_since = if self.early.is_empty() { None } else { self.gap_since.or(Some(now)) };
        if self.early.len() > MAX_EARLY_TOKENS {
            Accepted::TooEarly
        } else if next.is_empty() {
            Accepted::Nothing
        } else {
            Accepted::Next(next, finish)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(ids: &[u32]) -> Vec<Token> {
        ids.iter().map(|id| Token { id: *id, logprob: None }).collect()
    }

    #[test]
    fn early_tokens_wait_for_the_missing_one_and_repeats_are_dropped() {
        let mut stream = Stream::default();
        assert_eq!(stream.accept(Time(1), 0, tokens(&[5]), None), Accepted::Next(tokens(&[5]), None));
        assert_eq!(stream.accept(Time(2), 2, tokens(&[7, 8]), Some(FinishReason::Stop)), Accepted::Nothing);
        assert_eq!(stream.gap_since(), Some(Time(2)));
        assert_eq!(stream.accept(Time(3), 0, tokens(&[5]), None), Accepted::Nothing);
        let rest = Accepted::Next(tokens(&[6, 7, 8]), Some(FinishReason::Stop));
        assert_eq!(stream.accept(Time(4), 0, tokens(&[5, 6]), None), rest);
        assert_eq!(stream.gap_since(), None);
        assert_eq!(stream.sent(), [5, 6, 7, 8]);
    }

    #[test]
    fn a_repeat_that_differs_is_a_conflict() {
        let mut stream = Stream::default();
        stream.accept(Time(1), 0, tokens(&[5, 6]), None);
        assert_eq!(stream.accept(Time(2), 1, tokens(&[9]), None), Accepted::Conflict);
        stream.accept(Time(3), 4, tokens(&[1]), None);
        assert_eq!(stream.accept(Time(4), 4, tokens(&[2]), None), Accepted::Conflict, "kept ones count too");
    }

    #[test]
    fn at_most_64_tokens_wait_for_a_missing_one_and_a_new_attempt_forgets_them() {
        let mut stream = Stream::default();
        for index in 1..=64 {
            assert_eq!(stream.accept(Time(1), index, tokens(&[index]), None), Accepted::Nothing);
        }
        assert_eq!(stream.accept(Time(1), 65, tokens(&[65]), None), Accepted::TooEarly);
        stream.restart();
        assert_eq!(stream.accept(Time(2), 0, tokens(&[9]), None), Accepted::Next(tokens(&[9]), None));
    }
}
