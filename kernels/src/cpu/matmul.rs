//! `y = x W^T` for weights in their stored format.
//!
//! A task is some output rows for all inputs. Which kernel computes them depends on the number of inputs, the bits
//! do not.

use super::Cpu;
use super::pool::{AlignedBuf, DisjointSlice, SharedScratch};
use super::simd::codec;
use super::simd::product;
use super::simd::weights::{Block, Inputs, deinterleave};
use crate::formats::{RowFormat, WeightFormat, decode_weight_row};
use crate::host::HostWeight;
use crate::mapped::ByteView;

/// Stored bytes that make a task worth its start.
const TASK_BYTES: usize = 96 << 10;
/// Bytes of inputs that a last-level cache holds even if others use it too.
const PANEL_BYTES: usize = 4 << 20;
/// Stored bytes below which a task is not worth another thread, with one input.
const LEAST_BYTES: usize = 24 << 10;
/// Bytes of a piece that a second-level cache holds next to some inputs.
const CACHE_BYTES: usize = 384 << 10;

impl Cpu {
    /// See [`crate::Backend::matmul`].
    pub(crate) fn matmul_rows(&self, w: &HostWeight, x: &[f32], rows: usize, y: &mut [f32]) {
        self.matmul_blocks(w, 1, x, rows, y);
    }

    /// See [`crate::Backend::matmul_grouped`]; with one group, [`crate::Backend::matmul`].
    pub(crate) fn matmul_blocks(&self, w: &HostWeight, groups: usize, x: &[f32], rows: usize, y: &mut [f32]) {
        assert!(groups > 0 && w.rows.is_multiple_of(groups), "{} rows in {groups} groups", w.rows);
        let (outs, cols) = (w.rows / groups, w.cols);
        let x = &x[..rows * groups * cols];
        let y = &mut y[..rows * w.rows];
        if y.is_empty() {
            return;
        }
        // Row r's part for group g is input row r * groups + g.
        let mut inputs = SharedScratch::hold(&self.shared.inputs);
        let x = self.deinterleave_rows(x, rows * groups, cols, None, &mut inputs);
        let mut picks = SharedScratch::hold(&self.shared.picks);
        picks.clear();
        picks.extend((0..groups).flat_map(|g| (0..rows).map(move |r| (r * groups + g) as u32)));

        // So many inputs at a time that a last-level cache keeps them.
        let panel = (PANEL_BYTES / (4 * cols).max(1)).next_multiple_of(4).max(4);
        let panel = rows.div_ceil(rows.div_ceil(panel)).next_multiple_of(4);
        let out = DisjointSlice::new(y);
        for from in (0..rows).step_by(panel) {
            let some = panel.min(rows - from);
            let height = self.piece_height(&Block::of(w), outs, some);
            let chunks = outs.div_ceil(height);
            self.pool.run(groups * chunks, &|task, thread| {
                let (group, begin) = (task / chunks, task % chunks * height);
                let count = height.min(outs - begin);
                let picks = &picks[group * rows + from..][..some];
                let first = group * outs + begin;
                let mut scratch = self.scratch.of(thread);
                let len = (some * count).next_multiple_of(16);
                let more = product::scratch_len(self.level, &Block::of(w), count, some);
                let (part, more) = scratch.get(len + more).split_at_mut(len);
                self.piece(w, first, count, &x, picks, &[], more, part);
                for (row, part) in part.chunks_exact(count).take(some).enumerate() {
                    out.claim((from + row) * w.rows + first, count).copy_from_slice(part);
                }
            });
        }
    }

    /// Output rows of a task: whole FP8 blocks, as many as are worth a task; fewer if that leaves threads without
    /// work, or if they would not stay in a second-level cache until the last input.
    fn piece_height(&self, w: &Block<'_>, outs: usize, inputs: usize) -> usize {
        let row_bytes = w.row_bytes().max(1);
        let worth = TASK_BYTES.div_ceil(row_bytes).next_multiple_of(32);
        let fair = (outs / (4 * self.threads())).next_multiple_of(8);
        // Below this, handing a task to a thread takes as long as doing it.
        let least = (LEAST_BYTES / (1 + inputs / 4)).div_ceil(row_bytes).next_multiple_of(8);
        let kept = if inputs <= product::max_inputs(self.level) {
            worth
        } else {
            // As BF16, which some formats are rewritten to.
            CACHE_BYTES / row_bytes.max(2 * w.cols()) / 8 * 8
        };
        fair.max(least).min(worth).min(kept).max(8)
    }

    /// Rows of inputs in the layout of the kernels, rounded to `format` before if there is one.
    pub(super) fn deinterleave_rows<'a>(
        &self,
        x: &[f32],
        rows: usize,
        cols: usize,
        format: Option<RowFormat>,
        buffer: &'a mut AlignedBuf,
    ) -> Inputs<'a> {
        let stride = Inputs::stride(cols);
        let data = buffer.get(rows * stride);
        if cols > 0 {
            // A few rows are copied faster than a thread wakes up.
            let rows_per_task = if rows * cols <= 1 << 16 { rows.max(1) } else { 8 };
            self.pool.run_pieces(data, rows_per_task * stride, &|task, thread, part| {
                let x = x[task * rows_per_task * cols..].chunks_exact(cols);
                for (row, x) in part.chunks_exact_mut(stride).zip(x) {
                    match format {
                        None => deinterleave(self.level, x, row),
                        Some(format) => {
                            let mut scratch = self.scratch.of(thread);
                            let rounded = scratch.get(cols);
                            rounded.copy_from_slice(x);
                            codec::quantize_row(self.level, format, rounded);
                            deinterleave(self.level, rounded, row);
                        }
                    }
                }
            });
        }
        Inputs::new(data, rows, cols)
    }

    /// `out[i, o] = x[picks[i]] . w[first + o]` for `o < count`, out `[picks.len(), count]`.
    ///
    /// `next` are the bytes that this thread will want after these rows; empty if they follow. `scratch` has
    /// [`product::scratch_len`] floats.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn piece(
        &self,
        w: &HostWeight,
        first: usize,
        count: usize,
        x: &Inputs<'_>,
        picks: &[u32],
        next: &[u8],
        scratch: &mut [f32],
        out: &mut [f32],
    ) {
        let block = Block::of(w);
        if block.has_plain_scales(first, count) {
            product::multiply(self.level, &block, first, count, x, picks, next, scratch, out);
        } else {
            self.long_way(w, first, count, x, picks, out);
        }
    }

    /// For scales that the decoders of FP8 cannot take: decodes row by row through [`decode_weight_row`]. No
    /// trained weight is near 2^120, so this may allocate.
    fn long_way(
        &self,
        w: &HostWeight,
        first: usize,
        count: usize,
        x: &Inputs<'_>,
        picks: &[u32],
        out: &mut [f32],
    ) {
        let mut values = vec![0.0; w.cols];
        for o in 0..count {
            decode_weight_row(w, first + o, &mut values);
            let row = HostWeight {
                format: WeightFormat::F32,
                rows: 1,
                cols: w.cols,
                data: ByteView::owned(values.iter().flat_map(|v| v.to_le_bytes()).collect()),
                scales: ByteView::default(),
            };
            let row = Block::of(&row);
            for (t, pick) in picks.iter().enumerate() {
                let mut sum = [0.0];
                product::multiply(self.level, &row, 0, 1, x, &[*pick], &[], &mut [], &mut sum);
                out[t * count + o] = sum[0];
            }
        }
    }
}

#[cfg(test)]
#[path = "matmul_tests.rs"]
mod tests;
