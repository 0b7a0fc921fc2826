//! Number formats against three independent definitions: the oracle's vectors, the `float8` and `half` crates,
//! and the rule "nearest value, ties to the even code" searched by brute force.

use deepinfer_kernels::formats::{
    E2M1_VALUES, E4M3_VALUES, RowFormat, WeightFormat, bf16_decode, bf16_encode, decode_row,
    decode_weight_row, e2m1_encode, e4m3_decode, e4m3_encode, e8m0_decode, e8m0_encode, encode_row,
    encode_weight, encode_weight_into, pow2_ceil, quantize_row,
};
use deepinfer_kernels::host::HostWeight;
use deepinfer_kernels::{ByteView, MatrixSource};
use proptest::prelude::*;
use safetensors::SafeTensors;

const ROW_FORMATS: [RowFormat; 4] = [RowFormat::F32, RowFormat::Fp8, RowFormat::Fp4Main, RowFormat::Fp4Index];
const WEIGHT_FORMATS: [WeightFormat; 5] =
    [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Fp8, WeightFormat::Fp8Rows, WeightFormat::Fp4];

fn vectors() -> Vec<u8> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../e2e/golden/vectors/number_formats.safetensors");
    std::fs::read(path).expect("the golden vectors are in the repository")
}

fn floats(tensors: &SafeTensors<'_>, name: &str) -> (Vec<usize>, Vec<f32>) {
    let tensor = tensors.tensor(name).expect("the vector holds this tensor");
    let values = tensor.data().chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    (tensor.shape().to_vec(), values.collect())
}

fn bytes(tensors: &SafeTensors<'_>, name: &str) -> Vec<u8> {
    tensors.tensor(name).expect("the vector holds this tensor").data().to_vec()
}

/// Equality of bits, with all NaN equal.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

fn assert_same(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "length of {what}");
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        assert!(same(got, want), "{what}[{i}]: {got:e} instead of {want:e}");
    }
}

fn weight(format: WeightFormat, rows: usize, cols: usize, data: Vec<u8>, scales: Vec<u8>) -> HostWeight {
    let scales = (!scales.is_empty()).then(|| ByteView::owned(scales));
    HostWeight::new(MatrixSource { format, rows, cols, data: ByteView::owned(data), scales })
}

fn decode_all(weight: &HostWeight) -> Vec<f32> {
    let mut out = vec![0.0; weight.rows * weight.cols];
    for (row, out) in out.chunks_exact_mut(weight.cols).enumerate() {
        decode_weight_row(weight, row, out);
    }
    out
}

/// Floats that are interesting to round: every power of two, its neighbours, midpoints, and specials.
fn edge_floats() -> Vec<f32> {
    let mut all = vec![0.0, f32::NAN, f32::INFINITY, f32::MIN_POSITIVE, f32::MAX, 448.0, 464.0, 465.0, 480.0];
    for exponent in 0..255u32 {
        for mantissa in [0, 1, 0x7F_FFFF, 0x40_0000, 0x08_0000, 0x07_FFFF, 0x08_0001, 0x10_0000, 0x18_0000] {
            all.push(f32::from_bits(exponent << 23 | mantissa));
        }
    }
    for pair in E4M3_VALUES[..127].windows(2).chain(E2M1_VALUES[..8].windows(2)) {
        let middle = (pair[0] + pair[1]) / 2.0;
        all.extend([middle, f32::from_bits(middle.to_bits() + 1), f32::from_bits(middle.to_bits() - 1)]);
    }
    let negative: Vec<f32> = all.iter().map(|v| -v).collect();
    all.extend(negative);
    all
}

/// Nearest code of an ascending table of magnitudes, ties to the even code, saturating.
fn nearest(table: &[f32], x: f32) -> u8 {
    let distance = |code: usize| (f64::from(table[code]) - f64::from(x.abs().min(1e4))).abs();
    let mut best = 0;
    for code in 1..table.len() {
        if distance(code) < distance(best) || distance(code) == distance(best) && code % 2 == 0 {
            best = code;
        }
    }
    best as u8
}

#[test]
fn rows_round_as_the_oracle_rounds() {
    let file = vectors();
    let tensors = SafeTensors::deserialize(&file).expect("a safetensors file");
    let (shape, x) = floats(&tensors, "x");
    for (format, name) in [
        (RowFormat::Fp8, "fp8_32_ue8m0"),
        (RowFormat::Fp4Index, "fp4_32_ue8m0"),
        (RowFormat::Fp4Main, "fp4_16_e4m3"),
    ] {
        let (_, want) = floats(&tensors, name);
        let mut rounded = x.clone();
        quantize_row(format, &mut rounded);
        assert_same(&rounded, &want, name);

        let mut stored = vec![0; format.row_bytes(shape[1])];
        for (x, want) in x.chunks_exact(shape[1]).zip(want.chunks_exact(shape[1])) {
            let mut back = vec![0.0; shape[1]];
            encode_row(format, x, &mut stored);
            decode_row(format, &stored, &mut back);
            assert_same(&back, want, name);
        }
    }
}

#[test]
fn weights_are_stored_and_read_as_the_oracle_does() {
    let file = vectors();
    let tensors = SafeTensors::deserialize(&file).expect("a safetensors file");
    let (shape, w) = floats(&tensors, "w");
    for (format, name) in [(WeightFormat::Fp8, "w_fp8"), (WeightFormat::Fp4, "w_fp4")] {
        let (data, scales) = encode_weight(format, shape[0], shape[1], &w);
        assert_eq!(data, bytes(&tensors, name), "bytes of {name}");
        assert_eq!(scales, bytes(&tensors, &format!("{name}_scale")), "scales of {name}");
        let (_, want) = floats(&tensors, &format!("{name}_dequant"));
        assert_same(&decode_all(&weight(format, shape[0], shape[1], data, scales)), &want, name);
    }
}

#[test]
fn every_e4m3_code_has_the_value_that_float8_gives_it() {
    for code in 0..=255u8 {
        let want = float8::F8E4M3::from_bits(code).to_f32();
        assert!(same(e4m3_decode(code), want), "code {code:#04x}: {} instead of {want}", e4m3_decode(code));
        if !want.is_nan() {
            assert_eq!(e4m3_encode(want), code, "encoding of {want}");
        }
    }
    assert!(e4m3_decode(0x7F).is_nan() && e4m3_decode(0xFF).is_nan());
    assert!(e4m3_decode(0x80).is_sign_negative(), "minus zero keeps its sign");
}

#[test]
fn e4m3_rounds_to_the_nearest_code_and_ties_to_even() {
    for x in edge_floats() {
        let code = e4m3_encode(x);
        if x.is_nan() {
            assert!(e4m3_decode(code).is_nan());
            continue;
        }
        let sign = if x.is_sign_negative() { 0x80 } else { 0 };
        assert_eq!(code, sign | nearest(&E4M3_VALUES[..127], x), "code of {x:e}");
    }
}

#[test]
fn e2m1_rounds_to_the_nearest_code_and_ties_to_even() {
    for x in edge_floats() {
        let sign = if x.is_sign_negative() { 8 } else { 0 };
        let want = if x.is_nan() { 0 } else { nearest(&E2M1_VALUES[..8], x) };
        assert_eq!(e2m1_encode(x), sign | want, "code of {x:e}");
    }
}

#[test]
fn e8m0_stands_for_powers_of_two_and_255_for_nan() {
    for code in 0..255u8 {
        let scale = e8m0_decode(code);
        assert_eq!(f64::from(scale), 2f64.powi(i32::from(code) - 127), "scale {code}");
        if code > 0 {
            assert_eq!(e8m0_encode(scale), code);
            assert_eq!(pow2_ceil(scale), scale, "a power of two is its own ceiling");
            let above = pow2_ceil(f32::from_bits(scale.to_bits() + 1));
            assert_eq!(f64::from(above), if code == 254 { f64::INFINITY } else { f64::from(scale) * 2.0 });
        }
    }
    assert!(e8m0_decode(255).is_nan());
    assert_eq!(e8m0_encode(f32::NAN), 255);
    assert_eq!(e8m0_encode(f32::INFINITY), 255);
    assert_eq!(pow2_ceil(0.0), 0.0);
    assert!(pow2_ceil(f32::NAN).is_nan());
}

#[test]
fn bf16_agrees_with_half() {
    for bits in 0..=u16::MAX {
        assert!(same(bf16_decode(bits), half::bf16::from_bits(bits).to_f32()), "bits {bits:#06x}");
    }
    for x in edge_floats() {
        let (got, want) = (bf16_decode(bf16_encode(x)), half::bf16::from_f32(x).to_f32());
        assert!(same(got, want), "{x:e} gives {got:e} instead of {want:e}");
    }
}

#[test]
fn a_group_with_a_broken_number_comes_back_as_nan_and_its_neighbours_do_not() {
    for format in ROW_FORMATS {
        for broken in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -f32::NAN] {
            let mut x: Vec<f32> = (0..96).map(|i| i as f32 - 40.0).collect();
            x[40] = broken;
            let mut stored = vec![0; format.row_bytes(96)];
            encode_row(format, &x, &mut stored);
            let mut back = vec![0.0; 96];
            decode_row(format, &stored, &mut back);
            if format == RowFormat::F32 {
                assert_same(&back, &x, "an unrounded row");
                continue;
            }
            let group = format.group();
            for (i, v) in back.iter().enumerate() {
                assert_eq!(v.is_nan(), i / group == 40 / group, "{format:?} channel {i} under {broken}");
            }
        }
    }
    for format in [WeightFormat::Fp8, WeightFormat::Fp8Rows, WeightFormat::Fp4] {
        let mut values = vec![1.0; 40 * 70];
        values[35 * 70 + 66] = f32::INFINITY;
        let (data, scales) = encode_weight(format, 40, 70, &values);
        for (i, v) in decode_all(&weight(format, 40, 70, data, scales)).iter().enumerate() {
            let (row, col) = (i / 70, i % 70);
            let in_row = if format == WeightFormat::Fp8 { row >= 32 } else { row == 35 };
            assert_eq!(v.is_nan(), in_row && col >= 64, "{format} [{row}, {col}]");
        }
    }
}

#[test]
fn extreme_magnitudes_stay_finite_and_near() {
    for format in ROW_FORMATS {
        for scale in [f32::MIN_POSITIVE, 1e-30, 1e30, 1e38] {
            let x: Vec<f32> = (0..64).map(|i| (i as f32 - 31.5) / 32.0 * scale).collect();
            let mut back = x.clone();
            quantize_row(format, &mut back);
            assert!(back.iter().all(|v| v.is_finite()), "{format:?} at {scale:e}");
            let largest = back.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            match format {
                RowFormat::F32 => assert_eq!(back, x),
                RowFormat::Fp4Main if scale > 1.0 => assert_eq!(largest, 2688.0, "the clamp of main KV"),
                RowFormat::Fp4Main => assert_eq!(largest, 0.0, "below half of the smallest main value"),
                RowFormat::Fp8 if scale < 1.0 => assert_eq!(largest, 0.0, "below the floor of FP8"),
                _ => assert!((largest / scale - 1.0).abs() < 0.34, "{format:?} at {scale:e}: {largest:e}"),
            }
        }
    }
}

#[test]
fn a_matrix_stored_in_strips_of_32_rows_has_the_bytes_of_the_whole() {
    for format in WEIGHT_FORMATS {
        for (rows, cols) in [(1, 2), (31, 32), (32, 34), (33, 96), (97, 130)] {
            let values: Vec<f32> =
                (0..rows * cols).map(|i| ((i * 7919) % 1013) as f32 / 37.0 - 13.0).collect();
            let (data, scales) = encode_weight(format, rows, cols, &values);
            let (mut strip_data, mut strip_scales) = (Vec::new(), Vec::new());
            for strip in values.chunks(32 * cols) {
                let height = strip.len() / cols;
                let (scale_rows, scale_cols) = format.scale_shape(height, cols);
                let mut part = vec![0xAA; format.data_bytes(height, cols)];
                let mut part_scales = vec![0xAA; scale_rows * scale_cols];
                encode_weight_into(format, height, cols, strip, &mut part, &mut part_scales);
                strip_data.extend(part);
                strip_scales.extend(part_scales);
            }
            assert!(data == strip_data && scales == strip_scales, "{format} [{rows}, {cols}]");
        }
    }
}

#[test]
fn blocks_at_the_edge_use_the_scale_of_their_block() {
    // One scale per 32 x 32 block, all different, so that a wrong block shows.
    let (rows, cols) = (65, 70);
    let data = vec![0x38; rows * cols]; // 1.0
    let scales: Vec<u8> = (0..9).map(|i| 120 + i).collect();
    let fp8 = weight(WeightFormat::Fp8, rows, cols, data.clone(), scales);
    for (i, v) in decode_all(&fp8).into_iter().enumerate() {
        let block = i / cols / 32 * 3 + i % cols / 32;
        assert_eq!(v, 2f32.powi(block as i32 - 7), "[{}, {}]", i / cols, i % cols);
    }
    let scales: Vec<u8> = (0..rows * 3).map(|i| 100 + (i % 50) as u8).collect();
    let by_rows = weight(WeightFormat::Fp8Rows, rows, cols, data, scales.clone());
    let fp4 = weight(WeightFormat::Fp4, rows, cols, vec![0x42; rows * cols / 2], scales);
    for (i, (a, b)) in decode_all(&by_rows).into_iter().zip(decode_all(&fp4)).enumerate() {
        let group = (i / cols * 3 + i % cols / 32) % 50;
        let scale = 2f32.powi(group as i32 - 27);
        assert_eq!(a, scale, "[{}, {}]", i / cols, i % cols);
        assert_eq!(b, scale * if i % 2 == 0 { 1.0 } else { 2.0 }, "low nibble first");
    }
}

/// Any float, with small exponents as likely as the ends of the range.
fn any_float() -> impl Strategy<Value = f32> {
    prop_oneof![any::<u32>().prop_map(f32::from_bits), -500f32..500.0, -1e-3f32..1e-3]
}

proptest! {
    #[test]
    fn e4m3_encoding_agrees_with_a_search_and_with_float8(x in any_float()) {
        prop_assume!(!x.is_nan());
        let sign = if x.is_sign_negative() { 0x80 } else { 0 };
        prop_assert_eq!(e4m3_encode(x), sign | nearest(&E4M3_VALUES[..127], x));
        // float8 breaks some ties and overflows in its own way; where it finds a nearest value we find as near a one.
        let other = float8::F8E4M3::from_f32(x.clamp(-448.0, 448.0)).to_f32();
        let near = |v: f32| (f64::from(v) - f64::from(x.clamp(-448.0, 448.0))).abs();
        prop_assert!(near(e4m3_decode(e4m3_encode(x))) <= near(other));
    }

    #[test]
    fn bf16_encoding_agrees_with_half(x in any_float()) {
        prop_assert!(same(bf16_decode(bf16_encode(x)), half::bf16::from_f32(x).to_f32()));
    }

    #[test]
    fn pow2_ceil_is_the_smallest_power_not_below(x in any::<u32>().prop_map(|b| f32::from_bits(b & 0x7FFF_FFFF))) {
        prop_assume!(x >= f32::MIN_POSITIVE && x <= 2f32.powi(127));
        let power = pow2_ceil(x);
        prop_assert!(power >= x && power / 2.0 < x);
        prop_assert_eq!(power.to_bits() & 0x7F_FFFF, 0);
    }

    #[test]
    fn rounding_a_rounded_row_changes_nothing(x in prop::collection::vec(any_float(), 64)) {
        for format in ROW_FORMATS {
            // Near the end of the range of float32 a value may round up to infinity, which the next round poisons.
            let mut once: Vec<f32> = x.iter().map(|v| v.clamp(-1e38, 1e38)).collect();
            quantize_row(format, &mut once);
            let mut twice = once.clone();
            quantize_row(format, &mut twice);
            for (a, b) in once.chunks(16).zip(twice.chunks(16)) {
                // Main KV: where amax / 6 is a normal E4M3 number its rounding leaves the largest value at code 6.
                let covered = format != RowFormat::Fp4Main || a.iter().any(|v| v.abs() >= 6.0 / 64.0);
                prop_assert!(!covered || a.iter().zip(b).all(|(&a, &b)| same(a, b)), "{:?}: {:?} {:?}", format, a, b);
            }
        }
    }

    #[test]
    fn stored_rows_are_what_quantizing_gives(x in prop::collection::vec(any_float(), 96)) {
        for format in ROW_FORMATS {
            let mut stored = vec![0xAA; format.row_bytes(96)];
            encode_row(format, &x, &mut stored);
            let mut back = vec![0.0; 96];
            decode_row(format, &stored, &mut back);
            let mut rounded = x.clone();
            quantize_row(format, &mut rounded);
            for (a, b) in back.iter().zip(&rounded) {
                prop_assert!(same(*a, *b));
            }
        }
    }

    #[test]
    fn any_bytes_decode_and_any_floats_encode_without_panic(
        raw in prop::collection::vec(any::<u8>(), 4 * 64),
        values in prop::collection::vec(any::<u32>().prop_map(f32::from_bits), 64),
    ) {
        for format in ROW_FORMATS {
            let mut back = [0.0; 64];
            decode_row(format, &raw[..format.row_bytes(64)], &mut back);
        }
        for format in WEIGHT_FORMATS {
            let (data, scales) = encode_weight(format, 2, 32, &values);
            let read = decode_all(&weight(format, 2, 32, data, scales));
            if values.iter().all(|v| v.is_finite()) && !matches!(format, WeightFormat::Bf16) {
                prop_assert!(read.iter().all(|v| !v.is_nan()));
            }
        }
    }
}
