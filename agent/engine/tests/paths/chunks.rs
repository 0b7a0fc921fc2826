//! One pass over a text against the same text in pieces.

use deepinfer_kernels::{Backend, Cpu, SimdLevel};
use deepinfer_serving::batch::{BLOCK_TOKENS, ImageSpan};

use crate::support::{Rig, Rng, cpu, golden_models, one_pass, options, same_bits};

/// Longer than a block, longer than every ring, not a whole number of groups.
const TOKENS: usize = BLOCK_TOKENS + 43;

#[test]
fn a_full_pass_equals_chunked_prefill_and_decode_for_any_cuts() {
    for (name, model, numerics) in golden_models() {
        let mut rng = Rng::new(11);
        let tokens = rng.tokens(TOKENS, model.shape.vocab_size);
        let want = one_pass(cpu(), &model, numerics, &tokens);
        let mut plans: Vec<Vec<usize>> = (0..8).map(|_| rng.cuts(TOKENS)).collect();
        let slack = model.shape.draft.as_ref().map_or(0, |d| d.block_size) + 1;
        plans.push(vec![1; TOKENS]);
        // On, just inside and just outside the number of rows that the rings take in place, and around a block.
        plans.push(repeat(slack, TOKENS));
        plans.push(repeat(slack - 1, TOKENS));
        plans.push(repeat(slack + 1, TOKENS));
        plans.push(vec![BLOCK_TOKENS - 1, 2, TOKENS - BLOCK_TOKENS - 1]);
        plans.push(vec![BLOCK_TOKENS, TOKENS - BLOCK_TOKENS]);
        for cuts in plans {
            let mut rig = Rig::open(cpu(), &model, options(numerics, 1, TOKENS, TOKENS));
            let got = run(&mut rig, 0, &tokens, &cuts);
            same_bits(&format!("{name}, cuts {cuts:?}"), &want, &got);
        }
    }
}

#[test]
fn threads_and_instruction_sets_do_not_change_a_bit() {
    for (name, model, numerics) in golden_models() {
        let mut rng = Rng::new(12);
        let total = 80;
        let tokens = rng.tokens(total, model.shape.vocab_size);
        let cuts = [60, 1, 1, 6, total - 68];
        let mut want = None;
        for level in SimdLevel::available() {
            for threads in [1, 2, 3] {
                let backend = Cpu::with_level(threads, level).expect("the level is available");
                let what = format!("{name}, {}", backend.name());
                let mut rig = Rig::open(backend, &model, options(numerics, 1, total, total));
                let mut got = run(&mut rig, 0, &tokens, &cuts);
                let draft = rig.draft(0, 7);
                got.extend(&draft.logits);
                got.extend(&draft.confidence);
                same_bits(&what, want.get_or_insert_with(|| got.clone()), &got);
            }
        }
    }
}

#[test]
fn image_spans_may_be_cut_anywhere() {
    for (name, model, numerics) in golden_models() {
        let mut rng = Rng::new(13);
        let (first, end, total) = (9, 31, 60);
        let hidden = model.shape.hidden_size;
        let mut tokens = rng.tokens(total, model.shape.vocab_size);
        tokens[first..end].fill(model.shape.image_token_id.expect("the golden models have images"));
        let embeddings: Vec<f32> =
            (0..(end - first) * hidden).map(|_| rng.within(0, 2000) as f32 / 1000.0 - 1.0).collect();
        let pass = |cuts: &[usize]| {
            let mut rig = Rig::open(cpu(), &model, options(numerics, 1, total, total));
            let mut logits = Vec::new();
            for cut in cuts {
                let start = rig.held(0);
                let mut step = rig.sequence(0, start, &tokens[start..start + cut]);
                let (a, b) = (first.max(start), end.min(start + cut));
                if a < b {
                    step.images.push(ImageSpan {
                        first: a - start,
                        embeddings: embeddings[(a - first) * hidden..(b - first) * hidden].to_vec(),
                    });
                }
                logits.extend(rig.step(vec![step]).remove(0));
            }
            logits
        };
        let want = pass(&[total]);
        for cuts in [vec![9, 22, 29], vec![10, 5, 1, 1, 43], vec![1; total], rng.cuts(total), rng.cuts(total)]
        {
            same_bits(&format!("{name}, cuts {cuts:?}"), &want, &pass(&cuts));
        }
        let mut text = Rig::open(cpu(), &model, options(numerics, 1, total, total));
        assert_ne!(text.extend(0, &tokens), want, "{name}: the image counts");
    }
}

#[test]
fn a_refused_step_leaves_no_trace() {
    for (name, model, numerics) in golden_models() {
        let mut rng = Rng::new(14);
        let vocab = model.shape.vocab_size;
        let tokens = rng.tokens(50, vocab);
        let want = one_pass(cpu(), &model, numerics, &tokens);
        let mut rig = Rig::open(cpu(), &model, options(numerics, 2, 50, 50));
        let mut got = rig.extend(0, &tokens[..30]);
        let good = rig.sequence(0, 30, &tokens[30..]);
        let mut unknown = good.clone();
        unknown.tokens[19] = vocab as u32;
        let mut gap = good.clone();
        gap.start = 31;
        let mut deep = good.clone();
        deep.start = 3;
        let mut blockless = good.clone();
        blockless.blocks.clear();
        let mut empty = good.clone();
        empty.tokens.clear();
        let long = rig.sequence(1, 0, &tokens[..40]);
        let batches = [
            ("unknown token", vec![unknown]),
            ("gap", vec![gap]),
            ("rollback deeper than the slack", vec![deep]),
            ("no blocks", vec![blockless]),
            ("no tokens", vec![empty]),
            ("a slot twice", vec![good.clone(), good.clone()]),
            ("too many rows", vec![good.clone(), long]),
        ];
        for (what, sequences) in batches {
            let batch = deepinfer_serving::batch::StepBatch { sequences };
            let before = rig.out.clone();
            let answer = rig.engine.execute(&batch, &mut rig.out);
            assert!(answer.is_err(), "{name}: {what} is refused");
            assert!(rig.out == before, "{name}: {what} leaves the last output");
            assert_eq!(rig.held(0), 30, "{name}: {what}");
        }
        got.extend(rig.step(vec![good]).remove(0));
        same_bits(&name, &want, &got);
    }
}

/// Runs a text in pieces; logits of all rows.
fn run(rig: &mut Rig<Cpu>, slot: usize, tokens: &[u32], cuts: &[usize]) -> Vec<f32> {
    let mut logits = Vec::new();
    let mut at = 0;
    for cut in cuts {
        logits.extend(rig.extend(slot, &tokens[at..at + cut]));
        at += cut;
    }
    assert_eq!(at, tokens.len(), "cuts cover the text");
    logits
}

fn repeat(length: usize, total: usize) -> Vec<usize> {
    let mut cuts = vec![length; total / length];
    if !total.is_multiple_of(length) {
        cuts.push(total % length);
    }
    cuts
}
