//! Index scores: `S[j] = sum_h w[h] * relu(q[h] . k[j])` for sixteen entries at a time, one per lane.
//!
//! **Order of additions.** For FP4 keys, queries are FP4 too, and twice a value is an integer of at most 12, so the
//! product of a group of 32 is an exact integer whatever the instruction. As a float it is multiplied by the key's
//! scale, then added to the head's sum by a fused multiply-add with a quarter of the query's scale, groups in
//! ascending order; then heads are added in ascending order by fused multiply-adds. For other formats the product
//! of a head is that of [`super::attention`].

#![allow(unsafe_code)]
#![allow(clippy::needless_range_loop)] // Lanes and copies are counted in several arrays at once.

use super::attention::{TILE, scores_lanes};
use super::bytes::{Bytes, GROUP_LINES, Line};
use super::codes::Codes;
use super::dispatch_fn;
use super::lanes::LANES;
use crate::formats::{GROUP, e8m0_decode};

/// Twice the value of a nibble.
const QUERY_BYTES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The FP4 queries of one row, taken apart.
#[derive(Default)]
pub(crate) struct Queries {
    /// Bytes as dwords in the order of the lines, `[groups, heads, 8]`.
    pub(crate) bytes: Vec<[i32; GROUP_LINES]>,
    /// `-12` times the sum of the bytes, `[groups, heads]`.
    pub(crate) bias: Vec<i32>,
    /// A quarter of the scale, `[groups, heads]`.
    pub(crate) scale: Vec<f32>,
}

impl Queries {
    /// Takes `heads` rows that are stored as FP4 index rows of `width` channels.
    pub(crate) fn unpack(&mut self, rows: &[u8], heads: usize, width: usize) {
        let groups = width / GROUP;
        self.bytes.resize(groups * heads, [0; GROUP_LINES]);
        self.bias.resize(groups * heads, 0);
        self.scale.resize(groups * heads, 0.0);
        for (h, row) in rows.chunks_exact(width / 2 + groups).enumerate() {
            let (values, scales) = row.split_at(width / 2);
            for (g, (codes, &scale)) in values.chunks_exact(GROUP / 2).zip(scales).enumerate() {
                let at = g * heads + h;
                let mut sum = 0;
                for (j, dword) in codes.chunks_exact(4).enumerate() {
                    let (mut even, mut odd) = ([0u8; 4], [0u8; 4]);
                    for (i, &code) in dword.iter().enumerate() {
                        let pair = (QUERY_BYTES[usize::from(code & 15)], QUERY_BYTES[usize::from(code >> 4)]);
                        sum += i32::from(pair.0) + i32::from(pair.1);
                        (even[i], odd[i]) = (pair.0 as u8, pair.1 as u8);
                    }
                    self.bytes[at][2 * j] = i32::from_le_bytes(even);
                    self.bytes[at][2 * j + 1] = i32::from_le_bytes(odd);
                }
                self.bias[at] = -12 * sum;
                self.scale[at] = e8m0_decode(scale) * 0.25;
            }
        }
    }
}

/// Takes FP4 index rows apart; see [`unpack`].
#[inline(always)]
fn unpack_lanes<L: Bytes>(
    data: &[u8],
    row_bytes: usize,
    width: usize,
    rows: &[u32],
    lines: &mut [Line],
    scales: &mut [f32],
) {
    let groups = width / GROUP;
    let tiles = rows.len().div_ceil(LANES);
    assert!(lines.len() >= tiles * groups * GROUP_LINES && scales.len() >= tiles * groups * LANES);
    assert_eq!(row_bytes, width / 2 + groups);
    let mut t = 0;
    while t < tiles {
        let mut starts = [0; LANES];
        let mut last = 0;
        for (lane, start) in starts.iter_mut().enumerate() {
            *start = rows[(t * LANES + lane).min(rows.len() - 1)] as usize * row_bytes;
            last = last.max(*start);
        }
        assert!(last + row_bytes <= data.len());
        let mut values = data.as_ptr();
        for g in 0..groups {
            let at = t * groups + g;
            let mut codes = [0; LANES];
            for (code, &start) in codes.iter_mut().zip(&starts) {
                // SAFETY: the row is inside `data`, its scales lie behind its values.
                *code = unsafe { *data.as_ptr().add(start + width / 2 + g) };
            }
            L::e8m0(codes).store(&mut scales[at * LANES..]);
            // SAFETY: the rows are inside `data`, and a group of 32 channels is 16 bytes.
            unsafe {
                L::unpack_keys(values, &starts, &mut lines[at * GROUP_LINES..(at + 1) * GROUP_LINES]);
                values = values.add(GROUP / 2);
            }
        }
        t += 1;
    }
}

dispatch_fn! {
    /// Takes the FP4 rows `rows` of a store apart: lines `[tiles, groups, GROUP_LINES]`, scales
    /// `[tiles, groups, 16]`. The last tile repeats its last key.
    pub(crate) fn unpack(
        data: &[u8], row_bytes: usize, width: usize, rows: &[u32], lines: &mut [Line], scales: &mut [f32],
    ) = unpack_lanes;
}

/// See [`score`].
#[inline(always)]
fn score_lanes<L: Bytes>(
    lines: &[Line],
    scales: &[f32],
    queries: &Queries,
    weights: &[f32],
    dots: &mut [f32],
    out: &mut [f32],
) {
    let heads = weights.len();
    let groups = queries.scale.len() / heads;
    let tiles = out.len() / LANES;
    assert!(lines.len() >= tiles * groups * GROUP_LINES && scales.len() >= tiles * groups * LANES);
    assert!(queries.bytes.len() == groups * heads && queries.bias.len() == groups * heads);
    let dots = &mut dots[..2 * heads * LANES];
    let mut t = 0;
    while t < tiles {
        // Two tiles share what is read of the queries; an odd last one is its own partner.
        let pair = [t, (t + 1).min(tiles - 1)];
        for g in 0..groups {
            let at = [pair[0] * groups + g, pair[1] * groups + g];
            let keys =
                [L::load_keys(&lines[at[0] * GROUP_LINES..]), L::load_keys(&lines[at[1] * GROUP_LINES..])];
            let scale = [L::load(&scales[at[0] * LANES..]), L::load(&scales[at[1] * LANES..])];
            let bytes = &queries.bytes[g * heads..(g + 1) * heads];
            let bias = &queries.bias[g * heads..(g + 1) * heads];
            let query_scale = &queries.scale[g * heads..(g + 1) * heads];
            for h in 0..heads {
                let [a, b] = L::dot_keys(keys, &bytes[h], bias[h]);
                let dot = &mut dots[2 * h * LANES..2 * (h + 1) * LANES];
                let (before_a, before_b) =
                    if g == 0 { (L::zero(), L::zero()) } else { (L::load(dot), L::load(&dot[LANES..])) };
                let query_scale = L::splat(query_scale[h]);
                a.mul(scale[0]).fma(query_scale, before_a).store(dot);
                b.mul(scale[1]).fma(query_scale, before_b).store(&mut dot[LANES..]);
            }
        }
        let (mut sum_a, mut sum_b) = (L::zero(), L::zero());
        for h in 0..heads {
            let dot = &dots[2 * h * LANES..2 * (h + 1) * LANES];
            let weight = L::splat(weights[h]);
            sum_a = weight.fma(L::load(dot).max(L::zero()), sum_a);
            sum_b = weight.fma(L::load(&dot[LANES..]).max(L::zero()), sum_b);
        }
        sum_a.store(&mut out[pair[0] * LANES..]);
        sum_b.store(&mut out[pair[1] * LANES..]);
        t += 2;
    }
}

dispatch_fn! {
    /// Scores of `out.len() / 16` unpacked tiles; `dots` is room for `heads * 32` numbers.
    pub(crate) fn score(
        lines: &[Line], scales: &[f32], queries: &Queries, weights: &[f32], dots: &mut [f32], out: &mut [f32],
    ) = score_lanes;
}

/// See [`score_floats`].
#[inline(always)]
fn score_floats_lanes<L: Codes>(
    query: &[f32],
    weights: &[f32],
    keys: &[f32],
    n: usize,
    stride: usize,
    dots: &mut [f32],
    out: &mut [f32],
) {
    let heads = weights.len();
    scores_lanes::<L>(query, heads, keys, n, stride, dots);
    let mut k = 0;
    while k < TILE {
        let mut sum = L::zero();
        for h in 0..heads {
            let dot = L::load(&dots[h * TILE + k..]);
            sum = L::splat(weights[h]).fma(dot.max(L::zero()), sum);
        }
        sum.store(&mut out[k..]);
        k += LANES;
    }
}

dispatch_fn! {
    /// Scores of at most [`TILE`] keys that are floats, rows of `stride` (a multiple of 16, zeros behind the last
    /// channel) like those of `query`; `dots` is room for `heads * TILE` numbers, `out` for [`TILE`].
    pub(crate) fn score_floats(
        query: &[f32], weights: &[f32], keys: &[f32], n: usize, stride: usize, dots: &mut [f32], out: &mut [f32],
    ) = score_floats_lanes;
}
