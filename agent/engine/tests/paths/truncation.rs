//! Consumer truncation: computing only the kept rows against masking the others.

use deepinfer_engine::engine::{BoundarySwa, EngineOptions, Truncation};
use deepinfer_serving::batch::{SequenceStep, StateSlot};

use crate::support::{Rig, Rng, cpu, golden_models, one_pass, options, same_bits};

const PROMPT: usize = 150;

/// Logits of the last row of a prompt in pieces, then of single tokens, then of a draft.
fn run(rig: &mut Rig<deepinfer_kernels::Cpu>, text: &[u32], cuts: &[usize]) -> Vec<f32> {
    let mut logits = Vec::new();
    for cut in cuts {
        let at = rig.held(0);
        let step = SequenceStep {
            prompt_tokens: Some(PROMPT),
            logits: deepinfer_serving::batch::Logits::Last,
            ..rig.sequence(0, at, &text[at..at + cut])
        };
        let last = rig.step(vec![step]).remove(0);
        if rig.held(0) == PROMPT {
            logits.extend(last);
        }
    }
    for token in &text[PROMPT..] {
        logits.extend(rig.extend(0, &[*token]));
    }
    let draft = rig.draft(0, 60);
    logits.extend(&draft.logits);
    logits
}

#[test]
fn masked_and_compacted_prefill_are_the_same_bits_however_it_is_cut() {
    for (name, model, numerics) in golden_models() {
        let mut rng = Rng::new(61);
        let text = rng.tokens(PROMPT + 9, model.shape.vocab_size);
        for boundary_swa in [BoundarySwa::Truncated, BoundarySwa::Full] {
            for keep in [1, 33, PROMPT - 1] {
                let open = |truncation| {
                    let options = EngineOptions {
                        truncation,
                        keep: Some(keep),
                        boundary_swa,
                        ..options(numerics, 1, 256, PROMPT)
                    };
                    Rig::open(cpu(), &model, options)
                };
                let want = run(&mut open(Truncation::Mask), &text, &[PROMPT]);
                let got = run(&mut open(Truncation::Compact), &text, &[PROMPT]);
                same_bits(&format!("{name}, keep {keep}, {boundary_swa:?}"), &want, &got);
                for cuts in [vec![PROMPT - keep, keep], rng.cuts(PROMPT)] {
                    for truncation in [Truncation::Mask, Truncation::Compact] {
                        let got = run(&mut open(truncation), &text, &cuts);
                        let what =
                            format!("{name}, keep {keep}, {boundary_swa:?}, {truncation:?}, cuts {cuts:?}");
                        same_bits(&what, &want, &got);
                    }
                }
            }
        }
    }
}

#[test]
fn a_prompt_that_is_kept_whole_is_exact() {
    for (name, model, numerics) in golden_models() {
        let mut rng = Rng::new(62);
        let text = rng.tokens(PROMPT, model.shape.vocab_size);
        let vocab = model.shape.vocab_size;
        let exact = one_pass(cpu(), &model, numerics, &text);
        for truncation in [Truncation::Mask, Truncation::Compact] {
            for (keep, equal) in [(PROMPT, true), (PROMPT + 50, true), (20, false)] {
                let options =
                    EngineOptions { truncation, keep: Some(keep), ..options(numerics, 1, PROMPT, PROMPT) };
                let mut rig = Rig::open(cpu(), &model, options);
                let step = SequenceStep { prompt_tokens: Some(PROMPT), ..rig.sequence(0, 0, &text) };
                let got = rig.step(vec![step]).remove(0);
                let (want, got) = (&exact[exact.len() - vocab..], &got[got.len() - vocab..]);
                if equal {
                    same_bits(&format!("{name}, {truncation:?}, keep {keep}"), want, got);
                } else {
                    assert_ne!(want, got, "{name}, {truncation:?}: a truncated prefill is an approximation");
                }
            }
        }
    }
}

#[test]
fn a_truncated_prefill_in_company_is_the_bits_of_it_alone() {
    for (name, model, numerics) in golden_models() {
        let mut rng = Rng::new(63);
        let vocab = model.shape.vocab_size;
        let texts = [rng.tokens(PROMPT, vocab), rng.tokens(90, vocab), rng.tokens(20, vocab)];
        let rig = |slots| {
            let options = EngineOptions {
                truncation: Truncation::Compact,
                keep: Some(37),
                ..options(numerics, slots, 256, 256)
            };
            Rig::open(cpu(), &model, options)
        };
        let step = |rig: &Rig<_>, slot: usize, text: &[u32], prompt: Option<usize>| SequenceStep {
            prompt_tokens: prompt,
            ..rig.sequence(slot, rig.held(slot), text)
        };
        // Alone: a long prompt, one whose first chunk has no kept row, and a sequence that is already decoding.
        let run = |rig: &mut Rig<_>, slots: [usize; 3], together: bool| {
            rig.extend(slots[2], &texts[2][..19]);
            let rounds = [
                [&texts[0][..100], &texts[1][..50], &texts[2][19..]],
                [&texts[0][100..], &texts[1][50..], &[8]],
            ];
            let mut logits = vec![Vec::new(); 3];
            for parts in rounds {
                let prompts = [Some(PROMPT), Some(90), None];
                let all: Vec<SequenceStep> =
                    (0..3).map(|i| step(rig, slots[i], parts[i], prompts[i])).collect();
                let groups = if together { vec![all] } else { all.into_iter().map(|s| vec![s]).collect() };
                let results = groups.into_iter().flat_map(|group| rig.step(group));
                for (logits, part) in logits.iter_mut().zip(results) {
                    logits.extend(part);
                }
            }
            for (slot, logits) in slots.into_iter().zip(&mut logits) {
                logits.extend(rig.extend(slot, &[11]));
                logits.extend(rig.draft(slot, 12).logits);
            }
            logits
        };
        let want = run(&mut rig(3), [0, 1, 2], false);
        let got = run(&mut rig(3), [2, 0, 1], true);
        for (i, (want, got)) in want.iter().zip(&got).enumerate() {
            same_bits(&format!("{name}: sequence {i}"), want, got);
        }
    }
}

#[test]
fn the_window_of_a_truncated_prefill_can_be_exported_and_imported() {
    for (name, model, numerics) in golden_models() {
        let mut rng = Rng::new(64);
        let text = rng.tokens(256 + 20, model.shape.vocab_size);
        for boundary_swa in [BoundarySwa::Truncated, BoundarySwa::Full] {
            let options = EngineOptions {
                truncation: Truncation::Compact,
                keep: Some(9),
                boundary_swa,
                ..options(numerics, 2, 384, 256)
            };
            let mut rig = Rig::open(cpu(), &model, options);
            let step = SequenceStep { prompt_tokens: Some(256), ..rig.sequence(0, 0, &text[..256]) };
            rig.step(vec![step]);
            let state = rig.engine.export_window(StateSlot(0)).unwrap();
            rig.share(0, 1, 256);
            rig.engine.import_window(StateSlot(1), &state).unwrap();
            let [want, got] = [0, 1].map(|slot| {
                let mut logits = rig.extend(slot, &text[256..]);
                logits.extend(rig.draft(slot, 12).logits);
                logits
            });
            same_bits(&format!("{name}, {boundary_swa:?}"), &want, &got);
        }
    }
}
