//! Experts spread over ranks: the same bits and the same counts as one rank, whatever each rank has to do.

use deepinfer_engine::engine::{EngineOptions, StepError, Truncation};
use deepinfer_engine::exchange::SlotMap;
use deepinfer_engine::{Checkpoint, Numerics};
use deepinfer_serving::batch::SequenceStep;

use crate::group::{Group, PATIENCE, no_counts};
use crate::support::{Rig, Rng, checkpoint, cpu, golden_models, options, same_bits};

/// Lengths of the texts: long prefill on one rank, others with little or nothing to do.
const LENGTHS: [usize; 5] = [150, 1, 41, 133, 20];

/// Logits of every row of each text run alone, and the counts of all of them.
fn alone(model: &Checkpoint, numerics: Numerics, texts: &[Vec<u32>]) -> (Vec<Vec<f32>>, Vec<Vec<u32>>) {
    let mut counts = no_counts(model);
    let mut logits = Vec::new();
    for text in texts {
        let mut rig = Rig::open(cpu(), model, options(numerics, 1, text.len(), text.len()));
        logits.push(rig.extend(0, text));
        for (layer, arrivals) in rig.out.arrivals.chunks(rig.out.slots_per_layer).enumerate() {
            counts[layer].iter_mut().zip(arrivals).for_each(|(count, n)| *count += n);
        }
    }
    (logits, counts)
}

/// Runs text `t` on rank `t % ranks`, in pieces of random length, ranks idle at random; logits and counts.
fn spread(
    group: &mut Group,
    model: &Checkpoint,
    texts: &[Vec<u32>],
    seed: u64,
) -> (Vec<Vec<f32>>, Vec<Vec<u32>>) {
    let (ranks, mut rng) = (group.rigs.len(), Rng::new(seed));
    let (mut counts, mut logits) = (no_counts(model), vec![Vec::new(); texts.len()]);
    let mut done = vec![0; texts.len()];
    while (0..texts.len()).any(|t| done[t] < texts[t].len()) {
        let mut batches: Vec<Vec<SequenceStep>> = vec![Vec::new(); ranks];
        let mut ran: Vec<Vec<usize>> = vec![Vec::new(); ranks];
        for t in 0..texts.len() {
            let left = texts[t].len() - done[t];
            if left == 0 || rng.below(3) == 0 {
                continue;
            }
            let longest = [1, 1, 30, 80][rng.below(4)];
            let count = rng.within(1, left.min(longest));
            let rank = t % ranks;
            let piece = &texts[t][done[t]..done[t] + count];
            batches[rank].push(group.rigs[rank].sequence(t / ranks, done[t], piece));
            ran[rank].push(t);
            done[t] += count;
        }
        group.step(&batches);
        let rows: usize = batches.iter().flatten().map(|s| s.tokens.len()).sum();
        let mut step = no_counts(model);
        group.fold(&mut step);
        for (layer, step) in step.iter().enumerate() {
            let arrived = step.iter().sum::<u32>() as usize;
            assert_eq!(arrived, rows * model.shape.num_experts_per_tok, "layer {layer}");
            counts[layer].iter_mut().zip(step).for_each(|(count, n)| *count += n);
        }
        for (rig, ran) in group.rigs.iter().zip(ran) {
            for (ordinal, t) in ran.into_iter().enumerate() {
                let range = rig.out.ranges[ordinal];
                let vocab = rig.out.vocab_size;
                logits[t].extend(&rig.out.logits[range.first * vocab..(range.first + range.len) * vocab]);
            }
        }
    }
    (logits, counts)
}

fn texts(model: &Checkpoint, seed: u64) -> Vec<Vec<u32>> {
    let mut rng = Rng::new(seed);
    LENGTHS.iter().map(|n| rng.tokens(*n, model.shape.vocab_size)).collect()
}

fn compare(what: &str, want: &(Vec<Vec<f32>>, Vec<Vec<u32>>), got: &(Vec<Vec<f32>>, Vec<Vec<u32>>)) {
    for (t, (want, got)) in want.0.iter().zip(&got.0).enumerate() {
        same_bits(&format!("{what}: text {t}"), want, got);
    }
    assert_eq!(want.1, got.1, "{what}: counts by layer and expert");
}

#[test]
fn any_number_of_ranks_gives_the_bits_and_the_counts_of_one() {
    for (name, model, numerics) in golden_models() {
        let texts = texts(&model, 41);
        let want = alone(&model, numerics, &texts);
        // 16 experts: 3 and 5 ranks do not divide them.
        for (ranks, extra) in [(1, 0), (2, 0), (3, 0), (4, 0), (4, 2), (5, 3)] {
            let slots = texts.len().div_ceil(ranks);
            let mut group = Group::open(&model, &options(numerics, slots, 150, 300), ranks, extra);
            assert_eq!(group.map.slots_per_rank(), 16usize.div_ceil(ranks) + extra);
            let got = spread(&mut group, &model, &texts, 42 + ranks as u64);
            compare(&format!("{name}, {ranks} ranks, {extra} extra slots"), &want, &got);
        }
    }
}

#[test]
fn any_placement_of_experts_gives_the_same_bits() {
    for (name, model, numerics) in golden_models() {
        let texts = texts(&model, 43);
        let want = alone(&model, numerics, &texts);
        let (experts, layers) = (model.shape.n_routed_experts, model.shape.num_hidden_layers);
        let mut rng = Rng::new(44);
        for ranks in [2, 3] {
            // Every layer its own order and its own replicas; some experts more than twice.
            let slots = (experts + 8).next_multiple_of(ranks);
            let layer = |rng: &mut Rng| {
                let mut list: Vec<u32> = (0..experts as u32).collect();
                list.extend((experts..slots).map(|_| rng.below(4) as u32));
                rng.shuffle(&mut list);
                list
            };
            let map = SlotMap::new(experts, ranks, (0..layers).map(|_| layer(&mut rng)).collect()).unwrap();
            let slots = texts.len().div_ceil(ranks);
            let options = options(numerics, slots, 150, 300);
            let mut group = Group::with(&model, &options, map, PATIENCE, |end| Box::new(end));
            let got = spread(&mut group, &model, &texts, 45);
            compare(&format!("{name}, {ranks} ranks, random layout"), &want, &got);
        }
    }
}

#[test]
fn the_published_load_of_a_workload_does_not_depend_on_the_number_of_ranks() {
    let model = checkpoint("e2e/golden/tiny-quant");
    let mut rng = Rng::new(46);
    let texts: Vec<Vec<u32>> = (0..8).map(|_| rng.tokens(125, model.shape.vocab_size)).collect();
    let mut published = Vec::new();
    for ranks in [1, 2, 4] {
        let slots = texts.len().div_ceil(ranks);
        let mut group = Group::open(&model, &options(Numerics::Quantized, slots, 128, 1000), ranks, 0);
        published.push(spread(&mut group, &model, &texts, 47).1);
    }
    let per_layer = 1000 * model.shape.num_experts_per_tok as u32;
    assert!(published[0].iter().all(|layer| layer.iter().sum::<u32>() == per_layer));
    assert_eq!(published[0], published[1]);
    assert_eq!(published[0], published[2]);
}

#[test]
fn ranks_that_drop_all_their_rows_at_the_boundary_still_serve_the_others() {
    for (name, model, numerics) in golden_models() {
        let mut rng = Rng::new(48);
        let prompts: Vec<Vec<u32>> = (0..2).map(|_| rng.tokens(200, model.shape.vocab_size)).collect();
        let options = EngineOptions {
            truncation: Truncation::Compact,
            keep: Some(40),
            ..options(numerics, 1, 256, 200)
        };
        let chunk = |rig: &Rig<_>, prompt: &[u32], from: usize, to: usize| SequenceStep {
            prompt_tokens: Some(prompt.len()),
            ..rig.sequence(0, from, &prompt[from..to])
        };
        let want: Vec<Vec<f32>> = prompts
            .iter()
            .map(|prompt| {
                let mut rig = Rig::open(cpu(), &model, options.clone());
                let step = chunk(&rig, prompt, 0, 200);
                rig.step(vec![step]).remove(0)
            })
            .collect();
        // Rank 0 has a chunk without kept rows while rank 1 has all of its.
        let mut group = Group::open(&model, &options, 2, 0);
        let first = chunk(&group.rigs[0], &prompts[0], 0, 100);
        let whole = chunk(&group.rigs[1], &prompts[1], 0, 200);
        group.step(&[vec![first], vec![whole]]);
        assert_eq!(group.rigs[0].out.ranges[0].len, 0);
        same_bits(&format!("{name}: rank 1"), &want[1], &group.rigs[1].out.logits);
        let second = chunk(&group.rigs[0], &prompts[0], 100, 200);
        group.step(&[vec![second], Vec::new()]);
        same_bits(&format!("{name}: rank 0"), &want[0], &group.rigs[0].out.logits);
    }
}

#[test]
fn drafts_need_no_exchange_and_are_the_same() {
    for (name, model, numerics) in golden_models() {
        let text = Rng::new(49).tokens(70, model.shape.vocab_size);
        let mut alone = Rig::open(cpu(), &model, options(numerics, 1, 128, 128));
        alone.extend(0, &text);
        let want = alone.draft(0, 77);
        let mut group = Group::open(&model, &options(numerics, 1, 128, 128), 2, 0);
        let step = group.rigs[1].sequence(0, 0, &text);
        group.step(&[Vec::new(), vec![step]]);
        let got = group.rigs[1].draft(0, 77);
        assert_eq!(want.tokens, got.tokens, "{name}");
        same_bits(&name, &want.logits, &got.logits);
    }
}

#[test]
fn a_refused_batch_hurts_no_other_rank_and_no_arrival_is_lost() {
    for (name, model, numerics) in golden_models() {
        let vocab = model.shape.vocab_size;
        let texts = [Rng::new(50).tokens(30, vocab)];
        let want = alone(&model, numerics, &texts);
        let mut group = Group::open(&model, &options(numerics, 1, 128, 128), 3, 0);
        let good = group.rigs[0].sequence(0, 0, &texts[0]);
        let bad = group.rigs[1].sequence(0, 0, &[5, vocab as u32]);
        let results = group.try_step(&[vec![good], vec![bad], Vec::new()]);
        assert_eq!(results[0], Some(Ok(())), "{name}");
        assert!(matches!(results[1], Some(Err(StepError::BadToken { .. }))), "{name}: {:?}", results[1]);
        let mut counts = no_counts(&model);
        group.fold(&mut counts);
        let logits = group.rigs[0].out.logits.clone();
        group.step(&vec![Vec::new(); 3]);
        group.fold(&mut counts);
        compare(&name, &want, &(vec![logits], counts));
    }
}
