//! `generate` without a prompt: a conversation, one line a turn.
//!
//! What the model has already run is not run again: the next turn goes on where the sequence stands if the new
//! prompt begins with it.

use std::io::{self, BufRead, IsTerminal, Write};
use std::sync::atomic::Ordering;

use anyhow::{Context, Result};
use deepinfer_gateway::ChatMessage;
use deepinfer_kernels::Backend;

use super::{Console, chat_request};
use crate::runner::Sequence;

/// Answers lines until the end of input, `/quit` or Ctrl-C; `/new` forgets the conversation.
pub fn run<B: Backend>(console: &mut Console<'_, B>, system: Vec<ChatMessage>) -> Result<()> {
    let interactive = io::stdin().is_terminal();
    if interactive {
        eprintln!("A line is a turn. /new starts over, /quit or the end of input leaves.");
    }
    let mut messages = system.clone();
    let mut last: Option<Sequence> = None;
    let mut input = io::stdin().lock();
    while !console.stop.load(Ordering::Relaxed) {
        if interactive {
            eprint!("> ");
            io::stderr().flush()?;
        }
        let mut line = Vec::new();
        if input.read_until(b'\n', &mut line).context("standard input")? == 0 {
            break;
        }
        let Ok(line) = String::from_utf8(line) else {
            eprintln!("that line is not UTF-8 and was not used");
            continue;
        };
        match line.trim() {
            "" => continue,
            "/quit" => break,
            "/new" => messages.clone_from(&system),
            turn => {
                messages.push(ChatMessage::user(turn));
                last = Some(answer(console, &mut messages, last.take())?);
            }
        }
    }
    Ok(())
}

/// One turn. A conversation that no longer fits says so, and loses the turn, not the conversation.
fn answer<B: Backend>(
    console: &mut Console<'_, B>,
    messages: &mut Vec<ChatMessage>,
    last: Option<Sequence>,
) -> Result<Sequence> {
    let rendered = console.text.chat(&chat_request(console.args, messages.clone())?)?;
    let sequence = match last {
        Some(sequence) => sequence.continued(rendered.ids, console.sampling),
        None => Sequence::new(0, rendered.ids, console.sampling),
    };
    if let Err(error) = console.runner.check_prompt(&sequence.ids) {
        messages.pop();
        eprintln!("{}; /new starts over", crate::report::chain(&error));
        return Ok(Sequence::new(0, Vec::new(), console.sampling));
    }
    let (sequence, said) = console.print(sequence, Some(rendered.answer))?;
    messages.push(ChatMessage::assistant(said.text));
    Ok(sequence)
}
