//! Rejected drafts and earlier sequences leave no trace.

use deepinfer_serving::batch::{BLOCK_TOKENS, StateSlot};

use crate::support::{Rig, Rng, cpu, golden_models, one_pass, options, same_bits};

/// Prompt of the tests; with what follows it crosses a block.
const PROMPT: usize = BLOCK_TOKENS - 20;
const TOTAL: usize = BLOCK_TOKENS + 12;

#[test]
fn drafts_that_were_run_and_rejected_leave_no_trace() {
    for (name, model, numerics) in golden_models() {
        let mut rng = Rng::new(41);
        let vocab = model.shape.vocab_size;
        let block = model.shape.draft.as_ref().expect("the golden models draft").block_size;
        let text = rng.tokens(TOTAL, vocab);
        let mut plain = Rig::open(cpu(), &model, options(numerics, 1, TOTAL, PROMPT));
        let mut wanton = Rig::open(cpu(), &model, options(numerics, 1, TOTAL + block + 1, PROMPT));
        let want = plain.extend(0, &text[..PROMPT]);
        same_bits(&name, &want, &wanton.extend(0, &text[..PROMPT]));
        let mut at = PROMPT;
        while at < TOTAL {
            // Some drafts are right, the rest is noise; one step runs them all.
            let right = rng.below(block).min(TOTAL - at - 1);
            let kept = &text[at..=at + right];
            let noise = rng.tokens(block - right, vocab);
            // Wrong drafts of the round before are forgotten here, if they were not already.
            let got = wanton.run(0, at, &[kept, &noise].concat());
            let mut want = Vec::new();
            for token in kept {
                want.extend(plain.extend(0, &[*token]));
            }
            same_bits(&format!("{name} at {at}"), &want, &got[..want.len()]);
            at += kept.len();
            if rng.below(2) == 0 {
                wanton.truncate(0, at);
                assert_eq!(wanton.held(0), at);
                let [want, got] = [&mut plain, &mut wanton].map(|rig| rig.draft(0, 50));
                assert_eq!(want.tokens, got.tokens, "{name} at {at}");
                same_bits(&format!("{name}: drafts at {at}"), &want.logits, &got.logits);
            }
        }
    }
}

#[test]
fn a_step_that_starts_lower_forgets_what_came_later() {
    for (name, model, numerics) in golden_models() {
        let mut rng = Rng::new(42);
        let text = rng.tokens(90, model.shape.vocab_size);
        let want = one_pass(cpu(), &model, numerics, &text);
        let vocab = model.shape.vocab_size;
        let block = model.shape.draft.as_ref().expect("the golden models draft").block_size;
        for back in 1..=block {
            let mut rig = Rig::open(cpu(), &model, options(numerics, 1, 128, 90));
            rig.extend(0, &text[..50]);
            let noise = rng.tokens(back, vocab);
            rig.extend(0, &noise);
            let got = rig.run(0, 50, &text[50..]);
            same_bits(&format!("{name}, {back} rows back"), &want[50 * vocab..], &got);
        }
    }
}

#[test]
fn window_states_at_a_block_are_equal_whether_or_not_drafts_ran_before() {
    for (name, model, numerics) in golden_models() {
        let mut rng = Rng::new(43);
        let vocab = model.shape.vocab_size;
        let block = model.shape.draft.as_ref().expect("the golden models draft").block_size;
        let text = rng.tokens(BLOCK_TOKENS, vocab);
        let mut plain = Rig::open(cpu(), &model, options(numerics, 1, 256, 256));
        plain.extend(0, &text);
        let want = plain.engine.export_window(StateSlot(0)).unwrap();
        let mut wanton = Rig::open(cpu(), &model, options(numerics, 1, 256, 256));
        wanton.extend(0, &text[..BLOCK_TOKENS - 3]);
        for at in BLOCK_TOKENS - 3..BLOCK_TOKENS {
            let noise = rng.tokens(block, vocab);
            wanton.extend(0, &[&text[at..=at], &noise].concat());
            wanton.truncate(0, at + 1);
        }
        let got = wanton.engine.export_window(StateSlot(0)).unwrap();
        assert!(want == got, "{name}: the exported windows differ");
    }
}

#[test]
fn a_slot_and_its_blocks_can_be_used_again() {
    for (name, model, numerics) in golden_models() {
        let mut rng = Rng::new(44);
        let vocab = model.shape.vocab_size;
        let long = rng.tokens(200, vocab);
        let mut rig = Rig::open(cpu(), &model, options(numerics, 1, 256, 200));
        rig.extend(0, &long);
        for (length, reset) in [(70, false), (1, true), (131, true), (33, false)] {
            let text = rng.tokens(length, vocab);
            let want = one_pass(cpu(), &model, numerics, &text);
            if reset {
                rig.engine.reset(StateSlot(0));
                assert_eq!(rig.held(0), 0);
            }
            let middle = length / 2;
            let mut got = rig.run(0, 0, &text[..middle.max(1)]);
            for token in &text[middle.max(1)..] {
                got.extend(rig.extend(0, &[*token]));
            }
            same_bits(&format!("{name}, {length} tokens, reset {reset}"), &want, &got);
            let fresh = {
                let mut fresh = Rig::open(cpu(), &model, options(numerics, 1, 256, 200));
                fresh.extend(0, &text);
                fresh.draft(0, 5)
            };
            let again = rig.draft(0, 5);
            same_bits(&format!("{name}: drafts after {length} tokens"), &fresh.logits, &again.logits);
        }
    }
}
