//! Text at the edge of the system: everything between what people write and the token ids that the engine
//! sees, and back.
//!
//! * [`Tokenizer`] reads `tokenizer.json` and turns text into ids and ids into bytes. Text that spells a special
//!   token stays ordinary text: no string given to [`Tokenizer::encode_text`] ever becomes a special id.
//! * [`ChatRequest`] is a conversation as a file or a program gives it; [`ChatRenderer`] turns it into the
//!   model's prompt. Only the ranges that rendering itself wrote become special ids.
//! * [`Detokenizer`] streams the text of generated ids and never splits a character.
//! * [`AnswerParser`] separates generated ids into reasoning, visible answer and tool calls.
//!
//! ```no_run
//! use std::sync::Arc;
//! use deepinfer_gateway::{ChatMessage, ChatRenderer, ChatRequest, Detokenizer, Tokenizer};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let tokenizer = Arc::new(Tokenizer::open("model/tokenizer.json")?);
//! tokenizer.check_embedding(129_280)?;
//! let renderer = ChatRenderer::new(Arc::clone(&tokenizer))?.with_default_thinking(false);
//! let prompt = renderer.render(&ChatRequest::new(vec![ChatMessage::user("Hello")]))?;
//! let mut text = Detokenizer::new(tokenizer);
//! for id in prompt.ids {
//!     print!("{}", text.push(id));
//! }
//! print!("{}", text.finish());
//! # Ok(())
//! # }
//! ```
//!
//! # The gateway itself
//!
//! [`server::start`] serves the OpenAI API on a port and hands requests to the agents that the FleetView names:
//! [`openai`] turns HTTP into requests and tokens into answers, [`core`] is the seam behind it, `driver` owns the
//! request machine and the connections to agents. The caller brings the async runtime; [`pod`] is the process around
//! it that runs in a pod.

pub mod access;
pub mod args;
mod byte_alphabet;
mod chat;
mod chat_file;
pub mod core;
mod detokenizer;
mod driver;
mod fleet;
#[doc(hidden)]
pub mod fuzzing;
pub mod limits;
pub mod metrics;
pub mod openai;
mod parse;
pub mod pod;
mod render;
pub mod server;
pub mod signals;
pub mod tls;
mod tokenizer;
mod tokenizer_file;

pub use chat::{ChatError, ChatMessage, ChatRequest, ChatTool, ChatToolCall, ReasoningEffort};
pub use detokenizer::Detokenizer;
pub use parse::{AnswerEvent, AnswerOptions, AnswerParser, EndReason, ParseError};
pub use render::{ChatRenderer, RECIPE_TOKENS, RenderError, RenderedChat};
pub use server::{GatewayError, GatewayHandle, GatewayOptions, start};
pub use tokenizer::{Tokenizer, TokenizerError};
