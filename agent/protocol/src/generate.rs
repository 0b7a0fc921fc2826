//! What a request asks of the engines, and what comes back.

use serde::{Deserialize, Serialize};

use crate::ids::{Attempt, RequestId};

/// How tokens are drawn (serving.md DS-1, DS-2) and what ends the sequence. The same for every attempt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GenerateSpec {
    /// Below 1e-5: greedy.
    pub temperature: f32,
    /// Smallest set of tokens whose probability reaches this; 1 keeps all.
    pub top_p: f32,
    /// Seed of the draws, resolved by the gateway. A draw depends on (seed, position) only.
    pub seed: u64,
    /// Output tokens, at least 1; the whole sequence never exceeds the context limit.
    pub max_tokens: u32,
    /// Output tokens before a stop token may be drawn.
    pub min_tokens: u32,
    /// Ids that end the sequence when drawn (the model's end-of-sentence tokens); empty with `ignore_eos`.
    pub stop_tokens: Vec<u32>,
    /// Log-probabilities: `None` for none, else how many alternatives (0 to 20) beside the drawn token's own.
    pub logprobs: Option<u8>,
}

/// The drawn token's log-probability and the most likely alternatives, from the unscaled distribution
/// (temperature 1, no top_p). Always finite: what is lower is [`Logprob::FLOOR`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Logprob {
    /// Of the drawn token.
    pub logprob: f32,
    /// The most likely tokens, highest first; ties by lowest id.
    pub top: Vec<(u32, f32)>,
}

impl Logprob {
    /// Lowest value ever sent, so that JSON can carry it.
    pub const FLOOR: f32 = -9999.0;
}

/// One output token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// If the request asked for it.
    pub logprob: Option<Box<Logprob>>,
}

/// Why an engine ended a sequence. Stop strings are found by the gateway, which then cancels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum FinishReason {
    /// A stop token was drawn; it is the last token of the event.
    Stop,
    /// `max_tokens` or the context limit.
    Length,
}

/// Tokens of one request from one step, straight from the engine that drew them to the gateway.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenEvent {
    /// Whose.
    pub request: RequestId,
    /// Under which attempt.
    pub attempt: Attempt,
    /// Index in the response of the first of `tokens` (PD-11), from 0 over all attempts.
    pub index: u32,
    /// One or more.
    pub tokens: Vec<Token>,
    /// Set on the last event of the sequence.
    pub finish: Option<FinishReason>,
}
