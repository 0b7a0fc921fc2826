//! Products of stored weights and rows of inputs.
//!
//! Weights are decoded in registers. A kernel takes a few output rows and up to four inputs at a time, so that both
//! are loaded once for several chains of multiply-adds and enough chains are in flight. Lanes run along the
//! columns, and a chain goes over all of them, whatever the number of rows, so it is always the same chain. Where
//! fewer output rows are left than a kernel takes, the last one is computed several times and stored once.
//!
//! A piece of the weight is as high as a second-level cache allows: it comes from memory for the first inputs and
//! from there for all others. If they are many, formats that cost much to decode are rewritten first, as BF16,
//! which is exact for them (see [`super::transcode`]).

#![allow(unsafe_code)]

use super::decode::{Decode, GROUP};
use super::dispatch_fn;
use super::lanes::LANES;
use super::stored::{Bf16, F32, Fp4, Fp8, Stored};
use super::transcode::{bf16_block, transcode};
use super::weights::{Block, Inputs};
use crate::cpu::SimdLevel;
use crate::formats::WeightFormat;

/// The memory is asked for the bytes of this many steps later: long enough for it to answer, short enough for the
/// answer to be still in the cache.
const AHEAD_STEPS: usize = 2;

/// Most inputs of a kernel.
pub(crate) fn max_inputs(level: SimdLevel) -> usize {
    if level == SimdLevel::Avx512 { 4 } else { 2 }
}

/// Whether the rows are rewritten for this number of inputs.
fn rewrites(level: SimdLevel, format: WeightFormat, inputs: usize) -> bool {
    match (level, format) {
        (_, WeightFormat::F32 | WeightFormat::Bf16) => false,
        (SimdLevel::Avx512, WeightFormat::Fp4) => false,
        (SimdLevel::Avx512, _) => inputs > 16,
        _ => inputs > 4,
    }
}

/// Floats of scratch that [`multiply`] needs.
pub(crate) fn scratch_len(level: SimdLevel, w: &Block<'_>, count: usize, inputs: usize) -> usize {
    if rewrites(level, w.format, inputs) { count * w.groups() * LANES } else { 0 }
}

/// `out[i, o] = x[picks[i]] . w[first + o]` for `o < count`, out `[picks.len(), count]`.
///
/// `next` are the bytes that will be wanted after the last row, if that is known; else they are taken to follow.
/// `scratch` has [`scratch_len`] floats; the scales are plain ([`Block::has_plain_scales`]).
#[allow(clippy::too_many_arguments)]
pub(crate) fn multiply(
    level: SimdLevel,
    w: &Block<'_>,
    first: usize,
    count: usize,
    x: &Inputs<'_>,
    picks: &[u32],
    next: &[u8],
    scratch: &mut [f32],
    out: &mut [f32],
) {
    assert!(first + count <= w.rows);
    let row_bytes = w.row_bytes();
    let group_bytes = w.format.data_bytes(1, GROUP);
    if rewrites(level, w.format, picks.len()) {
        let tile = &mut scratch[..count * w.groups() * LANES];
        transcode(level, w, first, count, tile);
        let bytes = if next.is_empty() { w.rows_from(first + count) } else { next };
        let ahead = Ahead { bytes, row_bytes, group_bytes, steps: 0, next: &[] };
        passes(level, &bf16_block(tile, count), 0, count, x, picks, &ahead, out);
    } else {
        let ahead = Ahead { bytes: w.rows_from(first), row_bytes, group_bytes, steps: AHEAD_STEPS, next };
        passes(level, w, first, count, x, picks, &ahead, out);
    }
}

/// Bytes to fetch from memory while others are multiplied: with output row `o` those of row `o + steps * height of
/// the kernel` of `bytes`; after `count` rows, of `next` if there is any. None of them need exist.
struct Ahead<'a> {
    bytes: &'a [u8],
    row_bytes: usize,
    group_bytes: usize,
    steps: usize,
    next: &'a [u8],
}

/// All inputs, a few at a time.
#[allow(clippy::too_many_arguments)]
fn passes(
    level: SimdLevel,
    w: &Block<'_>,
    first: usize,
    count: usize,
    x: &Inputs<'_>,
    picks: &[u32],
    ahead: &Ahead<'_>,
    out: &mut [f32],
) {
    let kernels = match w.format {
        WeightFormat::F32 => [f32_1, f32_2, f32_3, f32_4],
        WeightFormat::Bf16 => [bf16_1, bf16_2, bf16_3, bf16_4],
        WeightFormat::Fp8 | WeightFormat::Fp8Rows => [fp8_1, fp8_2, fp8_3, fp8_4],
        WeightFormat::Fp4 => [fp4_1, fp4_2, fp4_3, fp4_4],
    };
    let most = max_inputs(level);
    let mut at = 0;
    for (some, out) in picks.chunks(most).zip(out.chunks_mut((most * count).max(1))) {
        at += some.len();
        // After the last inputs, the next piece of the weight begins with the first ones.
        let soon = if at < picks.len() { &picks[at..] } else { picks };
        kernels[some.len() - 1](level, w, first, count, x, some, soon, ahead, out);
    }
}

/// One kernel per format and number of rows.
macro_rules! kernels {
    ($($name:ident, $body:ident: $format:ty, $rows:literal;)*) => {$(
        #[allow(clippy::too_many_arguments)]
        #[inline(always)]
        fn $body<L: Decode>(
            w: &Block<'_>, first: usize, count: usize, x: &Inputs<'_>, picks: &[u32], soon: &[u32],
            ahead: &Ahead<'_>, out: &mut [f32],
        ) {
            // As many chains as the registers hold, next to decoded weights and inputs.
            match ($rows, L::REGISTERS >= 32) {
                (1 | 2, true) => body::<L, $format, $rows, 8>(w, first, count, x, picks, soon, ahead, out),
                (_, true) => body::<L, $format, $rows, 4>(w, first, count, x, picks, soon, ahead, out),
                (1, false) => body::<L, $format, $rows, 4>(w, first, count, x, picks, soon, ahead, out),
                (2, false) => body::<L, $format, $rows, 3>(w, first, count, x, picks, soon, ahead, out),
                (_, false) => unreachable!("at most two inputs, see max_inputs"),
            }
        }
        dispatch_fn! {
            fn $name(
                w: &Block<'_>, first: usize, count: usize, x: &Inputs<'_>, picks: &[u32], soon: &[u32],
                ahead: &Ahead<'_>, out: &mut [f32],
            ) = $body;
        }
    )*};
}

kernels! {
    f32_1, f32_1_lanes: F32, 1;
    f32_2, f32_2_lanes: F32, 2;
    f32_3, f32_3_lanes: F32, 3;
    f32_4, f32_4_lanes: F32, 4;
    bf16_1, bf16_1_lanes: Bf16, 1;
    bf16_2, bf16_2_lanes: Bf16, 2;
    bf16_3, bf16_3_lanes: Bf16, 3;
    bf16_4, bf16_4_lanes: Bf16, 4;
    fp8_1, fp8_1_lanes: Fp8, 1;
    fp8_2, fp8_2_lanes: Fp8, 2;
    fp8_3, fp8_3_lanes: Fp8, 3;
    fp8_4, fp8_4_lanes: Fp8, 4;
    fp4_1, fp4_1_lanes: Fp4, 1;
    fp4_2, fp4_2_lanes: Fp4, 2;
    fp4_3, fp4_3_lanes: Fp4, 3;
    fp4_4, fp4_4_lanes: Fp4, 4;
}

/// All output rows, `O` at a time, for `T` inputs.
#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn body<L: Decode, F: Stored, const T: usize, const O: usize>(
    w: &Block<'_>,
    first: usize,
    count: usize,
    x: &Inputs<'_>,
    picks: &[u32],
    soon: &[u32],
    ahead: &Ahead<'_>,
    out: &mut [f32],
) {
    assert!(picks.len() == T && first + count <= w.rows && out.len() >= T * count);
    assert!(x.stride >= w.groups() * GROUP);
    let mut inputs = [x.data.as_ptr(); T];
    for t in 0..T {
        let row = picks[t] as usize;
        assert!(row < x.rows);
        inputs[t] = x.data[row * x.stride..].as_ptr();
    }
    let mut step = 0;
    let mut o = 0;
    while o < count {
        let far = o + ahead.steps * O;
        let fetch_weights = if far < count || ahead.next.is_empty() {
            ahead.bytes.as_ptr().wrapping_add(far * ahead.row_bytes)
        } else {
            ahead.next.as_ptr().wrapping_add((far - count) * ahead.row_bytes)
        };
        // With each step half of an input that comes next, until all are there.
        let fetch_input = match soon.get(step / 2) {
            Some(&row) if step / 2 < T => row as usize * x.stride + step % 2 * w.groups() * LANES,
            _ => picks[0] as usize * x.stride,
        };
        let mut at = Place {
            rows: [w.data.as_ptr(); O],
            scales: [w.scales.as_ptr(); O],
            inputs,
            fetch_weights,
            row_bytes: ahead.row_bytes,
            group_bytes: ahead.group_bytes,
            fetch_input: x.data.as_ptr().wrapping_add(fetch_input),
        };
        // Rows of one block of FP8, which is 32 rows high.
        let mut one_scale = true;
        for i in 0..O {
            let row = first + (o + i).min(count - 1);
            at.rows[i] = w.data[row * w.row_bytes()..].as_ptr();
            if F::SCALED {
                at.scales[i] = w.scales[w.scale_row(row) * w.groups()..].as_ptr();
            }
            one_scale &= at.scales[i] == at.scales[0];
        }
        // SAFETY: each row has `cols` values and its scales, each input a value per (padded) column; asserted above
        // and by `Block::new`.
        let dots =
            unsafe { if one_scale { at.dots::<L, F::OneScale>(w.cols) } else { at.dots::<L, F>(w.cols) } };
        for i in 0..O.min(count - o) {
            for t in 0..T {
                out[t * count + o + i] = dots[i][t];
            }
        }
        step += 1;
        o += O;
    }
}

/// Where a step of the kernel reads: `O` rows of a weight and `T` inputs.
struct Place<const T: usize, const O: usize> {
    rows: [*const u8; O],
    scales: [*const u8; O],
    inputs: [*const f32; T],
    /// Bytes to ask for, and how far rows and groups are apart there.
    fetch_weights: *const u8,
    row_bytes: usize,
    group_bytes: usize,
    /// A cache line for each group.
    fetch_input: *const f32,
}

impl<const T: usize, const O: usize> Place<T, O> {
    /// The dot products in the fixed order. A NaN in FP8 makes all sums of its row NaN.
    ///
    /// # Safety
    /// `rows` point to `cols` stored values, `scales` to their scales as the format says, `inputs` to `cols`
    /// floats, rounded up to a whole group.
    #[inline(always)]
    unsafe fn dots<L: Decode, F: Stored>(&self, cols: usize) -> [[f32; T]; O] {
        let full = cols / GROUP;
        let mut acc = [[L::zero(); T]; O];
        let mut seen = [L::nothing_seen(); O];
        for g in 0..full {
            let mut at = self.rows;
            if T > 1 {
                L::prefetch(self.fetch_input.wrapping_add(g * LANES).cast());
            }
            for i in 0..O {
                L::prefetch(self.fetch_weights.wrapping_add(i * self.row_bytes + g * self.group_bytes));
                // SAFETY: group `g` is inside the row.
                at[i] = unsafe { self.rows[i].add(g * F::GROUP_BYTES) };
            }
            // SAFETY: group `g` is inside every row, its scales and every input.
            unsafe { self.group::<L, F>(at, g, &mut acc, &mut seen) };
        }
        if full * GROUP < cols {
            let mut padded = [[0u8; 4 * GROUP]; O];
            let mut at = self.rows;
            for i in 0..O {
                let bytes = F::GROUP_BYTES * (cols - full * GROUP) / GROUP;
                // SAFETY: the rest of the row is inside it, and shorter than a group.
                unsafe {
                    self.rows[i]
                        .add(full * F::GROUP_BYTES)
                        .copy_to_nonoverlapping(padded[i].as_mut_ptr(), bytes);
                }
                at[i] = padded[i].as_ptr();
            }
            // SAFETY: `padded` holds whole groups; scales and inputs have a last, padded group.
            unsafe { self.group::<L, F>(at, full, &mut acc, &mut seen) };
        }
        let mut out = sums(acc);
        for i in 0..O {
            if F::HAS_NAN && L::saw_nan(seen[i]) {
                out[i] = [f32::NAN; T];
            }
        }
        out
    }

    /// One group of all rows times the inputs.
    ///
    /// # Safety
    /// `at` point to whole groups; scales and inputs have group `g`.
    #[inline(always)]
    unsafe fn group<L: Decode, F: Stored>(
        &self,
        at: [*const u8; O],
        g: usize,
        acc: &mut [[L; T]; O],
        seen: &mut [L::Seen; O],
    ) {
        if F::TOGETHER && L::REGISTERS >= 32 {
            // SAFETY: passed on from the caller.
            let w = unsafe { F::rows::<L, O>(at, self.scales, g, seen) };
            for t in 0..T {
                // SAFETY: passed on from the caller.
                let (even, odd) = unsafe { input::<L>(self.inputs[t].add(g * GROUP)) };
                for i in 0..O {
                    acc[i][t] = even.fma(w[i].0, acc[i][t]);
                }
                for i in 0..O {
                    acc[i][t] = odd.fma(w[i].1, acc[i][t]);
                }
            }
            return;
        }
        for i in 0..O {
            let mut of_row = [seen[i]];
            // SAFETY: passed on from the caller.
            let [w] = unsafe { F::rows::<L, 1>([at[i]], [self.scales[i]], g, &mut of_row) };
            seen[i] = of_row[0];
            for t in 0..T {
                // SAFETY: passed on from the caller.
                let (even, odd) = unsafe { input::<L>(self.inputs[t].add(g * GROUP)) };
                acc[i][t] = odd.fma(w.1, even.fma(w.0, acc[i][t]));
            }
        }
    }
}

/// A group of an input.
///
/// # Safety
/// `p` points to 32 floats.
#[inline(always)]
unsafe fn input<L: Decode>(p: *const f32) -> (L, L) {
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_mut))]
    let mut nothing = 0usize;
    #[cfg(target_arch = "x86_64")]
    if L::REGISTERS < 32 {
        // The compiler would load an input once for all rows, find that there are not enough registers, and keep
        // it on the stack. It is better loaded again with each multiply-add, which costs nothing, so it must not
        // know that the places are the same.
        // SAFETY: no instruction at all.
        unsafe { std::arch::asm!("/* {0} */", inout(reg) nothing, options(nomem, nostack, preserves_flags)) };
    }
    // SAFETY: the caller's promise.
    unsafe { (L::load_ptr(p.add(nothing)), L::load_ptr(p.add(nothing + GROUP / 2))) }
}

/// The sums of all chains, at most sixteen.
#[inline(always)]
fn sums<L: Decode, const T: usize, const O: usize>(acc: [[L; T]; O]) -> [[f32; T]; O] {
    let mut out = [[0.0; T]; O];
    if L::REGISTERS < 32 {
        for i in 0..O {
            for t in 0..T {
                out[i][t] = acc[i][t].reduce_add();
            }
        }
        return out;
    }
    let mut all = [L::zero(); LANES];
    for i in 0..O {
        for t in 0..T {
            all[i * T + t] = acc[i][t];
        }
    }
    let all = L::reduce_add_16(all).to_array();
    for i in 0..O {
        for t in 0..T {
            out[i][t] = all[i * T + t];
        }
    }
    out
}
