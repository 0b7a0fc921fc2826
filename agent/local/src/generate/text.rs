//! Text on one side, token ids on the other: prompts in, answers out.

use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use deepinfer_engine::Checkpoint;
use deepinfer_gateway::{
    AnswerEvent, AnswerOptions, AnswerParser, ChatRenderer, ChatRequest, Detokenizer, RenderedChat, Tokenizer,
};
use serde::Serialize;

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// The model ended it, or a stop string did.
    Stop,
    /// The token limit or the context ended it.
    Length,
}

/// The tokenizer of a checkpoint and the chat format on top of it.
pub struct TextModel {
    tokenizer: Arc<Tokenizer>,
    /// What a chat needs; a tokenizer without the format's tokens can still continue plain text.
    renderer: Result<ChatRenderer, String>,
    bos: u32,
    eos: u32,
}

impl TextModel {
    /// Reads the checkpoint's tokenizer and checks that the embedding covers it.
    pub fn open(checkpoint: &Checkpoint) -> Result<Self> {
        let path = checkpoint
            .tokenizer_path()
            .with_context(|| format!("{}: tokenizer.json is missing", checkpoint.dir().display()))?;
        let tokenizer = Arc::new(Tokenizer::open(path)?);
        tokenizer.check_embedding(checkpoint.shape.vocab_size)?;
        let renderer = ChatRenderer::new(Arc::clone(&tokenizer))
            .map(|r| r.with_default_thinking(false))
            .map_err(|e| e.to_string());
        let shape = &checkpoint.shape;
        Ok(Self { tokenizer, renderer, bos: shape.bos_token_id, eos: shape.eos_token_id })
    }

    /// The prompt of a conversation, and how its answer is to be read.
    pub fn chat(&self, request: &ChatRequest) -> Result<RenderedChat> {
        let renderer = self.renderer.as_ref().map_err(|e| anyhow!("{e}; --raw continues plain text"))?;
        Ok(renderer.render(request)?)
    }

    /// The prompt of plain text that is to be continued: begin of sequence, then the text.
    pub fn raw(&self, text: &str) -> Result<Vec<u32>> {
        if text.is_empty() {
            bail!("the prompt is empty");
        }
        let mut ids = vec![self.bos];
        ids.extend(self.tokenizer.encode_text(text)?);
        Ok(ids)
    }

    /// A reader for the answer to a prompt; `None` reads plain text.
    pub fn answer(&self, options: Option<AnswerOptions>) -> Answer {
        let tokenizer = Arc::clone(&self.tokenizer);
        let reader = match options {
            Some(options) => Reader::Chat(Box::new(AnswerParser::new(tokenizer, options))),
            None => Reader::Plain(Detokenizer::new(tokenizer)),
        };
        Answer { reader, eos: self.eos, said: Said::default() }
    }
}

enum Reader {
    Chat(Box<AnswerParser>),
    Plain(Detokenizer),
}

/// A function that the model wants called.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ToolCall {
    /// Name of the function.
    pub name: String,
    /// Text of a JSON object.
    pub arguments: String,
}

/// What has been said.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Said {
    /// Visible part.
    pub text: String,
    /// Thoughts.
    pub reasoning: String,
    /// Calls.
    pub tool_calls: Vec<ToolCall>,
}

/// An answer as it grows.
pub struct Answer {
    reader: Reader,
    eos: u32,
    /// All of it so far.
    pub said: Said,
}

impl Answer {
    /// Takes the next token; says if it ends the answer. `generated` counts it already.
    pub fn push(&mut self, token: u32, generated: usize, max_tokens: usize) -> Result<Option<Finish>> {
        if token == self.eos {
            return Ok(Some(Finish::Stop));
        }
        match &mut self.reader {
            Reader::Plain(detokenizer) => self.said.text.push_str(detokenizer.push(token)),
            Reader::Chat(parser) => {
                let events = parser.push(token)?;
                let stopped = parser.stopped().is_some();
                self.said.take(events);
                if stopped {
                    return Ok(Some(Finish::Stop));
                }
            }
        }
        Ok((generated >= max_tokens).then_some(Finish::Length))
    }

    /// All of it, with what was held back, such as half a character.
    pub fn close(self, finish: Finish) -> Result<Said> {
        let mut said = self.said;
        match self.reader {
            Reader::Plain(mut detokenizer) => said.text.push_str(detokenizer.finish()),
            Reader::Chat(parser) => {
                let (events, _) = parser.finish(finish == Finish::Length)?;
                said.take(events);
            }
        }
        Ok(said)
    }
}

impl Said {
    fn take(&mut self, events: Vec<AnswerEvent>) {
        for event in events {
            match event {
                AnswerEvent::Text(piece) => self.text.push_str(&piece),
                AnswerEvent::Reasoning(piece) => self.reasoning.push_str(&piece),
                AnswerEvent::ToolCall { name } => {
                    self.tool_calls.push(ToolCall { name, arguments: String::new() });
                }
                AnswerEvent::ToolArguments(piece) => {
                    if let Some(call) = self.tool_calls.last_mut() {
                        call.arguments.push_str(&piece);
                    }
                }
                other => unreachable!("an event that this command does not know: {other:?}"),
            }
        }
    }
}
