//! Answers as one JSON object: everything that a stream would have said, gathered.

use axum::body::Body;
use axum::response::Response;
use http::{HeaderValue, header};

use super::answer::Step;
use super::errors::ApiError;
use super::stream::Answer;

/// Wait for the end, then answer.
pub(crate) async fn respond(mut answer: Answer) -> Result<Response, ApiError> {
    let mut all = Step::default();
    let end = loop {
        let event = answer.events.next().await;
        if let Some(end) = answer.take(event, &mut all)? {
            break end;
        }
    };
    let mut body = Vec::with_capacity(512);
    let usage = answer.usage();
    answer.writer.whole(&all, end, usage, &mut body);
    let mut response = Response::new(Body::from(body));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}
