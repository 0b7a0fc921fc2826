//! Edges: which rows return logits, small engines, the end of the context.

use deepinfer_serving::batch::{Logits, StepBatch};

use crate::support::{Rig, Rng, cpu, golden_models, one_pass, options, same_bits};

#[test]
fn each_sequence_returns_the_rows_it_asked_for() {
    for (name, model, numerics) in golden_models() {
        let mut rng = Rng::new(81);
        let vocab = model.shape.vocab_size;
        let texts = [5, 9, 4, 1].map(|n| rng.tokens(n, vocab));
        let asked = [Logits::Last, Logits::None, Logits::All, Logits::All];
        let mut rig = Rig::open(cpu(), &model, options(numerics, 4, 128, 64));
        let steps = (0..4)
            .map(|slot| {
                let mut step = rig.sequence(slot, 0, &texts[slot]);
                step.logits = asked[slot];
                step
            })
            .collect();
        let got = rig.step(steps);
        assert_eq!(got.iter().map(|rows| rows.len() / vocab).collect::<Vec<_>>(), [1, 0, 4, 1], "{name}");
        for (slot, text) in texts.iter().enumerate() {
            let all = one_pass(cpu(), &model, numerics, text);
            same_bits(&format!("{name}: slot {slot}"), &all[all.len() - got[slot].len()..], &got[slot]);
        }
        let empty = StepBatch::default();
        rig.engine.execute(&empty, &mut rig.out).unwrap();
        assert!(rig.out.logits.is_empty() && rig.out.ranges.is_empty(), "{name}");
        assert!(rig.out.arrivals.iter().all(|count| *count == 0), "{name}");
    }
}

#[test]
fn an_engine_of_one_row_drafts_and_decodes_as_any_other() {
    for (name, model, numerics) in golden_models() {
        let mut rng = Rng::new(82);
        let text = rng.tokens(12, model.shape.vocab_size);
        let mut small = Rig::open(cpu(), &model, options(numerics, 3, 128, 1));
        let mut large = Rig::open(cpu(), &model, options(numerics, 3, 128, 128));
        for token in &text {
            for slot in 0..3 {
                let [want, got] = [&mut large, &mut small].map(|rig| rig.extend(slot, &[*token]));
                same_bits(&name, &want, &got);
            }
        }
        let [want, got] = [&mut large, &mut small].map(|rig| rig.draft(2, 9));
        same_bits(&name, &want.logits, &got.logits);
    }
}

#[test]
fn the_context_can_be_filled_to_its_last_position_and_no_further() {
    for (name, mut model, numerics) in golden_models() {
        model.shape.max_position_embeddings = 60;
        let mut rng = Rng::new(83);
        let text = rng.tokens(61, model.shape.vocab_size);
        let mut rig = Rig::open(cpu(), &model, options(numerics, 1, 128, 64));
        rig.extend(0, &text[..57]);
        let batch = StepBatch { sequences: vec![rig.sequence(0, 57, &text[57..])] };
        let refusal = rig.engine.execute(&batch, &mut rig.out).unwrap_err().to_string();
        assert!(refusal.contains("max_position_embeddings is 60"), "{name}: {refusal}");
        rig.extend(0, &text[57..60]);
        assert_eq!(rig.held(0), 60, "{name}");
        assert_eq!(rig.draft(0, 9).tokens.len(), 5, "{name}: drafts beyond the end are only not run");
    }
}

#[test]
fn drafts_after_no_or_few_positions_see_what_there_is() {
    for (name, model, numerics) in golden_models() {
        let mut rig = Rig::open(cpu(), &model, options(numerics, 2, 128, 64));
        let first = rig.draft(0, 9);
        assert!(first.logits.iter().all(|v| v.is_finite()), "{name}");
        rig.extend(1, &[40, 41]);
        rig.extend(0, &[40, 41]);
        let [after, other] = [0, 1].map(|slot| rig.draft(slot, 9));
        same_bits(&name, &other.logits, &after.logits);
        assert_ne!(first.logits, after.logits, "{name}: the context counts");
    }
}
