//! From generated ids to what a client is told: the one machine behind streamed and whole answers.
//!
//! Invariants: the joined deltas do not depend on how ids are spread over steps; after a stop string nothing counts,
//! neither as text nor as log-probability nor as usage (SV-016); log-probabilities go out with the text of their
//! tokens, in order, each once; special tokens have no text and no log-probability.

use std::sync::Arc;

use deepinfer_protocol::generate::{FinishReason, Token};
use deepseek_recipe_core::special_tokens::SpecialToken;

use super::plain::PlainReader;
use crate::parse::{AnswerEvent, AnswerOptions, AnswerParser, ParseError};
use crate::tokenizer::Tokenizer;

/// More of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Delta {
    /// More reasoning.
    Reasoning(String),
    /// More of the visible answer.
    Content(String),
    /// A tool call begins.
    Call {
        /// Counts from 0 in the answer.
        index: u32,
        /// Name of the function.
        name: String,
        /// The answer has no reasoning although it could: part of the call's id.
        unreasoned: bool,
    },
    /// More of that call's arguments.
    Arguments {
        /// Which call.
        index: u32,
        /// Text.
        text: String,
    },
}

/// What one step adds to an answer. Reused from step to step.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Step {
    /// In order; neighbours of one kind are joined.
    pub(crate) deltas: Vec<Delta>,
    /// Tokens of the reasoning with their log-probabilities.
    pub(crate) reasoning_logprobs: Vec<Token>,
    /// Tokens of the visible answer with their log-probabilities.
    pub(crate) content_logprobs: Vec<Token>,
    /// Every id that counts, if they were asked for.
    pub(crate) ids: Vec<u32>,
}

impl Step {
    pub(crate) fn clear(&mut self) {
        self.deltas.clear();
        self.reasoning_logprobs.clear();
        self.content_logprobs.clear();
        self.ids.clear();
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.deltas.is_empty()
            && self.reasoning_logprobs.is_empty()
            && self.content_logprobs.is_empty()
            && self.ids.is_empty()
    }

    fn reasoning(&mut self) -> &mut String {
        if !matches!(self.deltas.last(), Some(Delta::Reasoning(_))) {
            self.deltas.push(Delta::Reasoning(String::new()));
        }
        match self.deltas.last_mut() {
            Some(Delta::Reasoning(text)) => text,
            _ => unreachable!("it was pushed"),
        }
    }

    fn content(&mut self) -> &mut String {
        if !matches!(self.deltas.last(), Some(Delta::Content(_))) {
            self.deltas.push(Delta::Content(String::new()));
        }
        match self.deltas.last_mut() {
            Some(Delta::Content(text)) => text,
            _ => unreachable!("it was pushed"),
        }
    }

    fn arguments(&mut self, index: u32, more: &str) {
        match self.deltas.last_mut() {
            Some(Delta::Arguments { index: last, text }) if *last == index => text.push_str(more),
            _ => self.deltas.push(Delta::Arguments { index, text: more.to_owned() }),
        }
    }
}

/// Why an answer ended, in the API's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The model ended its turn, or a stop string appeared.
    Stop,
    /// The token limit cut it.
    Length,
    /// The model ended its turn with tool calls.
    ToolCalls,
}

impl End {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
        }
    }
}

/// Separates ids into reasoning, visible text and calls.
enum Reader {
    /// No tool calls: the cheap path.
    Plain(Box<PlainReader>),
    /// Tool calls, as the recipe's parser sees them. `None` once it has finished.
    Tools(Option<Box<AnswerParser>>),
}

/// Reads one answer.
pub(crate) struct AnswerBuilder {
    reader: Reader,
    tokenizer: Arc<Tokenizer>,
    /// Text that the plain reader released, before it becomes a delta.
    reasoning: String,
    content: String,
    /// Tokens whose text is not out yet.
    waiting: Vec<Token>,
    want_logprobs: bool,
    want_ids: bool,
    thinks: bool,
    in_reasoning: bool,
    in_tools: bool,
    thinking_end: Option<u32>,
    dsml: Option<u32>,
    reasoned: bool,
    calls: u32,
    completion_tokens: u32,
    reasoning_tokens: u32,
    end: Option<End>,
}

impl AnswerBuilder {
    /// A reader for the answer to a chat.
    pub(crate) fn chat(tokenizer: Arc<Tokenizer>, mut options: AnswerOptions, logprobs: bool) -> Self {
        let thinks = options.thinking;
        // Of matches that end together the recipe's parser takes the first listed, the plain reader the longest.
        options.stop.sort_by_key(|stop| std::cmp::Reverse(stop.len()));
        let reader = if options.tools {
            Reader::Tools(Some(Box::new(AnswerParser::new(Arc::clone(&tokenizer), options))))
        } else {
            let reader = PlainReader::chat(Arc::clone(&tokenizer), options.thinking, &options.stop);
            Reader::Plain(Box::new(reader))
        };
        Self::new(reader, tokenizer, thinks, logprobs, false)
    }

    /// A reader for a plain continuation.
    pub(crate) fn completion(tokenizer: Arc<Tokenizer>, stops: &[String], logprobs: bool, ids: bool) -> Self {
        let reader = Reader::Plain(Box::new(PlainReader::raw(Arc::clone(&tokenizer), stops)));
        Self::new(reader, tokenizer, false, logprobs, ids)
    }

    fn new(reader: Reader, tokenizer: Arc<Tokenizer>, thinks: bool, logprobs: bool, ids: bool) -> Self {
        let [thinking_end, dsml] = [SpecialToken::ThinkingEnd, SpecialToken::Dsml]
            .map(|token| tokenizer.special_id(token.default_str()));
        Self {
            reader,
            tokenizer,
            reasoning: String::new(),
            content: String::new(),
            waiting: Vec::new(),
            want_logprobs: logprobs,
            want_ids: ids,
            thinks,
            in_reasoning: thinks,
            in_tools: false,
            thinking_end,
            dsml,
            reasoned: false,
            calls: 0,
            completion_tokens: 0,
            reasoning_tokens: 0,
            end: None,
        }
    }

    /// Take the tokens of a step and append to `step` what they add. Once [`Self::end`] says something, the answer
    /// is complete.
    pub(crate) fn push(
        &mut self,
        tokens: Vec<Token>,
        finish: Option<FinishReason>,
        step: &mut Step,
    ) -> Result<(), ParseError> {
        let count = tokens.len();
        for (index, token) in tokens.into_iter().enumerate() {
            if self.end.is_some() {
                return Ok(());
            }
            self.completion_tokens += 1;
            if self.want_ids {
                step.ids.push(token.id);
            }
            let is_stop_token = finish == Some(FinishReason::Stop) && index + 1 == count;
            if !is_stop_token {
                self.take(token, step)?;
            }
        }
        match finish {
            Some(reason) if self.end.is_none() => self.finish(reason, step),
            _ => Ok(()),
        }
    }

    /// How the answer ended.
    pub(crate) fn end(&self) -> Option<End> {
        self.end
    }

    /// Tokens that count.
    pub(crate) fn completion_tokens(&self) -> u32 {
        self.completion_tokens
    }

    /// Tokens of the reasoning among them, without the one that ends it.
    pub(crate) fn reasoning_tokens(&self) -> u32 {
        self.reasoning_tokens
    }

    /// Whether the answer begins with reasoning.
    pub(crate) fn thinks(&self) -> bool {
        self.thinks
    }

    fn take(&mut self, token: Token, step: &mut Step) -> Result<(), ParseError> {
        let id = token.id;
        if self.in_reasoning {
            self.in_reasoning = self.thinking_end != Some(id);
            self.reasoning_tokens += u32::from(self.in_reasoning);
        }
        if self.want_logprobs && !self.in_tools && !self.tokenizer.is_special(id) {
            self.waiting.push(token);
        }
        match &mut self.reader {
            Reader::Plain(reader) => {
                reader.push(id, &mut self.reasoning, &mut self.content);
                let stopped = reader.stopped();
                self.release(step);
                if stopped {
                    self.stop();
                }
            }
            Reader::Tools(parser) => {
                let Some(parser) = parser else { return Ok(()) };
                let events = parser.push(id)?;
                let stopped = parser.stopped().is_some();
                if self.dsml == Some(id) {
                    self.in_tools = true;
                    self.waiting.clear();
                }
                self.apply(events, step);
                if stopped {
                    self.stop();
                }
            }
        }
        Ok(())
    }

    fn finish(&mut self, reason: FinishReason, step: &mut Step) -> Result<(), ParseError> {
        match &mut self.reader {
            Reader::Plain(reader) => {
                reader.finish(&mut self.reasoning, &mut self.content);
                let stopped = reader.stopped();
                self.release(step);
                if stopped {
                    self.stop();
                    return Ok(());
                }
            }
            Reader::Tools(parser) => {
                if let Some(parser) = parser.take() {
                    let (events, end) = parser.finish(reason == FinishReason::Length)?;
                    self.apply(events, step);
                    if matches!(end, crate::parse::EndReason::StopString(_)) {
                        self.stop();
                        return Ok(());
                    }
                }
            }
        }
        self.flush_logprobs(self.in_reasoning, step);
        self.end = Some(match reason {
            FinishReason::Length => End::Length,
            FinishReason::Stop if self.calls > 0 => End::ToolCalls,
            FinishReason::Stop => End::Stop,
        });
        Ok(())
    }

    /// A stop string ended the answer; tokens whose text is its beginning do not count as text.
    fn stop(&mut self) {
        self.waiting.clear();
        self.end = Some(if self.calls > 0 { End::ToolCalls } else { End::Stop });
    }

    /// Turn what the plain reader released into deltas.
    fn release(&mut self, step: &mut Step) {
        if !self.reasoning.is_empty() {
            self.reasoned = true;
            step.reasoning().push_str(&self.reasoning);
            self.reasoning.clear();
            self.flush_logprobs(true, step);
        }
        if !self.content.is_empty() {
            step.content().push_str(&self.content);
            self.content.clear();
            self.flush_logprobs(false, step);
        }
    }

    fn apply(&mut self, events: Vec<AnswerEvent>, step: &mut Step) {
        for event in events {
            match event {
                AnswerEvent::Reasoning(text) => {
                    self.reasoned = true;
                    step.reasoning().push_str(&text);
                    self.flush_logprobs(true, step);
                }
                AnswerEvent::Text(text) => {
                    step.content().push_str(&text);
                    self.flush_logprobs(false, step);
                }
                AnswerEvent::ToolCall { name } => {
                    let unreasoned = self.thinks && !self.reasoned;
                    step.deltas.push(Delta::Call { index: self.calls, name, unreasoned });
                    self.calls += 1;
                    self.in_reasoning = false;
                }
                // Arguments without a call have nowhere to go.
                AnswerEvent::ToolArguments(text) => {
                    if let Some(index) = self.calls.checked_sub(1) {
                        step.arguments(index, &text);
                    }
                }
            }
        }
    }

    fn flush_logprobs(&mut self, reasoning: bool, step: &mut Step) {
        if !self.waiting.is_empty() {
            let to = if reasoning { &mut step.reasoning_logprobs } else { &mut step.content_logprobs };
            to.append(&mut self.waiting);
        }
    }
}

impl std::fmt::Debug for AnswerBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AnswerBuilder").field("end", &self.end).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
