//! Row operations: one set of bits for every level, thread count and grouping of rows, close to the definition.

use super::super::testing::{Random, assert_bits, assert_close, same_bits};
use super::*;
use crate::Reference;
use crate::formats::{RowFormat, WeightFormat, encode_weight};
use crate::mapped::ByteView;
use crate::ops::{Backend, HcParams, MatrixSource, RouteParams};

/// Widths below, at and above a vector, odd ones, and one that is shared out among threads.
const WIDTHS: [usize; 7] = [1, 7, 16, 33, 64, 100, 5120];

fn buf(v: &[f32]) -> F32 {
    HostBuf(v.to_vec())
}

fn zeros(len: usize) -> F32 {
    HostBuf(vec![0.0; len])
}

/// Checks an operation that maps rows of `x` to rows of the result: same bits everywhere, same bits row by row,
/// close to the reference.
fn check_rows(
    what: &str,
    x: &[f32],
    rows: usize,
    tolerance: f32,
    cpu_op: impl Fn(&Cpu, &[f32], usize) -> Vec<f32>,
    reference_op: impl Fn(&Reference, &[f32], usize) -> Vec<f32>,
) {
    let all = same_bits(what, |cpu| cpu_op(cpu, x, rows));
    let one = Cpu::new(1);
    let by_row: Vec<f32> = x.chunks_exact(x.len() / rows).flat_map(|row| cpu_op(&one, row, 1)).collect();
    assert_bits(&format!("{what}, row by row"), &by_row, &all);
    assert_close(what, &all, &reference_op(&Reference, x, rows), tolerance);
}

/// `check_rows` with one closure body for both backends.
macro_rules! check {
    ($what:expr, $x:expr, $rows:expr, $tolerance:expr, |$b:ident, $in:ident, $n:ident| $body:block) => {
        check_rows(
            $what,
            $x,
            $rows,
            $tolerance,
            |$b: &Cpu, $in: &[f32], $n: usize| $body,
            |$b: &Reference, $in: &[f32], $n: usize| $body,
        )
    };
}

#[test]
fn rmsnorm_depends_on_nothing_but_the_row() {
    let mut random = Random(1);
    for width in WIDTHS {
        let weight = random.buffer(width);
        let x = random.floats(9 * width);
        check!("rmsnorm", &x, 9, 2e-6, |b, x, n| {
            let mut y = zeros(n * width);
            b.rmsnorm(&buf(x), n, width, &weight, 1e-20, &mut y);
            y.0
        });
    }
}

#[test]
fn element_wise_operations_depend_on_nothing_but_the_element() {
    let mut random = Random(2);
    for width in WIDTHS {
        let (x, other) = (random.floats(9 * width), random.floats(width));
        check!("add", &x, 9, 0.0, |b, x, n| {
            let mut y = buf(x);
            b.add(&mut y, &buf(&other.repeat(n)), n * width);
            y.0
        });
        check!("scale", &x, 9, 0.0, |b, x, n| {
            let mut y = buf(x);
            b.scale(&mut y, 0.37, n * width);
            y.0
        });
        for limit in [0.0, 0.8] {
            check!("swiglu", &x, 9, 2e-6, |b, x, n| {
                let mut y = buf(x);
                b.swiglu(&mut y, &buf(&other.repeat(n)), n * width, limit);
                y.0
            });
        }
    }
}

#[test]
fn rope_rotates_pairs_the_same_everywhere() {
    let mut random = Random(3);
    for (heads, width, rd) in [(1, 2, 2), (3, 20, 6), (2, 64, 16), (5, 50, 34), (64, 512, 64)] {
        let rows = 5;
        let x = random.floats(rows * heads * width);
        // The row's angle travels with the row: taken from its first number.
        let angles = |x: &[f32]| -> Vec<f32> {
            let rows = x.chunks_exact(heads * width);
            rows.flat_map(|row| {
                let angle = |i: usize| row[0] * 10.0 / (i + 1) as f32;
                let cos = (0..rd / 2).map(move |i| angle(i).cos());
                cos.chain((0..rd / 2).map(move |i| angle(i).sin())).collect::<Vec<_>>()
            })
            .collect()
        };
        for inverse in [false, true] {
            check!("rope", &x, rows, 2e-6, |b, x, n| {
                let mut y = buf(x);
                b.rope(&mut y, n, heads, width, rd, &buf(&angles(x)), inverse);
                y.0
            });
        }
    }
}

#[test]
fn pooling_and_means_depend_on_nothing_but_the_group() {
    let mut random = Random(4);
    for width in [1, 17, 64, 515] {
        for ratio in [1, 2, 5] {
            let groups = 37;
            let x = random.floats(groups * 2 * ratio * width);
            check!("compress_pool", &x, groups, 3e-6, |b, x, n| {
                // Values and gates of a group travel together.
                let (mut values, mut gates) = (Vec::new(), Vec::new());
                for group in x.chunks_exact(2 * ratio * width) {
                    values.extend_from_slice(&group[..ratio * width]);
                    gates.extend_from_slice(&group[ratio * width..]);
                }
                let mut out = zeros(n * width);
                b.compress_pool(&buf(&values), &buf(&gates), n, ratio, width, &mut out);
                out.0
            });
            check!("mean_copies", &x, groups, 3e-6, |b, x, n| {
                let mut out = zeros(n * (width + 3));
                b.mean_copies(&buf(x), n, 2 * ratio, width, &mut out, width + 3, 2);
                out.0
            });
        }
    }
}

fn f32_weight(random: &mut Random, format: WeightFormat, rows: usize, cols: usize) -> HostWeightPair {
    let (data, scales) = encode_weight(format, rows, cols, &random.floats(rows * cols));
    let scales = (!scales.is_empty()).then(|| ByteView::owned(scales));
    HostWeightPair(MatrixSource { format, rows, cols, data: ByteView::owned(data), scales })
}

/// A weight to be taken by either backend.
struct HostWeightPair(MatrixSource);

#[test]
fn hyper_connections_depend_on_nothing_but_the_row() {
    let mut random = Random(5);
    for (m, width, iters) in [(4, 5120, 20), (4, 33, 20), (1, 16, 3), (3, 50, 1), (16, 20, 5)] {
        let rows = 7;
        let f = f32_weight(&mut random, WeightFormat::F32, m * (2 + m), m * width);
        let (scale, base) = (random.buffer(3), random.buffer(m * (2 + m)));
        let p = HcParams { copies: m, iters, eps: 1e-6, norm_eps: 1e-20 };
        let x = random.floats(rows * m * width);
        check!("hc_mixes", &x, rows, 5e-5, |b, x, n| {
            let (mut pre, mut post, mut comb) = (zeros(n * m), zeros(n * m), zeros(n * m * m));
            let w = b.weight(f.0.clone());
            b.hc_mixes(&buf(x), n, &w, &scale, &base, p, &mut pre, &mut post, &mut comb);
            // One row after the other, so that rows can be compared.
            (0..n)
                .flat_map(|r| {
                    let row = [&pre.0[r * m..][..m], &post.0[r * m..][..m], &comb.0[r * m * m..][..m * m]];
                    row.concat()
                })
                .collect()
        });
        let (pre, comb, y) = (random.floats(m), random.floats(m * m), random.floats(width));
        check!("hc_collapse", &x, rows, 1e-5, |b, x, n| {
            let mut out = zeros(n * width);
            b.hc_collapse(&buf(x), n, m, width, &buf(&pre.repeat(n)), &mut out);
            out.0
        });
        check!("hc_merge", &x, rows, 1e-5, |b, x, n| {
            let mut s = buf(x);
            let (y, post, comb) = (buf(&y.repeat(n)), buf(&pre.repeat(n)), buf(&comb.repeat(n)));
            b.hc_merge(&mut s, n, m, width, &y, &post, &comb);
            s.0
        });
        let (kv, q, k) = (random.floats((m + 1) * width), random.buffer(m * width), random.buffer(m * width));
        for is_open in [0, 1] {
            check!("engram_gate", &x, rows, 1e-4, |b, x, n| {
                let (mut s, mut gates) = (buf(x), zeros(n * m));
                let open = vec![is_open; n];
                b.engram_gate(&mut s, n, m, width, &buf(&kv.repeat(n)), &q, &k, &open, 1e-20, &mut gates);
                let rows = s.0.chunks_exact(m * width).zip(gates.0.chunks_exact(m));
                rows.flat_map(|(s, g)| [s, g].concat()).collect()
            });
        }
    }
}

#[test]
fn routing_picks_the_same_experts_everywhere() {
    let mut random = Random(6);
    for (experts, inputs, top_k, rows) in [(384, 640, 6, 40), (16, 64, 3, 5), (5, 7, 5, 3), (1, 3, 1, 2)] {
        let gate = f32_weight(&mut random, WeightFormat::Bf16, experts, inputs);
        let (bias, bias_image) = (random.buffer(experts), random.buffer(experts));
        let x = random.floats(rows * inputs);
        for normalize in [false, true] {
            let p = RouteParams { top_k, normalize, scale: 1.5 };
            check!("route", &x, rows, 1e-4, |b, x, n| {
                let (mut ids, mut weights) = (HostBuf(vec![0; n * top_k]), zeros(n * top_k));
                let image: Vec<u8> = x.chunks_exact(inputs).map(|row| u8::from(row[0] > 0.0)).collect();
                let w = b.weight(gate.0.clone());
                b.route(&buf(x), n, &w, &bias, &bias_image, &image, p, &mut ids, &mut weights);
                let ids = ids.0.chunks_exact(top_k).zip(weights.0.chunks_exact(top_k));
                ids.flat_map(|(ids, w)| {
                    ids.iter().map(|&id| id as f32).chain(w.iter().copied()).collect::<Vec<_>>()
                })
                .collect()
            });
        }
    }
}

#[test]
fn equal_router_scores_go_to_the_lowest_expert() {
    let experts = 20;
    let gate = MatrixSource {
        format: WeightFormat::F32,
        rows: experts,
        cols: 1,
        data: ByteView::owned(vec![0; experts * 4]),
        scales: None,
    };
    let mut bias = vec![0.0f32; experts];
    (bias[7], bias[3], bias[11]) = (1.0, 0.5, 0.5);
    let cpu = Cpu::new(1);
    let (mut ids, mut weights) = (HostBuf(vec![0; 5]), zeros(5));
    let p = RouteParams { top_k: 5, normalize: true, scale: 2.0 };
    cpu.route(&buf(&[1.0]), 1, &cpu.weight(gate), &buf(&bias), &zeros(0), &[], p, &mut ids, &mut weights);
    assert_eq!(ids.0, [7, 3, 11, 0, 1]);
    assert_close("weights", &weights.0, &[0.4; 5], 1e-6);
}

#[test]
fn stored_rows_come_back_the_same_everywhere() {
    let mut random = Random(7);
    for format in [RowFormat::F32, RowFormat::Fp8, RowFormat::Fp4Main, RowFormat::Fp4Index] {
        for width in [format.group().max(3), 96, 512] {
            let width = width / format.group() * format.group();
            let rows = 70;
            let x = random.floats(rows * width);
            check!("store_rows and load_rows", &x, rows, 0.0, |b, x, n| {
                let mut store = b.store(format, width, n + 2);
                let at: Vec<u32> = (0..n as u32).map(|i| n as u32 + 1 - i).collect();
                b.store_rows(&buf(x), &mut store, &at);
                let mut out = zeros(n * width);
                b.load_rows(&store, &at, &mut out);
                let mut rounded = buf(x);
                b.fake_quantize(&mut rounded, n, width, format);
                assert_eq!(rounded, out, "{format:?}");
                out.0
            });
        }
    }
}

#[test]
fn gathered_rows_are_the_dequantised_ones_in_every_format() {
    let mut random = Random(8);
    use WeightFormat::{Bf16, F32, Fp4, Fp8, Fp8Rows};
    for format in [F32, Bf16, Fp8, Fp8Rows, Fp4] {
        for cols in [2, 32, 70, 256] {
            let table = f32_weight(&mut random, format, 75, cols);
            let ids: Vec<f32> = (0..90).map(|_| random.below(75) as f32).collect();
            check!("gather", &ids, 90, 0.0, |b, ids, n| {
                let ids: Vec<u32> = ids.iter().map(|&id| id as u32).collect();
                let mut out = zeros(n * cols);
                b.gather(&b.weight(table.0.clone()), &ids, &mut out);
                out.0
            });
        }
    }
}
