//! Attention over a tile of decoded keys: scores, softmax and weighted sum for the heads of one row.
//!
//! **Order of additions**, a function of the list of keys alone: the list is cut in tiles of [`TILE`] keys. A score
//! runs over the channels in 16 lanes (lane `j` takes `j`, `j + 16`, ...), fused, then the tree of
//! [`Lanes::reduce_add`]. The running maximum starts at the sink; a tile multiplies what was summed before by
//! `exp(old maximum - new maximum)` (1 if it did not change), then adds its keys in the order of the list, one
//! fused multiply-add each; its part of the denominator is the tree sum of its weights' two halves. Register
//! blocking only decides which heads and keys are in flight together.
//!
//! Rows of queries, tiles and accumulators have a stride that is a multiple of 16 floats, with zeros behind the
//! last channel.

#![allow(unsafe_code)]

use super::codes::Codes;
use super::dispatch_fn;
use super::lanes::{LANES, Lanes};
use super::math;
use super::vector::{load_up_to, store_up_to};

/// Keys of a tile.
pub(crate) const TILE: usize = 32;

/// What is known of each head after some tiles.
pub(crate) struct Softmax<'a> {
    /// Largest logit so far, `[heads]`; starts at the sink.
    pub(crate) max: &'a mut [f32],
    /// Sum of `exp(logit - max)`, `[heads]`; starts at 1 for the sink.
    pub(crate) sum: &'a mut [f32],
    /// Room for the factors of a tile, `[heads]`.
    pub(crate) alpha: &'a mut [f32],
}

/// Dot products of `B` queries with `B` keys, clamped to the last of each; unused ones repeat it.
///
/// # Safety
/// `query` holds `heads` rows and `keys` holds `n` rows of `stride` floats, a multiple of 16; both are positive.
#[inline(always)]
unsafe fn dots<L: Lanes, const H: usize, const K: usize>(
    query: *const f32,
    heads: usize,
    first_head: usize,
    keys: *const f32,
    n: usize,
    first_key: usize,
    stride: usize,
) -> [[L; K]; H] {
    let mut q = [query; H];
    let mut k = [keys; K];
    let mut i = 0;
    // SAFETY: rows below `heads` and `n` exist.
    unsafe {
        while i < H {
            q[i] = query.add((first_head + i).min(heads - 1) * stride);
            i += 1;
        }
        i = 0;
        while i < K {
            k[i] = keys.add((first_key + i).min(n - 1) * stride);
            i += 1;
        }
    }
    let mut sums = [[L::zero(); K]; H];
    let mut c = 0;
    while c < stride {
        let mut key = [L::zero(); K];
        let mut i = 0;
        while i < K {
            // SAFETY: 16 floats of an existing row.
            key[i] = unsafe { L::load_ptr(k[i].add(c)) };
            i += 1;
        }
        let mut h = 0;
        while h < H {
            // SAFETY: 16 floats of an existing row.
            let v = unsafe { L::load_ptr(q[h].add(c)) };
            let mut i = 0;
            while i < K {
                sums[h][i] = v.fma(key[i], sums[h][i]);
                i += 1;
            }
            h += 1;
        }
        c += LANES;
    }
    sums
}

/// Scores of all heads with the `n` keys of a tile: `out[h * TILE + key]`.
#[inline(always)]
pub(crate) fn scores_lanes<L: Codes>(
    query: &[f32],
    heads: usize,
    tile: &[f32],
    n: usize,
    stride: usize,
    out: &mut [f32],
) {
    assert!(heads > 0 && n > 0 && n <= TILE && stride.is_multiple_of(LANES));
    assert!(query.len() >= heads * stride && tile.len() >= n * stride && out.len() >= heads * TILE);
    let (query, tile) = (query.as_ptr(), tile.as_ptr());
    // What the registers hold: 4 x 4 sums, or 3 x 2.
    let wide = L::REGISTERS >= 32;
    let (h_block, k_block) = if wide { (4, 4) } else { (3, 2) };
    let mut h = 0;
    while h < heads {
        let mut k = 0;
        while k < n {
            let (hs, ks) = (h_block.min(heads - h), k_block.min(n - k));
            if wide {
                // SAFETY: the lengths were checked above.
                let sums = unsafe { dots::<L, 4, 4>(query, heads, h, tile, n, k, stride) };
                let mut flat = [L::zero(); LANES];
                let mut i = 0;
                while i < LANES {
                    flat[i] = sums[i / 4][i % 4];
                    i += 1;
                }
                let sums = L::reduce_add_16(flat).to_array();
                for i in 0..hs {
                    for j in 0..ks {
                        out[(h + i) * TILE + k + j] = sums[i * 4 + j];
                    }
                }
            } else {
                // SAFETY: the lengths were checked above.
                let sums = unsafe { dots::<L, 3, 2>(query, heads, h, tile, n, k, stride) };
                for i in 0..hs {
                    for j in 0..ks {
                        out[(h + i) * TILE + k + j] = sums[i][j].reduce_add();
                    }
                }
            }
            k += k_block;
        }
        h += h_block;
    }
}

/// Turns the scores of a tile into weights and brings `state` up to date.
#[inline(always)]
fn softmax_lanes<L: Lanes>(scores: &mut [f32], n: usize, scale: f32, state: &mut Softmax<'_>) {
    let heads = state.max.len();
    let scale = L::splat(scale);
    for h in 0..heads {
        let row = &mut scores[h * TILE..(h + 1) * TILE];
        L::load(row).mul(scale).store(row);
        L::load(&row[LANES..]).mul(scale).store(&mut row[LANES..]);
        for s in &mut row[n..] {
            *s = f32::NEG_INFINITY;
        }
        let top = L::load(row).max(L::load(&row[LANES..])).reduce_max();
        let old = state.max[h];
        let new = if top > old { top } else { old };
        state.alpha[h] = old - new;
        state.max[h] = new;
    }
    let mut h = 0;
    while h < heads {
        let to = (h + LANES).min(heads);
        let alpha = math::exp(load_up_to::<L>(&state.alpha[h..to]));
        store_up_to(alpha, &mut state.alpha[h..to]);
        h = to;
    }
    for h in 0..heads {
        let row = &mut scores[h * TILE..(h + 1) * TILE];
        let max = L::splat(state.max[h]);
        // Keys that are not there have logit -inf and so weight 0.
        let a = math::exp(L::load(row).sub(max));
        let b = math::exp(L::load(&row[LANES..]).sub(max));
        a.store(row);
        b.store(&mut row[LANES..]);
        state.sum[h] = state.sum[h].mul_add(state.alpha[h], a.add(b).reduce_add());
    }
}

/// `acc[h][c] = acc[h][c] * alpha[h] + sum_k weight[h][k] * key[k][c]` for `H` heads and `V` vectors of channels.
///
/// # Safety
/// All rows that the block names exist.
#[inline(always)]
unsafe fn weigh<L: Lanes, const H: usize, const V: usize>(
    acc: *mut f32,
    alpha: *const f32,
    weights: *const f32,
    keys: *const f32,
    n: usize,
    stride: usize,
) {
    // SAFETY: the caller promises the rows.
    unsafe {
        let mut sums = [[L::zero(); V]; H];
        let mut h = 0;
        while h < H {
            let factor = L::splat(*alpha.add(h));
            let mut v = 0;
            while v < V {
                sums[h][v] = L::load_ptr(acc.add(h * stride + v * LANES)).mul(factor);
                v += 1;
            }
            h += 1;
        }
        let mut k = 0;
        while k < n {
            let mut key = [L::zero(); V];
            let mut v = 0;
            while v < V {
                key[v] = L::load_ptr(keys.add(k * stride + v * LANES));
                v += 1;
            }
            let mut h = 0;
            while h < H {
                let weight = L::splat(*weights.add(h * TILE + k));
                let mut v = 0;
                while v < V {
                    sums[h][v] = weight.fma(key[v], sums[h][v]);
                    v += 1;
                }
                h += 1;
            }
            k += 1;
        }
        h = 0;
        while h < H {
            let mut v = 0;
            while v < V {
                sums[h][v].store_ptr(acc.add(h * stride + v * LANES));
                v += 1;
            }
            h += 1;
        }
    }
}

/// [`weigh`] for all heads and one column of `V` vectors.
///
/// # Safety
/// As [`weigh`], for all `heads`.
#[inline(always)]
unsafe fn weigh_column<L: Lanes, const H: usize, const V: usize>(
    heads: usize,
    acc: *mut f32,
    alpha: *const f32,
    weights: *const f32,
    keys: *const f32,
    n: usize,
    stride: usize,
) {
    let mut h = 0;
    // SAFETY: heads below `heads` exist.
    unsafe {
        while h + H <= heads {
            let (acc, alpha, weights) = (acc.add(h * stride), alpha.add(h), weights.add(h * TILE));
            weigh::<L, H, V>(acc, alpha, weights, keys, n, stride);
            h += H;
        }
        while h < heads {
            let (acc, alpha, weights) = (acc.add(h * stride), alpha.add(h), weights.add(h * TILE));
            weigh::<L, 1, V>(acc, alpha, weights, keys, n, stride);
            h += 1;
        }
    }
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn tile_lanes<L: Codes>(
    query: &[f32],
    tile: &[f32],
    n: usize,
    stride: usize,
    scale: f32,
    weights: &mut [f32],
    state: &mut Softmax<'_>,
    acc: &mut [f32],
) {
    let heads = state.max.len();
    assert!(state.sum.len() == heads && state.alpha.len() == heads && acc.len() >= heads * stride);
    scores_lanes::<L>(query, heads, tile, n, stride, weights);
    softmax_lanes::<L>(weights, n, scale, state);
    let (acc, alpha) = (acc.as_mut_ptr(), state.alpha.as_ptr());
    let (weights, tile) = (weights.as_ptr(), tile.as_ptr());
    let mut c = 0;
    // SAFETY: `scores_lanes` has checked the lengths of tile and weights, the others are checked above.
    unsafe {
        if L::REGISTERS >= 32 {
            while c + 4 * LANES <= stride {
                weigh_column::<L, 4, 4>(heads, acc.add(c), alpha, weights, tile.add(c), n, stride);
                c += 4 * LANES;
            }
        } else {
            while c + 2 * LANES <= stride {
                weigh_column::<L, 2, 2>(heads, acc.add(c), alpha, weights, tile.add(c), n, stride);
                c += 2 * LANES;
            }
        }
        while c < stride {
            weigh_column::<L, 4, 1>(heads, acc.add(c), alpha, weights, tile.add(c), n, stride);
            c += LANES;
        }
    }
}

dispatch_fn! {
    /// Adds a tile of `n` keys (`[n, stride]`) to the `heads` accumulators `acc` (`[heads, stride]`) of queries
    /// `[heads, stride]`. `weights` is room for `heads * TILE` numbers.
    pub(crate) fn tile(
        query: &[f32], tile: &[f32], n: usize, stride: usize, scale: f32,
        weights: &mut [f32], state: &mut Softmax<'_>, acc: &mut [f32],
    ) = tile_lanes;
}

#[inline(always)]
fn finish_lanes<L: Lanes>(acc: &mut [f32], stride: usize, sum: &[f32]) {
    for (h, sum) in sum.iter().enumerate() {
        let factor = L::splat(1.0 / sum);
        let mut c = 0;
        while c < stride {
            let at = h * stride + c;
            L::load(&acc[at..]).mul(factor).store(&mut acc[at..]);
            c += LANES;
        }
    }
}

dispatch_fn! {
    /// Divides each accumulator by its denominator (as a product with the inverse).
    pub(crate) fn finish(acc: &mut [f32], stride: usize, sum: &[f32]) = finish_lanes;
}
