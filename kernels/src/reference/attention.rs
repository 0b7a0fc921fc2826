//! Attention over window and selected keys, and the pooling of the compressor.

use super::{F32, Reference, dot, part, part_mut};
use crate::formats::decode_row;
use crate::host::HostStore;
use crate::ops::AttentionArgs;

/// Per row r and head h, over the row's keys k_i (window first, then selected, both ascending):
/// `s_i = q . k_i * scale`, `out = sum_i e^(s_i) k_i / (sum_i e^(s_i) + e^(sink[h]))`, computed relative to the
/// largest logit. A row without keys gives zeros.
pub(super) fn attention(args: &AttentionArgs<'_, Reference>, out: &mut F32) {
    let (heads, width) = (args.heads, args.width);
    let query = part(args.query, args.rows * heads * width, "query");
    let sink = part(args.sink, heads, "sink");
    let out = part_mut(out, args.rows * heads * width, "out");
    assert!(args.window_ends.len() >= args.rows, "an end of window rows for each row");
    let mut keys = Vec::new();
    for r in 0..args.rows {
        collect_keys(args, r, &mut keys);
        for (h, &sink) in sink.iter().enumerate() {
            let at = (r * heads + h) * width;
            attend(&query[at..at + width], &keys, sink, args.scale, &mut out[at..at + width]);
        }
    }
}

/// Decodes all keys that row `r` sees, in the order of the sum.
fn collect_keys(args: &AttentionArgs<'_, Reference>, r: usize, keys: &mut Vec<f32>) {
    keys.clear();
    let first = if r == 0 { 0 } else { args.window_ends[r - 1] as usize };
    for &row in &args.window_rows[first..args.window_ends[r] as usize] {
        push_key(args.window, row as usize, args.width, keys);
    }
    if let Some(global) = &args.global {
        let from = r * global.selection.top_k;
        let count = global.selection.counts.0[r] as usize;
        assert!(count <= global.selection.top_k, "{count} entries of {}", global.selection.top_k);
        for &entry in &global.selection.indices.0[from..from + count] {
            push_key(global.store, global.tables.store_row(r, entry as usize), args.width, keys);
        }
    }
}

fn push_key(store: &HostStore, row: usize, width: usize, keys: &mut Vec<f32>) {
    assert_eq!(store.width, width, "channels of a key");
    let at = keys.len();
    keys.resize(at + width, 0.0);
    decode_row(store.format, store.row(row), &mut keys[at..]);
}

fn attend(query: &[f32], keys: &[f32], sink: f32, scale: f32, out: &mut [f32]) {
    let width = query.len();
    if keys.is_empty() {
        out.fill(0.0);
        return;
    }
    let logits: Vec<f64> = keys.chunks_exact(width).map(|k| dot(query, k) * f64::from(scale)).collect();
    let max = logits.iter().copied().fold(f64::from(sink), f64::max);
    let weights: Vec<f64> = logits.iter().map(|s| (s - max).exp()).collect();
    let total = weights.iter().sum::<f64>() + (f64::from(sink) - max).exp();
    for (c, out) in out.iter_mut().enumerate() {
        let sum: f64 = weights.iter().enumerate().map(|(i, w)| w * f64::from(keys[i * width + c])).sum();
        *out = (sum / total) as f32;
    }
}

/// `out[g, c] = sum_i v[g ratio + i, c] * softmax_i(gate[g ratio + i, c])`.
pub(super) fn compress_pool(
    values: &F32,
    gates: &F32,
    groups: usize,
    ratio: usize,
    width: usize,
    out: &mut F32,
) {
    let values = part(values, groups * ratio * width, "values");
    let gates = part(gates, groups * ratio * width, "gates");
    let out = part_mut(out, groups * width, "out");
    for g in 0..groups {
        for c in 0..width {
            let at = |i: usize| (g * ratio + i) * width + c;
            let max = (0..ratio).map(|i| f64::from(gates[at(i)])).fold(f64::NEG_INFINITY, f64::max);
            let (mut sum, mut total) = (0.0, 0.0);
            for i in 0..ratio {
                let weight = (f64::from(gates[at(i)]) - max).exp();
                sum += weight * f64::from(values[at(i)]);
                total += weight;
            }
            out[g * width + c] = (sum / total) as f32;
        }
    }
}
