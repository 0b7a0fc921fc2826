//! Norms, element-wise functions and rotations of one row.
//!
//! **Order of additions.** A sum over channels runs in 16 lanes: lane `j` takes the channels `j`, `j + 16`, ... in
//! ascending order with a fused multiply-add each, then the tree of [`Lanes::reduce_add`]. Missing channels of the
//! last sixteen count as zeros.

#![allow(unsafe_code)] // `dispatch_fn!`
#![allow(clippy::needless_range_loop)] // Lanes and copies are counted in several arrays at once.

use super::codes::Codes;
use super::dispatch_fn;
use super::lanes::{LANES, Lanes};
use super::math;

/// Channels of a row that fill whole vectors.
#[inline(always)]
fn whole(width: usize) -> usize {
    width / LANES * LANES
}

/// The floats of `s`, at most 16, the other lanes +0; whole vectors without a detour.
#[inline(always)]
pub(crate) fn load_up_to<L: Lanes>(s: &[f32]) -> L {
    if s.len() >= LANES { L::load(s) } else { L::load_partial(s) }
}

/// Writes as many lanes as `s` has room for.
#[inline(always)]
pub(crate) fn store_up_to<L: Lanes>(v: L, s: &mut [f32]) {
    if s.len() >= LANES {
        v.store(s);
    } else {
        v.store_partial(s);
    }
}

/// `sum x^2` in the order of this file.
#[inline(always)]
pub(crate) fn sum_of_squares_lanes<L: Lanes>(x: &[f32]) -> f32 {
    let mut sum = L::zero();
    let end = whole(x.len());
    let mut i = 0;
    while i < end {
        let v = L::load(&x[i..]);
        sum = v.fma(v, sum);
        i += LANES;
    }
    if end < x.len() {
        let v = L::load_partial(&x[end..]);
        sum = v.fma(v, sum);
    }
    sum.reduce_add()
}

#[inline(always)]
fn rmsnorm_row_lanes<L: Lanes>(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
    let (width, end) = (x.len(), whole(x.len()));
    let factor = L::splat(math::inverse_rms(sum_of_squares_lanes::<L>(x), width, eps));
    let mut i = 0;
    while i < end {
        L::load(&x[i..]).mul(factor).mul(L::load(&weight[i..])).store(&mut y[i..]);
        i += LANES;
    }
    if end < width {
        let v = L::load_partial(&x[end..]).mul(factor);
        v.mul(L::load_partial(&weight[end..width])).store_partial(&mut y[end..width]);
    }
}

dispatch_fn! {
    /// `y = x * rsqrt(mean(x^2) + eps) * weight`, one row.
    pub(crate) fn rmsnorm_row(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) = rmsnorm_row_lanes;
}

#[inline(always)]
fn add_lanes<L: Lanes>(y: &mut [f32], x: &[f32]) {
    let (len, end) = (y.len(), whole(y.len()));
    let mut i = 0;
    while i < end {
        L::load(&y[i..]).add(L::load(&x[i..])).store(&mut y[i..]);
        i += LANES;
    }
    for i in end..len {
        y[i] += x[i];
    }
}

dispatch_fn! {
    /// `y += x`.
    pub(crate) fn add(y: &mut [f32], x: &[f32]) = add_lanes;
}

#[inline(always)]
fn scale_lanes<L: Lanes>(x: &mut [f32], factor: f32) {
    let (len, end) = (x.len(), whole(x.len()));
    let mut i = 0;
    while i < end {
        L::load(&x[i..]).mul(L::splat(factor)).store(&mut x[i..]);
        i += LANES;
    }
    for i in end..len {
        x[i] *= factor;
    }
}

dispatch_fn! {
    /// `x *= factor`.
    pub(crate) fn scale(x: &mut [f32], factor: f32) = scale_lanes;
}

#[inline(always)]
fn swiglu_vector<L: Lanes>(gate: L, up: L, limit: f32) -> L {
    if limit > 0.0 {
        let (high, low) = (L::splat(limit), L::splat(-limit));
        math::silu(high.min(gate)).mul(low.max(high.min(up)))
    } else {
        math::silu(gate).mul(up)
    }
}

#[inline(always)]
fn swiglu_lanes<L: Lanes>(gate: &mut [f32], up: &[f32], limit: f32) {
    let (len, end) = (gate.len(), whole(gate.len()));
    let mut i = 0;
    while i < end {
        swiglu_vector(L::load(&gate[i..]), L::load(&up[i..]), limit).store(&mut gate[i..]);
        i += LANES;
    }
    if end < len {
        let (g, u) = (L::load_partial(&gate[end..]), L::load_partial(&up[end..len]));
        swiglu_vector(g, u, limit).store_partial(&mut gate[end..]);
    }
}

dispatch_fn! {
    /// `gate = silu(min(gate, limit)) * clamp(up, -limit, limit)`; no clamp if `limit <= 0`.
    pub(crate) fn swiglu(gate: &mut [f32], up: &[f32], limit: f32) = swiglu_lanes;
}

#[inline(always)]
fn rope_row_lanes<L: Codes>(
    x: &mut [f32],
    heads: usize,
    width: usize,
    rd: usize,
    cos_sin: &[f32],
    inverse: bool,
) {
    let half = rd / 2;
    let end = whole(rd);
    let mut i = 0;
    while i < end {
        // a' = a cos - b sin, b' = b cos + a sin: one vector of cosines, one of signed sines.
        let (mut cos, mut sin) = ([0.0; LANES], [0.0; LANES]);
        for j in 0..LANES / 2 {
            let (c, s) = (cos_sin[i / 2 + j], cos_sin[half + i / 2 + j]);
            let s = if inverse { -s } else { s };
            (cos[2 * j], cos[2 * j + 1]) = (c, c);
            (sin[2 * j], sin[2 * j + 1]) = (-s, s);
        }
        let (cos, sin) = (L::from_array(cos), L::from_array(sin));
        for h in 0..heads {
            let at = (h + 1) * width - rd + i;
            let v = L::load(&x[at..]);
            v.fma(cos, v.swap_pairs().mul(sin)).store(&mut x[at..]);
        }
        i += LANES;
    }
    while i < rd {
        let (c, s) = (cos_sin[i / 2], cos_sin[half + i / 2]);
        let s = if inverse { -s } else { s };
        for h in 0..heads {
            let at = (h + 1) * width - rd + i;
            let (a, b) = (x[at], x[at + 1]);
            x[at] = a.mul_add(c, b * -s);
            x[at + 1] = b.mul_add(c, a * s);
        }
        i += 2;
    }
}

dispatch_fn! {
    /// Rotates the last `rd` channels of every head of one row; `cos_sin` is that row's, `[rd]`.
    pub(crate) fn rope_row(x: &mut [f32], heads: usize, width: usize, rd: usize, cos_sin: &[f32], inverse: bool)
        = rope_row_lanes;
}

#[inline(always)]
fn pool_group_lanes<L: Lanes>(values: &[f32], gates: &[f32], ratio: usize, out: &mut [f32]) {
    let width = out.len();
    let mut c = 0;
    while c < width {
        let to = (c + LANES).min(width);
        let mut max = load_up_to::<L>(&gates[c..to]);
        for i in 1..ratio {
            max = load_up_to::<L>(&gates[i * width + c..i * width + to]).max(max);
        }
        let (mut sum, mut total) = (L::zero(), L::zero());
        for i in 0..ratio {
            let weight = math::exp(load_up_to::<L>(&gates[i * width + c..i * width + to]).sub(max));
            sum = weight.fma(load_up_to::<L>(&values[i * width + c..i * width + to]), sum);
            total = total.add(weight);
        }
        store_up_to(sum.div(total), &mut out[c..to]);
        c = to;
    }
}

dispatch_fn! {
    /// `out[c] = sum_i v[i, c] * softmax_i(gate[i, c])` over the `ratio` rows of one group.
    pub(crate) fn pool_group(values: &[f32], gates: &[f32], ratio: usize, out: &mut [f32]) = pool_group_lanes;
}

#[inline(always)]
fn mean_row_lanes<L: Lanes>(stream: &[f32], copies: usize, out: &mut [f32]) {
    let width = out.len();
    let count = L::splat(copies as f32);
    let mut c = 0;
    while c < width {
        let to = (c + LANES).min(width);
        let mut sum = load_up_to::<L>(&stream[c..to]);
        for i in 1..copies {
            sum = sum.add(load_up_to::<L>(&stream[i * width + c..i * width + to]));
        }
        store_up_to(sum.div(count), &mut out[c..to]);
        c = to;
    }
}

dispatch_fn! {
    /// Mean over the `copies` of one row of the stream.
    pub(crate) fn mean_row(stream: &[f32], copies: usize, out: &mut [f32]) = mean_row_lanes;
}

/// `sum_c s[c] * (q[c] * k[c]) * key[c]` in the order of this file.
#[inline(always)]
fn gated_dot<L: Lanes>(s: &[f32], q: &[f32], k: &[f32], key: &[f32]) -> f32 {
    let (width, end) = (s.len(), whole(s.len()));
    let mut sum = L::zero();
    let mut i = 0;
    while i < end {
        let weighted = L::load(&q[i..]).mul(L::load(&k[i..])).mul(L::load(&s[i..]));
        sum = weighted.fma(L::load(&key[i..]), sum);
        i += LANES;
    }
    if end < width {
        let weighted = L::load_partial(&q[end..width]).mul(L::load_partial(&k[end..width]));
        let weighted = weighted.mul(L::load_partial(&s[end..]));
        sum = weighted.fma(L::load_partial(&key[end..width]), sum);
    }
    sum.reduce_add()
}

#[inline(always)]
fn engram_copy_lanes<L: Lanes>(
    s: &mut [f32],
    key: &[f32],
    value: &[f32],
    q: &[f32],
    k: &[f32],
    eps: f32,
) -> f32 {
    let (width, end) = (s.len(), whole(s.len()));
    let d = gated_dot::<L>(s, q, k, key)
        * math::inverse_rms(sum_of_squares_lanes::<L>(s), width, eps)
        * math::inverse_rms(sum_of_squares_lanes::<L>(key), width, eps)
        * (1.0 / (width as f32).sqrt());
    let depth = d.abs().max(1e-6).sqrt().copysign(d);
    let gate = math::sigmoid(L::splat(depth));
    let mut i = 0;
    while i < end {
        gate.fma(L::load(&value[i..]), L::load(&s[i..])).store(&mut s[i..]);
        i += LANES;
    }
    if end < width {
        let v = gate.fma(L::load_partial(&value[end..width]), L::load_partial(&s[end..]));
        v.store_partial(&mut s[end..]);
    }
    gate.to_array()[0]
}

dispatch_fn! {
    /// The Engram gate of one copy `s` of one row: answers `g` and adds `g * value` to `s`.
    pub(crate) fn engram_copy(s: &mut [f32], key: &[f32], value: &[f32], q: &[f32], k: &[f32], eps: f32) -> f32
        = engram_copy_lanes;
}
