//! The work estimate against numbers of the published model, and against its own definition row by row.

use deepinfer_serving::batch::{
    ChunkRows, Truncation, Work, WorkLayer, WorkModel, WorkModelError, WorkShape, decode_work, prefill_work,
};
use proptest::prelude::*;

/// The sizes of DeepSeek-V4.1-Flash.
fn v41() -> WorkModel {
    let layer = |i: usize| WorkLayer {
        ratio: [0, 2, 1][usize::from(i >= 2) + usize::from(i >= 20)],
        kv_source: [2, 8, 14, 20].contains(&i),
        index_source: [2, 8, 14, 20, 24, 28, 32, 36].contains(&i),
        restricted: i > 20,
        engram_width: if [1, 14].contains(&i) { 6144 } else { 0 },
    };
    WorkModel {
        hidden_size: 5120,
        num_attention_heads: 64,
        head_dim: 512,
        q_lora_rank: 1280,
        o_groups: 8,
        o_lora_rank: 1024,
        sliding_window: 128,
        index_n_heads: 32,
        index_head_dim: 128,
        index_topk: 512,
        candidate_blocks: 2048,
        candidate_block_size: 8,
        n_routed_experts: 384,
        experts_per_row: 7,
        moe_intermediate_size: 2304,
        hc_mult: 4,
        vocab_size: 129_280,
        layers: (0..40).map(layer).collect(),
    }
}

/// A model small enough to count row by row, with everything in it.
fn small() -> WorkModel {
    let layer = |ratio, kv_source, index_source, restricted, engram_width| WorkLayer {
        ratio,
        kv_source,
        index_source,
        restricted,
        engram_width,
    };
    WorkModel {
        hidden_size: 6,
        num_attention_heads: 2,
        head_dim: 4,
        q_lora_rank: 3,
        o_groups: 2,
        o_lora_rank: 2,
        sliding_window: 5,
        index_n_heads: 3,
        index_head_dim: 2,
        index_topk: 7,
        candidate_blocks: 3,
        candidate_block_size: 4,
        n_routed_experts: 9,
        experts_per_row: 3,
        moe_intermediate_size: 5,
        hc_mult: 2,
        vocab_size: 11,
        layers: vec![
            layer(0, false, false, false, 0),
            layer(2, true, true, false, 8),
            layer(2, false, false, false, 0),
            layer(1, true, true, false, 0),
            layer(1, false, true, true, 0),
            layer(1, false, false, false, 0),
        ],
    }
}

const COMPACT: Truncation = Truncation::Compact { keep: 140 };

#[test]
fn prefill_of_the_published_model_costs_what_the_published_estimator_says() {
    // (truncation, rows, end, prompt, attention, total)
    let vectors: &[(Truncation, usize, usize, usize, u128, u128)] = &[
        (COMPACT, 1, 1, 1, 10_308_685_824, 34_111_688_704),
        (COMPACT, 128, 128, 128, 1_466_840_645_632, 4_177_372_905_472),
        (COMPACT, 1024, 1024, 1024, 8_327_722_426_368, 20_924_486_115_328),
        (COMPACT, 4096, 4096, 4096, 33_756_831_277_056, 79_827_160_784_896),
        (COMPACT, 8192, 8192, 8192, 67_752_504_057_856, 158_454_254_657_536),
        (COMPACT, 8192, 32_768, 32_768, 70_302_054_211_584, 161_003_804_811_264),
        (COMPACT, 8192, 131_072, 131_072, 75_306_227_982_336, 166_007_978_582_016),
        (COMPACT, 8192, 1_048_576, 1_048_576, 122_011_849_842_688, 212_713_600_442_368),
        (COMPACT, 2048, 65_536, 65_536, 18_945_519_640_576, 42_700_138_602_496),
        (COMPACT, 128, 65_536, 65_536, 2_227_270_057_984, 4_937_802_317_824),
        (COMPACT, 8192, 65_536, 131_072, 70_759_337_820_160, 160_035_086_663_680),
        (COMPACT, 65_536, 65_536, 65_536, 554_402_649_202_688, 1_269_944_295_088_128),
        (COMPACT, 131_072, 131_072, 131_072, 1_135_291_607_277_568, 2_564_935_990_632_448),
        (Truncation::Off, 1024, 1024, 1024, 15_142_513_278_976, 36_808_237_776_896),
        (Truncation::Off, 8192, 8192, 8192, 135_978_010_279_936, 309_285_272_682_496),
        (Truncation::Off, 8192, 32_768, 32_768, 141_696_356_581_376, 315_003_618_983_936),
        (Truncation::Off, 8192, 131_072, 131_072, 149_942_693_789_696, 323_249_956_192_256),
        (Truncation::Off, 8192, 1_048_576, 1_048_576, 226_908_507_734_016, 400_215_770_136_576),
        (Truncation::Off, 131_072, 131_072, 131_072, 2_312_413_747_609_600, 5_085_290_231_234_560),
    ];
    let shape = WorkShape::new(&v41()).unwrap();
    for &(truncation, rows, end, prompt, attention, total) in vectors {
        let chunk = ChunkRows { rows, end, prompt, window_start: 0 };
        let work = prefill_work(&shape, chunk, truncation);
        assert_eq!(work, Work { attention, total }, "{truncation:?} {chunk:?}");
    }
}

#[test]
fn decode_of_the_published_model_costs_what_the_published_estimator_says() {
    let vectors: &[(usize, usize, u128, u128)] = &[
        (1, 1024, 16_762_535_936, 40_565_538_816),
        (6, 1024, 100_532_576_256, 243_350_593_536),
        (1, 32_768, 17_339_252_736, 41_142_255_616),
        (6, 32_768, 104_035_344_384, 246_853_361_664),
        (6, 131_072, 110_075_142_144, 252_893_159_424),
        (6, 1_048_576, 166_446_587_904, 309_264_605_184),
    ];
    let shape = WorkShape::new(&v41()).unwrap();
    for &(rows, end, attention, total) in vectors {
        assert_eq!(decode_work(&shape, rows, end), Work { attention, total }, "{rows} rows to {end}");
    }
}

#[test]
fn constants_of_the_published_model_are_the_table_of_the_estimate() {
    let shape = WorkShape::new(&v41()).unwrap();
    let (producers, consumers, all) = (&shape.producers, &shape.consumers, &shape.all);
    assert_eq!(producers.attention_row, 5_171_445_760);
    assert_eq!(consumers.attention_row, 5_120_327_680);
    assert_eq!(all.attention_row, 10_291_773_440);
    assert_eq!(
        [producers.window_pair, consumers.window_pair, all.window_pair],
        [5_242_880, 5_242_880, 10_485_760]
    );
    assert_eq!([producers.ratios[&2].key_entry, producers.ratios[&1].key_entry], [786_432, 262_144]);
    assert_eq!([all.ratios[&2].key_entry, all.ratios[&1].key_entry], [786_432, 262_144]);
    assert_eq!([producers.ratios[&2].core_pair, consumers.ratios[&1].core_pair], [4_718_592, 5_242_880]);
    assert_eq!([producers.ratios[&2].index_pair, consumers.ratios[&1].index_pair], [12_288, 4_096]);
    assert_eq!([all.candidate_block, consumers.candidate_block], [131_072, 131_072]);
    assert_eq!(producers.other_row, 10_896_343_040);
    assert_eq!(consumers.other_row, 10_259_005_440);
    assert_eq!(all.other_row, 21_155_348_480);
    assert_eq!(shape.logit_row, 2_647_654_400);
}

/// Attention over entries and the window, pair by pair, as the table of A.1 words it.
fn pairs_one_by_one(model: &WorkModel, first: usize, end: usize, window_start: usize) -> u128 {
    let core = 4 * u128::from(model.num_attention_heads) * 2 * u128::from(model.head_dim);
    let index = u128::from(model.index_n_heads * model.index_head_dim);
    let mut work = 0;
    for t in (first + 1..=end).map(|t| t as u64) {
        for layer in &model.layers {
            let window = t.saturating_sub(window_start as u64).min(model.sliding_window);
            work += core * u128::from(window);
            if layer.ratio == 0 {
                continue;
            }
            let entries = t / layer.ratio;
            work += core * u128::from(entries.min(model.index_topk));
            if layer.index_source && layer.restricted {
                let blocks = t.div_ceil(model.candidate_block_size).min(model.candidate_blocks);
                work += index * u128::from(blocks * model.candidate_block_size);
            } else if layer.index_source {
                work += index * u128::from(entries);
            }
        }
    }
    work
}

proptest! {
    #[test]
    fn closed_sums_equal_counting_pair_by_pair(first in 0_usize..200, rows in 1_usize..100, start in 0_usize..100) {
        let model = small();
        let shape = WorkShape::new(&model).unwrap();
        let end = first + rows;
        let chunk = ChunkRows { rows, end, prompt: end, window_start: start };
        let completed: u128 = shape.all.ratios.iter().map(|(&r, costs)| {
            let r = r as usize;
            costs.key_entry * (end / r - first / r).max(1) as u128
        }).sum();
        let expected = shape.all.attention_row * rows as u128
            + completed
            + pairs_one_by_one(&model, first, end, start);
        prop_assert_eq!(prefill_work(&shape, chunk, Truncation::Off).attention, expected);
    }

    #[test]
    fn work_is_the_same_however_a_prompt_is_cut(cuts in prop::collection::vec(1_usize..20, 1..8)) {
        let shape = WorkShape::new(&v41()).unwrap();
        let end = 128 * cuts.iter().sum::<usize>();
        let whole = prefill_work(&shape, ChunkRows::last(end, end), Truncation::Off);
        let (mut at, mut attention, mut total) = (0, 0, 0);
        for cut in &cuts {
            at += 128 * cut;
            let chunk = ChunkRows { rows: 128 * cut, end: at, prompt: end, window_start: 0 };
            let work = prefill_work(&shape, chunk, Truncation::Off);
            attention += work.attention;
            total += work.total - shape.logit_row;
        }
        prop_assert_eq!(attention, whole.attention);
        prop_assert_eq!(total, whole.total - shape.logit_row);
    }

    #[test]
    fn more_rows_are_never_less_work(start in 0_usize..5_000, rows in 1_usize..5_000, rest in 0_usize..5_000) {
        let shape = WorkShape::new(&v41()).unwrap();
        let prompt = start + rows + 1 + rest;
        for truncation in [Truncation::Off, COMPACT] {
            let chunk = |rows| ChunkRows { rows, end: start + rows, prompt, window_start: 0 };
            let fewer = prefill_work(&shape, chunk(rows), truncation);
            let more = prefill_work(&shape, chunk(rows + 1), truncation);
            prop_assert!(fewer.total < more.total && fewer.attention < more.attention, "{:?}", truncation);
        }
    }

    #[test]
    fn no_model_and_no_position_overflows(size in 1_u64..=1 << 24, copies in 1_u64..=1 << 10, end in 1_usize..) {
        let layer = WorkLayer {
            ratio: 1, kv_source: true, index_source: true, restricted: size % 2 == 0, engram_width: size,
        };
        let model = WorkModel {
            hidden_size: size, num_attention_heads: size, head_dim: size, q_lora_rank: size, o_groups: size,
            o_lora_rank: size, sliding_window: size, index_n_heads: size, index_head_dim: size, index_topk: size,
            candidate_blocks: size, candidate_block_size: size, n_routed_experts: size, experts_per_row: size,
            moe_intermediate_size: size, hc_mult: copies, vocab_size: size, layers: vec![layer; 1 << 12],
        };
        let shape = WorkShape::new(&model).unwrap();
        let work = prefill_work(&shape, ChunkRows::last(end, end), Truncation::Off);
        prop_assert!(work.total > work.attention);
        prop_assert!(decode_work(&shape, end.min(9), end).total > 0);
    }
}

#[test]
fn nothing_to_run_is_no_work() {
    let shape = WorkShape::new(&v41()).unwrap();
    for truncation in [Truncation::Off, COMPACT] {
        assert_eq!(prefill_work(&shape, ChunkRows::last(0, 500), truncation), Work::default());
    }
}

#[test]
fn a_model_without_a_decoder_half_is_never_truncated() {
    let mut model = small();
    model.layers.iter_mut().for_each(|l| l.ratio *= 2);
    model.layers.iter_mut().filter(|l| l.ratio == 2 && l.restricted).for_each(|l| l.restricted = false);
    let shape = WorkShape::new(&model).unwrap();
    let chunk = ChunkRows::last(64, 64);
    assert_eq!(
        prefill_work(&shape, chunk, Truncation::Compact { keep: 8 }),
        prefill_work(&shape, chunk, Truncation::Off)
    );
}

#[test]
fn a_size_out_of_bounds_is_named() {
    let mut model = small();
    model.candidate_block_size = 0;
    let error = WorkShape::new(&model).unwrap_err();
    assert_eq!(error.to_string(), "candidate_block_size is 0, it must be between 1 and 16777216");
    model = small();
    model.hc_mult = 2_000;
    assert!(matches!(WorkShape::new(&model), Err(WorkModelError::Size { field: "hc_mult", most: 1024, .. })));
    model.layers.clear();
    assert_eq!(WorkShape::new(&model), Err(WorkModelError::Layers(0)));
}
