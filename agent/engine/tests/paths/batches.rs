//! Several sequences in one step against each alone.

use deepinfer_kernels::{Cpu, SimdLevel};

use crate::support::{Rig, Rng, cpu, golden_models, one_pass, options, same_bits};

const LENGTHS: [usize; 4] = [150, 1, 41, 133];

/// Runs all texts together in random pieces: random company, order, slots and blocks.
fn together(rig: &mut Rig<Cpu>, texts: &[Vec<u32>], slots: &[usize], rng: &mut Rng) -> Vec<Vec<f32>> {
    let mut logits = vec![Vec::new(); texts.len()];
    let mut done = vec![0; texts.len()];
    while (0..texts.len()).any(|t| done[t] < texts[t].len()) {
        let mut turn: Vec<usize> =
            (0..texts.len()).filter(|t| done[*t] < texts[*t].len() && rng.below(4) > 0).collect();
        rng.shuffle(&mut turn);
        if turn.is_empty() {
            continue;
        }
        let mut steps = Vec::new();
        for t in &turn {
            let left = texts[*t].len() - done[*t];
            let longest = [1, 1, 5, 60][rng.below(4)];
            let count = rng.within(1, left.min(longest));
            steps.push(rig.sequence(slots[*t], done[*t], &texts[*t][done[*t]..done[*t] + count]));
            done[*t] += count;
        }
        for (t, part) in turn.iter().zip(rig.step(steps)) {
            logits[*t].extend(part);
        }
    }
    logits
}

#[test]
fn sequences_in_one_step_give_the_bits_of_each_alone() {
    for (name, model, numerics) in golden_models() {
        let mut rng = Rng::new(21);
        let vocab = model.shape.vocab_size;
        let texts: Vec<Vec<u32>> = LENGTHS.iter().map(|n| rng.tokens(*n, vocab)).collect();
        let want: Vec<Vec<f32>> = texts.iter().map(|t| one_pass(cpu(), &model, numerics, t)).collect();
        for level in SimdLevel::available() {
            // The other test of threads and levels has all pairs of them.
            let some = if level == SimdLevel::detect() { vec![1, 2, 3] } else { vec![2] };
            for threads in some {
                let backend = Cpu::with_level(threads, level).expect("the level is available");
                let mut rig = Rig::open(backend, &model, options(numerics, 5, 150, 256));
                let mut ids: Vec<u32> = (0..10).collect();
                rng.shuffle(&mut ids);
                rig.deal(ids);
                let mut slots = vec![0, 1, 2, 3, 4];
                rng.shuffle(&mut slots);
                let got = together(&mut rig, &texts, &slots, &mut rng);
                for (t, (want, got)) in want.iter().zip(&got).enumerate() {
                    let what = format!("{name}, {level}, {threads} threads, slots {slots:?}: sequence {t}");
                    same_bits(&what, want, got);
                }
            }
        }
    }
}

#[test]
fn drafts_of_several_sequences_at_once_are_the_bits_of_each_alone() {
    for (name, model, numerics) in golden_models() {
        let mut rng = Rng::new(22);
        let vocab = model.shape.vocab_size;
        let mut rig = Rig::open(cpu(), &model, options(numerics, 3, 150, 150));
        let lengths = [5, 150, 70];
        for (slot, length) in lengths.into_iter().enumerate() {
            rig.extend(slot, &rng.tokens(length, vocab));
        }
        let alone: Vec<_> = (0..3).map(|slot| rig.draft(slot, 40 + slot as u32)).collect();
        for order in [[0, 1, 2], [2, 0, 1], [1, 2, 0]] {
            let requests = order.map(|slot: usize| deepinfer_serving::batch::DraftRequest {
                slot: deepinfer_serving::batch::StateSlot(slot as u32),
                token: 40 + slot as u32,
            });
            let mut out = Vec::new();
            rig.engine.draft(&requests, &mut out).unwrap();
            for (slot, got) in order.into_iter().zip(&out) {
                assert_eq!(alone[slot].tokens, got.tokens, "{name}: slot {slot}");
                same_bits(&format!("{name}: logits of slot {slot}"), &alone[slot].logits, &got.logits);
                same_bits(
                    &format!("{name}: confidence of slot {slot}"),
                    &alone[slot].confidence,
                    &got.confidence,
                );
            }
        }
    }
}
