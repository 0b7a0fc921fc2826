//! Products with weights, norms, rotations and element-wise functions.

use super::{F32, dot, inverse_rms, part, part_mut, sigmoid};
use crate::formats::decode_weight_row;
use crate::host::HostWeight;

/// `y[r, g N + n] = sum_k x[r, g K + k] * W[g N + n, k]`; one group is the ordinary product.
pub(super) fn matmul_grouped(w: &HostWeight, groups: usize, x: &F32, rows: usize, y: &mut F32) {
    assert!(groups > 0 && w.rows.is_multiple_of(groups), "{} rows in {groups} groups", w.rows);
    let (outputs, inputs) = (w.rows, w.cols);
    let per_group = outputs / groups;
    let x = part(x, rows * groups * inputs, "x");
    let y = part_mut(y, rows * outputs, "y");
    let mut weight = vec![0.0; inputs];
    for n in 0..outputs {
        decode_weight_row(w, n, &mut weight);
        let group = n / per_group;
        for r in 0..rows {
            let from = (r * groups + group) * inputs;
            y[r * outputs + n] = dot(&x[from..from + inputs], &weight) as f32;
        }
    }
}

/// `y[r, i] = x[r, i] * (mean_i(x[r, i]^2) + eps)^(-1/2) * weight[i]`.
pub(super) fn rmsnorm(x: &F32, rows: usize, width: usize, weight: &F32, eps: f32, y: &mut F32) {
    let x = part(x, rows * width, "x");
    let weight = part(weight, width, "weight");
    let y = part_mut(y, rows * width, "y");
    for r in 0..rows {
        let row = &x[r * width..(r + 1) * width];
        let inverse = inverse_rms(row, eps);
        for i in 0..width {
            y[r * width + i] = (f64::from(row[i]) * inverse * f64::from(weight[i])) as f32;
        }
    }
}

/// `y += x`.
pub(super) fn add(y: &mut F32, x: &F32, len: usize) {
    let x = part(x, len, "x");
    for (y, x) in part_mut(y, len, "y").iter_mut().zip(x) {
        *y += x;
    }
}

/// `x *= factor`.
pub(super) fn scale(x: &mut F32, factor: f32, len: usize) {
    for x in part_mut(x, len, "x") {
        *x *= factor;
    }
}

/// `(a, b) -> (a cos - b sin, a sin + b cos)` on adjacent pairs of the last `rd` channels of each head.
pub(super) fn rope(
    x: &mut F32,
    rows: usize,
    heads: usize,
    width: usize,
    rd: usize,
    cos_sin: &F32,
    inverse: bool,
) {
    assert!(rd <= width && rd.is_multiple_of(2), "rotation of {rd} of {width} channels");
    let x = part_mut(x, rows * heads * width, "x");
    let cos_sin = part(cos_sin, rows * rd, "cos_sin");
    let direction = if inverse { -1.0 } else { 1.0 };
    for r in 0..rows {
        let (cos, sin) = cos_sin[r * rd..(r + 1) * rd].split_at(rd / 2);
        for h in 0..heads {
            let end = (r * heads + h + 1) * width;
            for (i, pair) in x[end - rd..end].chunks_exact_mut(2).enumerate() {
                let (a, b) = (f64::from(pair[0]), f64::from(pair[1]));
                let (cos, sin) = (f64::from(cos[i]), f64::from(sin[i]) * direction);
                pair[0] = (a * cos - b * sin) as f32;
                pair[1] = (a * sin + b * cos) as f32;
            }
        }
    }
}

/// `silu(min(gate, limit)) * clamp(up, -limit, limit)` with `silu(g) = g * sigmoid(g)`; no clamp if `limit <= 0`.
pub(super) fn gated(gate: f32, up: f32, limit: f32) -> f64 {
    let (gate, up) = if limit > 0.0 { (gate.min(limit), up.clamp(-limit, limit)) } else { (gate, up) };
    let gate = f64::from(gate);
    gate * sigmoid(gate) * f64::from(up)
}

/// `gate = gated(gate, up)`.
pub(super) fn swiglu(gate: &mut F32, up: &F32, len: usize, limit: f32) {
    let up = part(up, len, "up");
    for (gate, &up) in part_mut(gate, len, "gate").iter_mut().zip(up) {
        *gate = gated(*gate, up, limit) as f32;
    }
}
