//! Reading conversations from JSON, in the OpenAI-like form: an array of messages, or an object with `messages`,
//! `tools`, `thinking` and `reasoning_effort`.
//!
//! A key that is not known is refused unless its value says nothing (null or empty): a misspelt field must not
//! silently change the answer. Refusals name the place and repeat no value: they may reach logs.

use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};

use crate::chat::{ChatError, ChatMessage, ChatRequest, ChatTool, ChatToolCall, ReasoningEffort, refuse};

/// Text parts of one message are joined with a blank line, as the model family's API does.
const PART_SEPARATOR: &str = "\n\n";

impl ChatRequest {
    /// Read a chat file: a JSON array of messages, or an object with `messages` and, if wanted, `tools`,
    /// `thinking` (true, false or `{"type": "enabled"}`) and `reasoning_effort`.
    ///
    /// # Errors
    ///
    /// [`ChatError`] naming the position or the field.
    pub fn parse(text: &str) -> Result<Self, ChatError> {
        let value = serde_json::from_str(text).map_err(|error| ChatError::Json(error.to_string()))?;
        Self::from_value(value)
    }

    /// As [`ChatRequest::parse`], from a value that is already read.
    ///
    /// # Errors
    ///
    /// [`ChatError::Field`].
    pub fn from_value(value: Value) -> Result<Self, ChatError> {
        let file = match value {
            Value::Array(messages) => Map::from_iter([("messages".to_owned(), Value::Array(messages))]),
            Value::Object(file) => file,
            _ => {
                return Err(refuse(
                    "top level",
                    "expected an array of messages or an object with `messages`",
                ));
            }
        };
        refuse_unknown(&file, "", &["messages", "tools", "thinking", "reasoning_effort"])?;
        let messages = match file.get("messages") {
            Some(Value::Array(messages)) => messages,
            Some(_) => return Err(refuse("messages", "expected an array")),
            None => return Err(refuse("messages", "missing")),
        };
        let messages = messages.iter().enumerate().map(|(index, message)| read_message(index, message));
        let tools = match file.get("tools") {
            None | Some(Value::Null) => &[],
            Some(Value::Array(tools)) => tools.as_slice(),
            Some(_) => return Err(refuse("tools", "expected an array")),
        };
        let tools = tools.iter().enumerate().map(|(index, tool)| read_tool(index, tool));
        let request = Self {
            messages: messages.collect::<Result<_, _>>()?,
            tools: tools.collect::<Result<_, _>>()?,
            thinking: read_thinking(file.get("thinking"))?,
            reasoning_effort: match file.get("reasoning_effort") {
                None | Some(Value::Null) => None,
                Some(Value::String(name)) => Some(Self::effort(name)?),
                Some(_) => return Err(refuse("reasoning_effort", "expected a string")),
            },
        };
        request.check()?;
        Ok(request)
    }

    /// A reasoning effort by its name: `none`, `minimal`, `low`, `medium`, `high`, `xhigh`, `ultra` or `max`.
    ///
    /// # Errors
    ///
    /// [`ChatError::Field`] listing the names.
    pub fn effort(name: &str) -> Result<ReasoningEffort, ChatError> {
        serde_json::from_value(json!(name)).map_err(|_| {
            refuse("reasoning_effort", "expected none, minimal, low, medium, high, xhigh, ultra or max")
        })
    }
}

impl<'de> Deserialize<'de> for ChatRequest {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::from_value(Value::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

fn read_message(index: usize, message: &Value) -> Result<ChatMessage, ChatError> {
    let path = format!("messages[{index}]");
    let message = object(message, &path)?;
    let role = text(message, &path, "role")?;
    let known: &[&str] = match role {
        "system" | "developer" | "user" => &["role", "content", "name"],
        "assistant" => &["role", "content", "name", "reasoning_content", "tool_calls"],
        "tool" => &["role", "content", "name", "tool_call_id"],
        _ => {
            return Err(refuse(
                format!("{path}.role"),
                "is not one of system, developer, user, assistant, tool",
            ));
        }
    };
    refuse_unknown(message, &path, known)?;
    let content = || read_content(message.get("content"), &path);
    Ok(match role {
        "user" => ChatMessage::User { content: content()? },
        "assistant" => read_assistant(message, &path)?,
        "tool" => ChatMessage::Tool {
            tool_call_id: text(message, &path, "tool_call_id")?.to_owned(),
            content: content()?,
        },
        _ => ChatMessage::System { content: content()? },
    })
}

fn read_assistant(message: &Map<String, Value>, path: &str) -> Result<ChatMessage, ChatError> {
    let calls = match message.get("tool_calls") {
        None | Some(Value::Null) => &[],
        Some(Value::Array(calls)) => calls.as_slice(),
        Some(_) => return Err(refuse(format!("{path}.tool_calls"), "expected an array")),
    };
    let calls =
        calls.iter().enumerate().map(|(index, call)| read_call(call, format!("{path}.tool_calls[{index}]")));
    let tool_calls = calls.collect::<Result<Vec<_>, _>>()?;
    let content = match message.get("content") {
        None | Some(Value::Null) if !tool_calls.is_empty() => String::new(),
        content => read_content(content, path)?,
    };
    let reasoning_content = match message.get("reasoning_content") {
        None | Some(Value::Null) => None,
        Some(Value::String(reasoning)) => Some(reasoning.clone()),
        Some(_) => return Err(refuse(format!("{path}.reasoning_content"), "expected a string")),
    };
    Ok(ChatMessage::Assistant { content, reasoning_content, tool_calls })
}

fn read_call(call: &Value, path: String) -> Result<ChatToolCall, ChatError> {
    let call = object(call, &path)?;
    refuse_unknown(call, &path, &["id", "type", "function", "index"])?;
    check_function_type(call, &path)?;
    let function = object(call.get("function").unwrap_or(&Value::Null), &format!("{path}.function"))?;
    let path_of_function = format!("{path}.function");
    refuse_unknown(function, &path_of_function, &["name", "arguments"])?;
    Ok(ChatToolCall {
        id: text(call, &path, "id")?.to_owned(),
        name: text(function, &path_of_function, "name")?.to_owned(),
        arguments: text(function, &path_of_function, "arguments")?.to_owned(),
    })
}

fn read_tool(index: usize, tool: &Value) -> Result<ChatTool, ChatError> {
    let path = format!("tools[{index}]");
    let tool = object(tool, &path)?;
    refuse_unknown(tool, &path, &["type", "function"])?;
    check_function_type(tool, &path)?;
    let path = format!("{path}.function");
    let function = object(tool.get("function").unwrap_or(&Value::Null), &path)?;
    refuse_unknown(function, &path, &["name", "description", "parameters", "strict"])?;
    Ok(ChatTool {
        name: text(function, &path, "name")?.to_owned(),
        description: match function.get("description") {
            None | Some(Value::Null) => None,
            Some(Value::String(description)) => Some(description.clone()),
            Some(_) => return Err(refuse(format!("{path}.description"), "expected a string")),
        },
        parameters: function.get("parameters").filter(|schema| !schema.is_null()).cloned(),
        strict: match function.get("strict") {
            None | Some(Value::Null) => None,
            Some(Value::Bool(strict)) => Some(*strict),
            Some(_) => return Err(refuse(format!("{path}.strict"), "expected true or false")),
        },
    })
}

fn check_function_type(value: &Map<String, Value>, path: &str) -> Result<(), ChatError> {
    match value.get("type") {
        None => Ok(()),
        Some(kind) if kind == "function" => Ok(()),
        Some(_) => Err(refuse(format!("{path}.type"), "only \"function\" is supported")),
    }
}

/// A string, or a list of text parts.
fn read_content(content: Option<&Value>, path: &str) -> Result<String, ChatError> {
    let field = format!("{path}.content");
    let parts = match content {
        Some(Value::String(content)) => return Ok(content.clone()),
        Some(Value::Array(parts)) => parts,
        None | Some(Value::Null) => return Err(refuse(field, "missing")),
        Some(_) => return Err(refuse(field, "expected a string or a list of text parts")),
    };
    let mut texts = Vec::with_capacity(parts.len());
    for (index, part) in parts.iter().enumerate() {
        let field = format!("{field}[{index}]");
        let part = object(part, &field)?;
        match text(part, &field, "type")? {
            "text" => {}
            "image_url" | "image" | "file" => return Err(refuse(field, "images are not supported yet")),
            _ => return Err(refuse(format!("{field}.type"), "only \"text\" is supported")),
        }
        refuse_unknown(part, &field, &["type", "text"])?;
        texts.push(text(part, &field, "text")?);
    }
    Ok(texts.join(PART_SEPARATOR))
}

fn read_thinking(thinking: Option<&Value>) -> Result<Option<bool>, ChatError> {
    let expected = "expected true, false or {\"type\": \"enabled\" or \"disabled\"}";
    match thinking {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Bool(thinking)) => Ok(Some(*thinking)),
        Some(Value::Object(thinking)) => {
            refuse_unknown(thinking, "thinking", &["type"])?;
            match thinking.get("type").and_then(Value::as_str) {
                Some("enabled" | "adaptive") => Ok(Some(true)),
                Some("disabled") => Ok(Some(false)),
                _ => Err(refuse("thinking.type", expected)),
            }
        }
        Some(_) => Err(refuse("thinking", expected)),
    }
}

fn object<'a>(value: &'a Value, path: &str) -> Result<&'a Map<String, Value>, ChatError> {
    value.as_object().ok_or_else(|| refuse(path, "expected an object"))
}

fn text<'a>(object: &'a Map<String, Value>, path: &str, key: &str) -> Result<&'a str, ChatError> {
    match object.get(key) {
        Some(Value::String(text)) => Ok(text),
        Some(_) => Err(refuse(format!("{path}.{key}"), "expected a string")),
        None => Err(refuse(format!("{path}.{key}"), "missing")),
    }
}

/// Refuse keys outside `known` that carry a value.
fn refuse_unknown(object: &Map<String, Value>, path: &str, known: &[&str]) -> Result<(), ChatError> {
    let says_nothing = |value: &Value| match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(object) => object.is_empty(),
        _ => false,
    };
    for (key, value) in object {
        if !known.contains(&key.as_str()) && !says_nothing(value) {
            let field = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
            return Err(refuse(field, format!("unknown field; expected one of {}", known.join(", "))));
        }
    }
    Ok(())
}
