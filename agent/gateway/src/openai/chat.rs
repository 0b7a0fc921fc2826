//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use deepseek_recipe_core::special_tokens::SpecialToken;
use serde_json::{Map, Value};

use super::Api;
use super::answer::AnswerBuilder;
use super::body::Fields;
use super::errors::ApiError;
use super::fields::{self, Endpoint};
use super::prepare::{Prepared, check_model};
use super::sampling::{Sampling, alternatives};
use super::write::Shape;
use crate::chat::{ChatError, ChatRequest, ReasoningEffort};
use crate::render::RenderError;

/// Output tokens where a request names no limit (serving.md J.1): without thinking, with it, at the highest effort.
const DEFAULT_MAX_TOKENS: [u32; 3] = [8_192, 65_536, 131_072];

/// The handler.
pub(crate) async fn complete(State(api): State<Arc<Api>>, request: Request) -> Response {
    super::respond::serve(api, request, prepare).await
}

/// Parse, render, validate.
pub(crate) fn prepare(api: &Api, body: &[u8]) -> Result<Prepared, ApiError> {
    let fields = Fields::parse(body)?;
    let ignored = fields::check(&fields, Endpoint::Chat)?;
    check_model(api, &fields)?;
    let sampling = Sampling::read(&fields, true)?;
    let logprobs = logprobs(&fields)?;
    let chat = conversation(&fields)?;
    let renderer = api.renderer.as_ref().map_err(|error| ApiError::field("messages", error))?;
    let rendered = renderer.render(&chat).map_err(explain)?;
    check_answerable(api, &rendered.ids)?;
    let top_effort = matches!(chat.reasoning_effort, Some(ReasoningEffort::Ultra | ReasoningEffort::Max));
    let mode = if rendered.answer.thinking { 1 + usize::from(top_effort) } else { 0 };
    let spec = sampling
        .spec(&api.model, rendered.ids.len(), DEFAULT_MAX_TOKENS[mode], logprobs)
        .map_err(|error| error.about("prompt", "messages"))?;
    let thinks = rendered.answer.thinking;
    let mut answer = rendered.answer;
    answer.stop = sampling.stop;
    Ok(Prepared {
        prompt: rendered.ids,
        spec,
        builder: AnswerBuilder::chat(Arc::clone(&api.model.tokenizer), answer, logprobs.is_some()),
        shape: Shape {
            endpoint: Endpoint::Chat,
            thinks,
            logprobs: logprobs.is_some(),
            prompt_ids: None,
            include_usage: sampling.include_usage,
        },
        stream: sampling.stream,
        ignored,
    })
}

fn logprobs(fields: &Fields<'_>) -> Result<Option<u8>, ApiError> {
    let wanted = fields.flag("logprobs")?.unwrap_or(false);
    let top = alternatives(fields, "top_logprobs")?;
    if top.is_some_and(|top| top > 0) && !wanted {
        return Err(ApiError::field("top_logprobs", "needs `logprobs: true`"));
    }
    Ok(wanted.then(|| top.unwrap_or(0)))
}

/// Messages, tools and thinking, through the same reader as chat files.
fn conversation(fields: &Fields<'_>) -> Result<ChatRequest, ApiError> {
    let mut chat = Map::new();
    for name in ["messages", "tools", "thinking", "reasoning_effort"] {
        if let Some(value) = fields.value(name)? {
            chat.insert(name.to_owned(), value);
        }
    }
    if !uses_tools(fields)? {
        // As the recipe renders `tool_choice: none`: as if no tools had been offered.
        if let Some(tools) = chat.remove("tools") {
            check_tools(tools)?;
        }
    }
    ChatRequest::from_value(Value::Object(chat)).map_err(|error| explain(RenderError::Chat(error)))
}

/// Tools that are not rendered must still be tools.
fn check_tools(tools: Value) -> Result<(), ApiError> {
    let messages = serde_json::json!([{ "role": "user", "content": "" }]);
    let chat = serde_json::json!({ "messages": messages, "tools": tools });
    ChatRequest::from_value(chat).map(drop).map_err(|error| explain(RenderError::Chat(error)))
}

fn uses_tools(fields: &Fields<'_>) -> Result<bool, ApiError> {
    match fields.value("tool_choice")? {
        None => Ok(true),
        Some(Value::String(choice)) if choice == "auto" => Ok(true),
        Some(Value::String(choice)) if choice == "none" => Ok(false),
        Some(Value::String(choice)) if choice == "required" => Err(ApiError::unsupported(
            "tool_choice",
            "\"required\" is not supported yet; use \"auto\" or \"none\"",
        )),
        Some(Value::Object(_)) => Err(ApiError::unsupported(
            "tool_choice",
            "a named function is not supported yet; use \"auto\" or \"none\"",
        )),
        Some(_) => Err(ApiError::field("tool_choice", "expected \"auto\" or \"none\"")),
    }
}

/// The prompt must end where the model's turn begins; else the model would answer nothing (SV-049).
fn check_answerable(api: &Api, ids: &[u32]) -> Result<(), ApiError> {
    let turn = [SpecialToken::ThinkingStart, SpecialToken::ThinkingEnd]
        .map(|token| api.model.tokenizer.special_id(token.default_str()));
    if ids.last().is_some_and(|last| turn.contains(&Some(*last))) {
        return Ok(());
    }
    Err(ApiError::field("messages", "the last message must be one that the model can answer (user or tool)"))
}

fn explain(error: RenderError) -> ApiError {
    match error {
        RenderError::Chat(ChatError::Field { field, problem }) => ApiError::field(field, problem),
        RenderError::Chat(error) => ApiError::bad_request(error.to_string()),
        RenderError::Refused(detail) => {
            // The recipe names the field between quotes, if it does.
            let named = detail.split_once("'").and_then(|(_, rest)| rest.split_once("'"));
            let field = named.map(|(field, _)| field).filter(|field| field.starts_with("tools["));
            ApiError::field(field.unwrap_or("messages"), &detail)
        }
        error @ (RenderError::MissingTokens(_) | RenderError::Encode(_)) => {
            ApiError::field("messages", error)
        }
    }
}
