//! Rows in cache formats, and operations that move rows without computing. All but `mean_copies` are exact.

use super::{F32, part, part_mut};
use crate::formats::{self, RowFormat, decode_weight_row};
use crate::host::{HostStore, HostWeight};

/// `dst[dst_rows[i]] = encode(x[i])`, x `[dst_rows.len(), width]`. A row named twice keeps the later value.
pub(super) fn store_rows(x: &F32, dst: &mut HostStore, dst_rows: &[u32]) {
    let (format, width) = (dst.format, dst.width);
    let x = part(x, dst_rows.len() * width, "x");
    for (i, &row) in dst_rows.iter().enumerate() {
        formats::encode_row(format, &x[i * width..(i + 1) * width], dst.row_mut(row as usize));
    }
}

/// `out[i] = decode(src[src_rows[i]])`.
pub(super) fn load_rows(src: &HostStore, src_rows: &[u32], out: &mut F32) {
    let width = src.width;
    let out = part_mut(out, src_rows.len() * width, "out");
    for (i, &row) in src_rows.iter().enumerate() {
        formats::decode_row(src.format, src.row(row as usize), &mut out[i * width..(i + 1) * width]);
    }
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
pub(super) fn fake_quantize(x: &mut F32, rows: usize, width: usize, format: RowFormat) {
    let x = part_mut(x, rows * width, "x");
    for r in 0..rows {
        formats::quantize_row(format, &mut x[r * width..(r + 1) * width]);
    }
}

/// `out[i] = table[ids[i]]`, dequantised.
pub(super) fn gather(table: &HostWeight, ids: &[u32], out: &mut F32) {
    let width = table.cols;
    let out = part_mut(out, ids.len() * width, "out");
    for (i, &id) in ids.iter().enumerate() {
        decode_weight_row(table, id as usize, &mut out[i * width..(i + 1) * width]);
    }
}

/// `dst[i] = src[ids[i]]`.
pub(super) fn take_rows(src: &F32, width: usize, ids: &[u32], dst: &mut F32) {
    let dst = part_mut(dst, ids.len() * width, "dst");
    for (i, &id) in ids.iter().enumerate() {
        let from = id as usize * width;
        dst[i * width..(i + 1) * width].copy_from_slice(&src.0[from..from + width]);
    }
}

/// `out[r, c, :] = x[r, :]`.
pub(super) fn broadcast_copies(x: &F32, rows: usize, copies: usize, width: usize, out: &mut F32) {
    let x = part(x, rows * width, "x");
    let out = part_mut(out, rows * copies * width, "out");
    for r in 0..rows {
        for c in 0..copies {
            let at = (r * copies + c) * width;
            out[at..at + width].copy_from_slice(&x[r * width..(r + 1) * width]);
        }
    }
}

/// `out[r, at + i] = (sum_c stream[r, c, i]) / copies`.
pub(super) fn mean_copies(
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
    let out = part_mut(out, rows * stride, "out");
    for r in 0..rows {
        for i in 0..width {
            let sum: f64 = (0..copies).map(|c| f64::from(stream[(r * copies + c) * width + i])).sum();
            out[r * stride + at + i] = (sum / copies as f64) as f32;
        }
    }
}
