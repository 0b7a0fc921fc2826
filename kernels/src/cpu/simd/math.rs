//! Our own transcendental functions, so that every level, machine and C library gives the same bits.
//!
//! Invariant: built from [`Lanes`] methods only, each of which is exact or rounds once; no lane sees another. So a
//! function of one number is the function of a vector that holds it in every lane.
//!
//! Errors against the true value, over the ranges that the tests walk: `exp` 1.01 ulp, `sigmoid` and `silu` 3 ulp,
//! `softplus` 4 ulp.

#![allow(unsafe_code)] // `dispatch_fn!`

use super::lanes::Lanes;

/// `ln 2 - f32(ln 2)`.
const LN_2_LOW: f32 = -1.904_654_3e-9;

/// `e^x`. -inf and everything below -103.98 give +0, numbers above 88.73 give +inf, NaN gives NaN; subnormal
/// results are rounded like the others.
#[inline(always)]
pub(crate) fn exp<L: Lanes>(x: L) -> L {
    // `min` and `max` return their second operand if one is NaN. Between the bounds 2^n stays in range in two steps.
    let x = L::splat(-104.0).max(L::splat(89.0).min(x));
    let n = x.mul(L::splat(std::f32::consts::LOG2_E)).round();
    let r = n.fma(L::splat(-std::f32::consts::LN_2), x);
    let r = n.fma(L::splat(-LN_2_LOW), r);
    // (e^r - 1 - r) / r^2 on |r| <= ln 2 / 2: interpolated at Chebyshev points, 9.4e-9 away at most.
    let q = L::splat(1.392_648_4e-3)
        .fma(r, L::splat(8.363_42e-3))
        .fma(r, L::splat(4.166_655_3e-2))
        .fma(r, L::splat(1.666_657_6e-1))
        .fma(r, L::splat(0.5));
    let p = q.fma(r.mul(r), r).add(L::splat(1.0));
    let half = n.mul(L::splat(0.5)).round();
    p.mul(half.pow2()).mul(n.sub(half).pow2())
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid<L: Lanes>(x: L) -> L {
    let one = L::splat(1.0);
    one.div(one.add(exp(x.neg())))
}

/// `x / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn silu<L: Lanes>(x: L) -> L {
    x.div(L::splat(1.0).add(exp(x.neg())))
}

/// `ln(1 + y)` for `0 <= y <= 1`.
#[inline(always)]
pub(crate) fn ln_1p_unit<L: Lanes>(y: L) -> L {
    // ln(1 + y) = 2 artanh(s), s = y / (2 + y) <= 1/3; (artanh(s) / s - 1) / s^2 is a polynomial in s^2.
    let s = y.div(y.add(L::splat(2.0)));
    let z = s.mul(s);
    let p = L::splat(1.161_216_5e-1)
        .fma(z, L::splat(1.085_328_8e-1))
        .fma(z, L::splat(1.429_617_9e-1))
        .fma(z, L::splat(1.999_985_3e-1))
        .fma(z, L::splat(3.333_333_4e-1));
    let s2 = s.add(s);
    s2.mul(z).fma(p, s2)
}

/// `ln(1 + e^x)`.
#[inline(always)]
pub(crate) fn softplus<L: Lanes>(x: L) -> L {
    let positive = L::zero().max(x);
    positive.add(ln_1p_unit(exp(x.abs().neg())))
}

/// `(sum / count + eps)^(-1/2)`, every step rounded once: the factor of a norm over `count` channels.
#[inline(always)]
pub(crate) fn inverse_rms(sum_of_squares: f32, count: usize, eps: f32) -> f32 {
    1.0 / (sum_of_squares / count as f32 + eps).sqrt()
}

#[cfg(test)]
mod tests {
    use super::super::dispatch_fn;
    use super::*;
    use crate::cpu::SimdLevel;

    #[inline(always)]
    fn all_lanes<L: Lanes>(x: &[f32], out: &mut Vec<f32>) {
        let v = L::load(x);
        for y in [exp(v), sigmoid(v), silu(v), softplus(v)] {
            out.extend(y.to_array());
        }
    }

    dispatch_fn! {
        fn all(x: &[f32], out: &mut Vec<f32>) = all_lanes;
    }

    /// Values at `level`, four functions one after the other for each block of 16 inputs.
    fn values(level: SimdLevel, x: &[f32]) -> Vec<f32> {
        let mut out = Vec::new();
        for block in x.chunks_exact(16) {
            all(level, block, &mut out);
        }
        out
    }

    fn grid() -> Vec<f32> {
        let mut x: Vec<f32> = (-44_000..=44_000).map(|i| i as f32 * 0.002_5).collect();
        x.extend((1..2_000).flat_map(|i| [i as f32 * 1e-6, -(i as f32) * 1e-9, i as f32 * 1e-30]));
        x.extend([0.0, -0.0, 1.0, -1.0, 88.722_84, 88.73, -87.34, -103.97, -103.98, 1e30, -1e30]);
        x.resize(x.len().next_multiple_of(16), 0.5);
        x
    }

    /// Distance in units of the last place of `want` rounded to float32.
    fn ulps(got: f32, want: f64) -> f64 {
        let rounded = want as f32;
        let unit = f64::from(f32::from_bits(rounded.abs().to_bits() + 1)) - f64::from(rounded.abs());
        (f64::from(got) - want).abs() / unit.max(f64::from(f32::from_bits(1)))
    }

    #[test]
    fn functions_stay_within_a_few_ulps_of_float64() {
        let x = grid();
        let out = values(SimdLevel::detect(), &x);
        let mut worst = [0.0f64; 4];
        for (block, results) in x.chunks_exact(16).zip(out.chunks_exact(64)) {
            for (i, &x) in block.iter().enumerate() {
                let x64 = f64::from(x);
                let e = x64.exp();
                let wanted = [
                    e,
                    1.0 / (1.0 + (-x64).exp()),
                    x64 / (1.0 + (-x64).exp()),
                    x64.max(0.0) + (-x64.abs()).exp().ln_1p(),
                ];
                for (f, &want) in wanted.iter().enumerate() {
                    let got = results[f * 16 + i];
                    if (want as f32).is_infinite() || (f == 1 || f == 2) && x < -88.0 {
                        // e^-x overflows where the results are below 1e-36: they may come out as 0.
                        assert!(got == want as f32 || got.abs() < 1e-36, "function {f} of {x}: {got}");
                        continue;
                    }
                    worst[f] = worst[f].max(ulps(got, want));
                }
            }
        }
        for (f, limit) in [1.01, 3.0, 3.0, 4.0].into_iter().enumerate() {
            assert!(worst[f] <= limit, "function {f}: {} ulp, at most {limit}", worst[f]);
        }
    }

    #[test]
    fn exp_of_the_extremes_is_zero_infinity_and_nan() {
        let mut x = [0.0f32; 16];
        x[..6].copy_from_slice(&[f32::NEG_INFINITY, -200.0, f32::INFINITY, 100.0, f32::NAN, 0.0]);
        for level in SimdLevel::available() {
            let y = values(level, &x);
            assert_eq!(y[..2], [0.0, 0.0], "{level}");
            assert_eq!(y[2..4], [f32::INFINITY, f32::INFINITY], "{level}");
            assert!(y[4].is_nan(), "{level}");
            assert_eq!(y[5], 1.0, "{level}");
        }
    }

    #[test]
    fn functions_have_the_same_bits_at_every_level() {
        let x = grid();
        let expected: Vec<u32> = values(SimdLevel::Portable, &x).iter().map(|v| v.to_bits()).collect();
        for level in SimdLevel::available() {
            let got: Vec<u32> = values(level, &x).iter().map(|v| v.to_bits()).collect();
            assert!(got == expected, "{level}");
        }
    }
}
