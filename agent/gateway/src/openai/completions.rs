//! `POST /v1/completions`: a plain continuation of text or of token ids.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use serde_json::value::RawValue;

use super::Api;
use super::answer::AnswerBuilder;
use super::body::{Fields, whole};
use super::errors::ApiError;
use super::fields::{self, Endpoint};
use super::prepare::{Prepared, check_model};
use super::sampling::{Sampling, alternatives};
use super::write::Shape;

/// Output tokens where a request names no limit: OpenAI's own default.
const DEFAULT_MAX_TOKENS: u32 = 16;

/// The handler.
pub(crate) async fn complete(State(api): State<Arc<Api>>, request: Request) -> Response {
    super::respond::serve(api, request, prepare).await
}

/// Parse, encode, validate.
pub(crate) fn prepare(api: &Api, body: &[u8]) -> Result<Prepared, ApiError> {
    let fields = Fields::parse(body)?;
    let ignored = fields::check(&fields, Endpoint::Completions)?;
    check_model(api, &fields)?;
    let sampling = Sampling::read(&fields, false)?;
    let logprobs = alternatives(&fields, "logprobs")?;
    let want_ids = fields.flag("return_token_ids")?.unwrap_or(false);
    let prompt = prompt(api, &fields)?;
    let spec = sampling.spec(&api.model, prompt.len(), DEFAULT_MAX_TOKENS, logprobs)?;
    let tokenizer = Arc::clone(&api.model.tokenizer);
    Ok(Prepared {
        spec,
        builder: AnswerBuilder::completion(tokenizer, &sampling.stop, logprobs.is_some(), want_ids),
        shape: Shape {
            endpoint: Endpoint::Completions,
            thinks: false,
            logprobs: logprobs.is_some(),
            prompt_ids: want_ids.then(|| prompt.as_slice().into()),
            include_usage: sampling.include_usage,
        },
        prompt,
        stream: sampling.stream,
        ignored,
    })
}

/// A text, an array of ids, or an array that holds one of these.
fn prompt(api: &Api, fields: &Fields<'_>) -> Result<Vec<u32>, ApiError> {
    let expected = || ApiError::field("prompt", "expected a string or an array of token ids");
    let raw = fields.raw("prompt").ok_or_else(|| ApiError::field("prompt", "is missing"))?;
    let ids = match raw.get().as_bytes().first() {
        Some(b'"') => encode(api, raw)?,
        Some(b'[') => match raw.get()[1..].trim_start().as_bytes().first() {
            Some(b'"' | b'[') => {
                let prompts: Vec<&RawValue> = serde_json::from_str(raw.get()).map_err(|_| expected())?;
                match prompts[..] {
                    [one] if one.get().starts_with('"') => encode(api, one)?,
                    [one] => token_ids(api, one)?,
                    _ => return Err(ApiError::field("prompt", "one prompt per request is supported")),
                }
            }
            _ => token_ids(api, raw)?,
        },
        _ => return Err(expected()),
    };
    if ids.is_empty() {
        return Err(ApiError::field("prompt", "is empty; the model needs at least one token"));
    }
    Ok(ids)
}

fn encode(api: &Api, raw: &RawValue) -> Result<Vec<u32>, ApiError> {
    let text: String = serde_json::from_str(raw.get())
        .map_err(|_| ApiError::field("prompt", "is not a valid string (half of a surrogate pair)"))?;
    api.model.tokenizer.encode_text(&text).map_err(|error| ApiError::field("prompt", error))
}

/// Ids below the vocabulary's size; the first that is not is named by its place.
fn token_ids(api: &Api, raw: &RawValue) -> Result<Vec<u32>, ApiError> {
    let size = api.model.vocab_size;
    let wrong = |index: usize| {
        let problem = format!("expected a token id: a whole number from 0 to {}", size.saturating_sub(1));
        ApiError::field(format!("prompt[{index}]"), problem)
    };
    if let Ok(ids) = serde_json::from_str::<Vec<u32>>(raw.get()) {
        return match ids.iter().position(|id| *id >= size) {
            Some(index) => Err(wrong(index)),
            None => Ok(ids),
        };
    }
    let items: Vec<&RawValue> = serde_json::from_str(raw.get())
        .map_err(|_| ApiError::field("prompt", "expected a string or an array of token ids"))?;
    let read = |(index, item): (usize, &&RawValue)| {
        whole(item).filter(|id| *id < u64::from(size)).map(|id| id as u32).ok_or_else(|| wrong(index))
    };
    items.iter().enumerate().map(read).collect()
}
