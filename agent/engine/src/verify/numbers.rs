//! `number_formats`: every codec, and every way in which a backend decodes. All exact.

use deepinfer_kernels::formats::{decode_row, decode_weight_row, encode_row, encode_weight, quantize_row};
use deepinfer_kernels::host::HostWeight;
use deepinfer_kernels::{Backend, ByteView, MatrixSource, RowFormat, WeightFormat};

use super::checks::Checks;
use super::tensors::VectorFile;
use super::{Case, Stop, VerifyError};

/// Row formats and the tensor that holds `x` rounded to them.
const ROWS: [(&str, RowFormat); 3] = [
    ("fp8_32_ue8m0", RowFormat::Fp8),
    ("fp4_32_ue8m0", RowFormat::Fp4Index),
    ("fp4_16_e4m3", RowFormat::Fp4Main),
];

/// Weight formats and the tensor that holds `w` in their bytes; `_scale` and `_dequant` follow.
const WEIGHTS: [(&str, WeightFormat); 2] = [("w_fp8", WeightFormat::Fp8), ("w_fp4", WeightFormat::Fp4)];

/// Every codec and every way a backend decodes, exact.
pub(super) fn formats<B: Backend>(case: &Case<'_, B>, checks: &mut Checks) -> Result<(), Stop> {
    let file = case.vector()?;
    let backend = (case.backend)();
    let (shape, x) = file.floats("x")?;
    let (rows, width) = matrix(case, "x", shape)?;
    for (name, format) in ROWS {
        let want = file.shaped(name, &[rows, width])?;
        if width % format.group() != 0 {
            return Err(case
                .bad(format!("x has {width} columns, {name} needs groups of {}", format.group()))
                .into());
        }
        row_format(&backend, name, format, x, want, width, checks);
    }
    let (shape, w) = file.floats("w")?;
    let (rows, cols) = matrix(case, "w", shape)?;
    for (name, format) in WEIGHTS {
        weight_format(case, &backend, &file, name, format, (rows, cols, w), checks)?;
    }
    Ok(())
}

fn matrix<B: Backend>(
    case: &Case<'_, B>,
    name: &str,
    shape: &[usize],
) -> Result<(usize, usize), VerifyError> {
    match shape {
        [rows, cols] if rows * cols > 0 => Ok((*rows, *cols)),
        _ => Err(case.bad(format!("{name} has shape {shape:?}, a matrix is needed"))),
    }
}

/// One cache format: rounding in place, encoding and decoding, and both again inside the backend.
fn row_format<B: Backend>(
    backend: &B,
    name: &str,
    format: RowFormat,
    x: &[f32],
    want: &[f32],
    width: usize,
    checks: &mut Checks,
) {
    let rows = x.len() / width;
    let mut rounded = x.to_vec();
    rounded.chunks_mut(width).for_each(|row| quantize_row(format, row));
    checks.same_numbers(&format!("{name}: rounded"), want, &rounded);

    let mut bytes = vec![0; format.row_bytes(width)];
    let mut decoded = vec![0.0; x.len()];
    for (x, out) in x.chunks(width).zip(decoded.chunks_mut(width)) {
        encode_row(format, x, &mut bytes);
        decode_row(format, &bytes, out);
    }
    checks.same_numbers(&format!("{name}: encoded and decoded"), want, &decoded);

    let mut buffer = buffer(backend, x);
    let mut store = backend.store(format, width, rows);
    let ids: Vec<u32> = (0..rows as u32).rev().collect();
    backend.store_rows(&buffer, &mut store, &ids);
    backend.fake_quantize(&mut buffer, rows, width, format);
    checks.same_numbers(&format!("{name}: fake_quantize"), want, &contents(backend, &buffer, x.len()));
    backend.load_rows(&store, &ids, &mut buffer);
    checks.same_numbers(&format!("{name}: stored and loaded"), want, &contents(backend, &buffer, x.len()));
}

/// One weight format: the bytes of an encoded matrix, its rows decoded, gathered, and multiplied out.
fn weight_format<B: Backend>(
    case: &Case<'_, B>,
    backend: &B,
    file: &VectorFile,
    name: &str,
    format: WeightFormat,
    (rows, cols, w): (usize, usize, &[f32]),
    checks: &mut Checks,
) -> Result<(), Stop> {
    let data = bytes(file, name)?;
    let scales = bytes(file, &format!("{name}_scale"))?;
    let want = file.shaped(&format!("{name}_dequant"), &[rows, cols])?;
    let (scale_rows, scale_cols) = format.scale_shape(rows, cols);
    if data.len() != format.data_bytes(rows, cols) || scales.len() != scale_rows * scale_cols {
        return Err(case.bad(format!("{name} is not a {format} matrix [{rows}, {cols}]")).into());
    }
    let (encoded, encoded_scales) = encode_weight(format, rows, cols, w);
    checks.equal(&format!("{name}: encoded"), &data, &encoded);
    checks.equal(&format!("{name}: scales"), &scales, &encoded_scales);

    let source = MatrixSource {
        format,
        rows,
        cols,
        data: ByteView::owned(data),
        scales: Some(ByteView::owned(scales)),
    };
    let host = HostWeight::new(source.clone());
    let mut decoded = vec![0.0; rows * cols];
    for (row, out) in decoded.chunks_mut(cols).enumerate() {
        decode_weight_row(&host, row, out);
    }
    checks.same_numbers(&format!("{name}: decoded"), want, &decoded);

    let weight = backend.weight(source);
    let ids: Vec<u32> = (0..rows as u32).collect();
    let mut gathered = backend.alloc(rows * cols);
    backend.gather(&weight, &ids, &mut gathered);
    checks.same_numbers(&format!("{name}: gathered"), want, &contents(backend, &gathered, rows * cols));

    // Each row of the unit matrix picks one column of the weight: sums of one term, so nothing is rounded.
    let unit: Vec<f32> = (0..cols * cols).map(|i| if i / cols == i % cols { 1.0 } else { 0.0 }).collect();
    let transposed: Vec<f32> = (0..cols * rows).map(|i| want[i % rows * cols + i / rows]).collect();
    for (what, count) in [("one row at a time", 1), ("all rows at once", cols)] {
        let mut got = Vec::with_capacity(rows * cols);
        for x in unit.chunks(count * cols) {
            let mut y = backend.alloc(count * rows);
            backend.matmul(&weight, &buffer(backend, x), count, &mut y);
            got.extend(contents(backend, &y, count * rows));
        }
        checks.same_numbers(&format!("{name}: matmul, {what}"), &transposed, &got);
    }
    Ok(())
}

fn bytes(file: &VectorFile, name: &str) -> Result<Vec<u8>, VerifyError> {
    let (_, values) = file.whole(name)?;
    // The file stores bytes; the conversion cannot lose any.
    Ok(values.iter().map(|v| *v as u8).collect())
}

/// Device memory that holds `values`.
pub(super) fn buffer<B: Backend>(backend: &B, values: &[f32]) -> B::Buf<f32> {
    let mut buffer = backend.alloc(values.len());
    backend.write(&mut buffer, 0, values);
    buffer
}

/// The first `len` values of device memory.
pub(super) fn contents<B: Backend>(backend: &B, buffer: &B::Buf<f32>, len: usize) -> Vec<f32> {
    let mut values = vec![0.0; len];
    backend.read(buffer, 0, &mut values);
    values
}
