//! What the engine refuses, and edges of its state that whole-model tests do not reach. On the reference
//! backend.

use std::path::Path;

use deepinfer_kernels::Reference;
use deepinfer_serving::batch::{
    BlockId, DraftRequest, ImageSpan, Logits, SequenceStep, StateSlot, StepBatch, StepOutput,
};

use super::*;

fn checkpoint() -> Checkpoint {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../e2e/golden/tiny-quant");
    Checkpoint::open(&path).unwrap()
}

fn options() -> EngineOptions {
    EngineOptions {
        numerics: Some(Numerics::F32),
        slots: 2,
        blocks: 6,
        max_rows: 96,
        ..EngineOptions::default()
    }
}

fn engine(options: EngineOptions) -> Engine<Reference> {
    Engine::open(Reference, &checkpoint(), options).unwrap()
}

fn step(slot: u32, start: usize, tokens: &[u32]) -> SequenceStep {
    let blocks = (0..3).map(|b| BlockId(3 * slot + b)).collect();
    SequenceStep::text(StateSlot(slot), start, tokens.to_vec(), blocks)
}

fn text(from: usize, to: usize) -> Vec<u32> {
    (from..to).map(|p| (p * 37 % 480 + 3) as u32).collect()
}

fn run(engine: &mut Engine<Reference>, sequences: Vec<SequenceStep>) -> StepOutput {
    let mut out = StepOutput::default();
    engine.execute(&StepBatch { sequences }, &mut out).unwrap();
    out
}

#[test]
fn sizes_out_of_range_are_refused_by_name() {
    type Change = fn(&mut EngineOptions);
    let changes: [(&str, Change); 5] = [
        ("slots", |o| o.slots = 0),
        ("slots", |o| o.slots = usize::MAX),
        ("blocks", |o| o.blocks = 0),
        ("max_rows", |o| o.max_rows = 0),
        ("keep", |o| o.keep = Some(0)),
    ];
    for (field, change) in changes {
        let mut options = options();
        change(&mut options);
        let error = Engine::open(Reference, &checkpoint(), options).unwrap_err();
        assert!(error.to_string().starts_with(field), "{error}");
    }
}

#[test]
fn memory_that_does_not_suffice_is_said_before_it_is_taken() {
    let options = EngineOptions { blocks: (u32::MAX / 128) as usize, ..options() };
    match Engine::open(Reference, &checkpoint(), options) {
        Err(OpenError::Memory { needed, available, .. }) => assert!(needed > 1 << 40 && available < needed),
        other => panic!("{other:?}"),
    }
}

#[test]
fn counted_memory_grows_with_blocks_and_slots() {
    let bytes = |slots, blocks| engine(EngineOptions { slots, blocks, ..options() }).allocated_bytes();
    let shape = checkpoint().shape;
    let entry = (shape.head_dim + shape.index_head_dim) as u64 * 4;
    assert_eq!(bytes(2, 7) - bytes(2, 6), entry * (64 + 64 + 128), "two sources of ratio 2, one of ratio 1");
    let ring = shape.total_layers() as u64 * 38 * shape.head_dim as u64 * 4;
    assert!(bytes(3, 6) - bytes(2, 6) > ring);
}

#[test]
fn batches_that_cannot_run_are_refused_with_the_reason() {
    let mut engine = engine(options());
    run(&mut engine, vec![step(0, 0, &text(0, 40))]);
    type Change = fn(&mut SequenceStep);
    let cases: [(&str, Change); 12] = [
        ("slot 5 does not exist", |s| s.slot = StateSlot(5)),
        ("no tokens", |s| s.tokens.clear()),
        ("token 512 at position 41", |s| s.tokens[1] = 512),
        ("98 rows in the step", |s| s.tokens = vec![3; 97]),
        ("starts at position 41", |s| s.start = 41),
        ("go back to 33 tokens, the lowest possible is 34", |s| s.start = 33),
        ("0 blocks, 1 are needed for 42", |s| s.blocks.clear()),
        ("block 6 does not exist", |s| s.blocks[0] = BlockId(6)),
        ("prompt_tokens is 41", |s| s.prompt_tokens = Some(41)),
        ("not whole rows", |s| s.images = vec![ImageSpan { first: 0, embeddings: vec![0.0; 65] }]),
        ("after the step's last token", |s| {
            s.images = vec![ImageSpan { first: 1, embeddings: vec![0.0; 128] }]
        }),
        ("overlaps", |s| {
            let span = ImageSpan { first: 0, embeddings: vec![0.0; 64] };
            s.images = vec![span.clone(), span];
        }),
    ];
    let mut out = StepOutput::default();
    for (message, change) in cases {
        let mut refused = step(0, 40, &[7, 8]);
        change(&mut refused);
        let batch = StepBatch { sequences: vec![step(1, 0, &[9]), refused] };
        let error = engine.execute(&batch, &mut out).unwrap_err().to_string();
        assert!(error.contains(message), "{error} does not say {message}");
        assert_eq!((engine.held(StateSlot(0)), engine.held(StateSlot(1))), (40, 0));
        assert_eq!(out, StepOutput::default());
    }
    let twice = StepBatch { sequences: vec![step(1, 0, &[9]), step(1, 0, &[9])] };
    assert_eq!(engine.execute(&twice, &mut out), Err(StepError::SlotTwice { slot: 1 }));
    let drafts = engine.draft(&[DraftRequest { slot: StateSlot(0), token: 600 }], &mut Vec::new());
    assert!(matches!(drafts, Err(StepError::BadToken { token: 600, position: 40, .. })));
    assert_eq!(
        engine.truncate(StateSlot(0), 41),
        Err(StepError::NotHeld { slot: 0, position: 41, held: 40 })
    );
    assert!(matches!(engine.begin_replay(StateSlot(0), 100, &[]), Err(StepError::NotAligned { .. })));
    assert!(matches!(
        engine.begin_replay(StateSlot(0), 128, &[1, 2]),
        Err(StepError::ShortHistory { given: 2, needed: 3, .. })
    ));
}

#[test]
fn the_context_limit_holds_for_the_last_position() {
    let mut engine = engine(EngineOptions { blocks: 32, max_rows: 512, ..options() });
    let blocks: Vec<BlockId> = (0..32).map(BlockId).collect();
    let mut out = StepOutput::default();
    engine.begin_replay(StateSlot(0), 3968, &[3, 4, 5]).unwrap();
    let mut last = SequenceStep::text(StateSlot(0), 3968, vec![3; 128], blocks);
    engine.execute(&StepBatch { sequences: vec![last.clone()] }, &mut out).unwrap();
    last.start = 4096;
    last.tokens = vec![3];
    last.blocks.push(BlockId(0));
    assert!(matches!(
        engine.execute(&StepBatch { sequences: vec![last] }, &mut out),
        Err(StepError::ContextLimit { end: 4097, limit: 4096, .. })
    ));
}

#[test]
fn an_empty_batch_gives_an_empty_output() {
    let out = run(&mut engine(options()), Vec::new());
    assert!(out.logits.is_empty() && out.ranges.is_empty());
    assert_eq!(out.arrivals, vec![0; 10 * 16]);
}

#[test]
fn one_kept_row_is_enough_and_the_row_before_it_can_be_gone_back_to() {
    let compact = EngineOptions { truncation: Truncation::Compact, keep: Some(1), ..options() };
    let mut engine = engine(compact);
    let mut prefill = step(0, 0, &text(0, 50));
    prefill.prompt_tokens = Some(50);
    prefill.logits = Logits::All;
    let out = run(&mut engine, vec![prefill]);
    assert_eq!(out.ranges, [RowRange { first: 0, len: 1 }]);
    let arrivals = |layer: usize| out.arrivals[layer * 16..(layer + 1) * 16].iter().sum::<u32>();
    assert_eq!((arrivals(4), arrivals(5), arrivals(9)), (150, 3, 3), "rows after the boundary");
    let out = run(&mut engine, vec![step(0, 47, &text(47, 52))]);
    assert!(out.row(0, 0).iter().all(|v| v.is_finite()));
    assert_eq!(engine.held(StateSlot(0)), 52);
}

#[test]
fn a_chunk_before_the_kept_rows_returns_nothing_and_a_neighbour_is_not_touched() {
    let truncated = |truncation| {
        let mut engine = engine(EngineOptions { truncation, keep: Some(33), ..options() });
        let mut early = step(0, 0, &text(0, 20));
        early.prompt_tokens = Some(150);
        run(&mut engine, vec![early, step(1, 0, &text(0, 9))])
    };
    let mut exact = engine(options());
    let alone = run(&mut exact, vec![step(1, 0, &text(0, 9))]);
    for truncation in [Truncation::Mask, Truncation::Compact] {
        let out = truncated(truncation);
        assert_eq!(out.ranges, [RowRange { first: 0, len: 0 }, RowRange { first: 0, len: 1 }]);
        assert_eq!(out.logits, alone.logits, "{truncation:?}");
    }
}

#[test]
fn the_state_of_a_boundary_can_be_cut_out_after_it_was_crossed() {
    let mut engine = engine(EngineOptions { max_rows: 128, ..options() });
    run(&mut engine, vec![step(0, 0, &text(0, 128))]);
    let there = engine.export_window(StateSlot(0)).unwrap();
    let crossed = 128 + engine.slack();
    run(&mut engine, vec![step(0, 128, &text(128, crossed))]);
    assert_eq!(engine.export_window_at(StateSlot(0), 128).unwrap(), there);
    run(&mut engine, vec![step(0, 134, &text(134, 135))]);
    assert!(matches!(engine.export_window_at(StateSlot(0), 128), Err(StepError::RollbackTooDeep { .. })));
    assert!(matches!(engine.export_window_at(StateSlot(0), 0), Err(StepError::NotAligned { .. })));
    assert!(matches!(engine.export_window_at(StateSlot(0), 256), Err(StepError::NotHeld { .. })));
}

#[test]
fn states_of_other_settings_and_damaged_ones_are_not_imported() {
    let mut engine_f32 = engine(EngineOptions { max_rows: 128, ..options() });
    run(&mut engine_f32, vec![step(0, 0, &text(0, 128))]);
    let state = engine_f32.export_window(StateSlot(0)).unwrap();
    let mut quantized = engine(EngineOptions { numerics: None, ..options() });
    assert_eq!(
        quantized.import_window(StateSlot(0), &state),
        Err(StepError::WindowState(WindowStateError::Digest))
    );
    let mut bytes = state.as_bytes().to_vec();
    bytes.pop();
    let short = WindowState::from_bytes(bytes).unwrap();
    let error = engine_f32.import_window(StateSlot(1), &short).unwrap_err();
    assert!(matches!(error, StepError::WindowState(WindowStateError::Length { .. })), "{error}");
    assert_eq!(engine_f32.held(StateSlot(1)), 0);
    engine_f32.import_window(StateSlot(1), &state).unwrap();
    assert_eq!(engine_f32.held(StateSlot(1)), 128);
    assert_eq!(engine_f32.export_window(StateSlot(1)).unwrap(), state);
}

#[test]
fn exact_replay_is_a_window_per_layer_rounded_to_blocks() {
    let replay = |truncation, keep| engine(EngineOptions { truncation, keep, ..options() }).replay_tokens();
    assert_eq!(replay(Truncation::Off, None), 384, "32 + 9 * 31 = 311");
    assert_eq!(replay(Truncation::Compact, Some(1)), 256, "32 + 5 * 31 = 187");
    assert_eq!(replay(Truncation::Compact, Some(300)), 512, "300 + 5 * 31 = 455");
}

/// Last-row logits of a prompt whose first `hit` tokens are in blocks that an earlier run of it has filled.
fn after_hit(options: EngineOptions, tokens: &[u32], hit: usize) -> (Vec<f32>, Vec<f32>) {
    let mut engine = engine(EngineOptions { blocks: 6, max_rows: 128, ..options });
    let blocks: Vec<BlockId> = (0..6).map(BlockId).collect();
    let chunk = |slot: u32, range: std::ops::Range<usize>, replay: bool, engine: &mut Engine<Reference>| {
        let mut out = StepOutput::default();
        for first in range.clone().step_by(128) {
            let end = range.end.min(first + 128);
            let step = SequenceStep {
                prompt_tokens: Some(tokens.len()),
                replay,
                ..SequenceStep::text(StateSlot(slot), first, tokens[first..end].to_vec(), blocks.clone())
            };
            engine.execute(&StepBatch { sequences: vec![step] }, &mut out).unwrap();
        }
        out.logits
    };
    let whole = chunk(0, 0..tokens.len(), false, &mut engine);
    let start = hit - engine.replay_tokens();
    assert!(start > 0, "the replay is shorter than the hit");
    engine.begin_replay(StateSlot(1), start, &tokens[..start]).unwrap();
    chunk(1, start..hit, true, &mut engine);
    (whole, chunk(1, hit..tokens.len(), false, &mut engine))
}

#[test]
fn a_hit_with_exact_replay_gives_the_bits_of_the_whole_prompt_in_every_mode() {
    let tokens = text(0, 648);
    // Kept rows that begin after the hit, and ones that begin in the replayed part.
    let cases = [
        (Truncation::Off, 40, BoundarySwa::Truncated),
        (Truncation::Compact, 40, BoundarySwa::Truncated),
        (Truncation::Compact, 160, BoundarySwa::Truncated),
        (Truncation::Compact, 160, BoundarySwa::Full),
    ];
    for (truncation, keep, boundary_swa) in cases {
        let options = EngineOptions { truncation, keep: Some(keep), boundary_swa, ..options() };
        let (whole, hit) = after_hit(options, &tokens, 512);
        assert_eq!(whole, hit, "{truncation:?}, keep {keep}, {boundary_swa:?}");
    }
}

#[test]
fn forged_states_with_a_valid_checksum_are_refused_or_run_and_never_panic() {
    let mut engine = engine(EngineOptions { max_rows: 128, ..options() });
    run(&mut engine, vec![step(0, 0, &text(0, 101))]);
    let state = engine.export_sequence(StateSlot(0)).unwrap();
    let limit = engine.shape().max_position_embeddings as u64;
    let mut seed = 1u64;
    let mut random = move || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        seed >> 33
    };
    let mut accepted = 0;
    for round in 0..400 {
        let mut bytes = state.as_bytes().to_vec();
        // Position, three bounds, then anything behind the header.
        let edges = [0, 1, 100, 102, 128, limit, limit + 1, u64::MAX, random()];
        for word in 2..6 {
            if random() % 3 == 0 {
                let value = edges[random() as usize % edges.len()];
                bytes[8 * word..8 * word + 8].copy_from_slice(&value.to_le_bytes());
            }
        }
        for _ in 0..round % 5 {
            let at = 52 + random() as usize % (bytes.len() - 52);
            bytes[at] = random() as u8;
        }
        let forged = WindowState::from_bytes(bytes).unwrap().seal();
        if engine.import_sequence(StateSlot(1), &forged).is_ok() {
            accepted += 1;
            let held = engine.held(StateSlot(1));
            let next = StepBatch { sequences: vec![step(1, held, &text(0, 2))] };
            engine.execute(&next, &mut StepOutput::default()).unwrap();
        }
    }
    assert!(accepted > 10, "some were whole: {accepted}");
}

#[test]
fn a_place_in_a_supernode_must_fit_the_model_and_the_exchange() {
    use crate::exchange::local::LocalExchange;
    let checkpoint = checkpoint();
    let limit = std::time::Duration::from_secs(1);
    let refused = |map: SlotMap, ranks: usize| {
        let exchange = Box::new(LocalExchange::new(ranks, limit).remove(0));
        let setup = RankSetup { map: Arc::new(map), exchange };
        Engine::open_rank(Reference, &checkpoint, options(), setup).unwrap_err().to_string()
    };
    let two = SlotMap::initial(&checkpoint.shape, 2, 0).unwrap();
    assert_eq!(refused(two, 3), "slot map: 2 ranks, the exchange has 3 and this is rank 0");
    let short = SlotMap::new(16, 1, vec![(0..16).collect(); 9]).unwrap();
    assert_eq!(refused(short, 1), "slot map: 16 experts in 9 layers, the model has 16 in 10");
    let extra = SlotMap::initial(&checkpoint.shape, 2, 9).unwrap_err().to_string();
    assert_eq!(extra, "extraSlotsPerRank is 9, at most 8: a rank would hold some expert twice");
    assert_eq!(SlotMap::initial(&checkpoint.shape, 1, 5).unwrap().slots_per_rank(), 16, "one rank has none");
}
