//! The expert router (model.md section 7).

use super::Cpu;
use super::pool::{DisjointSlice, SharedScratch};
use super::simd::route;
use super::vector::{F32, U32, part, part_mut, rows_per_task};
use crate::host::HostWeight;
use crate::ops::RouteParams;

/// Scores, picks and weights of every row; see [`crate::Backend::route`].
#[allow(clippy::too_many_arguments)]
pub(super) fn route(
    cpu: &Cpu,
    x: &F32,
    rows: usize,
    gate: &HostWeight,
    bias: &F32,
    bias_image: &F32,
    image: &[u8],
    p: RouteParams,
    ids: &mut U32,
    weights: &mut F32,
) {
    let (experts, inputs, top_k) = (gate.rows, gate.cols, p.top_k);
    assert!(top_k <= experts, "{top_k} picks of {experts} experts");
    assert!(image.is_empty() || image.len() >= rows, "image flags of {rows} rows");
    let x = part(x, rows * inputs, "x");
    let bias = part(bias, experts, "bias");
    let ids = DisjointSlice::new(part_mut(ids, rows * top_k, "ids"));
    let weights = DisjointSlice::new(part_mut(weights, rows * top_k, "weights"));
    let mut linear = SharedScratch::hold(&cpu.shared.linear);
    let scores = linear.get(rows * experts);
    cpu.matmul_rows(gate, x, rows, scores);
    let per_task = rows_per_task(cpu, rows, experts * (8 + top_k));
    cpu.pool.run_pieces(scores, (per_task * experts).max(1), &|task, _, scores| {
        for (i, scores) in scores.chunks_exact_mut(experts).enumerate() {
            let r = task * per_task + i;
            let of_image = image.get(r).is_some_and(|&flag| flag != 0);
            let bias = if of_image { part(bias_image, experts, "bias_image") } else { bias };
            let (ids, weights) = (ids.claim(r * top_k, top_k), weights.claim(r * top_k, top_k));
            route::scores_row(cpu.level, scores);
            pick(scores, bias, p, ids, weights);
        }
    });
}

/// The `top_k` experts with the highest `score + bias`, descending, lowest id among equals, and their weights.
fn pick(scores: &[f32], bias: &[f32], p: RouteParams, ids: &mut [u32], weights: &mut [f32]) {
    // Insertion into a short list: an expert moves up past those it beats, so equals keep ascending ids. Until
    // they are divided, `weights` holds the biased scores.
    let mut held = 0;
    for (e, (&score, &bias)) in scores.iter().zip(bias).enumerate() {
        // The addition makes -0.0 equal to 0.0.
        let biased = score + bias + 0.0;
        if held == p.top_k && (held == 0 || !beats(biased, weights[held - 1])) {
            continue;
        }
        let mut at = if held < p.top_k { held } else { held - 1 };
        held = at + 1;
        while at > 0 && beats(biased, weights[at - 1]) {
            (ids[at], weights[at]) = (ids[at - 1], weights[at - 1]);
            at -= 1;
        }
        (ids[at], weights[at]) = (e as u32, biased);
    }
    let mut sum = 0.0;
    for (&e, weight) in ids.iter().zip(weights.iter_mut()) {
        *weight = scores[e as usize];
        sum += *weight;
    }
    let divisor = if p.normalize && p.top_k > 1 { sum + 1e-20 } else { 1.0 };
    for weight in weights {
        *weight = *weight / divisor * p.scale;
    }
}

/// Whether `a` goes before `b`; a NaN goes before nothing.
fn beats(a: f32, b: f32) -> bool {
    a > b || b.is_nan() && !a.is_nan()
}
