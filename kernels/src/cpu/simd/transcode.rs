//! Rows of FP8 and FP4 rewritten as BF16, for products with many inputs.
//!
//! Exact: a value has at most four significant bits, and BF16 has the exponents of float32 (at its lower end the
//! scales are checked, see [`Block::has_plain_scales`]).

#![allow(unsafe_code)]

use super::decode::{Decode, GROUP};
use super::dispatch_fn;
use super::lanes::LANES;
use super::stored::{Bf16, F32, Fp4, Fp8, Stored};
use super::weights::Block;
use crate::formats::WeightFormat;

/// Rows between rewriting one and asking the memory for it.
const AHEAD: usize = 4;

/// What [`transcode`] has written: `rows` rows of BF16 in whole groups.
pub(super) fn bf16_block(tile: &[f32], rows: usize) -> Block<'_> {
    // SAFETY: the same memory, as bytes.
    let bytes = unsafe { std::slice::from_raw_parts(tile.as_ptr().cast::<u8>(), size_of_val(tile)) };
    Block::new(WeightFormat::Bf16, rows, tile.len() / rows.max(1) * 2, bytes, &[])
}

#[inline(always)]
fn transcode_lanes<L: Decode>(w: &Block<'_>, first: usize, count: usize, tile: &mut [f32]) {
    match w.format {
        WeightFormat::F32 => rewrite::<L, F32>(w, first, count, tile),
        WeightFormat::Bf16 => rewrite::<L, Bf16>(w, first, count, tile),
        WeightFormat::Fp8 | WeightFormat::Fp8Rows => rewrite::<L, Fp8>(w, first, count, tile),
        WeightFormat::Fp4 => rewrite::<L, Fp4>(w, first, count, tile),
    }
}

dispatch_fn! {
    /// Rows `first .. first + count` as BF16, two in a float of `tile` `[count, groups * 16]`.
    pub(super) fn transcode(w: &Block<'_>, first: usize, count: usize, tile: &mut [f32]) = transcode_lanes;
}

#[inline(always)]
fn rewrite<L: Decode, F: Stored>(w: &Block<'_>, first: usize, count: usize, tile: &mut [f32]) {
    let mut o = 0;
    while o < count {
        let row = first + o;
        let tile = &mut tile[o * w.groups() * LANES..];
        // Two rows of a block of FP8 share their scales, and the work of decoding.
        if o + 1 < count && w.scale_row(row) == w.scale_row(row + 1) {
            rewrite_rows::<L, F::OneScale, 2>(w, row, tile);
            o += 2;
        } else {
            rewrite_rows::<L, F, 1>(w, row, tile);
            o += 1;
        }
    }
}

#[inline(always)]
fn rewrite_rows<L: Decode, F: Stored, const O: usize>(w: &Block<'_>, first: usize, tile: &mut [f32]) {
    let (groups, full) = (w.groups(), w.cols / GROUP);
    let tile = &mut tile[..O * groups * LANES];
    let mut bytes = [w.data; O];
    let mut scales = [w.scales.as_ptr(); O];
    for i in 0..O {
        let row = first + i;
        bytes[i] = &w.data[row * w.row_bytes()..(row + 1) * w.row_bytes()];
        if F::SCALED {
            scales[i] = w.scales[w.scale_row(row) * groups..][..groups].as_ptr();
        }
    }
    let mut seen = [L::nothing_seen(); O];
    for g in 0..full {
        let mut p = [w.data.as_ptr(); O];
        for i in 0..O {
            p[i] = bytes[i][g * F::GROUP_BYTES..].as_ptr();
            L::prefetch(p[i].wrapping_add(AHEAD * w.row_bytes()));
        }
        // SAFETY: `p` point to whole groups of the rows, and group `g` of each row has its scale.
        let values = unsafe { F::rows::<L, O>(p, scales, g, &mut seen) };
        for i in 0..O {
            L::pack_bf16(values[i].0, values[i].1).store(&mut tile[(i * groups + g) * LANES..]);
        }
    }
    if full < groups {
        let mut padded = [[0u8; 4 * GROUP]; O];
        let mut p = [w.data.as_ptr(); O];
        for i in 0..O {
            let rest = &bytes[i][full * F::GROUP_BYTES..];
            padded[i][..rest.len()].copy_from_slice(rest);
            p[i] = padded[i].as_ptr();
        }
        // SAFETY: `padded` holds whole groups, and the last group of each row has its scale.
        let values = unsafe { F::rows::<L, O>(p, scales, full, &mut seen) };
        for i in 0..O {
            L::pack_bf16(values[i].0, values[i].1).store(&mut tile[(i * groups + full) * LANES..]);
        }
    }
    for i in 0..O {
        if F::HAS_NAN && L::saw_nan(seen[i]) {
            // One NaN makes the row's sums NaN.
            tile[i * groups * LANES] = f32::NAN;
        }
    }
}
