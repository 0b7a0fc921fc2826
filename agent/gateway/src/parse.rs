//! Reading generated ids: reasoning, visible answer, tool calls, through `deepseek-recipe`'s output parser.
//!
//! Invariants: ids go in, not text, so `</think>` and the tool-call tags count only as the special tokens that
//! they are, and the same characters from ordinary tokens stay text; the text of a special token never comes out.
//! For that the two special tokens that the parser reads are given to it as noncharacters ("marks"), which are
//! removed from whatever it hands back; all other special ids are left out before.
//!
//! The parser is an async stream; here it is driven by hand, one poll for each id, so no runtime is needed.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::task::{Context, Poll, Waker};

use deepseek_recipe::stream::{
    ChunkGenerator, FinishReason, InferenceChunk, InferenceFinishReason, OutputChunk, ParsingOptions,
    StreamError, StreamProcessor, ThinkingInitialStage,
};
use deepseek_recipe_core::special_tokens::{SpecialToken, SpecialTokensMap};
use tokio_stream::Stream;

use crate::tokenizer::{MarkingDecoder, Tokenizer};

/// Noncharacters: never assigned, never exchanged, so no text loses anything when they are removed.
const THINKING_END_MARK: char = '\u{10FFFE}';
const DSML_MARK: char = '\u{10FFFF}';
/// Stands for [`FLUSH_ID`], which makes the parser's decoder give up on an incomplete character.
const FLUSH_MARK: char = '\u{FFFFE}';
/// No tokenizer has this id: ids are bounded by the file's size.
const FLUSH_ID: u32 = u32::MAX;

/// How an answer is to be read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AnswerOptions {
    /// The answer begins with reasoning (the prompt opened it).
    pub thinking: bool,
    /// Tool calls are recognized (the prompt offered tools).
    pub tools: bool,
    /// Strings that end the answer when they appear in its visible part; empty ones are ignored.
    pub stop: Vec<String>,
}

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum AnswerEvent {
    /// More reasoning.
    Reasoning(String),
    /// More of the visible answer.
    Text(String),
    /// A tool call begins; its arguments follow.
    ToolCall {
        /// Name of the function.
        name: String,
    },
    /// More of the open tool call's arguments, which together are the text of a JSON object.
    ToolArguments(String),
}

/// Why an answer ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum EndReason {
    /// The model ended its turn.
    Stop,
    /// The token limit cut it.
    Length,
    /// The model ended its turn with tool calls.
    ToolCalls,
    /// This stop string appeared.
    StopString(String),
}

/// The output parser failed; it has no reason to on ids of its own tokenizer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot read the model's output: {0}")]
pub struct ParseError(String);

/// Separates generated ids into [`AnswerEvent`]s.
pub struct AnswerParser {
    tokenizer: Arc<Tokenizer>,
    /// The special ids that the parser reads; other special ids are left out.
    markers: [Option<u32>; 2],
    input: SyncSender<InferenceChunk>,
    output: Pin<Box<dyn Stream<Item = Result<OutputChunk, StreamError>> + Send>>,
    end: Option<EndReason>,
}

impl AnswerParser {
    /// A parser for one answer, generated after a prompt of [`crate::ChatRenderer`].
    #[must_use]
    pub fn new(tokenizer: Arc<Tokenizer>, options: AnswerOptions) -> Self {
        let markers = [SpecialToken::ThinkingEnd, SpecialToken::Dsml]
            .map(|token| tokenizer.special_id(token.default_str()));
        let marks = markers.into_iter().zip([THINKING_END_MARK, DSML_MARK]);
        let marks = marks.filter_map(|(id, mark)| id.map(|id| (id, mark)));
        let decoder = MarkingDecoder {
            tokenizer: Arc::clone(&tokenizer),
            marks: marks.chain([(FLUSH_ID, FLUSH_MARK)]).collect(),
        };
        let special_tokens = SpecialTokensMap {
            thinking_end: THINKING_END_MARK.to_string(),
            dsml: DSML_MARK.to_string(),
            ..SpecialTokensMap::default()
        };
        let options = ParsingOptions {
            parse_tool_calls: options.tools,
            thinking_initial_stage: options.thinking.then_some(ThinkingInitialStage::ReasoningStart),
            stop_sequences: options.stop,
            special_tokens: Arc::new(special_tokens),
            ..ParsingOptions::default()
        };
        // One chunk at a time: each is read before the next is sent.
        let (input, received) = sync_channel(1);
        let output = StreamProcessor::new(AsIs, options).with_tokenizer(decoder);
        let output = Box::pin(output.into_protocol_stream(Fed(received)));
        Self { tokenizer, markers, input, output, end: None }
    }

    /// Take the next generated id (the end-of-sentence token may be given or not) and return what it completes.
    ///
    /// # Errors
    ///
    /// [`ParseError`].
    pub fn push(&mut self, id: u32) -> Result<Vec<AnswerEvent>, ParseError> {
        if self.tokenizer.is_special(id) && !self.markers.contains(&Some(id)) {
            return Ok(Vec::new());
        }
        self.feed(tokens(id))
    }

    /// The stop string that ended the answer; ids pushed after it change nothing.
    #[must_use]
    pub fn stopped(&self) -> Option<&str> {
        match &self.end {
            Some(EndReason::StopString(stop)) => Some(stop),
            _ => None,
        }
    }

    /// End the answer and return what was held back. `cut`: the token limit ended it, not the model.
    ///
    /// # Errors
    ///
    /// [`ParseError`].
    pub fn finish(mut self, cut: bool) -> Result<(Vec<AnswerEvent>, EndReason), ParseError> {
        let finish_reason = if cut { InferenceFinishReason::Length } else { InferenceFinishReason::Stop };
        let mut events = self.feed(tokens(FLUSH_ID))?;
        events.extend(self.feed(InferenceChunk::Finish { finish_reason })?);
        let end = self.end.unwrap_or(if cut { EndReason::Length } else { EndReason::Stop });
        Ok((events, end))
    }

    fn feed(&mut self, chunk: InferenceChunk) -> Result<Vec<AnswerEvent>, ParseError> {
        let mut events = Vec::new();
        if self.end.is_some() {
            return Ok(events);
        }
        self.input.try_send(chunk).map_err(|error| ParseError(error.to_string()))?;
        let mut context = Context::from_waker(Waker::noop());
        while let Poll::Ready(Some(chunk)) = self.output.as_mut().poll_next(&mut context) {
            let chunk = chunk.map_err(|error| ParseError(error.to_string()))?;
            if let OutputChunk::Finish { finish_reason, stop_sequence, .. } = chunk {
                self.end = Some(end_reason(finish_reason, stop_sequence));
                break;
            }
            events.extend(event(chunk));
        }
        Ok(events)
    }
}

impl std::fmt::Debug for AnswerParser {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AnswerParser").field("end", &self.end).finish_non_exhaustive()
    }
}

fn tokens(id: u32) -> InferenceChunk {
    InferenceChunk::Tokens { token_ids: vec![id], logprobs: None }
}

fn end_reason(reason: FinishReason, stop: Option<String>) -> EndReason {
    match (reason, stop) {
        (_, Some(stop)) => EndReason::StopString(stop),
        (FinishReason::ToolCalls, None) => EndReason::ToolCalls,
        (FinishReason::Length, None) => EndReason::Length,
        _ => EndReason::Stop,
    }
}

fn event(chunk: OutputChunk) -> Option<AnswerEvent> {
    let text = |text: String| {
        let marks = [THINKING_END_MARK, DSML_MARK, FLUSH_MARK];
        let text = if text.contains(marks) { text.replace(marks, "") } else { text };
        (!text.is_empty()).then_some(text)
    };
    match chunk {
        OutputChunk::Content { content, .. } => text(content).map(AnswerEvent::Text),
        OutputChunk::Reasoning { content, .. } => text(content).map(AnswerEvent::Reasoning),
        OutputChunk::ToolCallNamed { tool_name } => {
            Some(AnswerEvent::ToolCall { name: text(tool_name).unwrap_or_default() })
        }
        OutputChunk::ToolCallArgumentsDelta { arguments } => text(arguments).map(AnswerEvent::ToolArguments),
        OutputChunk::Start { .. } | OutputChunk::ToolCallBegin | OutputChunk::Finish { .. } => None,
    }
}

/// The recipe's chunks, unchanged.
struct AsIs;

impl ChunkGenerator for AsIs {
    type Chunk = OutputChunk;

    async fn generate(&mut self, chunk: OutputChunk) -> Vec<OutputChunk> {
        vec![chunk]
    }
}

/// The chunks that were sent so far; pending where there is none.
struct Fed(Receiver<InferenceChunk>);

impl Stream for Fed {
    type Item = InferenceChunk;

    fn poll_next(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<InferenceChunk>> {
        match self.0.try_recv() {
            Ok(chunk) => Poll::Ready(Some(chunk)),
            // The sender lives as long as the stream, so an empty queue only means: not yet.
            Err(_) => Poll::Pending,
        }
    }
}
