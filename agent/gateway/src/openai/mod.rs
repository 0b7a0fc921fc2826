//! The OpenAI-compatible API: chat completions, completions, models.
//!
//! ```text
//! body.rs      bytes -> the fields of one JSON object          fields.rs   what each field of each API means
//! sampling.rs  how to draw, when to end                        chat.rs, completions.rs  parse -> prompt -> answer
//! answer.rs    ids -> deltas, one struct for both modes        write.rs    deltas -> JSON
//! stream.rs    server-sent events                              whole.rs    one JSON object
//! ```
//!
//! Invariants: what would change the answer and is not supported is refused by name, never ignored; streamed and
//! whole answers come from the same [`answer`] machine, so they say the same; errors never repeat what was sent.

mod answer;
mod body;
mod chat;
mod completions;
mod errors;
mod fields;
mod json;
mod logprobs;
mod models;
mod plain;
mod prepare;
mod respond;
mod sampling;
mod stop;
mod stream;
mod whole;
mod write;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{get, post};
use deepinfer_protocol::Span;

pub use self::errors::{ApiError, ErrorCode};
use crate::core::CoreHandle;
use crate::render::{ChatRenderer, RenderError};
use crate::tokenizer::Tokenizer;

/// What is served.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// The name that answers carry.
    pub name: String,
    /// Other names that requests may use.
    pub aliases: Vec<String>,
    /// Longest sequence, prompt and answer together, in tokens.
    pub context_limit: u32,
    /// Rows of the embedding: token ids are below.
    pub vocab_size: u32,
    /// Ids that end an answer.
    pub stop_tokens: Vec<u32>,
    /// Text to ids and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Whether requests think that say nothing about it.
    pub default_thinking: bool,
    /// When the model was put here, in seconds since 1970.
    pub created: u64,
}

/// Limits of the API.
#[derive(Clone, Debug)]
pub struct ApiOptions {
    /// Longest request body in bytes.
    pub body_limit: usize,
    /// Longest time until a body is complete.
    pub body_timeout: Duration,
    /// Longest wait for the first token.
    pub first_token_deadline: Span,
    /// A stream that has nothing to say says a comment this often.
    pub comment_every: Duration,
    /// How long an error may still get its own HTTP status instead of a frame in a stream.
    pub status_wait: Duration,
}

impl Default for ApiOptions {
    fn default() -> Self {
        Self {
            // A prompt of a million tokens is 8 MB as ids and about 5 MB as text.
            body_limit: 32 << 20,
            body_timeout: Duration::from_secs(60),
            first_token_deadline: Span::secs(600),
            // Proxies cut silent connections after 60 s, some after 30 (SV-008).
            comment_every: Duration::from_secs(15),
            status_wait: Duration::from_secs(10),
        }
    }
}

/// The API of one model.
#[derive(Debug)]
pub struct Api {
    model: ModelInfo,
    core: CoreHandle,
    options: ApiOptions,
    /// Or why there is none: the tokenizer lacks tokens of the recipe.
    renderer: Result<ChatRenderer, RenderError>,
    ignored_fields: AtomicU64,
}

impl Api {
    /// An API that hands its requests to `core`.
    #[must_use]
    pub fn new(model: ModelInfo, core: CoreHandle, options: ApiOptions) -> Self {
        let renderer = ChatRenderer::new(Arc::clone(&model.tokenizer))
            .map(|renderer| renderer.with_default_thinking(model.default_thinking));
        Self { model, core, options, renderer, ignored_fields: AtomicU64::new(0) }
    }

    /// Fields of no known API that requests carried, since start.
    #[must_use]
    pub fn ignored_fields(&self) -> u64 {
        self.ignored_fields.load(Ordering::Relaxed)
    }

    /// For fuzzing: prepare `body` for each endpoint, and check what holds for any input. True where it is accepted.
    pub(crate) fn check_body(&self, body: &[u8]) -> [bool; 2] {
        [chat::prepare, completions::prepare].map(|prepare: prepare::Prepare| match prepare(self, body) {
            Ok(prepared) => {
                let total = prepared.prompt.len() + prepared.spec.max_tokens as usize;
                assert!(!prepared.prompt.is_empty() && total <= self.model.context_limit as usize);
                assert!(prepared.spec.max_tokens > 0 && prepared.spec.min_tokens <= prepared.spec.max_tokens);
                assert!(prepared.prompt.iter().all(|id| *id < self.model.vocab_size));
                true
            }
            Err(error) => {
                let mut body = Vec::new();
                error.write(&mut body);
                assert!(body.len() < 4096 && error.status().is_client_error());
                false
            }
        })
    }

    fn serves(&self, name: &str) -> bool {
        name == self.model.name || self.model.aliases.iter().any(|alias| alias == name)
    }
}

/// The routes under `/v1`.
pub fn router(api: Arc<Api>) -> Router {
    let only_post = || async { ApiError::method("POST") };
    let only_get = || async { ApiError::method("GET") };
    Router::new()
        .route("/v1/chat/completions", post(chat::complete).fallback(only_post))
        .route("/v1/completions", post(completions::complete).fallback(only_post))
        .route("/v1/models", get(models::list).fallback(only_get))
        .route("/v1/models/{*id}", get(models::one).fallback(only_get))
        .fallback(|| async { ApiError::not_found("no such path in this API") })
        // The handlers read bodies themselves, with a limit and a time-out.
        .layer(DefaultBodyLimit::disable())
        .with_state(api)
}
