//! The expert router and the experts (model.md section 7).

use super::dense::gated;
use super::{F32, U32, dot, part, part_mut};
use crate::formats::{RowFormat, decode_weight_row, quantize_row};
use crate::host::HostWeight;
use crate::ops::{ExpertParams, ExpertSet, ExpertWeights, RouteParams};

/// `a[e] = sqrt(ln(1 + e^(gate[e] . x)))`, rounded to float32; picks the `top_k` highest `a + bias` (float32),
/// descending, lowest id among equals; weights `a / (sum of picked a + 1e-20) * scale`, without the division if
/// `top_k == 1` or not `normalize`.
#[allow(clippy::too_many_arguments)]
pub(super) fn route(
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
    let ids = part_mut(ids, rows * top_k, "ids");
    let weights = part_mut(weights, rows * top_k, "weights");
    let mut weight = vec![0.0; inputs];
    let mut scores = vec![0.0f32; rows * experts];
    for e in 0..experts {
        decode_weight_row(gate, e, &mut weight);
        for r in 0..rows {
            let z = dot(&x[r * inputs..(r + 1) * inputs], &weight);
            scores[r * experts + e] = softplus(z).sqrt() as f32;
        }
    }
    for (r, scores) in scores.chunks_exact(experts).enumerate() {
        let of_image = image.get(r).is_some_and(|&flag| flag != 0);
        let bias = part(if of_image { bias_image } else { bias }, experts, "bias");
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|&a, &b| (scores[b] + bias[b]).total_cmp(&(scores[a] + bias[a])));
        let picked = &order[..top_k];
        let sum: f64 = picked.iter().map(|&e| f64::from(scores[e])).sum::<f64>() + 1e-20;
        let divisor = if p.normalize && top_k > 1 { sum } else { 1.0 };
        for (k, &e) in picked.iter().enumerate() {
            ids[r * top_k + k] = e as u32;
            weights[r * top_k + k] = (f64::from(scores[e]) / divisor * f64::from(p.scale)) as f32;
        }
    }
}

/// `ln(1 + e^z)` without overflow.
fn softplus(z: f64) -> f64 {
    z.max(0.0) + (-z.abs()).exp().ln_1p()
}

/// `y[r] = sum over the row's picks, ascending expert id, of w2 . Q(weight * swiglu(w1 . Q(x), w3 . Q(x)))`, where Q
/// rounds to FP8 rows if `quantize` is set and does nothing otherwise.
#[allow(clippy::too_many_arguments)]
pub(super) fn experts(
    x: &F32,
    rows: usize,
    ids: &U32,
    weights: &F32,
    set: &ExpertSet<HostWeight>,
    p: ExpertParams,
    y: &mut F32,
    arrivals: &mut [u32],
) {
    let top_k = p.top_k;
    let width = set.slots.first().map_or(0, |expert| expert.w2.rows);
    let x = part(x, rows * width, "x");
    let ids = part(ids, rows * top_k, "ids");
    let weights = part(weights, rows * top_k, "weights");
    assert!(arrivals.len() >= set.slots.len(), "arrivals of {} slots", set.slots.len());
    let y = part_mut(y, rows * width, "y");
    for r in 0..rows {
        let mut input = x[r * width..(r + 1) * width].to_vec();
        if p.quantize {
            quantize_row(RowFormat::Fp8, &mut input);
        }
        let mut picks: Vec<usize> = (r * top_k..(r + 1) * top_k).collect();
        picks.sort_by_key(|&pick| ids[pick]);
        let mut sum = vec![0.0f64; width];
        for pick in picks {
            let slot = set.slot_of[ids[pick] as usize] as usize;
            arrivals[slot] += 1;
            add_expert(&set.slots[slot], &input, weights[pick], p, &mut sum);
        }
        for (y, sum) in y[r * width..(r + 1) * width].iter_mut().zip(sum) {
            *y = sum as f32;
        }
    }
}

/// `sum += w2 . Q(weight * swiglu(w1 . input, w3 . input))`.
fn add_expert(
    expert: &ExpertWeights<HostWeight>,
    input: &[f32],
    weight: f32,
    p: ExpertParams,
    sum: &mut [f64],
) {
    assert_eq!((expert.w1.rows, expert.w1.cols), (expert.w3.rows, expert.w3.cols), "w1 and w3 of an expert");
    assert_eq!((expert.w2.rows, expert.w2.cols), (input.len(), expert.w1.rows), "w2 of an expert");
    let gate = product(&expert.w1, input);
    let up = product(&expert.w3, input);
    let mut hidden: Vec<f32> = gate
        .iter()
        .zip(&up)
        .map(|(&gate, &up)| (f64::from(weight) * gated(gate as f32, up as f32, p.limit)) as f32)
        .collect();
    if p.quantize {
        quantize_row(RowFormat::Fp8, &mut hidden);
    }
    for (sum, out) in sum.iter_mut().zip(product(&expert.w2, &hidden)) {
        *sum += out;
    }
}

/// `W x`.
fn product(w: &HostWeight, x: &[f32]) -> Vec<f64> {
    assert_eq!(x.len(), w.cols, "inputs of a product");
    let mut weight = vec![0.0; w.cols];
    (0..w.rows)
        .map(|n| {
            decode_weight_row(w, n, &mut weight);
            dot(x, &weight)
        })
        .collect()
}
