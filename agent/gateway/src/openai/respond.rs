//! The way of a request through its handler: read, prepare, hand to the core, answer.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};

use super::errors::ApiError;
use super::prepare::{Prepare, Prepared};
use super::write::Writer;
use super::{Api, body, stream, whole};
use crate::core::{Caller, Order};

/// Bodies longer than this are parsed and tokenized on a thread that may block; shorter ones take less than the
/// hand-over costs the others.
const INLINE_BYTES: usize = 16 << 10;
/// Longest id that a client may give its request.
const MAX_CLIENT_ID: usize = 128;
/// Most names in the header of ignored fields, and the longest of them.
const MAX_IGNORED: (usize, usize) = (16, 64);

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const IGNORED: HeaderName = HeaderName::from_static("x-deepinfer-ignored");

/// Answer a request.
pub(crate) async fn serve(api: Arc<Api>, request: Request, prepare: Prepare) -> Response {
    let client_id = client_id(request.headers());
    let echo = client_id.as_deref().and_then(|id| HeaderValue::from_str(id).ok());
    let mut response = match answer(api, request, prepare, client_id).await {
        Ok(response) => response,
        Err(error) => error.into_response(),
    };
    if let Some(id) = echo {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

async fn answer(
    api: Arc<Api>,
    request: Request,
    prepare: Prepare,
    client_id: Option<Arc<str>>,
) -> Result<Response, ApiError> {
    let (mut parts, body) = request.into_parts();
    let options = &api.options;
    let bytes = body::read(&parts.headers, body, options.body_limit, options.body_timeout).await?;
    let caller = parts.extensions.remove::<Caller>().unwrap_or_else(Caller::open);
    let prepared = prepare_somewhere(&api, bytes, prepare).await?;
    let ignored = prepared.ignored.clone();
    let mut response = generate(&api, prepared, caller, client_id).await?;
    if !ignored.is_empty() {
        api.ignored_fields.fetch_add(ignored.len() as u64, Ordering::Relaxed);
        if let Some(names) = ignored_header(&ignored) {
            response.headers_mut().insert(IGNORED, names);
        }
    }
    Ok(response)
}

async fn prepare_somewhere(api: &Arc<Api>, bytes: Bytes, prepare: Prepare) -> Result<Prepared, ApiError> {
    if bytes.len() <= INLINE_BYTES {
        return prepare(api, &bytes);
    }
    let api = Arc::clone(api);
    tokio::task::spawn_blocking(move || prepare(&api, &bytes))
        .await
        .unwrap_or_else(|_| Err(ApiError::internal("the request could not be read")))
}

async fn generate(
    api: &Api,
    prepared: Prepared,
    caller: Caller,
    client_id: Option<Arc<str>>,
) -> Result<Response, ApiError> {
    let Prepared { prompt, spec, builder, shape, stream: streamed, .. } = prepared;
    let prompt_tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
    let order = Order {
        caller,
        prompt: prompt.into(),
        spec,
        reuse: true,
        first_token_deadline: api.options.first_token_deadline,
        client_id,
    };
    let events = api.core.submit(order).map_err(ApiError::ended)?;
    let id = events.id();
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let tokenizer = Arc::clone(&api.model.tokenizer);
    let writer = Writer::new(tokenizer, shape, id, &api.model.name, created, streamed);
    let answer = stream::Answer::new(events, builder, writer, prompt_tokens);
    let mut response =
        if streamed { stream::respond(answer, &api.options).await? } else { whole::respond(answer).await? };
    if let Ok(id) = HeaderValue::from_str(&id.to_string()) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    Ok(response)
}

/// The client's name for its request, if it is one that logs and headers can carry.
fn client_id(headers: &HeaderMap) -> Option<Arc<str>> {
    let id = headers.get(REQUEST_ID)?.to_str().ok()?;
    let plain = !id.is_empty() && id.len() <= MAX_CLIENT_ID && id.bytes().all(|byte| byte.is_ascii_graphic());
    plain.then(|| Arc::from(id))
}

fn ignored_header(names: &[String]) -> Option<HeaderValue> {
    let (most, longest) = MAX_IGNORED;
    let clean = |name: &String| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        name.chars().take(longest).map(|c| if plain(c) { c } else { '?' }).collect::<String>()
    };
    HeaderValue::from_str(&names.iter().take(most).map(clean).collect::<Vec<_>>().join(", ")).ok()
}
