//! What the matmul kernels read: a weight in its stored bytes, and inputs in the layout of a decoded group.

#![allow(unsafe_code)]

use super::decode::{Decode, FP8_PLAIN_SCALES, GROUP};
use super::dispatch_fn;
use crate::formats::WeightFormat;
use crate::host::HostWeight;

/// Rows of a weight in stored bytes; the lengths fit the shape.
#[derive(Clone, Copy)]
pub(crate) struct Block<'a> {
    pub(super) format: WeightFormat,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) data: &'a [u8],
    pub(super) scales: &'a [u8],
}

impl<'a> Block<'a> {
    /// All rows of a weight.
    pub(crate) fn of(w: &'a HostWeight) -> Self {
        Self::new(w.format, w.rows, w.cols, &w.data, &w.scales)
    }

    /// `[rows, cols]` of these bytes.
    ///
    /// # Panics
    /// If their number does not fit the shape: the kernels rely on it.
    pub(super) fn new(
        format: WeightFormat,
        rows: usize,
        cols: usize,
        data: &'a [u8],
        scales: &'a [u8],
    ) -> Self {
        assert_eq!(data.len(), format.data_bytes(rows, cols), "bytes of a {format} weight [{rows}, {cols}]");
        let (a, b) = format.scale_shape(rows, cols);
        assert_eq!(scales.len(), a * b, "scales of a {format} weight [{rows}, {cols}]");
        assert!(format != WeightFormat::Fp4 || cols.is_multiple_of(2), "an FP4 row of {cols} columns");
        Self { format, rows, cols, data, scales }
    }

    /// Input columns.
    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    /// Groups of 32 columns, the last may be short.
    pub(crate) fn groups(&self) -> usize {
        self.cols.div_ceil(GROUP)
    }

    /// Bytes of the values of one row.
    pub(crate) fn row_bytes(&self) -> usize {
        self.format.data_bytes(1, self.cols)
    }

    /// Bytes of the values of `row` and all rows after it.
    pub(crate) fn rows_from(&self, row: usize) -> &'a [u8] {
        &self.data[row * self.row_bytes()..]
    }

    /// Row of the scale matrix that belongs to `row`.
    #[inline(always)]
    pub(super) fn scale_row(&self, row: usize) -> usize {
        if self.format == WeightFormat::Fp8 { row / GROUP } else { row }
    }

    /// Whether the kernels decode the rows exactly: FP8 with a scale near the end of float32 (nothing a trained
    /// model has) takes the long way.
    pub(crate) fn has_plain_scales(&self, first: usize, count: usize) -> bool {
        if !matches!(self.format, WeightFormat::Fp8 | WeightFormat::Fp8Rows) || count == 0 {
            return true;
        }
        let range =
            self.scale_row(first) * self.groups()..(self.scale_row(first + count - 1) + 1) * self.groups();
        let scales = self.scales[range].iter();
        let (low, high) = scales.fold((u8::MAX, 0), |(low, high), &b| (b.min(low), b.max(high)));
        FP8_PLAIN_SCALES.contains(&low) && FP8_PLAIN_SCALES.contains(&high)
    }
}

/// Rows of inputs: of every group of 32 channels the even ones, then the odd ones; zeros after the last channel.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    pub(super) data: &'a [f32],
    pub(super) rows: usize,
    pub(super) stride: usize,
}

impl<'a> Inputs<'a> {
    /// Floats from one row of `cols` channels to the next: whole groups, and a cache line more, or rows of a
    /// power of two would all want the same lines of the cache.
    pub(crate) fn stride(cols: usize) -> usize {
        cols.next_multiple_of(GROUP) + GROUP / 2
    }

    /// Rows of `cols` channels that [`deinterleave`] has written.
    pub(crate) fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        let stride = Self::stride(cols);
        assert!(data.len() >= rows * stride, "{} floats for {rows} rows of {stride}", data.len());
        Self { data, rows, stride }
    }
}

#[inline(always)]
fn deinterleave_lanes<L: Decode>(x: &[f32], out: &mut [f32]) {
    let full = x.len() / GROUP * GROUP;
    let mut at = 0;
    while at < full {
        let group = &x[at..at + GROUP];
        // SAFETY: a group of 32 floats.
        let (even, odd) = unsafe { L::f32(group.as_ptr().cast()) };
        even.store(&mut out[at..]);
        odd.store(&mut out[at + GROUP / 2..]);
        at += GROUP;
    }
    if full < x.len() {
        let mut group = [0.0f32; GROUP];
        group[..x.len() - full].copy_from_slice(&x[full..]);
        // SAFETY: a group of 32 floats.
        let (even, odd) = unsafe { L::f32(group.as_ptr().cast()) };
        even.store(&mut out[full..]);
        odd.store(&mut out[full + GROUP / 2..]);
    }
}

dispatch_fn! {
    /// One row of inputs into the layout of [`Inputs`]; `out` has room for [`Inputs::stride`] floats.
    pub(crate) fn deinterleave(x: &[f32], out: &mut [f32]) = deinterleave_lanes;
}
