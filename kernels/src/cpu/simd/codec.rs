//! Rows in cache formats to float32 and back, sixteen channels at a time, with the bits of [`crate::formats`].
//!
//! Decoding takes groups apart into even and odd channels ([`super::decode`]) and weaves them together again. Whatever is
//! rare (a NaN, an infinity, a scale outside the middle of the range, a short last group) is left to the scalar
//! codecs, so both agree by construction there and by test everywhere else.

#![allow(unsafe_code)]
#![allow(clippy::needless_range_loop)] // Lanes and copies are counted in several arrays at once.

use super::codes::Codes;
use super::decode::{FP8_MAX_SCALE, fp8_scale_value};
use super::dispatch_fn;
use super::lanes::{LANES, Lanes};
use crate::formats::{self, GROUP, MAIN_GROUP, RowFormat, WeightFormat};

/// Nearest E2M1 code of the magnitude of each lane as a float `0 ..= 7`, ties to even, saturating.
#[inline(always)]
fn e2m1_magnitude_codes<L: Lanes>(v: L) -> L {
    // Above the midpoint of codes i - 1 and i the code is at least i; at the midpoint it is the even one. Midpoints
    // below an even code are entered one place lower, so that `>` includes them.
    const ABOVE: [f32; 7] =
        [0.25, 0.75f32.next_down(), 1.25, 1.75f32.next_down(), 2.5, 3.5f32.next_down(), 5.0];
    let a = v.abs();
    let mut code = L::zero();
    for i in 0..7 {
        code = L::select_gt(a, L::splat(ABOVE[i]), L::splat((i + 1) as f32), code);
    }
    code
}

/// Nearest E2M1 value of finite lanes, with their sign.
#[inline(always)]
fn e2m1_round<L: Lanes>(v: L) -> L {
    const ABOVE: [f32; 7] =
        [0.25, 0.75f32.next_down(), 1.25, 1.75f32.next_down(), 2.5, 3.5f32.next_down(), 5.0];
    const VALUE: [f32; 7] = [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let a = v.abs();
    let mut value = L::zero();
    for i in 0..7 {
        value = L::select_gt(a, L::splat(ABOVE[i]), L::splat(VALUE[i]), value);
    }
    value.copysign(v)
}

/// `1 / scale` for a power of two between 2^-126 and 2^126: a product with it is the quotient. Other numbers give
/// nonsense.
#[inline(always)]
fn inverse_of_power(scale: f32) -> f32 {
    f32::from_bits((254u32 << 23).wrapping_sub(scale.to_bits()))
}

/// Scale of a group of 32 whose largest magnitude is `amax`, as [`formats::encode_row`] chooses it; a power of two
/// between 2^-126 and 2^126.
#[inline(always)]
fn power_scale(format: RowFormat, amax: f32) -> f32 {
    match format {
        RowFormat::Fp8 => formats::pow2_ceil(amax.max(1e-4) * (1.0 / formats::E4M3_MAX)),
        _ => formats::pow2_ceil(amax.max(6.0 * f32::MIN_POSITIVE) * (1.0 / 6.0)),
    }
}

/// Scale of a group of 16 of main KV.
#[inline(always)]
fn main_scale(amax: f32) -> u8 {
    formats::e4m3_encode(amax.max(6.0 / 512.0) / 6.0)
}

/// Whether every lane is finite and has an exponent that leaves room for exact scaling.
#[inline(always)]
fn is_ordinary(amax: f32, poison: f32) -> bool {
    poison == 0.0 && amax < 1e37
}

/// [`formats::quantize_row`].
#[inline(always)]
fn quantize_row_lanes<L: Codes>(format: RowFormat, x: &mut [f32]) {
    let size = format.group();
    assert!(x.len().is_multiple_of(size), "{} channels in groups of {size}", x.len());
    match format {
        RowFormat::F32 => {}
        RowFormat::Fp8 | RowFormat::Fp4Index => {
            for group in x.chunks_exact_mut(GROUP) {
                let (a, b) = (L::load(group), L::load(&group[LANES..]));
                let amax = a.abs().max(b.abs()).reduce_max();
                let poison = a.mul(L::zero()).add(b.mul(L::zero())).reduce_add();
                if !is_ordinary(amax, poison) {
                    formats::quantize_row(format, group);
                    continue;
                }
                let scale = power_scale(format, amax);
                let (s, inverse) = (L::splat(scale), L::splat(inverse_of_power(scale)));
                let (a, b) = (a.mul(inverse), b.mul(inverse));
                let (a, b) = match format {
                    RowFormat::Fp8 => (a.e4m3_round(), b.e4m3_round()),
                    _ => (e2m1_round(a), e2m1_round(b)),
                };
                a.mul(s).store(group);
                b.mul(s).store(&mut group[LANES..]);
            }
        }
        RowFormat::Fp4Main => {
            for group in x.chunks_exact_mut(MAIN_GROUP) {
                let a = L::load(group);
                let amax = a.abs().reduce_max();
                if !is_ordinary(amax, a.mul(L::zero()).reduce_add()) {
                    formats::quantize_row(format, group);
                    continue;
                }
                let s = L::splat(formats::e4m3_decode(main_scale(amax)));
                e2m1_round(a.div(s)).mul(s).store(group);
            }
        }
    }
}

dispatch_fn! {
    /// [`formats::quantize_row`]: rounds a row to `format` and back.
    pub(crate) fn quantize_row(format: RowFormat, x: &mut [f32]) = quantize_row_lanes;
}

/// Packed E2M1 codes of sixteen lanes.
#[inline(always)]
fn store_e2m1<L: Codes>(v: L, out: &mut [u8]) {
    let magnitude = e2m1_magnitude_codes(v);
    // The sign bit, of zeros too, is worth 8; the odd lane of a pair is the high nibble.
    let sign = L::splat(1.0).copysign(v);
    let codes = L::select_gt(L::zero(), sign, magnitude.add(L::splat(8.0)), magnitude);
    let bytes = codes.swap_pairs().fma(L::splat(16.0), codes).to_array();
    for j in 0..LANES / 2 {
        out[j] = bytes[2 * j] as u8;
    }
}

/// [`formats::encode_row`].
#[inline(always)]
fn encode_row_lanes<L: Codes>(format: RowFormat, x: &[f32], out: &mut [u8]) {
    let width = x.len();
    assert_eq!(out.len(), format.row_bytes(width), "bytes of a {format:?} row");
    let mut poison = L::zero();
    let mut largest = 0.0f32;
    match format {
        RowFormat::F32 => {
            formats::encode_row(format, x, out);
            return;
        }
        RowFormat::Fp8 | RowFormat::Fp4Index => {
            let value_bytes = if format == RowFormat::Fp8 { width } else { width / 2 };
            let (values, scales) = out.split_at_mut(value_bytes);
            for g in 0..width / GROUP {
                let (a, b) = (L::load(&x[g * GROUP..]), L::load(&x[g * GROUP + LANES..]));
                let amax = a.abs().max(b.abs()).reduce_max();
                largest = largest.max(amax);
                poison = a.fma(L::zero(), b.fma(L::zero(), poison));
                let scale = power_scale(format, amax);
                scales[g] = formats::e8m0_encode(scale);
                let inverse = L::splat(inverse_of_power(scale));
                let (a, b) = (a.mul(inverse), b.mul(inverse));
                if format == RowFormat::Fp8 {
                    values[g * GROUP..][..LANES].copy_from_slice(&a.e4m3_codes());
                    values[g * GROUP + LANES..][..LANES].copy_from_slice(&b.e4m3_codes());
                } else {
                    store_e2m1(a, &mut values[g * GROUP / 2..]);
                    store_e2m1(b, &mut values[(g * GROUP + LANES) / 2..]);
                }
            }
        }
        RowFormat::Fp4Main => {
            let (values, scales) = out.split_at_mut(width / 2);
            for g in 0..width / MAIN_GROUP {
                let a = L::load(&x[g * MAIN_GROUP..]);
                let amax = a.abs().reduce_max();
                largest = largest.max(amax);
                poison = a.fma(L::zero(), poison);
                scales[g] = main_scale(amax);
                let scale = L::splat(formats::e4m3_decode(scales[g]));
                store_e2m1(a.div(scale), &mut values[g * MAIN_GROUP / 2..]);
            }
        }
    }
    if !is_ordinary(largest, poison.reduce_add()) {
        formats::encode_row(format, x, out);
    }
}

dispatch_fn! {
    /// [`formats::encode_row`]: stores `x` in `format`.
    pub(crate) fn encode_row(format: RowFormat, x: &[f32], out: &mut [u8]) = encode_row_lanes;
}

/// [`formats::decode_row`].
#[inline(always)]
pub(crate) fn decode_row_lanes<L: Codes>(format: RowFormat, bytes: &[u8], out: &mut [f32]) {
    let width = out.len();
    assert_eq!(bytes.len(), format.row_bytes(width), "bytes of a {format:?} row");
    match format {
        RowFormat::F32 => formats::decode_row(format, bytes, out),
        RowFormat::Fp8 => {
            let (values, scales) = bytes.split_at(width);
            if !decode_fp8::<L>(values, scales, out) {
                formats::decode_row(format, bytes, out);
            }
        }
        RowFormat::Fp4Index => {
            let (values, scales) = bytes.split_at(width / 2);
            for g in 0..width / GROUP {
                // SAFETY: a group is 16 bytes, and the slice is cut to them.
                let (even, odd) = unsafe {
                    L::fp4(values[g * GROUP / 2..][..GROUP / 2].as_ptr(), formats::e8m0_decode(scales[g]))
                };
                store_group(even, odd, &mut out[g * GROUP..]);
            }
        }
        RowFormat::Fp4Main => {
            let (values, scales) = bytes.split_at(width / 2);
            for g in 0..width / GROUP {
                // SAFETY: two groups of 16 channels are 16 bytes, and the slice is cut to them.
                let (even, odd) = unsafe { L::fp4(values[g * GROUP / 2..][..GROUP / 2].as_ptr(), 1.0) };
                let (low, high) = L::interleave(even, odd);
                low.mul(L::splat(formats::e4m3_decode(scales[2 * g]))).store(&mut out[g * GROUP..]);
                high.mul(L::splat(formats::e4m3_decode(scales[2 * g + 1])))
                    .store(&mut out[g * GROUP + LANES..]);
            }
            let done = width / GROUP * GROUP;
            if done < width {
                // One group of 16 is left; as a row of its own it is 8 bytes of values and one scale.
                let mut tail = [0; MAIN_GROUP / 2 + 1];
                tail[..MAIN_GROUP / 2].copy_from_slice(&values[done / 2..]);
                tail[MAIN_GROUP / 2] = scales[width / MAIN_GROUP - 1];
                formats::decode_row(format, &tail, &mut out[done..]);
            }
        }
    }
}

#[inline(always)]
fn store_group<L: Codes>(even: L, odd: L, out: &mut [f32]) {
    let (low, high) = L::interleave(even, odd);
    low.store(out);
    high.store(&mut out[LANES..]);
}

/// Whole groups of E4M3 with one E8M0 scale each; false if a number was met that needs the scalar codec.
#[inline(always)]
fn decode_fp8<L: Codes>(values: &[u8], scales: &[u8], out: &mut [f32]) -> bool {
    let mut seen = L::nothing_seen();
    for g in 0..out.len() / GROUP {
        if scales[g] > FP8_MAX_SCALE {
            return false;
        }
        // SAFETY: a group is 32 bytes, and the slice is cut to them.
        let (even, odd) =
            unsafe { L::fp8(values[g * GROUP..][..GROUP].as_ptr(), fp8_scale_value(scales[g]), &mut seen) };
        store_group(even, odd, &mut out[g * GROUP..]);
    }
    !L::saw_nan(seen)
}

dispatch_fn! {
    /// [`formats::decode_row`]: reads a stored row.
    pub(crate) fn decode_row(format: RowFormat, bytes: &[u8], out: &mut [f32]) = decode_row_lanes;
}

/// One row of a weight whose number of columns is a multiple of 32; false if it needs the scalar codec.
#[inline(always)]
fn decode_weight_lanes<L: Codes>(format: WeightFormat, data: &[u8], scales: &[u8], out: &mut [f32]) -> bool {
    let groups = out.len() / GROUP;
    match format {
        WeightFormat::F32 => false,
        WeightFormat::Bf16 => {
            for g in 0..groups {
                // SAFETY: a group is 64 bytes, and the slice is cut to them.
                let (even, odd) = unsafe { L::bf16(data[g * 2 * GROUP..][..2 * GROUP].as_ptr()) };
                store_group(even, odd, &mut out[g * GROUP..]);
            }
            true
        }
        WeightFormat::Fp8 | WeightFormat::Fp8Rows => decode_fp8::<L>(data, scales, out),
        WeightFormat::Fp4 => {
            for g in 0..groups {
                let scale = formats::e8m0_decode(scales[g]);
                // SAFETY: a group is 16 bytes, and the slice is cut to them.
                let (even, odd) = unsafe { L::fp4(data[g * GROUP / 2..][..GROUP / 2].as_ptr(), scale) };
                store_group(even, odd, &mut out[g * GROUP..]);
            }
            true
        }
    }
}

dispatch_fn! {
    /// Dequantises one row of a weight, `data` and `scales` being that row's bytes and `out.len()` a multiple of 32.
    /// Answers false, with `out` undefined, if the row needs [`formats::decode_weight_row`].
    pub(crate) fn decode_weight(format: WeightFormat, data: &[u8], scales: &[u8], out: &mut [f32]) -> bool
        = decode_weight_lanes;
}

/// Asks for all cache lines of `bytes`.
#[inline]
pub(crate) fn prefetch(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    for line in bytes.chunks(64) {
        // SAFETY: a prefetch never faults.
        unsafe { std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(line.as_ptr().cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}

#[cfg(test)]
#[path = "codec_tests.rs"]
mod tests;
