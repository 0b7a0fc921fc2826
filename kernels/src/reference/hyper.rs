//! Hyper-connections (model.md section 5).

use super::{F32, dot, inverse_rms, part, part_mut, sigmoid};
use crate::formats::decode_weight_row;
use crate::host::HostWeight;
use crate::ops::HcParams;

/// With `v = stream[r]` flattened, `z[k] = (f[k] . v) * (mean(v^2) + norm_eps)^(-1/2)`:
/// - `pre[i] = sigmoid(z[i] scale[0] + base[i]) + eps`
/// - `post[i] = 2 sigmoid(z[m + i] scale[1] + base[m + i])`
/// - `comb = sinkhorn(z[2 m + m i + j] scale[2] + base[2 m + m i + j])`
#[allow(clippy::too_many_arguments)]
pub(super) fn mixes(
    stream: &F32,
    rows: usize,
    f: &HostWeight,
    scale: &F32,
    base: &F32,
    p: HcParams,
    pre: &mut F32,
    post: &mut F32,
    comb: &mut F32,
) {
    let m = p.copies;
    let (outputs, inputs) = (f.rows, f.cols);
    assert_eq!(outputs, m * (2 + m), "rows of the mixing matrix for {m} copies");
    assert!(m > 0 && inputs.is_multiple_of(m), "{inputs} channels in {m} copies");
    let stream = part(stream, rows * inputs, "stream");
    let scale = part(scale, 3, "scale");
    let base = part(base, outputs, "base");
    let pre = part_mut(pre, rows * m, "pre");
    let post = part_mut(post, rows * m, "post");
    let comb = part_mut(comb, rows * m * m, "comb");
    let inverse: Vec<f64> =
        (0..rows).map(|r| inverse_rms(&stream[r * inputs..(r + 1) * inputs], p.norm_eps)).collect();
    let mut weight = vec![0.0; inputs];
    let mut z = vec![0.0; rows * outputs];
    for k in 0..outputs {
        decode_weight_row(f, k, &mut weight);
        let factor = f64::from(scale[if k < m { 0 } else { 1 + usize::from(k >= 2 * m) }]);
        for r in 0..rows {
            let v = &stream[r * inputs..(r + 1) * inputs];
            let mix = dot(&weight, v) * inverse[r];
            z[r * outputs + k] = mix * factor + f64::from(base[k]);
        }
    }
    for (r, z) in z.chunks_exact_mut(outputs).enumerate() {
        for i in 0..m {
            pre[r * m + i] = (sigmoid(z[i]) + f64::from(p.eps)) as f32;
            post[r * m + i] = (2.0 * sigmoid(z[m + i])) as f32;
        }
        let table = &mut z[2 * m..];
        sinkhorn(table, m, p);
        for (out, &c) in comb[r * m * m..(r + 1) * m * m].iter_mut().zip(table.iter()) {
            *out = c as f32;
        }
    }
}

/// Softmax of each row plus eps, then columns divided by their sum, then `iters - 1` times rows and columns.
/// Every sum gets eps added. `c` is `[old][new]`.
fn sinkhorn(c: &mut [f64], m: usize, p: HcParams) {
    let eps = f64::from(p.eps);
    for row in c.chunks_exact_mut(m) {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        row.iter_mut().for_each(|v| *v = (*v - max).exp());
        let sum: f64 = row.iter().sum();
        row.iter_mut().for_each(|v| *v = *v / sum + eps);
    }
    for iteration in 0..p.iters {
        if iteration > 0 {
            for row in c.chunks_exact_mut(m) {
                let sum: f64 = row.iter().sum::<f64>() + eps;
                row.iter_mut().for_each(|v| *v /= sum);
            }
        }
        for new in 0..m {
            let sum: f64 = (0..m).map(|old| c[old * m + new]).sum::<f64>() + eps;
            (0..m).for_each(|old| c[old * m + new] /= sum);
        }
    }
}

/// `x[r, :] = sum_i pre[r, i] * stream[r, i, :]`.
pub(super) fn collapse(stream: &F32, rows: usize, copies: usize, width: usize, pre: &F32, x: &mut F32) {
    let stream = part(stream, rows * copies * width, "stream");
    let pre = part(pre, rows * copies, "pre");
    let x = part_mut(x, rows * width, "x");
    for r in 0..rows {
        for c in 0..width {
            let sum: f64 = (0..copies)
                .map(|i| f64::from(pre[r * copies + i]) * f64::from(stream[(r * copies + i) * width + c]))
                .sum();
            x[r * width + c] = sum as f32;
        }
    }
}

/// `stream[r, j, :] = post[r, j] * y[r, :] + sum_i comb[r, i, j] * stream[r, i, :]`, old values on the right.
pub(super) fn merge(
    stream: &mut F32,
    rows: usize,
    copies: usize,
    width: usize,
    y: &F32,
    post: &F32,
    comb: &F32,
) {
    let stream = part_mut(stream, rows * copies * width, "stream");
    let y = part(y, rows * width, "y");
    let post = part(post, rows * copies, "post");
    let comb = part(comb, rows * copies * copies, "comb");
    let mut old = vec![0.0; copies];
    for r in 0..rows {
        for c in 0..width {
            for (i, old) in old.iter_mut().enumerate() {
                *old = f64::from(stream[(r * copies + i) * width + c]);
            }
            for j in 0..copies {
                let mut sum = f64::from(post[r * copies + j]) * f64::from(y[r * width + c]);
                for (i, old) in old.iter().enumerate() {
                    sum += f64::from(comb[(r * copies + i) * copies + j]) * old;
                }
                stream[(r * copies + j) * width + c] = sum as f32;
            }
        }
    }
}
