//! Errors in the form that clients of OpenAI's API expect: `{"error": {"message", "type", "param", "code"}}`.
//!
//! Invariants: a body stays under 4 kB whatever was sent (SV-110): message and field name are cut; every 429 and
//! 503 says when to try again.

use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use deepinfer_protocol::Span;
use deepinfer_serving::gateway::EndedEarly;
use http::{HeaderValue, StatusCode, header};

use super::json::{push_escaped, push_string};

/// Longest message in bytes, before escaping (which makes at most six bytes of one).
const MESSAGE_LIMIT: usize = 500;
/// Longest field name in bytes.
const PARAM_LIMIT: usize = 100;

/// The code of an error response, in its extensions: a label for metrics from a closed set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorCode(pub &'static str);

/// An answer that is an error.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ApiError {
    status: StatusCode,
    kind: &'static str,
    code: &'static str,
    message: String,
    param: Option<String>,
    retry_after: Option<Span>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: &'static str, message: impl Into<String>) -> Self {
        let mut message = message.into();
        cut(&mut message, MESSAGE_LIMIT);
        Self { status, kind, code, message, param: None, retry_after: None }
    }

    /// 400: a field of the request. The message must not repeat what was sent.
    #[must_use]
    pub fn field(param: impl Into<String>, problem: impl std::fmt::Display) -> Self {
        let mut param = param.into();
        cut(&mut param, PARAM_LIMIT);
        let message = format!("`{param}`: {problem}");
        let error = Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", "invalid_value", message);
        Self { param: Some(param), ..error }
    }

    /// 400: a field that would change the answer and is not supported.
    #[must_use]
    pub fn unsupported(param: &str, advice: &str) -> Self {
        Self { code: "unsupported_parameter", ..Self::field(param, advice) }
    }

    /// The same error, if it is about the field `from`, about the field `to`.
    #[must_use]
    pub(crate) fn about(self, from: &str, to: &str) -> Self {
        if self.param.as_deref() != Some(from) {
            return self;
        }
        let message = self.message.replacen(&format!("`{from}`"), &format!("`{to}`"), 1);
        Self { message, param: Some(to.to_owned()), ..self }
    }

    /// 400: the request as a whole.
    #[must_use]
    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", "invalid_request", message)
    }

    /// 400: prompt and answer do not fit into the context.
    #[must_use]
    pub fn too_long(param: &'static str, tokens: usize, limit: u32) -> Self {
        let problem = format!(
            "the prompt has {tokens} tokens; the context limit of this model is {limit} tokens, one of which the \
             answer needs; shorten the prompt by at least {}",
            tokens.saturating_sub(limit as usize) + 1
        );
        Self { code: "context_length_exceeded", ..Self::field(param, problem) }
    }

    /// 401.
    #[must_use]
    pub fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "authentication_error", "invalid_api_key", message)
    }

    /// 404 for a path.
    #[must_use]
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", "not_found", message)
    }

    /// 404 for a model.
    #[must_use]
    pub fn unknown_model(served: &str) -> Self {
        let message = format!("this model is not served here; `model` must be {served:?}");
        let error = Self::new(StatusCode::NOT_FOUND, "invalid_request_error", "model_not_found", message);
        Self { param: Some("model".to_owned()), ..error }
    }

    /// 405.
    #[must_use]
    pub fn method(allowed: &str) -> Self {
        let message = format!("this path takes {allowed} only");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", "method_not_allowed", message)
    }

    /// 408: the body did not come in time.
    #[must_use]
    pub fn body_timeout(limit: Duration) -> Self {
        let message = format!("the request body did not arrive within {} s", limit.as_secs());
        Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", "request_timeout", message)
    }

    /// 413: the body is too long.
    #[must_use]
    pub fn body_too_large(limit: usize) -> Self {
        let message = format!("the request body is longer than {limit} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", "body_too_large", message)
    }

    /// 415: not JSON.
    #[must_use]
    pub fn content_type() -> Self {
        let message = "the request body must be JSON; send the header `content-type: application/json`";
        Self::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "invalid_request_error",
            "unsupported_media_type",
            message,
        )
    }

    /// 429: `reason` is a label for metrics.
    #[must_use]
    pub fn overloaded(reason: &'static str, message: impl Into<String>, retry_after: Span) -> Self {
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", reason, message);
        Self { retry_after: Some(retry_after), ..error }
    }

    /// 500.
    #[must_use]
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", "internal_error", message)
    }

    /// 503.
    #[must_use]
    pub fn unavailable(message: impl Into<String>, retry_after: Span) -> Self {
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", "unavailable", message);
        Self { retry_after: Some(retry_after), ..error }
    }

    /// The answer for a request that ended without a finish reason.
    #[must_use]
    pub fn ended(why: EndedEarly) -> Self {
        match why {
            EndedEarly::Overloaded { reason, detail, retry_after } => {
                Self::overloaded(reason.as_str(), detail, retry_after)
            }
            EndedEarly::TooLarge { detail } => {
                Self { code: "context_length_exceeded", ..Self::bad_request(detail) }
            }
            EndedEarly::Unavailable { detail, retry_after } => Self::unavailable(detail, retry_after),
            EndedEarly::Failed { detail } => Self::internal(detail),
            // The client is there, or nobody would ask: the gateway ended it.
            EndedEarly::Cancelled => {
                Self::unavailable("the request was cancelled: the gateway is shutting down", Span::secs(5))
            }
        }
    }

    /// HTTP status.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// Label for metrics.
    #[must_use]
    pub fn code(&self) -> &'static str {
        self.code
    }

    /// Name of the field, if it is about one.
    #[must_use]
    pub fn param(&self) -> Option<&str> {
        self.param.as_deref()
    }

    /// The JSON body, on one line.
    pub(crate) fn write(&self, buffer: &mut Vec<u8>) {
        buffer.extend_from_slice(br#"{"error":{"message":"#);
        push_string(buffer, &self.message);
        buffer.extend_from_slice(br#","type":""#);
        push_escaped(buffer, self.kind);
        buffer.extend_from_slice(br#"","param":"#);
        match &self.param {
            Some(param) => push_string(buffer, param),
            None => buffer.extend_from_slice(b"null"),
        }
        buffer.extend_from_slice(br#","code":""#);
        push_escaped(buffer, self.code);
        buffer.extend_from_slice(br#""}}"#);
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut body = Vec::with_capacity(256);
        self.write(&mut body);
        let mut response = Response::new(Body::from(body));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(after) = self.retry_after {
            // Whole seconds, at least one: 0 would invite a loop.
            let seconds = after.0.div_ceil(1_000_000_000).max(1);
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response.extensions_mut().insert(ErrorCode(self.code));
        response
    }
}

/// Shorten to `limit` bytes at a character's border.
fn cut(text: &mut String, limit: usize) {
    if text.len() > limit {
        text.truncate(text.floor_char_boundary(limit));
        text.push_str("...");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_small_whatever_the_message() {
        let error = ApiError::field("\u{1}".repeat(5000), "\u{1}".repeat(50_000));
        let mut body = Vec::new();
        error.write(&mut body);
        assert!(body.len() < 4096, "{} bytes", body.len());
        let read: serde_json::Value = serde_json::from_slice(&body).unwrap();
        assert!(read["error"]["message"].is_string());
    }

    #[test]
    fn a_wait_is_rounded_up_to_whole_seconds() {
        for (wait, seconds) in [(Span::ZERO, "1"), (Span::millis(1), "1"), (Span::millis(1001), "2")] {
            let response = ApiError::overloaded("queue_full", "full", wait).into_response();
            assert_eq!(response.headers()[header::RETRY_AFTER], seconds);
            assert_eq!(response.extensions().get::<ErrorCode>(), Some(&ErrorCode("queue_full")));
        }
    }
}
