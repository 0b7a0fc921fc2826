//! Rollback, truncation and replay in models of random shapes: what the paths tests show for the golden ones.

use deepinfer_engine::Checkpoint;
use deepinfer_engine::engine::{BoundarySwa, EngineOptions, Truncation};
use deepinfer_kernels::Cpu;
use deepinfer_serving::batch::{BLOCK_TOKENS, StateSlot};

use crate::support::{Rig, bits, options};
use crate::{TOKENS, for_random_models};

/// Fewer models than elsewhere: each runs a dozen engines or hundreds of tokens.
const CASES: u32 = 32;

#[test]
fn rejected_drafts_leave_no_trace_for_random_shapes() {
    for_random_models(CASES, |model, numerics, rng| {
        let vocab = model.shape.vocab_size;
        let text = rng.tokens(TOKENS, vocab);
        let mut plain = open(model, options(numerics, 1, 2 * TOKENS, TOKENS));
        let want = plain.extend(0, &text);
        let mut wanton = open(model, options(numerics, 1, 2 * TOKENS, TOKENS));
        let prompt = rng.within(1, 20);
        let mut got = wanton.extend(0, &text[..prompt]);
        let slack = wanton.engine.slack();
        let mut at = prompt;
        while at < TOKENS {
            let kept = rng.within(1, slack).min(TOKENS - at);
            let noise = rng.tokens(slack - kept.min(slack), vocab);
            let rows = wanton.run(0, at, &[&text[at..at + kept], &noise].concat());
            got.extend_from_slice(&rows[..kept * vocab]);
            at += kept;
            if rng.below(2) == 0 {
                wanton.truncate(0, at);
            }
        }
        wanton.truncate(0, TOKENS);
        let drafts = |rig: &mut Rig<Cpu>| model.shape.draft.as_ref().map(|_| bits(&rig.draft(0, 5).logits));
        match bits(&want) == bits(&got) && drafts(&mut plain) == drafts(&mut wanton) {
            true => Ok(()),
            false => Err(format!("{numerics}: rejected drafts after {prompt} tokens change bits")),
        }
    });
}

#[test]
fn masked_and_compacted_prefill_are_the_same_bits_for_random_shapes() {
    for_random_models(CASES, |model, numerics, rng| {
        if !model.shape.check_truncation().is_empty() {
            return Ok(());
        }
        let prompt = TOKENS - 5;
        let text = rng.tokens(TOKENS, model.shape.vocab_size);
        let keep = rng.within(1, prompt);
        let boundary_swa = [BoundarySwa::Truncated, BoundarySwa::Full][rng.below(2)];
        let cuts = rng.cuts(prompt);
        let run = |truncation, cuts: &[usize]| {
            let options = EngineOptions {
                truncation,
                keep: Some(keep),
                boundary_swa,
                ..options(numerics, 1, 2 * TOKENS, TOKENS)
            };
            let mut rig = open(model, options);
            let mut logits = Vec::new();
            for cut in cuts {
                let at = rig.held(0);
                let mut step = rig.sequence(0, at, &text[at..at + cut]);
                step.prompt_tokens = Some(prompt);
                logits.extend(rig.step(vec![step]).remove(0));
            }
            for token in &text[prompt..] {
                logits.extend(rig.extend(0, &[*token]));
            }
            bits(&logits)
        };
        let want = run(Truncation::Mask, &[prompt]);
        let others = [
            run(Truncation::Compact, &[prompt]),
            run(Truncation::Mask, &cuts),
            run(Truncation::Compact, &cuts),
        ];
        match others.iter().all(|other| *other == want) {
            true => Ok(()),
            false => Err(format!("{numerics}: keep {keep}, {boundary_swa:?}, cuts {cuts:?} change bits")),
        }
    });
}

#[test]
fn exact_replay_rebuilds_the_window_state_for_random_shapes() {
    for_random_models(CASES, |model, numerics, rng| {
        let mut rig = open(model, options(numerics, 2, 3 * BLOCK_TOKENS, 3 * BLOCK_TOKENS));
        let replay = rig.engine.replay_tokens();
        if replay > BLOCK_TOKENS {
            return Ok(());
        }
        let held = 2 * BLOCK_TOKENS;
        let text = rng.tokens(held + 9, model.shape.vocab_size);
        rig.extend(0, &text[..held]);
        let state = rig.engine.export_window(StateSlot(0)).expect("a block boundary");
        rig.share(0, 1, held);
        let start = held - replay;
        rig.engine.begin_replay(StateSlot(1), start, &text[..start]).expect("a block boundary");
        for cut in rng.cuts(replay) {
            let at = rig.held(1);
            let mut step = rig.sequence(1, at, &text[at..at + cut]);
            step.replay = true;
            rig.step(vec![step]);
        }
        let rebuilt = rig.engine.export_window(StateSlot(1)).expect("a block boundary");
        let [want, got] = [0, 1].map(|slot| bits(&rig.extend(slot, &text[held..])));
        match rebuilt == state && want == got {
            true => Ok(()),
            false => Err(format!("{numerics}: a replay of {replay} tokens rebuilds another state")),
        }
    });
}

fn open(model: &Checkpoint, options: EngineOptions) -> Rig<Cpu> {
    Rig::open(Cpu::new(2), model, options)
}
