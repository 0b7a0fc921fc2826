//! The shipped model answers as the float32 reference did: token for token in f32, nearly always in quantized.
//!
//! Rendering and tokenizing are tested at the gateway; here the recorded prompt ids go in.

// Helpers of tests unwrap like tests; the lint knows functions marked as tests only.
#![allow(clippy::unwrap_used)]

mod support;

use deepinfer_engine::Numerics;
use deepinfer_serving::batch::{BLOCK_TOKENS, Logits, SequenceStep};
use serde_json::Value;
use support::{Rig, argmax, checkpoint, cpu, options, repository};

/// Sequences that are decoded together.
const COMPANY: usize = 16;
/// Rows of a prefill step.
const CHUNK: usize = 256;

struct Answer {
    prompt: Vec<u32>,
    want: Vec<u32>,
}

/// Rows of the file whose answers do not hang on a rounding.
fn stable_answers() -> Vec<Answer> {
    let path = repository("examples/models/tiny-v41/answers.json");
    let rows: Vec<Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let ids = |value: &Value| -> Vec<u32> {
        let list = value.as_array().expect("a list of ids");
        list.iter().map(|id| id.as_u64().expect("an id") as u32).collect()
    };
    rows.iter()
        .filter(|row| row["stable"] == Value::Bool(true))
        .map(|row| Answer { prompt: ids(&row["prompt_ids"]), want: ids(&row["answer_ids"]) })
        .collect()
}

/// One sequence on its way.
struct Running<'a> {
    answer: &'a Answer,
    got: Vec<u32>,
}

impl Running<'_> {
    /// The next part of the sequence: a piece of the prompt, or the last token.
    fn step<'s>(&'s self, held: usize, last: &'s [u32]) -> &'s [u32] {
        match self.answer.prompt.len().checked_sub(held) {
            Some(left) if left > 0 => &self.answer.prompt[held..held + left.min(CHUNK)],
            _ => last,
        }
    }
}

/// Answers all prompts greedily, a group at a time; which of them came out as recorded.
fn answers_match(numerics: Numerics) -> Vec<bool> {
    let model = checkpoint("examples/models/tiny-v41");
    let answers = stable_answers();
    let longest = answers.iter().map(|a| a.prompt.len() + a.want.len()).max().unwrap();
    let positions = longest.next_multiple_of(BLOCK_TOKENS);
    let mut rig = Rig::open(cpu(), &model, options(numerics, COMPANY, positions, COMPANY * CHUNK));
    let mut matches = Vec::new();
    for group in answers.chunks(COMPANY) {
        let mut running: Vec<Running> =
            group.iter().map(|answer| Running { answer, got: Vec::new() }).collect();
        for slot in 0..group.len() {
            rig.engine.reset(deepinfer_serving::batch::StateSlot(slot as u32));
        }
        while advance(&mut rig, &mut running) {}
        matches.extend(running.iter().map(|r| r.got == r.answer.want));
    }
    matches
}

/// One step of all unfinished sequences; false when there is none.
fn advance<B: deepinfer_kernels::Backend>(rig: &mut Rig<B>, running: &mut [Running<'_>]) -> bool {
    let mut steps = Vec::new();
    let mut slots = Vec::new();
    for (slot, sequence) in running.iter().enumerate() {
        // A wrong token ends a sequence: what follows it proves nothing.
        let so_far = sequence.got.len();
        if so_far == sequence.answer.want.len() || sequence.got[..] != sequence.answer.want[..so_far] {
            continue;
        }
        let last: Vec<u32> = sequence.got.last().copied().into_iter().collect();
        let held = rig.held(slot);
        let tokens = sequence.step(held, &last).to_vec();
        let prompt = sequence.answer.prompt.len();
        steps.push(SequenceStep {
            logits: Logits::Last,
            prompt_tokens: (held < prompt).then_some(prompt),
            ..rig.sequence(slot, held, &tokens)
        });
        slots.push(slot);
    }
    if steps.is_empty() {
        return false;
    }
    let logits = rig.step(steps);
    for (slot, logits) in slots.into_iter().zip(logits) {
        if rig.held(slot) >= running[slot].answer.prompt.len() {
            running[slot].got.push(argmax(&logits));
        }
    }
    true
}

#[test]
fn the_shipped_model_gives_every_stable_answer_in_f32() {
    let matches = answers_match(Numerics::F32);
    assert!(matches.len() >= 80, "{} stable answers", matches.len());
    let wrong: Vec<usize> = (0..matches.len()).filter(|i| !matches[*i]).collect();
    assert!(wrong.is_empty(), "stable rows {wrong:?} of {} differ", matches.len());
}

#[test]
fn the_shipped_model_gives_nearly_every_stable_answer_in_quantized() {
    let matches = answers_match(Numerics::Quantized);
    let right = matches.iter().filter(|m| **m).count();
    assert!(right * 100 >= matches.len() * 95, "{right} of {} stable answers", matches.len());
}
