//! Weight matrices as checkpoints store them: decoding by rows, encoding by strips of rows.
//!
//! Blocks and groups at the right and lower edge may be short (`cols` or `rows` not a multiple of 32). The bytes
//! of a matrix are the bytes of its strips one after the other as long as strips start at multiples of 32 rows,
//! so a writer can stream a matrix of any height.

use super::rows::{FP4_STEP, FP8_STEP, decode_e2m1, e8m0_scale, encode_e2m1, encode_e4m3, finite_amax};
use super::{GROUP, WeightFormat, bf16_decode, bf16_encode, e4m3_decode, e8m0_decode};
use crate::host::HostWeight;

/// Smallest magnitude that the scale of a weight block or group is made for.
const WEIGHT_FLOOR: f32 = 1e-12;

/// Dequantises row `row` of a weight; `out.len()` is its number of columns.
///
/// # Panics
/// If `row` is outside the matrix or `out` has another length.
pub fn decode_weight_row(weight: &HostWeight, row: usize, out: &mut [f32]) {
    let cols = weight.cols;
    assert!(row < weight.rows, "row {row} of a weight of {} rows", weight.rows);
    assert_eq!(out.len(), cols, "columns of a decoded weight row");
    let stride = weight.format.data_bytes(1, cols);
    let data = &weight.data[row * stride..(row + 1) * stride];
    let groups = cols.div_ceil(GROUP);
    match weight.format {
        WeightFormat::F32 => {
            for (v, b) in out.iter_mut().zip(data.chunks_exact(4)) {
                *v = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        WeightFormat::Bf16 => {
            for (v, b) in out.iter_mut().zip(data.chunks_exact(2)) {
                *v = bf16_decode(u16::from_le_bytes([b[0], b[1]]));
            }
        }
        WeightFormat::Fp8 | WeightFormat::Fp8Rows => {
            let scale_row = match weight.format {
                WeightFormat::Fp8 => row / GROUP,
                _ => row,
            };
            let scales = &weight.scales[scale_row * groups..(scale_row + 1) * groups];
            for ((group, codes), &scale) in out.chunks_mut(GROUP).zip(data.chunks(GROUP)).zip(scales) {
                let scale = e8m0_decode(scale);
                for (v, &code) in group.iter_mut().zip(codes) {
                    *v = e4m3_decode(code) * scale;
                }
            }
        }
        WeightFormat::Fp4 => {
            let scales = &weight.scales[row * groups..(row + 1) * groups];
            for ((group, codes), &scale) in out.chunks_mut(GROUP).zip(data.chunks(GROUP / 2)).zip(scales) {
                decode_e2m1(codes, e8m0_decode(scale), group);
            }
        }
    }
}

/// Stores a matrix `[rows, cols]`: its data bytes and its scale bytes (empty for F32 and BF16).
///
/// # Panics
/// As [`encode_weight_into`].
pub fn encode_weight(format: WeightFormat, rows: usize, cols: usize, values: &[f32]) -> (Vec<u8>, Vec<u8>) {
    let (scale_rows, scale_cols) = format.scale_shape(rows, cols);
    let mut data = vec![0; format.data_bytes(rows, cols)];
    let mut scales = vec![0; scale_rows * scale_cols];
    encode_weight_into(format, rows, cols, values, &mut data, &mut scales);
    (data, scales)
}

/// Stores a strip of `rows` rows of a matrix of `cols` columns, values row-major.
///
/// A strip of an FP8 matrix starts at a row that is a multiple of 32 of the whole matrix, and only the last one
/// may have a number of rows that is no multiple of 32; other formats can be cut anywhere. Scales are
/// `2^ceil(log2(max(amax, 1e-12) * fl32(1 / largest)))`; a block or group with a NaN or an infinity gets a NaN
/// scale.
///
/// # Panics
/// If a length does not fit the shape, or `cols` is odd in FP4.
pub fn encode_weight_into(
    format: WeightFormat,
    rows: usize,
    cols: usize,
    values: &[f32],
    data: &mut [u8],
    scales: &mut [u8],
) {
    assert_eq!(values.len(), rows * cols, "values of a [{rows}, {cols}] strip");
    assert_eq!(data.len(), format.data_bytes(rows, cols), "bytes of a {format} strip [{rows}, {cols}]");
    let (scale_rows, scale_cols) = format.scale_shape(rows, cols);
    assert_eq!(scales.len(), scale_rows * scale_cols, "scales of a {format} strip [{rows}, {cols}]");
    match format {
        WeightFormat::F32 => {
            for (bytes, v) in data.chunks_exact_mut(4).zip(values) {
                bytes.copy_from_slice(&v.to_le_bytes());
            }
        }
        WeightFormat::Bf16 => {
            for (bytes, v) in data.chunks_exact_mut(2).zip(values) {
                bytes.copy_from_slice(&bf16_encode(*v).to_le_bytes());
            }
        }
        WeightFormat::Fp8 => encode_blocks(rows, cols, values, data, scales),
        WeightFormat::Fp8Rows => {
            encode_groups(cols, values, scales, FP8_STEP, |at, group, scale| {
                encode_e4m3(group, scale, &mut data[at..at + group.len()]);
            });
        }
        WeightFormat::Fp4 => {
            assert!(cols.is_multiple_of(2), "{cols} columns of an FP4 weight: an even number is needed");
            encode_groups(cols, values, scales, FP4_STEP, |at, group, scale| {
                encode_e2m1(group, scale, &mut data[at / 2..(at + group.len()) / 2]);
            });
        }
    }
}

/// One scale per 32 x 32 block.
fn encode_blocks(rows: usize, cols: usize, values: &[f32], data: &mut [u8], scales: &mut [u8]) {
    let block_cols = cols.div_ceil(GROUP);
    for top in (0..rows).step_by(GROUP) {
        let bottom = (top + GROUP).min(rows);
        for left in (0..cols).step_by(GROUP) {
            let right = (left + GROUP).min(cols);
            let part = |row: usize| row * cols + left..row * cols + right;
            let block = (top..bottom).flat_map(|row| values[part(row)].iter().copied());
            let (code, scale) = e8m0_scale(finite_amax(block), WEIGHT_FLOOR, FP8_STEP);
            scales[top / GROUP * block_cols + left / GROUP] = code;
            for row in top..bottom {
                encode_e4m3(&values[part(row)], scale, &mut data[part(row)]);
            }
        }
    }
}

/// One scale per row and 32 columns; `write` gets the position of the group's first value, the group, its scale.
fn encode_groups(
    cols: usize,
    values: &[f32],
    scales: &mut [u8],
    step: f32,
    mut write: impl FnMut(usize, &[f32], f32),
) {
    if cols == 0 {
        return;
    }
    let groups = cols.div_ceil(GROUP);
    for (row, (values, scales)) in values.chunks_exact(cols).zip(scales.chunks_exact_mut(groups)).enumerate()
    {
        for (g, (group, code)) in values.chunks(GROUP).zip(scales).enumerate() {
            let scale;
            (*code, scale) = e8m0_scale(finite_amax(group.iter().copied()), WEIGHT_FLOOR, step);
            write(row * cols + g * GROUP, group, scale);
        }
    }
}
