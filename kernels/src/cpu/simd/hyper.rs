//! Hyper-connections of one row: mixes from their linear forms, collapse, merge.

#![allow(unsafe_code)] // `dispatch_fn!`
#![allow(clippy::needless_range_loop)] // Lanes and copies are counted in several arrays at once.

use super::dispatch_fn;
use super::lanes::{LANES, Lanes};
use super::math;
use super::vector::{load_up_to, store_up_to, sum_of_squares_lanes};
use crate::ops::HcParams;

/// Most copies of the stream that the kernels hold at once.
pub(crate) const MAX_COPIES: usize = 16;

/// `z * norm * scale[part] + base`, then what each part becomes of it; see [`mixes_row`].
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn mixes_row_lanes<L: Lanes>(
    stream: &[f32],
    z: &mut [f32],
    scale: &[f32],
    base: &[f32],
    p: HcParams,
    pre: &mut [f32],
    post: &mut [f32],
    comb: &mut [f32],
) {
    let m = p.copies;
    let norm = math::inverse_rms(sum_of_squares_lanes::<L>(stream), stream.len(), p.norm_eps);
    for (k, z) in z.iter_mut().enumerate() {
        let part = if k < m { 0 } else { 1 + usize::from(k >= 2 * m) };
        *z = (*z * norm).mul_add(scale[part], base[k]);
    }
    let eps = L::splat(p.eps);
    math::sigmoid(L::load_partial(&z[..m])).add(eps).store_partial(pre);
    let gate = math::sigmoid(L::load_partial(&z[m..2 * m]));
    gate.add(gate).store_partial(post);
    comb.copy_from_slice(&z[2 * m..]);
    sinkhorn::<L>(comb, m, p);
}

/// Softmax of each row plus eps, then columns divided by their sum, then `iters - 1` times rows and columns; every
/// sum gets eps added. Sums run in ascending order.
#[inline(always)]
fn sinkhorn<L: Lanes>(comb: &mut [f32], m: usize, p: HcParams) {
    let mut c = [L::zero(); MAX_COPIES];
    let lanes = m.min(LANES);
    for i in 0..m {
        let row = &comb[i * m..(i + 1) * m];
        let mut max = row[0];
        for &v in &row[1..] {
            max = if v > max { v } else { max };
        }
        let e = math::exp(L::load_partial(row).sub(L::splat(max)));
        c[i] = e.div(L::splat(row_sum(e, lanes))).add(L::splat(p.eps));
    }
    let eps = L::splat(p.eps);
    for iteration in 0..p.iters {
        if iteration > 0 {
            for i in 0..m {
                c[i] = c[i].div(L::splat(row_sum(c[i], lanes) + p.eps));
            }
        }
        let mut sum = c[0];
        for i in 1..m {
            sum = sum.add(c[i]);
        }
        let sum = sum.add(eps);
        for i in 0..m {
            c[i] = c[i].div(sum);
        }
    }
    for i in 0..m {
        c[i].store_partial(&mut comb[i * m..(i + 1) * m]);
    }
}

/// Sum of the first `lanes` lanes, ascending.
#[inline(always)]
fn row_sum<L: Lanes>(v: L, lanes: usize) -> f32 {
    let v = v.to_array();
    let mut sum = v[0];
    for j in 1..lanes {
        sum += v[j];
    }
    sum
}

dispatch_fn! {
    /// Mixes of one row (model.md section 5). `z` holds the products of the mixing matrix with the row's stream and
    /// is overwritten; `scale` `[3]`, `base` `[m (2 + m)]`, pre and post `[m]`, comb `[m, m]`, m <= [`MAX_COPIES`].
    pub(crate) fn mixes_row(
        stream: &[f32], z: &mut [f32], scale: &[f32], base: &[f32], p: HcParams,
        pre: &mut [f32], post: &mut [f32], comb: &mut [f32],
    ) = mixes_row_lanes;
}

#[inline(always)]
fn collapse_row_lanes<L: Lanes>(stream: &[f32], pre: &[f32], x: &mut [f32]) {
    let width = x.len();
    let end = width / LANES * LANES;
    let mut c = 0;
    while c < end {
        let mut sum = L::splat(pre[0]).mul(L::load(&stream[c..]));
        for i in 1..pre.len() {
            sum = L::splat(pre[i]).fma(L::load(&stream[i * width + c..]), sum);
        }
        sum.store(&mut x[c..]);
        c += LANES;
    }
    if end < width {
        let mut sum = L::splat(pre[0]).mul(L::load_partial(&stream[end..width]));
        for i in 1..pre.len() {
            sum = L::splat(pre[i]).fma(L::load_partial(&stream[i * width + end..(i + 1) * width]), sum);
        }
        sum.store_partial(&mut x[end..]);
    }
}

dispatch_fn! {
    /// `x = sum_i pre[i] * stream[i]`, i ascending, one row.
    pub(crate) fn collapse_row(stream: &[f32], pre: &[f32], x: &mut [f32]) = collapse_row_lanes;
}

/// The merge of channels `c .. to` (at most 16) with `copies` known to the compiler where it matters.
#[inline(always)]
fn merge_vector<L: Lanes>(
    stream: &mut [f32],
    copies: usize,
    width: usize,
    c: usize,
    y: &[f32],
    post: &[f32],
    comb: &[f32],
) {
    let to = (c + LANES).min(width);
    let mut old = [L::zero(); MAX_COPIES];
    for i in 0..copies {
        old[i] = load_up_to::<L>(&stream[i * width + c..i * width + to]);
    }
    let y = load_up_to::<L>(&y[c..to]);
    for j in 0..copies {
        let mut sum = L::splat(post[j]).mul(y);
        for i in 0..copies {
            sum = L::splat(comb[i * copies + j]).fma(old[i], sum);
        }
        store_up_to(sum, &mut stream[j * width + c..j * width + to]);
    }
}

#[inline(always)]
fn merge_row_lanes<L: Lanes>(stream: &mut [f32], y: &[f32], post: &[f32], comb: &[f32]) {
    let (copies, width) = (post.len(), y.len());
    let mut c = 0;
    while c < width {
        if copies == 4 {
            merge_vector::<L>(stream, 4, width, c, y, post, comb);
        } else {
            merge_vector::<L>(stream, copies, width, c, y, post, comb);
        }
        c += LANES;
    }
}

dispatch_fn! {
    /// `stream[j] = post[j] * y + sum_i comb[i, j] * stream[i]`, i ascending, one row, in place; at most
    /// [`MAX_COPIES`] copies.
    pub(crate) fn merge_row(stream: &mut [f32], y: &[f32], post: &[f32], comb: &[f32]) = merge_row_lanes;
}
