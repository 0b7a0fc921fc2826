//! `deepinfer generate`: a prompt, a chat file, a conversation, or a batch file.

mod batch;
mod conversation;
mod text;

use std::io::{self, IsTerminal, Read, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context, Result};
use deepinfer_engine::Checkpoint;
use deepinfer_engine::sampler::Sampling;
use deepinfer_gateway::{AnswerOptions, ChatMessage, ChatRequest};
use deepinfer_kernels::Backend;

use self::text::{Finish, Said, TextModel};
use crate::args::GenerateArgs;
use crate::machine::{self, Job};
use crate::report;
use crate::runner::{Runner, RunnerOptions, Sequence};

/// Context when neither the flag nor a short model says otherwise: memory for it is taken at start.
const DEFAULT_CONTEXT: usize = 4096;
/// Exit code after Ctrl-C, as shells expect it.
const INTERRUPTED: u8 = 130;

/// Runs the command.
pub fn run(args: GenerateArgs) -> Result<ExitCode> {
    let input = Input::read(&args)?;
    let checkpoint = machine::open(&args.engine)?;
    let text = TextModel::open(&checkpoint)?;
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::Relaxed) {
            std::process::exit(INTERRUPTED.into());
        }
    })
    .context("installing the Ctrl-C handler")?;
    let engine = &args.engine;
    let job = Generate { args: &args, input, checkpoint: &checkpoint, text: &text, stop: &stop };
    machine::with_backend(engine.backend, engine.threads, engine.simd, job)
}

/// What is to be answered, read before the model is opened so that a bad file is said at once.
enum Input {
    Raw(String),
    Chat(ChatRequest),
    Conversation(Vec<ChatMessage>),
    Batch,
}

impl Input {
    fn read(args: &GenerateArgs) -> Result<Self> {
        if args.batch.is_some() {
            return Ok(Self::Batch);
        }
        if let Some(path) = &args.chat {
            let mut chat = read_chat(path)?;
            if args.thinking {
                chat.thinking = Some(true);
            }
            if let Some(effort) = &args.reasoning_effort {
                chat.reasoning_effort = Some(ChatRequest::effort(effort)?);
            }
            return Ok(Self::Chat(chat));
        }
        let system: Vec<ChatMessage> = args.system.iter().map(ChatMessage::system).collect();
        let Some(prompt) = &args.prompt else { return Ok(Self::Conversation(system)) };
        let prompt = if prompt == "-" { read_stdin()? } else { prompt.clone() };
        if args.raw {
            return Ok(Self::Raw(prompt));
        }
        anyhow::ensure!(!prompt.trim().is_empty(), "the prompt is empty");
        let mut messages = system;
        messages.push(ChatMessage::user(prompt));
        Ok(Self::Chat(chat_request(args, messages)?))
    }
}

/// Messages with the thinking flags of the command line.
fn chat_request(args: &GenerateArgs, messages: Vec<ChatMessage>) -> Result<ChatRequest> {
    let mut chat = ChatRequest::new(messages);
    chat.thinking = Some(args.thinking);
    chat.reasoning_effort = args.reasoning_effort.as_deref().map(ChatRequest::effort).transpose()?;
    Ok(chat)
}

fn read_chat(path: &Path) -> Result<ChatRequest> {
    let name = || format!("--chat {}", path.display());
    let bytes = std::fs::read(path).with_context(name)?;
    let text = String::from_utf8(bytes).map_err(|e| not_utf8(&name(), &e)).with_context(name)?;
    ChatRequest::parse(&text).with_context(name)
}

fn read_stdin() -> Result<String> {
    let mut bytes = Vec::new();
    io::stdin().lock().read_to_end(&mut bytes).context("standard input")?;
    String::from_utf8(bytes).map_err(|e| not_utf8("standard input", &e))
}

fn not_utf8(what: &str, error: &std::string::FromUtf8Error) -> anyhow::Error {
    let at = error.utf8_error().valid_up_to();
    anyhow::anyhow!("{what} is not UTF-8: byte {at} does not belong to a character; convert it first")
}

struct Generate<'a> {
    args: &'a GenerateArgs,
    input: Input,
    checkpoint: &'a Checkpoint,
    text: &'a TextModel,
    stop: &'a AtomicBool,
}

impl Job for Generate<'_> {
    type Output = ExitCode;

    fn run<B: Backend>(self, backend: B) -> Result<ExitCode> {
        let Self { args, input, checkpoint, text, stop } = self;
        let most = checkpoint.shape.max_position_embeddings;
        let context = args.context.map_or(most.min(DEFAULT_CONTEXT), |c| c as usize);
        anyhow::ensure!(context <= most, "--context {context} exceeds the model's {most} positions");
        let options = RunnerOptions {
            slots: if args.batch.is_some() { args.batch_size.into() } else { 1 },
            context,
            chunk: args.chunk as usize,
            numerics: machine::numerics(args.engine.numerics),
        };
        let mut runner = Runner::open(backend, checkpoint, options)?;
        let sampling = Sampling { temperature: args.temperature, top_p: args.top_p, seed: args.seed };
        let mut console = Console { runner: &mut runner, text, args, sampling, stop };
        match input {
            Input::Raw(prompt) => {
                let ids = text.raw(&prompt)?;
                console.print(Sequence::new(0, ids, sampling), None)?;
            }
            Input::Chat(chat) => {
                let rendered = text.chat(&chat)?;
                console.print(Sequence::new(0, rendered.ids, sampling), Some(rendered.answer))?;
            }
            Input::Conversation(system) => conversation::run(&mut console, system)?,
            Input::Batch => return batch_file(&mut console),
        }
        Ok(if stop.load(Ordering::Relaxed) { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
    }
}

fn batch_file<B: Backend>(console: &mut Console<'_, B>) -> Result<ExitCode> {
    let args = console.args;
    let (Some(input), Some(output)) = (&args.batch, &args.out) else {
        unreachable!("the command line requires --batch and --out together");
    };
    let defaults = batch::Defaults {
        max_tokens: args.max_tokens as usize,
        sampling: console.sampling,
        thinking: args.thinking,
        reasoning_effort: args.reasoning_effort.clone(),
    };
    let done = batch::run(console.runner, console.text, input, output, &defaults, console.stop)?;
    Ok(if done { ExitCode::SUCCESS } else { ExitCode::from(INTERRUPTED) })
}

/// A runner with a terminal or a pipe behind it.
struct Console<'a, B: Backend> {
    runner: &'a mut Runner<B>,
    text: &'a TextModel,
    args: &'a GenerateArgs,
    sampling: Sampling,
    stop: &'a AtomicBool,
}

impl<B: Backend> Console<'_, B> {
    /// Runs a sequence to its end and prints it as it grows: the answer to standard output, thoughts to standard
    /// error. Ctrl-C ends it early.
    fn print(&mut self, mut sequence: Sequence, options: Option<AnswerOptions>) -> Result<(Sequence, Said)> {
        self.runner.check_prompt(&sequence.ids)?;
        let mut answer = self.text.answer(options);
        let mut printer = Printer::default();
        let started = Instant::now();
        let mut first = None;
        let context = self.runner.options().context;
        let finish = loop {
            if self.stop.load(Ordering::Relaxed) {
                break Finish::Length;
            }
            if self.runner.step(&mut [&mut sequence])?.is_empty() {
                continue;
            }
            first.get_or_insert_with(|| started.elapsed());
            let token = *sequence.ids.last().expect("a token was just added");
            let generated = sequence.generated().len();
            let finish = answer.push(token, generated, self.args.max_tokens as usize)?;
            printer.show(&answer.said)?;
            if let Some(finish) = finish.or((sequence.ids.len() >= context).then_some(Finish::Length)) {
                break finish;
            }
        };
        let said = answer.close(finish)?;
        printer.show(&said)?;
        printer.end(&said)?;
        if !self.args.quiet {
            let first = first.unwrap_or_else(|| started.elapsed()).as_secs_f64();
            let rest = started.elapsed().as_secs_f64() - first;
            self.print_speed(&sequence, first, rest, finish);
        }
        Ok((sequence, said))
    }

    fn print_speed(&self, sequence: &Sequence, first: f64, rest: f64, finish: Finish) {
        let generated = sequence.generated().len();
        let mut line = format!("[{} prompt tokens, first token after {:.3} s", sequence.prompt, first);
        if generated > 1 && rest > 0.0 {
            let speed = report::three_digits((generated - 1) as f64 / rest);
            line += &format!(", {generated} tokens at {speed} tokens/s");
        }
        if finish == Finish::Length && !self.stop.load(Ordering::Relaxed) {
            line += ", cut at the token limit";
        }
        eprintln!("{line}]");
    }
}

/// Prints what is new.
#[derive(Debug, Default)]
struct Printer {
    text: usize,
    reasoning: usize,
}

impl Printer {
    fn show(&mut self, said: &Said) -> io::Result<()> {
        if said.reasoning.len() > self.reasoning {
            let piece = &said.reasoning[self.reasoning..];
            if io::stderr().is_terminal() {
                eprint!("\x1b[2m{piece}\x1b[0m")
            } else {
                eprint!("{piece}")
            }
            self.reasoning = said.reasoning.len();
        }
        if said.text.len() > self.text {
            if self.text == 0 && self.reasoning > 0 {
                eprintln!();
            }
            let mut out = io::stdout().lock();
            out.write_all(&said.text.as_bytes()[self.text..])?;
            out.flush()?;
            self.text = said.text.len();
        }
        Ok(())
    }

    /// Tool calls as JSON lines, and the last line's end.
    fn end(&self, said: &Said) -> Result<()> {
        let mut out = io::stdout().lock();
        if self.text > 0 && !said.text.ends_with('\n') {
            writeln!(out)?;
        } else if self.text == 0 && self.reasoning > 0 {
            eprintln!();
        }
        for call in &said.tool_calls {
            writeln!(out, "{}", serde_json::to_string(call)?)?;
        }
        out.flush()?;
        Ok(())
    }
}
