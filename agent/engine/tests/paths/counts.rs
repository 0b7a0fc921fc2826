//! Expert arrivals: what a step reports against what its router recorded.

use deepinfer_engine::record::{Probe, Recorded};
use deepinfer_serving::batch::StepBatch;

use crate::support::{Rig, Rng, cpu, golden_models, options};

#[test]
fn a_step_counts_every_pick_of_every_row_once() {
    for (name, model, numerics) in golden_models() {
        let shape = &model.shape;
        let (layers, top_k, experts) =
            (shape.num_hidden_layers, shape.num_experts_per_tok, shape.n_routed_experts);
        let mut rng = Rng::new(31);
        let mut rig = Rig::open(cpu(), &model, options(numerics, 1, 128, 128));
        for rows in [30, 1, 17, 1] {
            let tokens = rng.tokens(rows, shape.vocab_size);
            let batch = StepBatch { sequences: vec![rig.sequence(0, rig.held(0), &tokens)] };
            let mut probe = Probe::default();
            rig.engine.execute_probed(&batch, &mut rig.out, &mut probe).unwrap();
            assert_eq!(rig.out.slots_per_layer, experts, "{name}: all experts are here");
            assert_eq!(rig.out.arrivals.len(), layers * experts, "{name}");
            for (layer, arrivals) in rig.out.arrivals.chunks(experts).enumerate() {
                let Some(Recorded::Whole { values, .. }) = probe.get(&format!("layers.{layer}.route_ids"))
                else {
                    panic!("{name}: layer {layer} records its route");
                };
                let mut want = vec![0; experts];
                values.iter().for_each(|expert| want[*expert as usize] += 1);
                assert_eq!(arrivals, want, "{name}: layer {layer}");
                let total: u32 = arrivals.iter().sum();
                assert_eq!(total as usize, top_k * rows, "{name}: layer {layer}");
            }
        }
    }
}

#[test]
fn the_counts_of_a_mixed_step_are_the_sum_of_its_sequences_counts() {
    for (name, model, numerics) in golden_models() {
        let mut rng = Rng::new(33);
        let texts = [30, 1, 9].map(|n| rng.tokens(n, model.shape.vocab_size));
        let arrivals = |texts: &[Vec<u32>]| {
            let mut rig = Rig::open(cpu(), &model, options(numerics, 3, 128, 128));
            let steps = texts.iter().enumerate().map(|(slot, text)| rig.sequence(slot, 0, text)).collect();
            rig.step(steps);
            rig.out.arrivals.clone()
        };
        let mut sum = vec![0; arrivals(&texts[..1]).len()];
        for text in &texts {
            let alone = arrivals(std::slice::from_ref(text));
            sum.iter_mut().zip(alone).for_each(|(total, count)| *total += count);
        }
        assert_eq!(arrivals(&texts), sum, "{name}");
    }
}

#[test]
fn counts_are_of_one_step_and_drafts_are_not_counted() {
    for (name, model, numerics) in golden_models() {
        let shape = &model.shape;
        let mut rng = Rng::new(32);
        let mut rig = Rig::open(cpu(), &model, options(numerics, 1, 128, 128));
        rig.extend(0, &rng.tokens(40, shape.vocab_size));
        rig.draft(0, 9);
        rig.extend(0, &[9]);
        let total: u32 = rig.out.arrivals.iter().sum();
        assert_eq!(total as usize, shape.num_hidden_layers * shape.num_experts_per_tok, "{name}");
    }
}
