//! Index scores and the two-level selection of compressed entries (model.md 6.4).
//!
//! Scores are rounded to float32 before they are compared, so a tie is a tie of float32 scores. The rules of
//! picking: the highest score first, the lowest ordinal among equals, the result in ascending order.

use super::{F32, Reference, U32, dot, part, part_mut};
use crate::formats::{RowFormat, decode_row, quantize_row};
use crate::ops::{CandidateUse, Candidates, IndexQuery, Selection};

/// `out[r, j] = S(r, j)` for `j < visible[r]`, else -inf.
pub(super) fn scores(query: &IndexQuery<'_, Reference>, entries: usize, out: &mut F32) {
    let out = part_mut(out, query.rows * entries, "out");
    for (r, out) in out.chunks_exact_mut(entries.max(1)).take(query.rows).enumerate() {
        let scores = row_scores(query, r);
        for (j, out) in out.iter_mut().enumerate() {
            *out = scores.get(j).copied().unwrap_or(f32::NEG_INFINITY);
        }
    }
}

/// `S[j] = sum_h w[h] * max(q[h] . k[j], 0)` for every visible entry, h ascending; q is rounded to the format of
/// the keys first if that is [`RowFormat::Fp4Index`].
fn row_scores(query: &IndexQuery<'_, Reference>, r: usize) -> Vec<f32> {
    let (heads, width) = (query.heads, query.width);
    assert_eq!(query.keys.width, width, "channels of an index key");
    let mut q = part(query.query, query.rows * heads * width, "query")
        [r * heads * width..(r + 1) * heads * width]
        .to_vec();
    let weights = &part(query.weights, query.rows * heads, "weights")[r * heads..(r + 1) * heads];
    if query.keys.format == RowFormat::Fp4Index {
        quantize_row(RowFormat::Fp4Index, &mut q);
    }
    let mut key = vec![0.0; width];
    (0..query.visible[r] as usize)
        .map(|j| {
            decode_row(query.keys.format, query.keys.row(query.tables.store_row(r, j)), &mut key);
            let heads = q.chunks_exact(width).zip(weights);
            heads.map(|(q, &w)| f64::from(w) * dot(q, &key).max(0.0)).sum::<f64>() as f32
        })
        .collect()
}

/// The best `keep` of `(ordinal, score)`, ascending by ordinal. `items` ascend by ordinal.
fn best(mut items: Vec<(u32, f32)>, keep: usize) -> Vec<u32> {
    // A stable sort leaves equal scores in ascending order of ordinals. The addition makes -0.0 equal to 0.0.
    items.sort_by(|a, b| (b.1 + 0.0).total_cmp(&(a.1 + 0.0)));
    items.truncate(keep);
    let mut picked: Vec<u32> = items.into_iter().map(|(ordinal, _)| ordinal).collect();
    picked.sort_unstable();
    picked
}

/// Writes one row of a selection or of candidates; what lies behind the count keeps its old value.
fn write_row(indices: &mut U32, counts: &mut U32, stride: usize, r: usize, picked: &[u32]) {
    indices.0[r * stride..r * stride + picked.len()].copy_from_slice(picked);
    counts.0[r] = picked.len() as u32;
}

/// Picks at most `selection.top_k` entries per row; see [`CandidateUse`] for what candidates do.
pub(super) fn select(
    query: &IndexQuery<'_, Reference>,
    mut candidates: CandidateUse<'_, U32>,
    selection: &mut Selection<U32>,
) {
    for r in 0..query.rows {
        let scores = row_scores(query, r);
        let mut items: Vec<(u32, f32)> = (0..).zip(scores.iter().copied()).collect();
        match &mut candidates {
            CandidateUse::Ignore => {}
            CandidateUse::Produce(blocks) => produce(&scores, r, blocks),
            CandidateUse::Restrict(blocks) => {
                let from = r * blocks.max_blocks;
                let count = blocks.counts.0[r] as usize;
                let allowed = &blocks.indices.0[from..from + count];
                items.retain(|(entry, _)| allowed.contains(&(entry / blocks.block_size as u32)));
            }
        }
        let picked = best(items, selection.top_k);
        write_row(&mut selection.indices, &mut selection.counts, selection.top_k, r, &picked);
    }
}

/// Block score = highest score in it; the newest block counts as infinite; the best `max_blocks` are kept.
fn produce(scores: &[f32], r: usize, blocks: &mut Candidates<U32>) {
    let mut items: Vec<(u32, f32)> = (0..)
        .zip(scores.chunks(blocks.block_size))
        .map(|(block, scores)| (block, scores.iter().copied().fold(f32::NEG_INFINITY, f32::max)))
        .collect();
    if let Some(newest) = items.last_mut() {
        newest.1 = f32::INFINITY;
    }
    let picked = best(items, blocks.max_blocks);
    write_row(&mut blocks.indices, &mut blocks.counts, blocks.max_blocks, r, &picked);
}
