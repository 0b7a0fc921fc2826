//! Long prompts of `e2e/golden/continuations.json` and the 64 tokens that the oracle goes on with: prefilled whole, in
//! chunks, and after the prefix came from another sequence.
//!
//! Each check runs on the cpu backend with f32 numerics, as the oracle does. No top-k decision and no token of the
//! fixture is a near tie for two correct engines, so the ids must be the same.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

mod support;

use std::fs;

use deepinfer_engine::{Checkpoint, Numerics};
use deepinfer_kernels::Cpu;
use deepinfer_serving::batch::{BLOCK_TOKENS, StateSlot};
use serde::Deserialize;
use support::{Rig, argmax, checkpoint, cpu, options, repository};

/// How far two correct engines may be apart in a distance of two logits: each may be off by 1e-4, twice.
const TOLERANCE: f32 = 4e-4;

#[derive(Deserialize)]
struct Fixture {
    checkpoint: String,
    numerics: String,
    cases: Vec<Case>,
}

#[derive(Clone, Deserialize)]
struct Case {
    name: String,
    prompt: Vec<u32>,
    continuation: Vec<u32>,
    min_margin: f32,
}

impl Case {
    /// Tokens that a later request with the same prompt can take from a cache: whole blocks, and one token is left
    /// to run.
    fn reusable(&self) -> usize {
        (self.prompt.len() - 1) / BLOCK_TOKENS * BLOCK_TOKENS
    }

    /// Most positions that a run of the case holds.
    fn positions(&self) -> usize {
        self.prompt.len() + self.continuation.len()
    }
}

fn fixture() -> (Checkpoint, Vec<Case>) {
    let path = repository("e2e/golden/continuations.json");
    let fixture: Fixture = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    assert_eq!(fixture.numerics, "f32");
    (checkpoint(&format!("e2e/golden/{}", fixture.checkpoint)), fixture.cases)
}

fn case(cases: &[Case], name: &str) -> Case {
    cases.iter().find(|case| case.name == name).unwrap_or_else(|| panic!("no case {name}")).clone()
}

/// An engine for `slots` sequences of a case.
fn rig(model: &Checkpoint, slots: usize, case: &Case) -> Rig<Cpu> {
    Rig::open(cpu(), model, options(Numerics::F32, slots, case.positions(), case.prompt.len()))
}

/// Brings a slot from what it holds to the end of the prompt, `rows` a step; the logits of the last row.
fn prefill(rig: &mut Rig<Cpu>, slot: usize, prompt: &[u32], rows: usize) -> Vec<f32> {
    let mut last = Vec::new();
    for piece in prompt[rig.held(slot)..].chunks(rows) {
        let logits = rig.extend(slot, piece);
        last = logits[logits.len() - rig.vocab()..].to_vec();
    }
    last
}

/// Greedy tokens from the logits after a prompt on, and how far the tightest of them led.
fn greedy(rig: &mut Rig<Cpu>, slot: usize, mut logits: Vec<f32>, count: usize) -> (Vec<u32>, f32) {
    let (mut tokens, mut margin) = (Vec::new(), f32::INFINITY);
    loop {
        let token = argmax(&logits);
        let best = logits[token as usize];
        let others = logits.iter().enumerate().filter(|(id, _)| *id != token as usize);
        margin = margin.min(best - others.map(|(_, v)| *v).fold(f32::NEG_INFINITY, f32::max));
        tokens.push(token);
        if tokens.len() == count {
            return (tokens, margin);
        }
        logits = rig.extend(slot, &[token]);
    }
}

/// Runs the rest of a case in a slot and compares with the oracle.
#[track_caller]
fn goes_on(rig: &mut Rig<Cpu>, slot: usize, case: &Case, rows: usize, what: &str) {
    let logits = prefill(rig, slot, &case.prompt, rows);
    let (tokens, margin) = greedy(rig, slot, logits, case.continuation.len());
    assert_eq!(tokens, case.continuation, "{}, {what}", case.name);
    let off = (margin - case.min_margin).abs();
    assert!(off < TOLERANCE, "{}, {what}: margin {margin} instead of {}", case.name, case.min_margin);
}

#[test]
fn the_fixture_leaves_no_token_in_doubt_and_shares_whole_blocks() {
    let (model, cases) = fixture();
    let lengths: Vec<(&str, usize, usize)> =
        cases.iter().map(|c| (c.name.as_str(), c.prompt.len(), c.continuation.len())).collect();
    assert_eq!(lengths, [("repeat", 700, 64), ("fork", 700, 64), ("long", 1300, 64)]);
    for case in &cases {
        assert!(case.min_margin > 10.0 * TOLERANCE, "{}: margin {}", case.name, case.min_margin);
        assert!(case.positions() <= model.shape.max_position_embeddings);
    }
    let common = |a: &Case, b: &Case| a.prompt.iter().zip(&b.prompt).take_while(|(x, y)| x == y).count();
    let [repeat, fork, long] = ["repeat", "fork", "long"].map(|name| case(&cases, name));
    assert_eq!(common(&repeat, &fork), repeat.reusable());
    assert!(common(&repeat, &long) < BLOCK_TOKENS, "the long prompt shares nothing");
    assert_ne!(repeat.continuation, fork.continuation);
}

#[test]
fn a_long_prompt_prefilled_whole_goes_on_as_the_oracle_says() {
    let (model, cases) = fixture();
    for case in cases {
        goes_on(&mut rig(&model, 1, &case), 0, &case, case.prompt.len(), "whole");
    }
}

#[test]
fn a_long_prompt_prefilled_in_chunks_goes_on_as_the_oracle_says() {
    let (model, cases) = fixture();
    for case in cases {
        for rows in [128, 96] {
            goes_on(&mut rig(&model, 1, &case), 0, &case, rows, &format!("chunks of {rows}"));
        }
    }
}

#[test]
fn a_prefix_of_another_sequence_and_its_window_checkpoint_go_on_as_the_oracle_says() {
    let (model, cases) = fixture();
    // The same prompt again, another prompt with the same first blocks, and the longest prompt again.
    for (first, second) in [("repeat", "repeat"), ("repeat", "fork"), ("long", "long")] {
        let [first, second] = [first, second].map(|name| case(&cases, name));
        let held = first.reusable();
        let mut rig = rig(&model, 2, &first);
        prefill(&mut rig, 0, &first.prompt[..held], BLOCK_TOKENS);
        let state = rig.engine.export_window(StateSlot(0)).unwrap();
        goes_on(&mut rig, 0, &first, BLOCK_TOKENS, "first");
        rig.share(0, 1, held);
        rig.engine.import_window(StateSlot(1), &state).unwrap();
        goes_on(&mut rig, 1, &second, BLOCK_TOKENS, &format!("{held} tokens of {}", first.name));
    }
}

#[test]
fn a_prefix_of_another_sequence_and_an_exact_replay_go_on_as_the_oracle_says() {
    let (model, cases) = fixture();
    for (first, second) in [("repeat", "fork"), ("long", "long")] {
        let [first, second] = [first, second].map(|name| case(&cases, name));
        let held = first.reusable();
        let mut rig = rig(&model, 2, &first);
        goes_on(&mut rig, 0, &first, 96, "first");
        let start = held - rig.engine.replay_tokens();
        assert!(start > 0, "{held} tokens are more than a replay");
        rig.share(0, 1, held);
        rig.engine.begin_replay(StateSlot(1), start, &second.prompt[start - 8..start]).unwrap();
        for (at, piece) in (start..held).step_by(96).zip(second.prompt[start..held].chunks(96)) {
            let mut step = rig.sequence(1, at, piece);
            step.replay = true;
            rig.step(vec![step]);
        }
        goes_on(&mut rig, 1, &second, 96, &format!("replay from {start} to {held}"));
    }
}

#[test]
fn a_hit_on_the_wrong_blocks_does_not_go_on_as_the_oracle_says() {
    let (model, cases) = fixture();
    let [repeat, long] = ["repeat", "long"].map(|name| case(&cases, name));
    let held = repeat.reusable();
    let mut rig = rig(&model, 2, &repeat);
    prefill(&mut rig, 0, &repeat.prompt[..held], BLOCK_TOKENS);
    let state = rig.engine.export_window(StateSlot(0)).unwrap();
    prefill(&mut rig, 1, &long.prompt[..held], BLOCK_TOKENS);
    rig.engine.import_window(StateSlot(1), &state).unwrap();
    let logits = prefill(&mut rig, 1, &repeat.prompt, BLOCK_TOKENS);
    let (tokens, _) = greedy(&mut rig, 1, logits, repeat.continuation.len());
    assert_ne!(tokens, repeat.continuation, "the continuation depends on the blocks of the prefix");
}
