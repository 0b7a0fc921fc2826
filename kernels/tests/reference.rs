//! The reference backend on cases small enough to be worked out on paper: it judges the others, so it is checked
//! against the formulas of the model, not against code.

use deepinfer_kernels::formats::encode_weight;
use deepinfer_kernels::host::{HostBuf, HostWeight};
use deepinfer_kernels::{
    AttentionArgs, Backend, BlockTables, ByteView, CandidateUse, Candidates, ExpertParams, ExpertSet,
    ExpertWeights, GlobalKeys, HcParams, IndexQuery, MatrixSource, Reference, RouteParams, RowFormat,
    Selection, WeightFormat,
};

const B: Reference = Reference;

fn weight(rows: usize, cols: usize, values: &[f32]) -> HostWeight {
    let (data, _) = encode_weight(WeightFormat::F32, rows, cols, values);
    B.weight(MatrixSource {
        format: WeightFormat::F32,
        rows,
        cols,
        data: ByteView::owned(data),
        scales: None,
    })
}

fn assert_near(got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(want) {
        assert!((f64::from(*got) - want).abs() < 1e-6 * want.abs().max(1.0), "{got} instead of {want}");
    }
}

/// One sequence whose entries lie in blocks of four, given in this order.
fn tables<'a>(row_sequence: &'a [u32], blocks: &'a [u32], ends: &'a [u32]) -> BlockTables<'a> {
    BlockTables { row_sequence, blocks, ends, entries_per_block: 4 }
}

#[test]
fn a_product_multiplies_by_rows_of_the_weight() {
    let w = weight(2, 3, &[1.0, 2.0, 3.0, -1.0, 0.5, 4.0]);
    let x = HostBuf(vec![1.0, 10.0, 100.0, 2.0, 0.0, -1.0]);
    let mut y = B.alloc(4);
    B.matmul(&w, &x, 2, &mut y);
    assert_eq!(y.0, [321.0, 404.0, -1.0, -6.0]);
}

#[test]
fn a_grouped_product_keeps_groups_apart() {
    // Two groups of two outputs and one input.
    let w = weight(4, 1, &[1.0, 2.0, 3.0, 4.0]);
    let mut y = B.alloc(8);
    B.matmul_grouped(&w, 2, &HostBuf(vec![1.0, 10.0, 100.0, 1000.0]), 2, &mut y);
    assert_eq!(y.0, [1.0, 2.0, 30.0, 40.0, 100.0, 200.0, 3000.0, 4000.0]);
}

#[test]
fn a_norm_divides_by_the_root_of_the_mean_square() {
    let mut y = B.alloc(2);
    B.rmsnorm(&HostBuf(vec![3.0, 4.0]), 1, 2, &HostBuf(vec![1.0, 10.0]), 0.0, &mut y);
    let root = 12.5f64.sqrt();
    assert_near(&y.0, &[3.0 / root, 40.0 / root]);
    B.rmsnorm(&HostBuf(vec![0.0, 0.0]), 1, 2, &HostBuf(vec![1.0, 10.0]), 1e-20, &mut y);
    assert_eq!(y.0, [0.0, 0.0]);
}

#[test]
fn a_quarter_turn_moves_the_last_pairs_and_its_inverse_moves_them_back() {
    let mut x = HostBuf(vec![7.0, 8.0, 1.0, 2.0]);
    let quarter = HostBuf(vec![0.0, 1.0]);
    B.rope(&mut x, 1, 1, 4, 2, &quarter, false);
    assert_eq!(x.0, [7.0, 8.0, -2.0, 1.0]);
    B.rope(&mut x, 1, 1, 4, 2, &quarter, true);
    assert_eq!(x.0, [7.0, 8.0, 1.0, 2.0]);
}

#[test]
fn swiglu_clamps_the_gate_from_above_and_the_other_branch_both_ways() {
    let silu = |g: f64| g / (1.0 + (-g).exp());
    let up = HostBuf(vec![3.0, -9.0, 9.0, 1.0]);
    let gates = vec![1.0, 5.0, -5.0, 0.0];
    let mut gate = HostBuf(gates.clone());
    B.swiglu(&mut gate, &up, 4, 2.0);
    assert_near(&gate.0, &[silu(1.0) * 2.0, silu(2.0) * -2.0, silu(-5.0) * 2.0, 0.0]);
    let mut gate = HostBuf(gates);
    B.swiglu(&mut gate, &up, 4, 0.0);
    assert_near(&gate.0, &[silu(1.0) * 3.0, silu(5.0) * -9.0, silu(-5.0) * 9.0, 0.0]);
}

#[test]
fn mixes_of_a_zero_matrix_come_from_the_base_and_the_comb_is_doubly_stochastic() {
    let m = 3;
    let outputs = m * (2 + m);
    let f = weight(outputs, m * 2, &vec![0.0; outputs * m * 2]);
    let base: Vec<f32> = (0..outputs).map(|i| (i * 5 % 7) as f32 / 3.0 - 1.0).collect();
    let p = HcParams { copies: m, iters: 20, eps: 1e-6, norm_eps: 1e-20 };
    let (mut pre, mut post, mut comb) = (B.alloc(m), B.alloc(m), B.alloc(m * m));
    let (stream, scale) = (HostBuf(vec![1.0; m * 2]), HostBuf(vec![1.0; 3]));
    B.hc_mixes(&stream, 1, &f, &scale, &HostBuf(base.clone()), p, &mut pre, &mut post, &mut comb);
    let sigmoid = |x: f32| 1.0 / (1.0 + (-f64::from(x)).exp());
    assert_near(&pre.0, &base[..m].iter().map(|b| sigmoid(*b) + 1e-6).collect::<Vec<_>>());
    assert_near(&post.0, &base[m..2 * m].iter().map(|b| 2.0 * sigmoid(*b)).collect::<Vec<_>>());
    for i in 0..m {
        let row: f32 = comb.0[i * m..(i + 1) * m].iter().sum();
        let column: f32 = (0..m).map(|old| comb.0[old * m + i]).sum();
        assert!((row - 1.0).abs() < 1e-4 && (column - 1.0).abs() < 1e-5, "row {row}, column {column}");
    }
}

#[test]
fn the_first_iteration_normalizes_columns_only() {
    let f = weight(8, 2, &[0.0; 16]);
    // Softmax rows are (1/4, 3/4) and (1/2, 1/2).
    let mut base = vec![0.0; 8];
    base[5] = 3f32.ln();
    let p = HcParams { copies: 2, iters: 1, eps: 0.0, norm_eps: 1e-20 };
    let (mut pre, mut post, mut comb) = (B.alloc(2), B.alloc(2), B.alloc(4));
    let (stream, scale) = (HostBuf(vec![1.0; 2]), HostBuf(vec![1.0; 3]));
    B.hc_mixes(&stream, 1, &f, &scale, &HostBuf(base), p, &mut pre, &mut post, &mut comb);
    // Columns sum to 3/4 and 5/4; the first index is the old copy.
    assert_near(&comb.0, &[0.25 / 0.75, 0.75 / 1.25, 0.5 / 0.75, 0.5 / 1.25]);
}

#[test]
fn the_three_parts_of_the_mixes_have_their_own_scales() {
    // Every row of f reads channel 0 of a stream whose norm is one.
    let f = weight(8, 2, &[1.0, 0.0].repeat(8));
    let stream = HostBuf(vec![1.0, -1.0]);
    let p = HcParams { copies: 2, iters: 1, eps: 0.0, norm_eps: 0.0 };
    let (mut pre, mut post, mut comb) = (B.alloc(2), B.alloc(2), B.alloc(4));
    let (scale, base) = (HostBuf(vec![2.0, -3.0, 5.0]), HostBuf(vec![0.0; 8]));
    B.hc_mixes(&stream, 1, &f, &scale, &base, p, &mut pre, &mut post, &mut comb);
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    assert_near(&pre.0, &[sigmoid(2.0), sigmoid(2.0)]);
    assert_near(&post.0, &[2.0 * sigmoid(-3.0), 2.0 * sigmoid(-3.0)]);
    assert_near(&comb.0, &[0.5; 4]);
}

#[test]
fn collapse_and_merge_weigh_copies() {
    let mut stream = HostBuf(vec![1.0, 2.0, 10.0, 20.0]);
    let mut x = B.alloc(2);
    B.hc_collapse(&stream, 1, 2, 2, &HostBuf(vec![1.0, 0.5]), &mut x);
    assert_eq!(x.0, [6.0, 12.0]);
    // comb[old][new]: the new copy 0 takes the old copy 1, the new copy 1 takes both.
    let (post, comb) = (HostBuf(vec![1.0, 2.0]), HostBuf(vec![0.0, 1.0, 1.0, 1.0]));
    B.hc_merge(&mut stream, 1, 2, 2, &HostBuf(vec![100.0, 200.0]), &post, &comb);
    assert_eq!(stream.0, [110.0, 220.0, 211.0, 422.0]);
}

#[test]
fn attention_adds_the_sink_to_the_denominator_only() {
    let mut window = B.store(RowFormat::F32, 2, 3);
    B.store_rows(&HostBuf(vec![1.0, 0.0, 0.0, 2.0, 5.0, 5.0]), &mut window, &[0, 1, 2]);
    let (query, sink) = (HostBuf(vec![3.0, 1.0, 0.0, 0.0]), HostBuf(vec![1.0]));
    let args = AttentionArgs {
        rows: 2,
        heads: 1,
        width: 2,
        scale: 0.5,
        query: &query,
        sink: &sink,
        window: &window,
        window_rows: &[1, 0],
        window_ends: &[2, 2],
        global: None,
    };
    let mut out = HostBuf(vec![9.0; 4]);
    B.attention(&args, &mut out);
    // Logits 1.0 for key (0, 2) and 1.5 for key (1, 0); the sink is not scaled. The second row sees nothing.
    let (a, b, s) = (1f64.exp(), 1.5f64.exp(), 1f64.exp());
    assert_near(&out.0, &[b / (a + b + s), 2.0 * a / (a + b + s), 0.0, 0.0]);
}

#[test]
fn attention_reads_selected_entries_through_the_tables_of_the_rows_sequence() {
    let mut store = B.store(RowFormat::F32, 1, 16);
    let numbers: Vec<f32> = (0..16).map(|i| i as f32).collect();
    B.store_rows(&HostBuf(numbers), &mut store, &(0..16).collect::<Vec<_>>());
    // Sequence 0 has block 3; sequence 1 has blocks 1 and 0.
    let (row_sequence, blocks, ends) = ([1, 0, 1], [3, 1, 0], [1, 3]);
    let selection =
        Selection { indices: HostBuf(vec![5, 0, 2, 9, 0, 6]), counts: HostBuf(vec![1, 1, 2]), top_k: 2 };
    // A query of zero gives every key the same weight, and a sink of -inf none to the sink.
    let (query, sink) = (HostBuf(vec![0.0; 3]), HostBuf(vec![f32::NEG_INFINITY]));
    let window = B.store(RowFormat::F32, 1, 1);
    let args = AttentionArgs {
        rows: 3,
        heads: 1,
        width: 1,
        scale: 1.0,
        query: &query,
        sink: &sink,
        window: &window,
        window_rows: &[],
        window_ends: &[0, 0, 0],
        global: Some(GlobalKeys {
            store: &store,
            selection: &selection,
            tables: tables(&row_sequence, &blocks, &ends),
        }),
    };
    let mut out = B.alloc(3);
    B.attention(&args, &mut out);
    // Entry 5 of sequence 1 is row 1 of block 0; entry 2 of sequence 0 row 2 of block 3; then rows 4 and 2.
    assert_near(&out.0, &[1.0, 14.0, 3.0]);
}

#[test]
fn pooling_with_equal_gates_is_the_mean_and_with_a_far_gate_a_choice() {
    let values = HostBuf(vec![1.0, 10.0, 3.0, 30.0]);
    let mut out = B.alloc(2);
    B.compress_pool(&values, &HostBuf(vec![0.5, 0.0, 0.5, 200.0]), 1, 2, 2, &mut out);
    assert_near(&out.0, &[2.0, 30.0]);
}

/// Index keys 0 .. n of one sequence in order, one channel; scores are the keys times the weight.
fn select(
    keys: &[f32],
    visible: u32,
    weight: f32,
    top_k: usize,
    candidates: CandidateUse<'_, HostBuf<u32>>,
) -> Vec<u32> {
    let n = keys.len().next_multiple_of(4);
    let mut store = B.store(RowFormat::F32, 1, n);
    B.store_rows(&HostBuf(keys.to_vec()), &mut store, &(0..keys.len() as u32).collect::<Vec<_>>());
    let blocks: Vec<u32> = (0..n as u32 / 4).collect();
    let ends = [blocks.len() as u32];
    let (query, weights) = (HostBuf(vec![1.0]), HostBuf(vec![weight]));
    let query = IndexQuery::<Reference> {
        rows: 1,
        heads: 1,
        width: 1,
        query: &query,
        weights: &weights,
        keys: &store,
        visible: &[visible],
        tables: tables(&[0], &blocks, &ends),
    };
    let mut selection = Selection { indices: B.alloc(top_k), counts: B.alloc(1), top_k };
    B.index_select(&query, candidates, &mut selection);
    selection.indices.0[..selection.counts.0[0] as usize].to_vec()
}

fn no_candidates(max_blocks: usize, block_size: usize) -> Candidates<HostBuf<u32>> {
    Candidates { indices: B.alloc(max_blocks), counts: B.alloc(1), max_blocks, block_size }
}

#[test]
fn selection_takes_the_highest_scores_and_among_equals_the_lowest_entries() {
    let keys = [1.0, 3.0, 2.0, 3.0, 3.0, 9.0, 0.5];
    assert_eq!(select(&keys, 5, 1.0, 2, CandidateUse::Ignore), [1, 3], "5 is not visible, 4 comes too late");
    assert_eq!(select(&keys, 7, 1.0, 2, CandidateUse::Ignore), [1, 5], "in ascending order");
    assert_eq!(select(&keys, 3, 1.0, 5, CandidateUse::Ignore), [0, 1, 2], "all that are visible");
    assert_eq!(select(&keys, 0, 1.0, 5, CandidateUse::Ignore), [], "nothing is visible");
    assert_eq!(select(&keys, 7, -1.0, 2, CandidateUse::Ignore), [0, 6], "weights may be negative");
    // Negative dots count as zero, whatever the sign of the weight makes of that zero.
    assert_eq!(select(&[-1.0, 0.0, -3.0, 1.0], 4, -1.0, 2, CandidateUse::Ignore), [0, 1]);
}

#[test]
fn candidates_are_the_best_blocks_and_always_the_newest_and_do_not_restrict_their_own_row() {
    // Blocks of two: maxima 4, 9, 5, 5, and the lone newest entry 1.
    let keys = [4.0, 1.0, 2.0, 9.0, 5.0, 0.0, 5.0, 5.0, 1.0];
    let mut candidates = no_candidates(3, 2);
    let picked = select(&keys, 9, 1.0, 4, CandidateUse::Produce(&mut candidates));
    assert_eq!((candidates.counts.0[0], &candidates.indices.0[..]), (3, &[1, 2, 4][..]));
    assert_eq!(picked, [3, 4, 6, 7]);
    let picked = select(&keys, 9, 1.0, 4, CandidateUse::Restrict(&candidates));
    assert_eq!(picked, [2, 3, 4, 8], "of the entries 2 and 3, 4 and 5, and 8")
}

#[test]
fn routing_selects_with_the_bias_and_weighs_without_it() {
    let gate = weight(3, 1, &[1.0, 2.0, 3.0]);
    let a = |z: f64| (1.0 + z.exp()).ln().sqrt();
    let (bias, bias_image) = (HostBuf(vec![5.0, 0.0, 0.0]), HostBuf(vec![0.0, 9.0, 8.0]));
    let p = RouteParams { top_k: 2, normalize: true, scale: 1.5 };
    let (mut ids, mut weights) = (B.alloc(4), B.alloc(4));
    B.route(&HostBuf(vec![1.0, 1.0]), 2, &gate, &bias, &bias_image, &[0, 1], p, &mut ids, &mut weights);
    assert_eq!(ids.0, [0, 2, 1, 2]);
    let (one, two) = (a(1.0) + a(3.0), a(2.0) + a(3.0));
    assert_near(
        &weights.0,
        &[1.5 * a(1.0) / one, 1.5 * a(3.0) / one, 1.5 * a(2.0) / two, 1.5 * a(3.0) / two],
    );

    // A single pick is not normalized: its weight would always be the scale.
    let p = RouteParams { top_k: 1, normalize: true, scale: 1.5 };
    B.route(&HostBuf(vec![1.0]), 1, &gate, &bias, &bias_image, &[], p, &mut ids, &mut weights);
    assert_near(&weights.0[..1], &[1.5 * a(1.0)]);
}

#[test]
fn equal_experts_are_picked_by_the_lowest_id() {
    let gate = weight(4, 1, &[0.0; 4]);
    let bias = HostBuf(vec![0.0, 1.0, 0.0, 1.0]);
    let p = RouteParams { top_k: 3, normalize: false, scale: 1.0 };
    let (mut ids, mut weights) = (B.alloc(3), B.alloc(3));
    B.route(&HostBuf(vec![1.0]), 1, &gate, &bias, &bias, &[], p, &mut ids, &mut weights);
    assert_eq!(ids.0, [1, 3, 0]);
    assert_near(&weights.0, &[2f64.ln().sqrt(); 3]);
}

#[test]
fn experts_are_found_through_their_slots_and_counted_there() {
    let expert = |factor: f32| ExpertWeights {
        w1: weight(1, 1, &[1.0]),
        w3: weight(1, 1, &[1.0]),
        w2: weight(1, 1, &[factor]),
    };
    // Expert 0 is served by slot 2, expert 1 by slot 0; slot 1 serves nobody.
    let set = ExpertSet { slots: vec![expert(1.0), expert(77.0), expert(100.0)], slot_of: vec![2, 0] };
    let p = ExpertParams { top_k: 2, limit: 0.0, quantize: false };
    let (ids, weights) = (HostBuf(vec![1, 0, 0, 1]), HostBuf(vec![0.5, 0.25, 1.0, 0.0]));
    let mut y = HostBuf(vec![9.0; 2]);
    let mut arrivals = [10, 10, 10];
    B.experts(&HostBuf(vec![2.0, 1.0]), 2, &ids, &weights, &set, p, &mut y, &mut arrivals);
    let h = |x: f64| x * x / (1.0 + (-x).exp());
    assert_near(&y.0, &[h(2.0) * (0.5 + 25.0), h(1.0) * 100.0]);
    assert_eq!(arrivals, [12, 10, 12]);
}

#[test]
fn an_engram_gate_opens_by_the_agreement_of_stream_and_key() {
    // Two copies of two channels; keys as the stream, against the stream; a value.
    let mut stream = HostBuf(vec![3.0, 4.0, 3.0, 4.0, 1.0, 1.0, 1.0, 1.0]);
    let kv = HostBuf(vec![6.0, 8.0, -3.0, -4.0, 10.0, 20.0, 1.0, 1.0, 1.0, 1.0, 5.0, 5.0]);
    let ones = HostBuf(vec![1.0; 4]);
    let mut gates = B.alloc(4);
    B.engram_gate(&mut stream, 2, 2, 2, &kv, &ones, &ones, &[1, 0], 0.0, &mut gates);
    // Normalized vectors of two channels have a dot of 2; over the root of 2 that is the root of 2.
    let open = 1.0 / (1.0 + (-2f64.powf(0.25)).exp());
    assert_near(&gates.0, &[open, 1.0 - open, 0.0, 0.0]);
    let moved = |s: f64, g: f64, v: f64| s + g * v;
    let first = [moved(3.0, open, 10.0), moved(4.0, open, 20.0)];
    let second = [moved(3.0, 1.0 - open, 10.0), moved(4.0, 1.0 - open, 20.0)];
    assert_near(&stream.0, &[first[0], first[1], second[0], second[1], 1.0, 1.0, 1.0, 1.0]);
}

#[test]
fn rows_move_without_change() {
    let mut out = B.alloc(4);
    B.gather(&weight(3, 2, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), &[2, 0], &mut out);
    assert_eq!(out.0, [5.0, 6.0, 1.0, 2.0]);
    B.take_rows(&HostBuf(vec![1.0, 2.0, 3.0, 4.0]), 2, &[1, 1], &mut out);
    assert_eq!(out.0, [3.0, 4.0, 3.0, 4.0]);
    let mut copies = B.alloc(6);
    B.broadcast_copies(&HostBuf(vec![1.0, 2.0]), 1, 3, 2, &mut copies);
    assert_eq!(copies.0, [1.0, 2.0, 1.0, 2.0, 1.0, 2.0]);
    let mut means = HostBuf(vec![7.0; 4]);
    B.mean_copies(&HostBuf(vec![1.0, 2.0, 3.0, 6.0]), 1, 2, 2, &mut means, 4, 1);
    assert_eq!(means.0, [7.0, 2.0, 4.0, 7.0]);
}
