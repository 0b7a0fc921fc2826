//! Rendering: a conversation to the model's prompt ids, through `deepseek-recipe`.
//!
//! Invariant: only ranges that rendering wrote become special ids; whatever stands in the conversation is encoded
//! as text. One exception belongs to the model family's format: the grounding tokens (`<｜ref｜>`, `<｜box｜>`
//! and their like) in earlier *assistant* messages are the model's own output and become their ids again.

use std::sync::Arc;

use deepseek_recipe::openai::ChatCompletionRequest;
use deepseek_recipe::request::{ConversionOptions, ModelVersion, ProtocolRequest};
use deepseek_recipe_core::special_tokens::SpecialToken;
use deepseek_recipe_encoding::PromptEncoding;
use deepseek_recipe_encoding::v4::dsv41::DeepseekV41Encoding;

use crate::chat::{ChatError, ChatRequest};
use crate::parse::AnswerOptions;
use crate::tokenizer::{PromptEncoder, Tokenizer};

/// The name under which the recipe converts requests; it never leaves this module.
const MODEL: &str = "model";

/// Special tokens that a prompt of this renderer can contain.
const WRITTEN: [SpecialToken; 16] = [
    SpecialToken::Bos,
    SpecialToken::Eos,
    SpecialToken::ThinkingStart,
    SpecialToken::ThinkingEnd,
    SpecialToken::System,
    SpecialToken::User,
    SpecialToken::Assistant,
    SpecialToken::Dsml,
    SpecialToken::Ref,
    SpecialToken::RefEnd,
    SpecialToken::Box,
    SpecialToken::BoxEnd,
    SpecialToken::Point,
    SpecialToken::PointEnd,
    SpecialToken::Polygon,
    SpecialToken::PolygonEnd,
];

/// Every special token of the model family's prompt format. [`ChatRenderer`] needs all but the last two, which
/// belong to reminders and images.
pub const RECIPE_TOKENS: [&str; 18] = {
    let mut tokens = [""; 18];
    let mut index = 0;
    while index < WRITTEN.len() {
        tokens[index] = WRITTEN[index].default_str();
        index += 1;
    }
    tokens[16] = SpecialToken::LatestReminder.default_str();
    tokens[17] = SpecialToken::Image.default_str();
    tokens
};

/// Why a conversation cannot be rendered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RenderError {
    /// The tokenizer has no ids for tokens that prompts need.
    #[error(
        "the tokenizer lacks the special tokens {}; chat needs a tokenizer.json of the model family, \
         a plain prompt works without",
        .0.join(" ")
    )]
    MissingTokens(Vec<String>),
    /// A field of the conversation.
    #[error(transparent)]
    Chat(#[from] ChatError),
    /// The recipe refuses the conversation (a tool's name or schema, mostly).
    #[error("the conversation cannot be rendered: {0}")]
    Refused(String),
    /// The prompt cannot be encoded.
    #[error("the prompt cannot be encoded: {0}")]
    Encode(String),
}

/// A conversation, ready for the engine.
#[derive(Debug, Clone)]
pub struct RenderedChat {
    /// The prompt.
    pub ids: Vec<u32>,
    /// How the answer is to be read; add stop strings here.
    pub answer: AnswerOptions,
}

/// Renders conversations for one tokenizer. Can be shared between threads.
pub struct ChatRenderer {
    encoding: DeepseekV41Encoding,
    options: ConversionOptions,
}

impl ChatRenderer {
    /// A renderer for `tokenizer`. Requests that say nothing about thinking think, as in the model family's API;
    /// see [`ChatRenderer::with_default_thinking`].
    ///
    /// # Errors
    ///
    /// [`RenderError::MissingTokens`] naming the special tokens that the tokenizer lacks.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Result<Self, RenderError> {
        let missing: Vec<String> = WRITTEN
            .iter()
            .map(|token| token.default_str())
            .filter(|content| tokenizer.special_id(content).is_none())
            .map(str::to_owned)
            .collect();
        if !missing.is_empty() {
            return Err(RenderError::MissingTokens(missing));
        }
        Ok(Self {
            encoding: DeepseekV41Encoding::new().with_tokenizer(PromptEncoder(tokenizer)),
            options: ConversionOptions::new().with_model_alias(MODEL, ModelVersion::DeepseekV41Flash),
        })
    }

    /// Whether requests think that give neither `thinking` nor `reasoning_effort`.
    #[must_use]
    pub fn with_default_thinking(mut self, thinking: bool) -> Self {
        self.options = self.options.with_default_thinking_mode(thinking);
        self
    }

    /// Render a conversation up to where the model's answer begins.
    ///
    /// # Errors
    ///
    /// [`RenderError`] naming the field where it is one field's fault.
    pub fn render(&self, request: &ChatRequest) -> Result<RenderedChat, RenderError> {
        request.check()?;
        let body = request.to_body(MODEL);
        let refused = |detail: String| RenderError::Refused(detail);
        let body: ChatCompletionRequest =
            serde_json::from_value(body).map_err(|error| refused(error.to_string()))?;
        let converted = body.convert(self.options.clone()).map_err(|error| refused(error.to_string()))?;
        let ids = self
            .encoding
            .encode(&converted.conversation)
            .map_err(|error| RenderError::Encode(error.to_string()))?;
        let answer = AnswerOptions {
            thinking: converted.conversation.thinking_mode,
            tools: converted.parsing_options.parse_tool_calls,
            stop: Vec::new(),
        };
        Ok(RenderedChat { ids, answer })
    }
}

impl std::fmt::Debug for ChatRenderer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let thinking = self.options.default_thinking_mode;
        f.debug_struct("ChatRenderer").field("default_thinking", &thinking).finish_non_exhaustive()
    }
}
