//! Rows of channels in a cache format: all values, then all scales, groups in ascending order.
//!
//! Two channels of an FP4 row share a byte, the even one in the low nibble.
//!
//! Rounding a rounded row changes nothing in F32, FP8 and FP4 index rows. In main KV rows that holds for groups
//! whose scale is a normal E4M3 number (largest magnitude from about 0.1 on); so rows are rounded exactly once,
//! when they are stored, and moved as bytes afterwards.

use super::codes::{E2M1_MAX, E4M3_NAN, E8M0_NAN};
use super::{
    E4M3_MAX, GROUP, MAIN_GROUP, RowFormat, e2m1_decode, e2m1_encode, e4m3_decode, e4m3_encode, e8m0_decode,
    e8m0_encode, pow2_ceil,
};

/// Smallest magnitude that an FP8 group's scale is made for.
const FP8_FLOOR: f32 = 1e-4;
/// The same for FP4 index rows: 6 * 2^-126, whose scale is the smallest normal float32.
const INDEX_FLOOR: f32 = E2M1_MAX * f32::MIN_POSITIVE;
/// The same for main KV rows: 6 * 2^-9, whose scale is the smallest E4M3 value.
const MAIN_FLOOR: f32 = E2M1_MAX / 512.0;

/// Largest magnitude, or NaN if any value is NaN or infinite.
pub(super) fn finite_amax(x: impl Iterator<Item = f32>) -> f32 {
    let mut amax = 0.0f32;
    let mut poison = 0.0f32;
    for v in x {
        amax = amax.max(v.abs());
        poison += v * 0.0; // 0, or NaN from a NaN or an infinity
    }
    amax + poison
}

/// E8M0 code and scale of a group whose largest magnitude is `amax`: `2^ceil(log2(max(amax, floor) * step))`.
/// A NaN `amax` gives the NaN code.
pub(super) fn e8m0_scale(amax: f32, floor: f32, step: f32) -> (u8, f32) {
    if amax.is_nan() {
        return (E8M0_NAN, f32::NAN);
    }
    let scale = pow2_ceil(amax.max(floor) * step);
    (e8m0_encode(scale), scale)
}

/// `fl32(1 / 448)`: scales are products with this number, not quotients.
pub(super) const FP8_STEP: f32 = 1.0 / E4M3_MAX;
/// `fl32(1 / 6)`.
pub(super) const FP4_STEP: f32 = 1.0 / E2M1_MAX;

/// Writes the E4M3 codes of `x / scale`; zeros under a NaN scale.
pub(super) fn encode_e4m3(x: &[f32], scale: f32, out: &mut [u8]) {
    if scale.is_nan() {
        out.fill(0);
        return;
    }
    for (code, &v) in out.iter_mut().zip(x) {
        *code = e4m3_encode(v / scale);
    }
}

/// Writes the packed E2M1 codes of `x / scale`; zeros under a NaN scale. `x.len()` is even.
pub(super) fn encode_e2m1(x: &[f32], scale: f32, out: &mut [u8]) {
    if scale.is_nan() {
        out.fill(0);
        return;
    }
    for (byte, pair) in out.iter_mut().zip(x.chunks_exact(2)) {
        *byte = e2m1_encode(pair[0] / scale) | e2m1_encode(pair[1] / scale) << 4;
    }
}

/// Stores `x` in `format`: `out` gets exactly [`RowFormat::row_bytes`] bytes.
///
/// A group with a NaN or an infinity is stored as NaN. Main KV scales saturate at 448, so magnitudes above 2,688
/// are clamped there.
///
/// # Panics
/// If `x.len()` is not a multiple of [`RowFormat::group`] or `out` has another length.
pub fn encode_row(format: RowFormat, x: &[f32], out: &mut [u8]) {
    assert_row(format, x.len(), out.len());
    let width = x.len();
    match format {
        RowFormat::F32 => {
            for (bytes, v) in out.chunks_exact_mut(4).zip(x) {
                bytes.copy_from_slice(&v.to_le_bytes());
            }
        }
        RowFormat::Fp8 => {
            let (values, scales) = out.split_at_mut(width);
            for (g, group) in x.chunks_exact(GROUP).enumerate() {
                let (code, scale) = e8m0_scale(finite_amax(group.iter().copied()), FP8_FLOOR, FP8_STEP);
                scales[g] = code;
                encode_e4m3(group, scale, &mut values[g * GROUP..(g + 1) * GROUP]);
            }
        }
        RowFormat::Fp4Main => {
            let (values, scales) = out.split_at_mut(width / 2);
            for (g, group) in x.chunks_exact(MAIN_GROUP).enumerate() {
                let amax = finite_amax(group.iter().copied());
                scales[g] =
                    if amax.is_nan() { E4M3_NAN } else { e4m3_encode(amax.max(MAIN_FLOOR) / E2M1_MAX) };
                let bytes = &mut values[g * MAIN_GROUP / 2..(g + 1) * MAIN_GROUP / 2];
                encode_e2m1(group, e4m3_decode(scales[g]), bytes);
            }
        }
        RowFormat::Fp4Index => {
            let (values, scales) = out.split_at_mut(width / 2);
            for (g, group) in x.chunks_exact(GROUP).enumerate() {
                let (code, scale) = e8m0_scale(finite_amax(group.iter().copied()), INDEX_FLOOR, FP4_STEP);
                scales[g] = code;
                encode_e2m1(group, scale, &mut values[g * GROUP / 2..(g + 1) * GROUP / 2]);
            }
        }
    }
}

/// Reads a row that [`encode_row`] wrote; `out.len()` is its width.
///
/// # Panics
/// If the lengths do not fit each other.
pub fn decode_row(format: RowFormat, bytes: &[u8], out: &mut [f32]) {
    assert_row(format, out.len(), bytes.len());
    let width = out.len();
    match format {
        RowFormat::F32 => {
            for (v, bytes) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *v = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            }
        }
        RowFormat::Fp8 => {
            let (values, scales) = bytes.split_at(width);
            let groups = out.chunks_exact_mut(GROUP).zip(values.chunks_exact(GROUP));
            for ((group, codes), &scale) in groups.zip(scales) {
                let scale = e8m0_decode(scale);
                for (v, &code) in group.iter_mut().zip(codes) {
                    *v = e4m3_decode(code) * scale;
                }
            }
        }
        RowFormat::Fp4Main | RowFormat::Fp4Index => {
            let (values, scales) = bytes.split_at(width / 2);
            let size = format.group();
            let groups = out.chunks_exact_mut(size).zip(values.chunks_exact(size / 2));
            for ((group, codes), &scale) in groups.zip(scales) {
                let scale = match format {
                    RowFormat::Fp4Main => e4m3_decode(scale),
                    _ => e8m0_decode(scale),
                };
                decode_e2m1(codes, scale, group);
            }
        }
    }
}

/// Unpacks E2M1 codes and multiplies by `scale`.
pub(super) fn decode_e2m1(codes: &[u8], scale: f32, out: &mut [f32]) {
    for (pair, &byte) in out.chunks_exact_mut(2).zip(codes) {
        pair[0] = e2m1_decode(byte) * scale;
        pair[1] = e2m1_decode(byte >> 4) * scale;
    }
}

/// Rounds a row to `format` and back: what [`encode_row`] followed by [`decode_row`] gives, without memory of its
/// own.
///
/// # Panics
/// If `x.len()` is not a multiple of [`RowFormat::group`].
pub fn quantize_row(format: RowFormat, x: &mut [f32]) {
    // The largest group, encoded: values and a scale.
    let mut bytes = [0; GROUP + 1];
    let size = format.group();
    assert!(x.len().is_multiple_of(size), "{} channels in groups of {size}", x.len());
    if format == RowFormat::F32 {
        return;
    }
    let bytes = &mut bytes[..format.row_bytes(size)];
    for group in x.chunks_exact_mut(size) {
        encode_row(format, group, bytes);
        decode_row(format, bytes, group);
    }
}

fn assert_row(format: RowFormat, width: usize, bytes: usize) {
    let size = format.group();
    assert!(width.is_multiple_of(size), "{width} channels in groups of {size}");
    assert_eq!(bytes, format.row_bytes(width), "bytes of a {format:?} row of {width} channels");
}
