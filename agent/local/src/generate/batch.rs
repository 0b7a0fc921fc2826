//! `generate --batch`: a file of prompts, answered side by side, resumable after any kind of stop.
//!
//! The output is a log: one whole JSON line for each finished request, flushed before the next one. After a kill
//! the last line may be torn; it is cut off and its request runs again. Nothing else is remembered.

use std::collections::{BTreeSet, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use deepinfer_engine::sampler::Sampling;
use deepinfer_gateway::{AnswerOptions, ChatMessage, ChatRequest};
use deepinfer_kernels::Backend;
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};

use super::text::{Answer, Finish, TextModel, ToolCall};
use crate::runner::{Runner, Sequence};

/// Most errors of an input file that are shown at once.
const SHOWN_ERRORS: usize = 20;

/// One line of the input.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    #[serde(alias = "custom_id")]
    id: String,
    prompt: Option<String>,
    prompt_ids: Option<Vec<u32>>,
    messages: Option<serde_json::Value>,
    tools: Option<serde_json::Value>,
    thinking: Option<bool>,
    reasoning_effort: Option<String>,
    max_tokens: Option<usize>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    seed: Option<u64>,
}

/// One line of the output.
#[derive(Debug, Serialize)]
struct Record<'a> {
    id: &'a str,
    #[serde(flatten)]
    outcome: Outcome,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Outcome {
    Done {
        text: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        reasoning: Option<String>,
        #[serde(skip_serializing_if = "Vec::is_empty")]
        tool_calls: Vec<ToolCall>,
        token_ids: Vec<u32>,
        finish_reason: Finish,
        prompt_tokens: usize,
        completion_tokens: usize,
    },
    Refused {
        error: String,
    },
}

/// What holds for lines that do not say otherwise.
#[derive(Clone, Debug)]
pub struct Defaults {
    /// Most tokens of an answer.
    pub max_tokens: usize,
    /// Draws.
    pub sampling: Sampling,
    /// Thinking before the answer.
    pub thinking: bool,
    /// Effort of the thinking.
    pub reasoning_effort: Option<String>,
}

/// A checked request.
#[derive(Debug)]
struct Request {
    id: String,
    prompt_ids: Result<Vec<u32>, String>,
    /// How the answer is read; `None` is plain text.
    answer: Option<AnswerOptions>,
    max_tokens: usize,
    sampling: Sampling,
}

struct Running {
    request: Request,
    sequence: Sequence,
    answer: Answer,
}

/// Runs the file. Gives whether all of it is done; `stop` ends it early.
pub fn run<B: Backend>(
    runner: &mut Runner<B>,
    text: &TextModel,
    input: &Path,
    output: &Path,
    defaults: &Defaults,
    stop: &AtomicBool,
) -> Result<bool> {
    let mut requests = read_input(input, text, defaults)?;
    let (mut log, finished) = open_output(output)?;
    let total = requests.len();
    requests.retain(|r| !finished.contains(&r.id));
    let bar = progress(total, total - requests.len());
    let free = &mut (0..runner.options().slots).rev().collect::<Vec<usize>>();
    let mut running: Vec<Running> = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        admit(runner, text, &mut requests, &mut running, free, &mut log, &bar)?;
        if running.is_empty() {
            break;
        }
        let mut members: Vec<&mut Sequence> = running.iter_mut().map(|r| &mut r.sequence).collect();
        let mut advanced = runner.step(&mut members)?;
        let context = runner.options().context;
        // From the highest ordinal down, so that removing one does not move the others that are still to be seen.
        advanced.sort_unstable_by(|a, b| b.cmp(a));
        for ordinal in advanced {
            let member = &mut running[ordinal];
            let token = *member.sequence.ids.last().expect("a token was just added");
            let generated = member.sequence.generated().len();
            let finish = member.answer.push(token, generated, member.request.max_tokens)?.or((member
                .sequence
                .ids
                .len()
                >= context)
                .then_some(Finish::Length));
            if let Some(finish) = finish {
                let done = running.swap_remove(ordinal);
                free.push(done.sequence.slot());
                write_done(&mut log, done, finish)?;
                bar.inc(1);
            }
        }
    }
    log.sync_all().with_context(|| format!("{}", output.display()))?;
    bar.finish_and_clear();
    let left = requests.len() + running.len();
    eprintln!(
        "{} of {total} answered{}",
        total - left,
        if left > 0 { "; run the same command again to go on" } else { "" }
    );
    Ok(left == 0)
}

/// Starts requests while slots are free; a request that cannot run is answered with its error at once.
fn admit<B: Backend>(
    runner: &Runner<B>,
    text: &TextModel,
    requests: &mut VecDeque<Request>,
    running: &mut Vec<Running>,
    free: &mut Vec<usize>,
    log: &mut File,
    bar: &ProgressBar,
) -> Result<()> {
    while let Some(&slot) = free.last() {
        let Some(request) = requests.pop_front() else { break };
        let checked = request
            .prompt_ids
            .as_ref()
            .map_err(Clone::clone)
            .and_then(|ids| runner.check_prompt(ids).map_err(|e| crate::report::chain(&e)));
        if let Err(error) = checked {
            write_record(log, &Record { id: &request.id, outcome: Outcome::Refused { error } })?;
            bar.inc(1);
            continue;
        }
        free.pop();
        let ids = request.prompt_ids.clone().expect("checked above");
        let answer = text.answer(request.answer.clone());
        running.push(Running { sequence: Sequence::new(slot, ids, request.sampling), answer, request });
    }
    Ok(())
}

fn write_done(log: &mut File, done: Running, finish: Finish) -> Result<()> {
    let token_ids = done.sequence.generated().to_vec();
    let said = done.answer.close(finish)?;
    let outcome = Outcome::Done {
        text: said.text,
        reasoning: (!said.reasoning.is_empty()).then_some(said.reasoning),
        tool_calls: said.tool_calls,
        finish_reason: finish,
        prompt_tokens: done.sequence.prompt,
        completion_tokens: token_ids.len(),
        token_ids,
    };
    write_record(log, &Record { id: &done.request.id, outcome })
}

fn write_record(log: &mut File, record: &Record<'_>) -> Result<()> {
    let mut line = serde_json::to_vec(record)?;
    line.push(b'\n');
    // One write for the whole line: a kill leaves it whole, absent, or torn at the end of the file.
    log.write_all(&line).context("writing --out (is the disk full?); run the same command again to go on")
}

/// Reads and checks every line before anything runs; all mistakes are named at once.
fn read_input(path: &Path, text: &TextModel, defaults: &Defaults) -> Result<VecDeque<Request>> {
    let file = File::open(path).with_context(|| format!("--batch {}", path.display()))?;
    let mut requests = VecDeque::new();
    let mut seen = BTreeSet::new();
    let mut errors = Vec::new();
    for (number, line) in BufReader::new(file).split(b'\n').enumerate() {
        let line = line.with_context(|| format!("--batch {}", path.display()))?;
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        match parse_line(&line, text, defaults) {
            Ok(request) if !seen.insert(request.id.clone()) => {
                errors.push(format!("line {}: id {:?} is there twice", number + 1, request.id));
            }
            Ok(request) => requests.push_back(request),
            Err(error) => errors.push(format!("line {}: {error}", number + 1)),
        }
    }
    if !errors.is_empty() {
        let more = errors.len().saturating_sub(SHOWN_ERRORS);
        errors.truncate(SHOWN_ERRORS);
        if more > 0 {
            errors.push(format!("and {more} more"));
        }
        bail!("--batch {}: nothing was run\n  {}", path.display(), errors.join("\n  "));
    }
    Ok(requests)
}

fn parse_line(line: &[u8], text: &TextModel, defaults: &Defaults) -> Result<Request, String> {
    let line: Line = serde_json::from_slice(line).map_err(|e| e.to_string())?;
    let sampling = Sampling {
        temperature: line.temperature.unwrap_or(defaults.sampling.temperature),
        top_p: line.top_p.unwrap_or(defaults.sampling.top_p),
        seed: line.seed.unwrap_or(defaults.sampling.seed),
    };
    if !(0.0..=2.0).contains(&sampling.temperature) {
        return Err(format!("temperature {} is not between 0 and 2", sampling.temperature));
    }
    if !(sampling.top_p > 0.0 && sampling.top_p <= 1.0) {
        return Err(format!("top_p {} is not above 0 and up to 1", sampling.top_p));
    }
    let max_tokens = line.max_tokens.unwrap_or(defaults.max_tokens);
    if max_tokens == 0 {
        return Err("max_tokens is 0, at least 1 is needed".to_owned());
    }
    let done = |prompt_ids, answer| Request { id: line.id.clone(), prompt_ids, answer, max_tokens, sampling };
    let mut chat = match (&line.prompt, line.prompt_ids, line.messages) {
        (Some(prompt), None, None) => ChatRequest::new(vec![ChatMessage::user(prompt)]),
        (None, None, Some(messages)) => {
            let mut file = serde_json::Map::from_iter([("messages".to_owned(), messages)]);
            file.extend(line.tools.map(|tools| ("tools".to_owned(), tools)));
            ChatRequest::from_value(file.into()).map_err(|e| e.to_string())?
        }
        (None, Some(ids), None) => return Ok(done(Ok(ids), None)),
        _ => return Err("exactly one of prompt, prompt_ids and messages is needed".to_owned()),
    };
    chat.thinking = Some(line.thinking.unwrap_or(defaults.thinking));
    let effort = line.reasoning_effort.as_ref().or(defaults.reasoning_effort.as_ref());
    chat.reasoning_effort = effort.map(|e| ChatRequest::effort(e)).transpose().map_err(|e| e.to_string())?;
    // A request that cannot be rendered is a result of its own, not a reason to run nothing.
    Ok(match text.chat(&chat) {
        Ok(rendered) => done(Ok(rendered.ids), Some(rendered.answer)),
        Err(error) => done(Err(crate::report::chain(&error)), None),
    })
}

/// Opens the log for appending, without its torn last line, and gives the ids that are done.
fn open_output(path: &Path) -> Result<(File, BTreeSet<String>)> {
    #[derive(Deserialize)]
    struct Done {
        id: String,
    }
    let name = || format!("--out {}", path.display());
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .with_context(name)?;
    let mut finished = BTreeSet::new();
    let mut whole = 0;
    let mut reader = BufReader::new(&file);
    let mut line = Vec::new();
    for number in 1.. {
        line.clear();
        let read = reader.read_until(b'\n', &mut line).with_context(name)?;
        if line.last() != Some(&b'\n') {
            break;
        }
        let done: Done = serde_json::from_slice(&line).with_context(|| {
            format!("{} line {number} is not a result of this command: name another file", name())
        })?;
        finished.insert(done.id);
        whole += read as u64;
    }
    file.set_len(whole).with_context(name)?;
    file.seek(SeekFrom::End(0)).with_context(name)?;
    Ok((file, finished))
}

fn progress(total: usize, done: usize) -> ProgressBar {
    let bar = ProgressBar::new(total as u64);
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} answered, {elapsed} elapsed, eta {eta}")
        .expect("the template is a constant");
    bar.set_style(style);
    bar.set_position(done as u64);
    bar
}
