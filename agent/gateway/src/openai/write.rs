//! From deltas to JSON: chunks of a stream and whole answers, of both APIs.
//!
//! What is the same in each chunk of a request (id, time, model) is prepared once; a chunk is then a few copies into
//! a reused buffer. Every chunk is one line.

use std::sync::Arc;

use deepinfer_protocol::RequestId;

use super::answer::{Delta, End, Step};
use super::fields::Endpoint;
use super::json::{push_numbers, push_string, push_u64};
use super::logprobs;
use crate::tokenizer::Tokenizer;

/// How many tokens a request took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) prompt: u32,
    pub(crate) cached: u32,
    pub(crate) completion: u32,
    /// `None` where the answer could not reason.
    pub(crate) reasoning: Option<u32>,
}

impl Usage {
    fn write(&self, buffer: &mut Vec<u8>) {
        buffer.extend_from_slice(br#"{"prompt_tokens":"#);
        push_u64(buffer, self.prompt.into());
        buffer.extend_from_slice(br#","completion_tokens":"#);
        push_u64(buffer, self.completion.into());
        buffer.extend_from_slice(br#","total_tokens":"#);
        push_u64(buffer, u64::from(self.prompt) + u64::from(self.completion));
        buffer.extend_from_slice(br#","prompt_tokens_details":{"cached_tokens":"#);
        push_u64(buffer, self.cached.into());
        buffer.push(b'}');
        if let Some(reasoning) = self.reasoning {
            buffer.extend_from_slice(br#","completion_tokens_details":{"reasoning_tokens":"#);
            push_u64(buffer, reasoning.into());
            buffer.push(b'}');
        }
        buffer.push(b'}');
    }
}

/// What the answers of one request look like.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) endpoint: Endpoint,
    pub(crate) thinks: bool,
    pub(crate) logprobs: bool,
    /// The client asked for ids; holds the prompt's, to be said once.
    pub(crate) prompt_ids: Option<Arc<[u32]>>,
    pub(crate) include_usage: bool,
}

/// Writes the answer of one request.
#[derive(Debug)]
pub(crate) struct Writer {
    tokenizer: Arc<Tokenizer>,
    shape: Shape,
    id: RequestId,
    /// From the opening brace to the value of `choices`, exclusive.
    head: Vec<u8>,
    /// After a choice: the rest of the chunk and the end of the event.
    tail: &'static [u8],
    /// Characters of text before the next log-probability (completions).
    offset: usize,
    /// The prompt's ids were said.
    prompt_said: bool,
}

impl Writer {
    /// A writer for the request `id`. `created` is in seconds since 1970.
    pub(crate) fn new(
        tokenizer: Arc<Tokenizer>,
        shape: Shape,
        id: RequestId,
        model: &str,
        created: u64,
        stream: bool,
    ) -> Self {
        let (prefix, object) = match (shape.endpoint, stream) {
            (Endpoint::Chat, true) => ("chatcmpl-", "chat.completion.chunk"),
            (Endpoint::Chat, false) => ("chatcmpl-", "chat.completion"),
            (Endpoint::Completions, _) => ("cmpl-", "text_completion"),
        };
        let mut head = Vec::with_capacity(160);
        if stream {
            head.extend_from_slice(b"data: ");
        }
        head.extend_from_slice(br#"{"id":"#);
        push_string(&mut head, &format!("{prefix}{id}"));
        head.extend_from_slice(br#","object":"#);
        push_string(&mut head, object);
        head.extend_from_slice(br#","created":"#);
        push_u64(&mut head, created);
        head.extend_from_slice(br#","model":"#);
        push_string(&mut head, model);
        head.extend_from_slice(br#","choices":"#);
        let tail: &[u8] = if shape.include_usage { b"}],\"usage\":null}\n\n" } else { b"}]}\n\n" };
        Self { tokenizer, shape, id, head, tail, offset: 0, prompt_said: false }
    }

    /// The first chunk of a chat's stream.
    pub(crate) fn role_chunk(&self, buffer: &mut Vec<u8>) {
        if self.shape.endpoint == Endpoint::Chat {
            self.open_delta(buffer);
            let role: &[u8] = if self.shape.thinks {
                br#""role":"assistant","content":null,"reasoning_content":"""#
            } else {
                br#""role":"assistant","content":"""#
            };
            buffer.extend_from_slice(role);
            buffer.extend_from_slice(br#"},"logprobs":null,"finish_reason":null"#);
            buffer.extend_from_slice(self.tail);
        }
    }

    /// The chunks of a step.
    pub(crate) fn step_chunks(&mut self, step: &Step, buffer: &mut Vec<u8>) {
        match self.shape.endpoint {
            Endpoint::Completions => self.completion_chunk(step, None, buffer),
            Endpoint::Chat => self.chat_chunks(step, buffer),
        }
    }

    /// The chunk with the finish reason, and the usage's if it was asked for, and the end mark.
    pub(crate) fn last_chunks(&mut self, end: End, usage: Usage, buffer: &mut Vec<u8>) {
        match self.shape.endpoint {
            Endpoint::Completions => self.completion_chunk(&Step::default(), Some(end), buffer),
            Endpoint::Chat => {
                self.open_delta(buffer);
                buffer.extend_from_slice(br#"},"logprobs":null,"finish_reason":"#);
                push_string(buffer, end.as_str());
                buffer.extend_from_slice(self.tail);
            }
        }
        if self.shape.include_usage {
            buffer.extend_from_slice(&self.head);
            buffer.extend_from_slice(br#"[],"usage":"#);
            usage.write(buffer);
            buffer.extend_from_slice(b"}\n\n");
        }
        buffer.extend_from_slice(b"data: [DONE]\n\n");
    }

    fn open_delta(&self, buffer: &mut Vec<u8>) {
        buffer.extend_from_slice(&self.head);
        buffer.extend_from_slice(br#"[{"index":0,"delta":{"#);
    }

    fn chat_chunks(&self, step: &Step, buffer: &mut Vec<u8>) {
        // Each list of log-probabilities goes with the first delta of its kind, or in a chunk of its own.
        let mut reasoning: &[_] = &step.reasoning_logprobs;
        let mut content: &[_] = &step.content_logprobs;
        for delta in &step.deltas {
            self.open_delta(buffer);
            self.write_delta(delta, buffer);
            buffer.extend_from_slice(br#"},"logprobs":"#);
            match delta {
                Delta::Reasoning(_) => self.write_logprobs(std::mem::take(&mut reasoning), &[], buffer),
                Delta::Content(_) => self.write_logprobs(&[], std::mem::take(&mut content), buffer),
                Delta::Call { .. } | Delta::Arguments { .. } => buffer.extend_from_slice(b"null"),
            }
            buffer.extend_from_slice(br#","finish_reason":null"#);
            buffer.extend_from_slice(self.tail);
        }
        if !reasoning.is_empty() || !content.is_empty() {
            self.open_delta(buffer);
            buffer.extend_from_slice(br#"},"logprobs":"#);
            self.write_logprobs(reasoning, content, buffer);
            buffer.extend_from_slice(br#","finish_reason":null"#);
            buffer.extend_from_slice(self.tail);
        }
    }

    fn write_delta(&self, delta: &Delta, buffer: &mut Vec<u8>) {
        match delta {
            Delta::Content(text) => {
                buffer.extend_from_slice(br#""content":"#);
                push_string(buffer, text);
            }
            Delta::Reasoning(text) => {
                buffer.extend_from_slice(br#""reasoning_content":"#);
                push_string(buffer, text);
            }
            Delta::Call { index, name, unreasoned } => {
                buffer.extend_from_slice(br#""tool_calls":[{"index":"#);
                push_u64(buffer, (*index).into());
                buffer.push(b',');
                self.write_call(*index, name, *unreasoned, "", buffer);
                buffer.extend_from_slice(b"}]");
            }
            Delta::Arguments { index, text } => {
                buffer.extend_from_slice(br#""tool_calls":[{"index":"#);
                push_u64(buffer, (*index).into());
                buffer.extend_from_slice(br#","function":{"arguments":"#);
                push_string(buffer, text);
                buffer.extend_from_slice(b"}}]");
            }
        }
    }

    /// The fields of a call, without braces. The recipe's renderer reads the mark `ET_` of an id when the call comes
    /// back in a later request: that answer had no reasoning.
    fn write_call(&self, index: u32, name: &str, unreasoned: bool, arguments: &str, buffer: &mut Vec<u8>) {
        let mark = if unreasoned { "ET_" } else { "" };
        buffer.extend_from_slice(br#""id":"#);
        push_string(buffer, &format!("call_{index:02}_{mark}{}", self.id));
        buffer.extend_from_slice(br#","type":"function","function":{"name":"#);
        push_string(buffer, name);
        buffer.extend_from_slice(br#","arguments":"#);
        push_string(buffer, arguments);
        buffer.push(b'}');
    }

    fn write_logprobs(
        &self,
        reasoning: &[deepinfer_protocol::generate::Token],
        content: &[deepinfer_protocol::generate::Token],
        buffer: &mut Vec<u8>,
    ) {
        if reasoning.is_empty() && content.is_empty() {
            buffer.extend_from_slice(b"null");
            return;
        }
        buffer.extend_from_slice(br#"{"content":"#);
        if content.is_empty() {
            buffer.extend_from_slice(b"null");
        } else {
            logprobs::push_chat(buffer, &self.tokenizer, content);
        }
        if !reasoning.is_empty() {
            buffer.extend_from_slice(br#","reasoning_content":"#);
            logprobs::push_chat(buffer, &self.tokenizer, reasoning);
        }
        buffer.extend_from_slice(br#","refusal":null}"#);
    }

    fn completion_chunk(&mut self, step: &Step, end: Option<End>, buffer: &mut Vec<u8>) {
        let text = match step.deltas.first() {
            Some(Delta::Content(text)) => text.as_str(),
            _ => "",
        };
        buffer.extend_from_slice(&self.head);
        self.completion_choice(text, step, end, buffer);
        buffer.extend_from_slice(self.tail);
    }

    /// The choice of a completion, up to its closing brace.
    fn completion_choice(&mut self, text: &str, step: &Step, end: Option<End>, buffer: &mut Vec<u8>) {
        buffer.extend_from_slice(br#"[{"index":0,"text":"#);
        push_string(buffer, text);
        buffer.extend_from_slice(br#","logprobs":"#);
        if self.shape.logprobs && (!step.content_logprobs.is_empty() || end.is_none()) {
            logprobs::push_completion(buffer, &self.tokenizer, &step.content_logprobs, &mut self.offset);
        } else {
            buffer.extend_from_slice(b"null");
        }
        buffer.extend_from_slice(br#","finish_reason":"#);
        match end {
            Some(end) => push_string(buffer, end.as_str()),
            None => buffer.extend_from_slice(b"null"),
        }
        if let Some(prompt) = &self.shape.prompt_ids {
            buffer.extend_from_slice(br#","token_ids":"#);
            push_numbers(buffer, step.ids.iter().map(|id| u64::from(*id)));
            buffer.extend_from_slice(br#","prompt_token_ids":"#);
            if self.prompt_said {
                buffer.extend_from_slice(b"null");
            } else {
                push_numbers(buffer, prompt.iter().map(|id| u64::from(*id)));
                self.prompt_said = true;
            }
        }
    }

    /// A whole answer. `all` holds everything that was generated.
    pub(crate) fn whole(&mut self, all: &Step, end: End, usage: Usage, buffer: &mut Vec<u8>) {
        buffer.extend_from_slice(&self.head);
        let mut message = Message::gather(&all.deltas);
        match self.shape.endpoint {
            Endpoint::Completions => {
                self.completion_choice(&message.content.take().unwrap_or_default(), all, Some(end), buffer);
            }
            Endpoint::Chat => self.whole_chat(&message, all, end, buffer),
        }
        buffer.extend_from_slice(br#"}],"usage":"#);
        usage.write(buffer);
        buffer.push(b'}');
    }

    fn whole_chat(&self, message: &Message<'_>, all: &Step, end: End, buffer: &mut Vec<u8>) {
        buffer.extend_from_slice(br#"[{"index":0,"message":{"role":"assistant","content":"#);
        match &message.content {
            Some(text) => push_string(buffer, text),
            None if message.calls.is_empty() => push_string(buffer, ""),
            None => buffer.extend_from_slice(b"null"),
        }
        if self.shape.thinks {
            buffer.extend_from_slice(br#","reasoning_content":"#);
            push_string(buffer, &message.reasoning);
        }
        buffer.extend_from_slice(br#","refusal":null"#);
        for (position, call) in message.calls.iter().enumerate() {
            let open: &[u8] = if position == 0 { br#","tool_calls":[{"# } else { b",{" };
            buffer.extend_from_slice(open);
            self.write_call(call.index, call.name, call.unreasoned, &call.arguments, buffer);
            buffer.push(b'}');
        }
        if !message.calls.is_empty() {
            buffer.push(b']');
        }
        buffer.extend_from_slice(br#"},"logprobs":"#);
        self.write_logprobs(&all.reasoning_logprobs, &all.content_logprobs, buffer);
        buffer.extend_from_slice(br#","finish_reason":"#);
        push_string(buffer, end.as_str());
    }
}

/// The parts of a whole chat answer.
#[derive(Default)]
struct Message<'a> {
    content: Option<String>,
    reasoning: String,
    calls: Vec<Call<'a>>,
}

struct Call<'a> {
    index: u32,
    name: &'a str,
    unreasoned: bool,
    arguments: String,
}

impl<'a> Message<'a> {
    fn gather(deltas: &'a [Delta]) -> Self {
        let mut message = Self::default();
        for delta in deltas {
            match delta {
                Delta::Content(text) => message.content.get_or_insert_default().push_str(text),
                Delta::Reasoning(text) => message.reasoning.push_str(text),
                Delta::Call { index, name, unreasoned } => message.calls.push(Call {
                    index: *index,
                    name,
                    unreasoned: *unreasoned,
                    arguments: String::new(),
                }),
                Delta::Arguments { text, .. } => {
                    if let Some(call) = message.calls.last_mut() {
                        call.arguments.push_str(text);
                    }
                }
            }
        }
        message
    }
}
