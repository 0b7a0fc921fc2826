//! Rows in cache formats, and operations that move rows.

use super::Cpu;
use super::pool::DisjointSlice;
use super::simd::{codec, vector};
use super::vector::{F32, part, part_mut, rows_per_task};
use crate::formats::{self, GROUP, RowFormat, WeightFormat};
use crate::host::{HostStore, HostWeight};

/// `dst[dst_rows[i]] = encode(x[i])`. A row named twice keeps the later value.
pub(super) fn store_rows(cpu: &Cpu, x: &F32, dst: &mut HostStore, dst_rows: &[u32]) {
    let (format, width, level) = (dst.format, dst.width, cpu.level);
    let x = part(x, dst_rows.len() * width, "x");
    // Rows may repeat, so they are not spread over threads; encoding is a small part of any step.
    for (i, &row) in dst_rows.iter().enumerate() {
        codec::encode_row(level, format, &x[i * width..(i + 1) * width], dst.row_mut(row as usize));
    }
}

/// `out[i] = decode(src[src_rows[i]])`.
pub(super) fn load_rows(cpu: &Cpu, src: &HostStore, src_rows: &[u32], out: &mut F32) {
    let (width, level) = (src.width, cpu.level);
    let out = part_mut(out, src_rows.len() * width, "out");
    let per_task = rows_per_task(cpu, src_rows.len(), width);
    cpu.pool.run_pieces(out, (per_task * width).max(1), &|task, _, out| {
        for (i, out) in out.chunks_exact_mut(width).enumerate() {
            let row = src_rows[task * per_task + i] as usize;
            codec::decode_row(level, src.format, src.row(row), out);
        }
    });
}

/// `dst[dst_rows[i]] = src[src_rows[i]]`, stored bytes.
pub(super) fn copy_rows(src: &HostStore, src_rows: &[u32], dst: &mut HostStore, dst_rows: &[u32]) {
    assert_eq!((src.format, src.width), (dst.format, dst.width), "copied rows have one format and width");
    assert_eq!(src_rows.len(), dst_rows.len(), "as many rows to write as to read");
    for (&from, &to) in src_rows.iter().zip(dst_rows) {
        dst.row_mut(to as usize).copy_from_slice(src.row(from as usize));
    }
}

/// Appends the stored bytes of `rows`.
pub(super) fn export_rows(src: &HostStore, rows: &[u32], out: &mut Vec<u8>) {
    out.reserve(rows.len() * src.row_bytes);
    for &row in rows {
        out.extend_from_slice(src.row(row as usize));
    }
}

/// The inverse of [`export_rows`].
pub(super) fn import_rows(dst: &mut HostStore, rows: &[u32], bytes: &[u8]) {
    let size = dst.row_bytes;
    assert_eq!(bytes.len(), rows.len() * size, "bytes of {} imported rows", rows.len());
    for (i, &row) in rows.iter().enumerate() {
        dst.row_mut(row as usize).copy_from_slice(&bytes[i * size..(i + 1) * size]);
    }
}

/// `x[r] = decode(encode(x[r]))`.
pub(super) fn fake_quantize(cpu: &Cpu, x: &mut F32, rows: usize, width: usize, format: RowFormat) {
    let level = cpu.level;
    let x = part_mut(x, rows * width, "x");
    let per_task = rows_per_task(cpu, rows, width);
    cpu.pool.run_pieces(x, (per_task * width).max(1), &|_, _, x| {
        for row in x.chunks_exact_mut(width) {
            codec::quantize_row(level, format, row);
        }
    });
}

/// `out[i] = table[ids[i]]`, dequantised.
pub(super) fn gather(cpu: &Cpu, table: &HostWeight, ids: &[u32], out: &mut F32) {
    let width = table.cols;
    let out = part_mut(out, ids.len() * width, "out");
    // A row of a table is a cache miss or a page fault: worth a thread sooner than its arithmetic is.
    let per_task = rows_per_task(cpu, ids.len(), 4 * width);
    cpu.pool.run_pieces(out, (per_task * width).max(1), &|task, _, out| {
        for (i, out) in out.chunks_exact_mut(width).enumerate() {
            decode_weight_row(cpu, table, ids[task * per_task + i] as usize, out);
        }
    });
}

/// [`formats::decode_weight_row`], vectorised where it is worth it.
fn decode_weight_row(cpu: &Cpu, table: &HostWeight, row: usize, out: &mut [f32]) {
    assert!(row < table.rows, "row {row} of a table of {} rows", table.rows);
    let cols = table.cols;
    if cols.is_multiple_of(GROUP) {
        let stride = table.format.data_bytes(1, cols);
        let groups = cols / GROUP;
        let scales = match table.format {
            WeightFormat::F32 | WeightFormat::Bf16 => &[],
            WeightFormat::Fp8 => &table.scales[row / GROUP * groups..][..groups],
            WeightFormat::Fp8Rows | WeightFormat::Fp4 => &table.scales[row * groups..][..groups],
        };
        let data = &table.data[row * stride..][..stride];
        if codec::decode_weight(cpu.level, table.format, data, scales, out) {
            return;
        }
    }
    formats::decode_weight_row(table, row, out);
}

/// `dst[i] = src[ids[i]]`.
pub(super) fn take_rows(src: &F32, width: usize, ids: &[u32], dst: &mut F32) {
    let dst = part_mut(dst, ids.len() * width, "dst");
    for (dst, &id) in dst.chunks_exact_mut(width.max(1)).zip(ids) {
        let from = id as usize * width;
        dst.copy_from_slice(&src.0[from..from + width]);
    }
}

/// `out[r, c, :] = x[r, :]`.
pub(super) fn broadcast_copies(x: &F32, rows: usize, copies: usize, width: usize, out: &mut F32) {
    let x = part(x, rows * width, "x");
    let out = part_mut(out, rows * copies * width, "out");
    for (i, out) in out.chunks_exact_mut(width.max(1)).enumerate() {
        let r = i / copies;
        out.copy_from_slice(&x[r * width..(r + 1) * width]);
    }
}

/// `out[r, at + i] = (sum_c stream[r, c, i]) / copies`.
#[allow(clippy::too_many_arguments)]
pub(super) fn mean_copies(
    cpu: &Cpu,
    stream: &F32,
    rows: usize,
    copies: usize,
    width: usize,
    out: &mut F32,
    stride: usize,
    at: usize,
) {
    assert!(at + width <= stride, "columns {at} .. {} of {stride}", at + width);
    let stream = part(stream, rows * copies * width, "stream");
    let out = DisjointSlice::new(part_mut(out, rows * stride, "out"));
    let per_task = rows_per_task(cpu, rows, copies * width);
    cpu.pool.run(rows.div_ceil(per_task), &|task, _| {
        for r in task * per_task..rows.min((task + 1) * per_task) {
            let row = &stream[r * copies * width..(r + 1) * copies * width];
            vector::mean_row(cpu.level, row, copies, out.claim(r * stride + at, width));
        }
    });
}
