//! Sequences that move to another engine at any position, and steps that leave nothing behind.

use std::sync::Arc;

use deepinfer_engine::engine::{BlockError, StepError, WindowState, WindowStateError};
use deepinfer_engine::{Checkpoint, Engine, EngineOptions, Numerics};
use deepinfer_kernels::Cpu;
use deepinfer_protocol::message::PieceKind;
use deepinfer_serving::batch::{BlockId, StateSlot};
use deepinfer_serving::node::Pieces;

use crate::group::{Group, no_counts};
use crate::support::{Rig, Rng, checkpoint, cpu, golden_models, options, same_bits};

/// Chunk, single tokens and a draft after what a slot holds.
fn go_on(rig: &mut Rig<Cpu>, slot: usize, tokens: &[u32]) -> Vec<f32> {
    let mut logits = Vec::new();
    for token in &tokens[..9] {
        logits.extend(rig.extend(slot, &[*token]));
    }
    logits.extend(rig.extend(slot, &tokens[9..]));
    let draft = rig.draft(slot, 77);
    logits.extend(&draft.logits);
    logits.extend(&draft.confidence);
    logits
}

/// An engine with other numbers of slots and blocks, all of them used before, and its blocks in another order.
fn other(model: &Checkpoint, numerics: Numerics, rng: &mut Rng) -> Rig<Cpu> {
    let mut rig = Rig::open(cpu(), model, options(numerics, 3, 500, 500));
    let mut ids: Vec<u32> = (0..12).collect();
    rng.shuffle(&mut ids);
    rig.deal(ids);
    for slot in 0..3 {
        rig.extend(slot, &rng.tokens(470, model.shape.vocab_size));
    }
    rig
}

#[test]
fn a_sequence_moves_to_another_engine_at_any_position() {
    for (name, model, numerics) in golden_models() {
        let mut rng = Rng::new(61);
        let mut there = other(&model, numerics, &mut rng);
        for held in [333, 1, 2, 5, 31, 127, 128, 129, 255] {
            let text = rng.tokens(held + 60, model.shape.vocab_size);
            let mut here = Rig::open(cpu(), &model, options(numerics, 1, 500, 500));
            here.extend(0, &text[..held]);
            let pieces = here.engine.export_pieces(StateSlot(0), here.blocks(0)).unwrap();
            assert_eq!(pieces.len(), held.div_ceil(128) + 1);
            assert!(pieces[..pieces.len() - 1].iter().all(|(_, b)| b.len() == here.engine.kv_block_bytes()));
            let blocks = there.blocks(1).to_vec();
            there.engine.import_pieces(StateSlot(1), &blocks, &pieces).unwrap();
            assert_eq!(there.held(1), held);
            let again = there.engine.export_pieces(StateSlot(1), &blocks).unwrap();
            assert!(again == pieces, "{name}, {held}: what was imported is exported");
            let want = go_on(&mut here, 0, &text[held..]);
            let got = go_on(&mut there, 1, &text[held..]);
            same_bits(&format!("{name}, {held} tokens"), &want, &got);
        }
    }
}

#[test]
fn sequences_of_other_shapes_move_too() {
    for path in ["deep-quant", "nodraft-quant", "odd-bf16", "ratio4-quant", "tails-bf16"] {
        let model = checkpoint(&format!("e2e/shapes/{path}"));
        let options = EngineOptions { numerics: None, ..options(Numerics::F32, 2, 256, 256) };
        let open = || Rig::around(Engine::open(cpu(), &model, options.clone()).unwrap());
        let mut rng = Rng::new(66);
        for held in [1, 2, 3, 66, 129, 130, 131] {
            let text = rng.tokens(held + 20, model.shape.vocab_size);
            let (mut here, mut there) = (open(), open());
            there.extend(1, &rng.tokens(140, model.shape.vocab_size));
            here.extend(0, &text[..held]);
            let pieces = here.engine.export_pieces(StateSlot(0), here.blocks(0)).unwrap();
            let blocks = there.blocks(1).to_vec();
            there.engine.import_pieces(StateSlot(1), &blocks, &pieces).unwrap();
            for token in &text[held..held + 10] {
                let (want, got) = (here.extend(0, &[*token]), there.extend(1, &[*token]));
                same_bits(&format!("{path}, {held}"), &want, &got);
            }
            let rest = &text[held + 10..];
            same_bits(&format!("{path}, {held}"), &here.extend(0, rest), &there.extend(1, rest));
        }
    }
}

#[test]
fn a_sequence_moves_after_drafts_were_rejected() {
    for (name, model, numerics) in golden_models() {
        let mut rng = Rng::new(62);
        let mut there = other(&model, numerics, &mut rng);
        let text = rng.tokens(300, model.shape.vocab_size);
        let mut here = Rig::open(cpu(), &model, options(numerics, 1, 500, 500));
        here.extend(0, &text[..200]);
        here.extend(0, &[3, 4, 5, 6]);
        here.truncate(0, 201);
        let state = here.engine.export_sequence(StateSlot(0)).unwrap();
        assert_eq!(state.position(), 201);
        let pieces = here.engine.export_pieces(StateSlot(0), here.blocks(0)).unwrap();
        let blocks = there.blocks(2).to_vec();
        there.engine.import_pieces(StateSlot(2), &blocks, &pieces).unwrap();
        same_bits(&name, &go_on(&mut here, 0, &text[240..]), &go_on(&mut there, 2, &text[240..]));
    }
}

/// A prompt of 200 tokens on an engine, and its pieces.
fn exported(model: &Checkpoint, numerics: Numerics) -> (Rig<Cpu>, Pieces) {
    let mut rig = Rig::open(cpu(), model, options(numerics, 2, 256, 256));
    rig.extend(0, &Rng::new(63).tokens(201, model.shape.vocab_size));
    let pieces = rig.engine.export_pieces(StateSlot(0), rig.blocks(0)).unwrap();
    (rig, pieces)
}

#[test]
fn a_flipped_byte_in_any_piece_is_refused_and_nothing_changes() {
    let model = checkpoint("e2e/golden/tiny-quant");
    let (mut rig, pieces) = exported(&model, Numerics::Quantized);
    let before = rig.engine.export_pieces(StateSlot(0), rig.blocks(0)).unwrap();
    rig.extend(1, &[9; 20]);
    let neighbour = rig.engine.export_sequence(StateSlot(1)).unwrap();
    let blocks = rig.blocks(1).to_vec();
    let mut rng = Rng::new(64);
    for piece in 0..pieces.len() {
        let len = pieces[piece].1.len();
        let places = (0..64.min(len)).chain((0..200).map(|_| rng.below(len)));
        for at in places.collect::<Vec<_>>() {
            let mut damaged = pieces.clone();
            let mut bytes = damaged[piece].1.to_vec();
            bytes[at] ^= 1 << rng.below(8);
            damaged[piece].1 = bytes.into();
            let refused = rig.engine.import_pieces(StateSlot(1), &blocks, &damaged);
            assert!(refused.is_err(), "piece {piece}, byte {at}");
        }
    }
    assert!(rig.engine.export_sequence(StateSlot(1)).unwrap() == neighbour);
    assert!(rig.engine.export_pieces(StateSlot(0), rig.blocks(0)).unwrap() == before);
    rig.engine.import_pieces(StateSlot(1), &blocks, &pieces).unwrap();
}

#[test]
fn pieces_that_are_not_one_whole_sequence_are_refused_by_name() {
    let model = checkpoint("e2e/golden/tiny-bf16");
    let (mut rig, pieces) = exported(&model, Numerics::F32);
    let blocks = rig.blocks(1).to_vec();
    let mut refused =
        |pieces: &Pieces| rig.engine.import_pieces(StateSlot(1), &blocks, pieces).unwrap_err().to_string();
    let without =
        |at: usize| pieces.iter().enumerate().filter(move |(i, _)| *i != at).map(|(_, p)| p.clone());
    assert_eq!(refused(&without(2).collect()), "slot 1: pieces of a sequence: State is missing");
    let text = "slot 1: pieces of a sequence: 1 blocks, 2 are needed for 201 positions";
    assert_eq!(refused(&without(1).collect()), text);
    let mut twice = pieces.clone();
    twice[1].0 = PieceKind::Block(0);
    assert_eq!(refused(&twice), "slot 1: pieces of a sequence: Block(0) is there twice");
    let mut turned = pieces.clone();
    turned.reverse();
    rig.engine.import_pieces(StateSlot(1), &blocks, &turned).unwrap();
    let few = rig.engine.import_pieces(StateSlot(1), &blocks[..1], &pieces);
    assert!(matches!(few, Err(StepError::MissingBlocks { given: 1, needed: 2, .. })));
    let none = rig.engine.import_pieces(StateSlot(1), &[blocks[0], BlockId(99)], &pieces);
    assert_eq!(none, Err(StepError::NoSuchBlock { block: 99, blocks: 4 }));
}

#[test]
fn pieces_of_another_model_or_numerics_are_refused_and_have_another_epoch() {
    let (quant, bf16) = (checkpoint("e2e/golden/tiny-quant"), checkpoint("e2e/golden/tiny-bf16"));
    let (rig, pieces) = exported(&quant, Numerics::Quantized);
    for (model, numerics) in [(&quant, Numerics::F32), (&bf16, Numerics::Quantized)] {
        let (mut other, _) = exported(model, numerics);
        let blocks = other.blocks(1).to_vec();
        let refused = other.engine.import_pieces(StateSlot(1), &blocks, &pieces);
        assert_eq!(refused, Err(StepError::WindowState(WindowStateError::Digest)));
        let refused = other.engine.import_block(blocks[0], &pieces[0].1);
        assert_eq!(refused, Err(StepError::Block(BlockError::Digest)));
        let (ours, theirs) = (quant.digest(), model.digest());
        assert_ne!(rig.engine.kv_epoch(&ours), other.engine.kv_epoch(&theirs));
        assert_ne!(rig.engine.kv_format(), other.engine.kv_format());
    }
    let group = Group::open(&quant, &options(Numerics::Quantized, 1, 128, 7), 2, 0);
    let weights = quant.digest();
    assert_eq!(rig.engine.kv_epoch(&weights), group.rigs[1].engine.kv_epoch(&weights), "ranks, sizes");
    assert_ne!(rig.engine.kv_epoch(&weights), rig.engine.kv_epoch(&bf16.digest()), "weights");
}

#[test]
fn an_empty_slot_has_no_state_and_a_checkpoint_is_at_a_boundary() {
    let model = checkpoint("e2e/golden/tiny-bf16");
    let (mut rig, pieces) = exported(&model, Numerics::F32);
    let empty = rig.engine.export_sequence(StateSlot(1));
    assert!(matches!(empty, Err(StepError::NotHeld { slot: 1, .. })), "{empty:?}");
    let state = WindowState::from_bytes(pieces[2].1.to_vec()).unwrap();
    let odd = rig.engine.import_window(StateSlot(1), &state);
    assert_eq!(odd, Err(StepError::NotAligned { slot: 1, position: 201 }));
}

#[test]
fn a_warm_up_leaves_nothing_behind() {
    for (name, model, numerics) in golden_models() {
        let text = Rng::new(65).tokens(200, model.shape.vocab_size);
        let run = |warm: bool| {
            let mut rig = Rig::open(cpu(), &model, options(numerics, 2, 256, 256));
            let mut logits = rig.extend(0, &text[..150]);
            if warm {
                rig.engine.warm_up(200).unwrap();
                rig.engine.warm_up(1).unwrap();
                assert_eq!((rig.held(0), rig.held(1)), (150, 0));
            }
            logits.extend(rig.extend(0, &text[150..]));
            let arrivals = rig.out.arrivals.clone();
            let pieces: Vec<Arc<[u8]>> = rig
                .engine
                .export_pieces(StateSlot(0), rig.blocks(0))
                .unwrap()
                .into_iter()
                .map(|(_, bytes)| bytes)
                .collect();
            (logits, arrivals, pieces)
        };
        let (want, got) = (run(false), run(true));
        same_bits(&name, &want.0, &got.0);
        assert_eq!(want.1, got.1, "{name}: arrivals");
        assert!(want.2 == got.2, "{name}: blocks and state");
    }
}

#[test]
fn warm_ups_of_a_supernode_are_in_no_count() {
    let model = checkpoint("e2e/golden/tiny-quant");
    let mut group = Group::open(&model, &options(Numerics::Quantized, 1, 128, 64), 3, 1);
    let warm = |group: &mut Group, rows: [usize; 3]| -> Vec<Result<(), StepError>> {
        group.together(|rank, rig| rig.engine.warm_up(rows[rank])).into_iter().map(|r| r.unwrap()).collect()
    };
    assert_eq!(warm(&mut group, [64, 64, 64]), vec![Ok(()); 3]);
    let step = group.rigs[1].sequence(0, 0, &[5, 6, 7]);
    group.step(&[Vec::new(), vec![step], Vec::new()]);
    // Rank 1's slot is in use: it says so, and the others warm up with it all the same.
    let again = warm(&mut group, [0, 8, 64]);
    assert_eq!(again, [Ok(()), Err(StepError::NoFreeSlot { slots: 1 }), Ok(())]);
    let step = group.rigs[1].sequence(0, 3, &[8]);
    group.step(&[Vec::new(), vec![step], Vec::new()]);
    let mut counts = no_counts(&model);
    group.fold(&mut counts);
    let per_layer = model.shape.num_experts_per_tok as u32;
    assert!(counts.iter().all(|layer| layer.iter().sum::<u32>() == per_layer), "{counts:?}");
}
