//! The vectorised row codecs against the scalar ones, bit for bit.

use super::*;
use crate::cpu::SimdLevel;
use crate::cpu::testing::Random;

const FORMATS: [RowFormat; 4] = [RowFormat::F32, RowFormat::Fp8, RowFormat::Fp4Main, RowFormat::Fp4Index];

/// Rows of all magnitudes, with ties, zeros of both signs, and now and then a NaN or an infinity.
fn rows(width: usize) -> Vec<Vec<f32>> {
    let mut random = Random(11);
    let mut rows = Vec::new();
    for round in 0..300 {
        let exponent = random.below(250) as i32 - 126;
        let mut row: Vec<f32> = (0..width)
            .map(|_| match random.below(8) {
                0 => 0.0,
                1 => -0.0,
                // Multiples of powers of two hit the midpoints between codes.
                2 | 3 => (random.below(64) as f32 - 32.0) * 0.125,
                4 => random.float() * 2f32.powi(-(random.below(12) as i32)),
                _ => random.float() * 4.0,
            })
            .map(|v| if round % 3 == 0 { v } else { v * 2f32.powi(exponent) })
            .collect();
        if round % 10 == 9 {
            let at = random.below(width);
            row[at] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX][random.below(4)];
        }
        rows.push(row);
    }
    rows.push(vec![0.0; width]);
    rows
}

fn bits(x: &[f32]) -> Vec<u32> {
    // NaN may differ in sign and payload.
    x.iter().map(|v| if v.is_nan() { f32::NAN.to_bits() } else { v.to_bits() }).collect()
}

#[test]
fn encoding_and_rounding_rows_have_the_bits_of_the_scalar_codecs() {
    for width in [32, 96, 160] {
        for row in rows(width) {
            for format in FORMATS {
                let mut expected = vec![0; format.row_bytes(width)];
                formats::encode_row(format, &row, &mut expected);
                let mut rounded = row.clone();
                formats::quantize_row(format, &mut rounded);
                for level in SimdLevel::available() {
                    let mut got = vec![0xee; expected.len()];
                    encode_row(level, format, &row, &mut got);
                    assert_eq!(got, expected, "{format:?} at {level} of {row:?}");
                    let mut got = row.clone();
                    quantize_row(level, format, &mut got);
                    assert_eq!(bits(&got), bits(&rounded), "{format:?} at {level} of {row:?}");
                }
            }
        }
    }
}

#[test]
fn decoding_any_bytes_has_the_bits_of_the_scalar_codecs() {
    let mut random = Random(5);
    for format in FORMATS {
        for width in [format.group(), 48 / format.group() * format.group(), 96, 512] {
            let value_bytes =
                format.row_bytes(width) - if format == RowFormat::F32 { 0 } else { width / format.group() };
            for round in 0..200 {
                let mut bytes: Vec<u8> = (0..format.row_bytes(width)).map(|_| random.next() as u8).collect();
                if round % 2 == 0 {
                    // Half of the rows without NaN codes and with scales in the middle.
                    for (i, byte) in bytes.iter_mut().enumerate() {
                        if i >= value_bytes {
                            *byte = 100 + *byte % 16;
                        } else if *byte & 0x7f == 0x7f {
                            *byte = 0;
                        }
                    }
                }
                let mut expected = vec![0.0; width];
                formats::decode_row(format, &bytes, &mut expected);
                for level in SimdLevel::available() {
                    let mut got = vec![0.0; width];
                    decode_row(level, format, &bytes, &mut got);
                    assert_eq!(bits(&got), bits(&expected), "{format:?} at {level}, width {width}");
                }
            }
        }
    }
}
