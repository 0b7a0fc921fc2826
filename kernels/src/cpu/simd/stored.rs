//! The stored formats as types, so that each kernel is compiled for one of them.

#![allow(unsafe_code)]

use super::decode::{Decode, FP4_TABLES};

/// How a group of 32 columns is stored and decoded.
pub(crate) trait Stored {
    /// Bytes of a group.
    const GROUP_BYTES: usize;
    /// Whether groups have scale bytes.
    const SCALED: bool;
    /// Whether a NaN needs a look at [`Decode::saw_nan`]; else it comes out by itself.
    const HAS_NAN: bool;
    /// Whether rows of a step are decoded together and not one by one.
    const TOGETHER: bool;
    /// The same format where all rows of a step have the same scales.
    type OneScale: Stored;

    /// Group `g` of `O` rows as even and odd columns. Its values are at `p`, its scale bytes at `scales + g`.
    ///
    /// # Safety
    /// `p` point to whole groups, `scales` to the rows' scales if the format is [`Stored::SCALED`].
    unsafe fn rows<L: Decode, const O: usize>(
        p: [*const u8; O],
        scales: [*const u8; O],
        g: usize,
        seen: &mut [L::Seen; O],
    ) -> [(L, L); O];
}

/// float32.
pub(crate) struct F32;
/// bfloat16.
pub(crate) struct Bf16;
/// E4M3 with E8M0 scales, per block or per row.
pub(crate) struct Fp8;
/// The same, rows of one block: the scales of the first row are those of all.
pub(crate) struct Fp8Block;
/// E2M1 with E8M0 scales.
pub(crate) struct Fp4;

impl Stored for F32 {
    const GROUP_BYTES: usize = 128;
    const SCALED: bool = false;
    const HAS_NAN: bool = false;
    const TOGETHER: bool = false;
    type OneScale = Self;

    #[inline(always)]
    unsafe fn rows<L: Decode, const O: usize>(
        p: [*const u8; O],
        _: [*const u8; O],
        _: usize,
        _: &mut [L::Seen; O],
    ) -> [(L, L); O] {
        let mut out = [(L::zero(), L::zero()); O];
        for i in 0..O {
            // SAFETY: the caller's promise.
            out[i] = unsafe { L::f32(p[i]) };
        }
        out
    }
}

impl Stored for Bf16 {
    const GROUP_BYTES: usize = 64;
    const SCALED: bool = false;
    const HAS_NAN: bool = false;
    const TOGETHER: bool = false;
    type OneScale = Self;

    #[inline(always)]
    unsafe fn rows<L: Decode, const O: usize>(
        p: [*const u8; O],
        _: [*const u8; O],
        _: usize,
        _: &mut [L::Seen; O],
    ) -> [(L, L); O] {
        let mut out = [(L::zero(), L::zero()); O];
        for i in 0..O {
            // SAFETY: the caller's promise.
            out[i] = unsafe { L::bf16(p[i]) };
        }
        out
    }
}

impl Stored for Fp8 {
    const GROUP_BYTES: usize = 32;
    const SCALED: bool = true;
    const HAS_NAN: bool = true;
    const TOGETHER: bool = false;
    type OneScale = Fp8Block;

    #[inline(always)]
    unsafe fn rows<L: Decode, const O: usize>(
        p: [*const u8; O],
        scales: [*const u8; O],
        g: usize,
        seen: &mut [L::Seen; O],
    ) -> [(L, L); O] {
        let mut out = [(L::zero(), L::zero()); O];
        for i in 0..O {
            let mut of_row = [seen[i]];
            // SAFETY: the caller's promise.
            let [row] = unsafe { L::fp8_rows([p[i]], *scales[i].add(g), &mut of_row) };
            (out[i], seen[i]) = (row, of_row[0]);
        }
        out
    }
}

impl Stored for Fp8Block {
    const GROUP_BYTES: usize = 32;
    const SCALED: bool = true;
    const HAS_NAN: bool = true;
    const TOGETHER: bool = true;
    type OneScale = Self;

    #[inline(always)]
    unsafe fn rows<L: Decode, const O: usize>(
        p: [*const u8; O],
        scales: [*const u8; O],
        g: usize,
        seen: &mut [L::Seen; O],
    ) -> [(L, L); O] {
        // SAFETY: the caller's promise.
        unsafe { L::fp8_rows(p, *scales[0].add(g), seen) }
    }
}

impl Stored for Fp4 {
    const GROUP_BYTES: usize = 16;
    const SCALED: bool = true;
    const HAS_NAN: bool = false;
    const TOGETHER: bool = false;
    type OneScale = Self;

    #[inline(always)]
    unsafe fn rows<L: Decode, const O: usize>(
        p: [*const u8; O],
        scales: [*const u8; O],
        g: usize,
        _: &mut [L::Seen; O],
    ) -> [(L, L); O] {
        let mut out = [(L::zero(), L::zero()); O];
        for i in 0..O {
            // SAFETY: the caller's promise.
            out[i] = unsafe { L::fp4_table(p[i], &FP4_TABLES.0[usize::from(*scales[i].add(g))]) };
        }
        out
    }
}
