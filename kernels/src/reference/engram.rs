//! The gate of Engram (model.md section 8).

use super::{F32, inverse_rms, part, part_mut, sigmoid};

/// kv is `[rows, (m + 1) H]`: m keys, then one value. Per row r and copy i:
/// `d = sum_c s[c] q_weight[i, c] k_weight[i, c] key_i[c] * rs(s) * rs(key_i) / sqrt(H)`,
/// `g = sigmoid(copysign(sqrt(max(|d|, 1e-6)), d))`, 0 where `open[r] == 0`; `s += g * value`.
#[allow(clippy::too_many_arguments)]
pub(super) fn gate(
    stream: &mut F32,
    rows: usize,
    copies: usize,
    width: usize,
    kv: &F32,
    q_weight: &F32,
    k_weight: &F32,
    open: &[u8],
    eps: f32,
    gates: &mut F32,
) {
    let stream = part_mut(stream, rows * copies * width, "stream");
    let kv = part(kv, rows * (copies + 1) * width, "kv");
    let q_weight = part(q_weight, copies * width, "q_weight");
    let k_weight = part(k_weight, copies * width, "k_weight");
    let gates = part_mut(gates, rows * copies, "gates");
    assert!(open.len() >= rows, "open flags of {rows} rows");
    for r in 0..rows {
        let kv = &kv[r * (copies + 1) * width..(r + 1) * (copies + 1) * width];
        let value = &kv[copies * width..];
        for i in 0..copies {
            let s = &mut stream[(r * copies + i) * width..(r * copies + i + 1) * width];
            let part = i * width..(i + 1) * width;
            let key = &kv[part.clone()];
            let weights = q_weight[part.clone()].iter().zip(&k_weight[part]);
            // From +0, so that a product of nothing but zeros opens the gate upwards.
            let mut product = 0.0;
            for ((&s, &key), (&q, &k)) in s.iter().zip(key).zip(weights) {
                product += f64::from(s) * f64::from(q) * f64::from(k) * f64::from(key);
            }
            let d = product * inverse_rms(s, eps) * inverse_rms(key, eps) / (width as f64).sqrt();
            let g = if open[r] == 0 { 0.0 } else { sigmoid(d.abs().max(1e-6).sqrt().copysign(d)) as f32 };
            gates[r * copies + i] = g;
            for (s, &value) in s.iter_mut().zip(value) {
                *s = (f64::from(*s) + f64::from(g) * f64::from(value)) as f32;
            }
        }
    }
}
