//! Conversations: messages, tools and how the model shall think, as a program builds them. `chat_file` reads them
//! from JSON. Every refusal names the field by its path, `messages[2].content`.

use serde_json::{Value, json};

pub use deepseek_recipe::request::RequestReasoningEffort as ReasoningEffort;

/// Why a conversation cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// The text is not JSON.
    #[error("the chat is not valid JSON: {0}")]
    Json(String),
    /// A field is missing, of the wrong kind, or contradicts another.
    #[error("`{field}`: {problem}")]
    Field {
        /// Path of the field, such as `messages[2].content`.
        field: String,
        /// What is wrong and what is expected.
        problem: String,
    },
}

pub(crate) fn refuse(field: impl Into<String>, problem: impl Into<String>) -> ChatError {
    ChatError::Field { field: field.into(), problem: problem.into() }
}

/// Most tool calls of one message: each is compared with all others.
const MAX_CALLS: usize = 1024;

/// A conversation to be answered.
#[derive(Debug, Clone, Default)]
pub struct ChatRequest {
    /// The messages, oldest first.
    pub messages: Vec<ChatMessage>,
    /// The tools that the model may call.
    pub tools: Vec<ChatTool>,
    /// Whether the model thinks before it answers. `None`: a reasoning effort decides, else the renderer's
    /// default.
    pub thinking: Option<bool>,
    /// How thoroughly it thinks. `None` is the model's default; ignored where thinking is off.
    pub reasoning_effort: Option<ReasoningEffort>,
}

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChatMessage {
    /// Instructions (roles `system` and `developer`).
    System {
        /// The text.
        content: String,
    },
    /// What the user says.
    User {
        /// The text.
        content: String,
    },
    /// An earlier answer of the model.
    Assistant {
        /// The visible answer; may be empty next to tool calls.
        content: String,
        /// The thinking that led to it.
        reasoning_content: Option<String>,
        /// The tools that it called; each needs a [`ChatMessage::Tool`] right after this message.
        tool_calls: Vec<ChatToolCall>,
    },
    /// The result of a tool call.
    Tool {
        /// The [`ChatToolCall::id`] that this answers.
        tool_call_id: String,
        /// The result.
        content: String,
    },
}

impl ChatMessage {
    /// A system message.
    pub fn system(content: impl Into<String>) -> Self {
        Self::System { content: content.into() }
    }

    /// A user message.
    pub fn user(content: impl Into<String>) -> Self {
        Self::User { content: content.into() }
    }

    /// An earlier answer without thinking or tool calls.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::Assistant { content: content.into(), reasoning_content: None, tool_calls: Vec::new() }
    }
}

/// A tool call in an earlier answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatToolCall {
    /// Connects the call with its result.
    pub id: String,
    /// Name of the function.
    pub name: String,
    /// Arguments as the text of a JSON object.
    pub arguments: String,
}

/// A tool that the model may call.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatTool {
    /// Name of the function: letters, digits, `_` and `-`, at most 128 bytes.
    pub name: String,
    /// What it does.
    pub description: Option<String>,
    /// JSON Schema of the arguments, of type object.
    pub parameters: Option<Value>,
    /// Whether the schema is to be tightened: all properties required, no others allowed.
    pub strict: Option<bool>,
}

impl ChatRequest {
    /// A conversation without tools, thinking as the renderer's default says.
    #[must_use]
    pub fn new(messages: Vec<ChatMessage>) -> Self {
        Self { messages, ..Self::default() }
    }

    /// Check what one message alone does not show: there are messages, every tool call has its result right
    /// after it, and every result belongs to a call.
    pub(crate) fn check(&self) -> Result<(), ChatError> {
        if self.messages.is_empty() {
            return Err(refuse("messages", "is empty; a conversation needs at least one message"));
        }
        let mut open: Vec<&str> = Vec::new();
        let mut caller = 0;
        for (index, message) in self.messages.iter().enumerate() {
            if let ChatMessage::Tool { tool_call_id, .. } = message {
                let position = open.iter().position(|id| id == tool_call_id).ok_or_else(|| {
                    let problem = "answers no open tool call of the message before it";
                    refuse(format!("messages[{index}].tool_call_id"), problem)
                })?;
                open.remove(position);
                continue;
            }
            self.all_answered(&open, caller)?;
            if let ChatMessage::Assistant { tool_calls, .. } = message {
                if tool_calls.len() > MAX_CALLS {
                    let problem = format!("more than {MAX_CALLS} calls in one message");
                    return Err(refuse(format!("messages[{index}].tool_calls"), problem));
                }
                open = tool_calls.iter().map(|call| call.id.as_str()).collect();
                caller = index;
                for (call, id) in open.iter().enumerate() {
                    if open[..call].contains(id) {
                        let field = format!("messages[{index}].tool_calls[{call}].id");
                        return Err(refuse(field, "is used by two calls"));
                    }
                }
            }
        }
        self.all_answered(&open, caller)
    }

    fn all_answered(&self, open: &[&str], caller: usize) -> Result<(), ChatError> {
        if open.is_empty() {
            return Ok(());
        }
        let problem = "a call has no `tool` message with its result after this message";
        Err(refuse(format!("messages[{caller}].tool_calls"), problem))
    }

    /// The Chat Completions body that `deepseek-recipe` converts.
    pub(crate) fn to_body(&self, model: &str) -> Value {
        let mut body = json!({
            "model": model,
            "messages": self.messages.iter().map(message_body).collect::<Vec<_>>(),
        });
        if !self.tools.is_empty() {
            body["tools"] = self.tools.iter().map(tool_body).collect();
        }
        if let Some(thinking) = self.thinking {
            body["thinking"] = json!({ "type": if thinking { "enabled" } else { "disabled" } });
        }
        if let Some(effort) = self.reasoning_effort {
            body["reasoning_effort"] = json!(effort);
        }
        body
    }
}

fn message_body(message: &ChatMessage) -> Value {
    match message {
        ChatMessage::System { content } => json!({ "role": "system", "content": content }),
        ChatMessage::User { content } => json!({ "role": "user", "content": content }),
        ChatMessage::Tool { tool_call_id, content } => {
            json!({ "role": "tool", "tool_call_id": tool_call_id, "content": content })
        }
        ChatMessage::Assistant { content, reasoning_content, tool_calls } => {
            let mut body = json!({ "role": "assistant", "content": content });
            if let Some(reasoning) = reasoning_content {
                body["reasoning_content"] = json!(reasoning);
            }
            if !tool_calls.is_empty() {
                body["tool_calls"] = tool_calls
                    .iter()
                    .map(|call| {
                        let function = json!({ "name": call.name, "arguments": call.arguments });
                        json!({ "id": call.id, "type": "function", "function": function })
                    })
                    .collect();
            }
            body
        }
    }
}

fn tool_body(tool: &ChatTool) -> Value {
    let mut function = json!({ "name": tool.name });
    if let Some(description) = &tool.description {
        function["description"] = json!(description);
    }
    if let Some(parameters) = &tool.parameters {
        function["parameters"] = parameters.clone();
    }
    if let Some(strict) = tool.strict {
        function["strict"] = json!(strict);
    }
    json!({ "type": "function", "function": function })
}
