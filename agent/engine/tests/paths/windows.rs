//! The state that a later hit needs: exported and imported, or rebuilt by exact replay.

use deepinfer_engine::engine::IMAGE_POSITION;
use deepinfer_serving::batch::{BLOCK_TOKENS, ImageSpan, StateSlot};

use crate::support::{Rig, Rng, cpu, golden_models, options, same_bits};

/// Runs a chunk, two single tokens and a draft in a slot; all logits.
fn go_on(rig: &mut Rig<deepinfer_kernels::Cpu>, slot: usize, tokens: &[u32]) -> Vec<f32> {
    let (chunk, single) = tokens.split_at(tokens.len() - 2);
    let mut logits = rig.extend(slot, chunk);
    for token in single {
        logits.extend(rig.extend(slot, &[*token]));
    }
    let draft = rig.draft(slot, 77);
    logits.extend(&draft.logits);
    logits.extend(&draft.confidence);
    logits
}

#[test]
fn an_imported_window_continues_as_if_never_interrupted() {
    for (name, model, numerics) in golden_models() {
        let mut rng = Rng::new(51);
        let vocab = model.shape.vocab_size;
        for blocks in [1, 2] {
            let held = blocks * BLOCK_TOKENS;
            let text = rng.tokens(held + 40, vocab);
            let mut rig = Rig::open(cpu(), &model, options(numerics, 3, held + BLOCK_TOKENS, held));
            for cut in [held - 3, 1, 2] {
                let at = rig.held(0);
                rig.extend(0, &text[at..at + cut]);
            }
            let state = rig.engine.export_window(StateSlot(0)).unwrap();
            // Slot 2 held something else before.
            rig.extend(2, &rng.tokens(61, vocab));
            for slot in [1, 2] {
                rig.share(0, slot, held);
                rig.engine.import_window(StateSlot(slot as u32), &state).unwrap();
                assert_eq!(rig.held(slot), held, "{name}");
                let again = rig.engine.export_window(StateSlot(slot as u32)).unwrap();
                assert!(again == state, "{name}: what was imported is exported");
            }
            let want = go_on(&mut rig, 0, &text[held..]);
            for slot in [1, 2] {
                let got = go_on(&mut rig, slot, &text[held..]);
                same_bits(&format!("{name}, {held} tokens, slot {slot}"), &want, &got);
            }
        }
    }
}

#[test]
fn a_window_is_exported_at_block_boundaries_only() {
    for (name, model, numerics) in golden_models() {
        let mut rng = Rng::new(52);
        let mut rig = Rig::open(cpu(), &model, options(numerics, 1, 256, 256));
        rig.extend(0, &rng.tokens(BLOCK_TOKENS - 1, model.shape.vocab_size));
        assert!(rig.engine.export_window(StateSlot(0)).is_err(), "{name}");
        rig.extend(0, &[9]);
        assert!(rig.engine.export_window(StateSlot(0)).is_ok(), "{name}");
        rig.extend(0, &[9]);
        assert!(rig.engine.export_window(StateSlot(0)).is_err(), "{name}");
    }
}

#[test]
fn exact_replay_rebuilds_the_window_state_bit_for_bit() {
    for (name, model, numerics) in golden_models() {
        let mut rng = Rng::new(53);
        let vocab = model.shape.vocab_size;
        let mut probe = Rig::open(cpu(), &model, options(numerics, 1, 128, 1));
        let replay = probe.engine.replay_tokens();
        probe.extend(0, &[3]);
        let layers = model.shape.num_hidden_layers;
        let exact = model.shape.sliding_window + (layers - 1) * (model.shape.sliding_window - 1);
        assert_eq!(replay, exact.next_multiple_of(BLOCK_TOKENS), "{name}");

        let held = replay + BLOCK_TOKENS;
        let text = rng.tokens(held + 40, vocab);
        let mut rig = Rig::open(cpu(), &model, options(numerics, 3, held + BLOCK_TOKENS, held));
        rig.extend(0, &text[..held]);
        let state = rig.engine.export_window(StateSlot(0)).unwrap();
        rig.extend(2, &rng.tokens(61, vocab));
        for (slot, cuts) in [(1, vec![replay]), (2, vec![100, 1, 6, replay - 107])] {
            rig.share(0, slot, held);
            let start = held - replay;
            let history = &text[start.saturating_sub(8)..start];
            rig.engine.begin_replay(StateSlot(slot as u32), start, history).unwrap();
            let mut at = start;
            for cut in &cuts {
                let mut step = rig.sequence(slot, at, &text[at..at + cut]);
                step.replay = true;
                rig.step(vec![step]);
                at += cut;
            }
            let rebuilt = rig.engine.export_window(StateSlot(slot as u32)).unwrap();
            assert!(rebuilt == state, "{name}: cuts {cuts:?} rebuild another window state");
        }
        let want = go_on(&mut rig, 0, &text[held..]);
        for slot in [1, 2] {
            let got = go_on(&mut rig, slot, &text[held..]);
            same_bits(&format!("{name}, after replay in slot {slot}"), &want, &got);
        }
    }
}

#[test]
fn a_replay_writes_no_compressed_entries() {
    for (name, model, numerics) in golden_models() {
        let mut rng = Rng::new(54);
        let vocab = model.shape.vocab_size;
        // Far shorter than exact: the windows it rebuilds are wrong, and so would be the entries it would write.
        let held = 2 * BLOCK_TOKENS;
        let text = rng.tokens(held + 30, vocab);
        let mut rig = Rig::open(cpu(), &model, options(numerics, 2, held + BLOCK_TOKENS, held));
        rig.extend(0, &text[..held]);
        let state = rig.engine.export_window(StateSlot(0)).unwrap();
        let want = rig.extend(0, &text[held..]);
        rig.share(0, 1, held);
        let start = held - BLOCK_TOKENS;
        rig.engine.begin_replay(StateSlot(1), start, &text[start - 8..start]).unwrap();
        let mut step = rig.sequence(1, start, &text[start..held]);
        step.replay = true;
        rig.step(vec![step]);
        let rebuilt = rig.engine.export_window(StateSlot(1)).unwrap();
        assert!(rebuilt != state, "{name}: a short replay is an approximation");
        rig.engine.import_window(StateSlot(1), &state).unwrap();
        let got = rig.extend(1, &text[held..]);
        same_bits(&name, &want, &got);
    }
}

#[test]
fn a_replay_over_images_rebuilds_the_window_state() {
    for (name, model, numerics) in golden_models() {
        let mut rng = Rng::new(55);
        let (vocab, hidden) = (model.shape.vocab_size, model.shape.hidden_size);
        let image = model.shape.image_token_id.expect("the golden models have images");
        let mut rig = Rig::open(cpu(), &model, options(numerics, 2, 640, 640));
        let replay = rig.engine.replay_tokens();
        let (start, held) = (BLOCK_TOKENS, BLOCK_TOKENS + replay);
        let mut text = rng.tokens(held + 20, vocab);
        // One image hides the history before the replay and reaches into it, another lies inside.
        let spans = [(start - 2, start + 3), (start + 100, start + 120)];
        let embeddings: Vec<Vec<f32>> = spans
            .iter()
            .map(|(a, b)| (0..(b - a) * hidden).map(|_| rng.within(0, 2000) as f32 / 1000.0 - 1.0).collect())
            .collect();
        spans.iter().for_each(|(a, b)| text[*a..*b].fill(image));
        let images = |from: usize| -> Vec<ImageSpan> {
            let parts = spans.iter().zip(&embeddings).map(|((a, _), rows)| ImageSpan {
                first: a.max(&from) - from,
                embeddings: rows[(a.max(&from) - a) * hidden..].to_vec(),
            });
            parts.collect()
        };
        let mut step = rig.sequence(0, 0, &text[..held]);
        step.images = images(0);
        rig.step(vec![step]);
        let state = rig.engine.export_window(StateSlot(0)).unwrap();
        rig.share(0, 1, held);
        let history = [text[start - 3], IMAGE_POSITION, IMAGE_POSITION];
        rig.engine.begin_replay(StateSlot(1), start, &history).unwrap();
        let mut step = rig.sequence(1, start, &text[start..held]);
        step.images = images(start);
        step.replay = true;
        rig.step(vec![step]);
        let rebuilt = rig.engine.export_window(StateSlot(1)).unwrap();
        assert!(rebuilt == state, "{name}: another window state is rebuilt");
        let [want, got] = [0, 1].map(|slot| rig.extend(slot, &text[held..]));
        same_bits(&name, &want, &got);
    }
}
