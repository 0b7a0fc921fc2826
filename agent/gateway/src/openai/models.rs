//! `GET /v1/models` and `GET /v1/models/{id}`. The model is listed only while requests would be served (SV-104).

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use deepinfer_protocol::Span;
use http::{HeaderValue, header};

use super::errors::ApiError;
use super::json::{push_string, push_u64};
use super::{Api, ModelInfo};

/// The handler of the list.
pub(crate) async fn list(State(api): State<Arc<Api>>) -> Response {
    let mut body = br#"{"object":"list","data":["#.to_vec();
    if api.core.is_ready() {
        write(&api.model, &mut body);
    }
    body.extend_from_slice(b"]}");
    json(body)
}

/// The handler of one model. Aliases have an entry too.
pub(crate) async fn one(State(api): State<Arc<Api>>, Path(id): Path<String>) -> Response {
    if !api.serves(&id) {
        return ApiError::unknown_model(&api.model.name).into_response();
    }
    if !api.core.is_ready() {
        return ApiError::unavailable("the model is not ready yet", Span::secs(1)).into_response();
    }
    let mut body = Vec::new();
    write(&api.model, &mut body);
    json(body)
}

fn write(model: &ModelInfo, body: &mut Vec<u8>) {
    body.extend_from_slice(br#"{"id":"#);
    push_string(body, &model.name);
    body.extend_from_slice(br#","object":"model","created":"#);
    push_u64(body, model.created);
    body.extend_from_slice(br#","owned_by":"deepinfer","max_model_len":"#);
    push_u64(body, model.context_limit.into());
    body.push(b'}');
}

fn json(body: Vec<u8>) -> Response {
    let mut response = Response::new(Body::from(body));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
