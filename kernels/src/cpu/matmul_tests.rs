//! Every path of the matmul against the written definition of the order of additions, bit for bit.

use super::*;
use crate::SimdLevel;
use crate::formats::WeightFormat;
use crate::mapped::ByteView;

/// The definition: 16 lanes; groups of 32 columns ascending, in each the even column, then the odd one of lane j;
/// the last group padded with zeros; the sum over lanes as a tree.
fn definition(w: &[f32], x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    for g in 0..w.len().div_ceil(32) {
        for odd in 0..2 {
            for (j, lane) in lanes.iter_mut().enumerate() {
                let k = 32 * g + 2 * j + odd;
                let (x, w) = if k < w.len() { (x[k], w[k]) } else { (0.0, 0.0) };
                *lane = x.mul_add(w, *lane);
            }
        }
    }
    for width in [8, 4, 2, 1] {
        for j in 0..width {
            lanes[j] += lanes[j + width];
        }
    }
    lanes[0]
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }
    fn byte(&mut self) -> u8 {
        (self.next() >> 8) as u8
    }
    fn float(&mut self) -> f32 {
        (self.next() as f32 / (1u32 << 30) as f32 - 1.0) * 2.0
    }
    fn floats(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.float()).collect()
    }
}

/// Every bit pattern of the small formats, except NaN; scales of any byte in `scales`.
fn weight(
    random: &mut Random,
    format: WeightFormat,
    rows: usize,
    cols: usize,
    scales: std::ops::RangeInclusive<u8>,
) -> HostWeight {
    let data: Vec<u8> = match format {
        WeightFormat::F32 => random.floats(rows * cols).iter().flat_map(|v| v.to_le_bytes()).collect(),
        WeightFormat::Bf16 => random
            .floats(rows * cols)
            .iter()
            .flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes())
            .collect(),
        _ => (0..format.data_bytes(rows, cols))
            .map(|_| {
                let byte = random.byte();
                if byte & 0x7f == 0x7f { 0x81 } else { byte }
            })
            .collect(),
    };
    let (a, b) = format.scale_shape(rows, cols);
    let span = u32::from(scales.end() - scales.start()) + 1;
    let scales: Vec<u8> = (0..a * b).map(|_| scales.start() + (random.next() % span) as u8).collect();
    HostWeight { format, rows, cols, data: ByteView::owned(data), scales: ByteView::owned(scales) }
}

fn decoded(w: &HostWeight) -> Vec<Vec<f32>> {
    (0..w.rows)
        .map(|row| {
            let mut out = vec![0.0; w.cols];
            decode_weight_row(w, row, &mut out);
            out
        })
        .collect()
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

fn backends() -> Vec<Cpu> {
    let levels = SimdLevel::available();
    [1, 2, 3]
        .into_iter()
        .flat_map(|threads| levels.iter().filter_map(move |&level| Cpu::with_level(threads, level)))
        .collect()
}

/// Compares all backends with the definition, for the first `rows` of each count.
fn check(w: &HostWeight, groups: usize, x: &[f32], counts: &[usize]) {
    let values = decoded(w);
    let (outs, cols) = (w.rows / groups, w.cols);
    let most = counts.iter().copied().max().unwrap_or(0);
    let mut expected = vec![0.0; most * w.rows];
    for r in 0..most {
        for (o, row) in values.iter().enumerate() {
            let at = (r * groups + o / outs) * cols;
            expected[r * w.rows + o] = definition(row, &x[at..at + cols]);
        }
    }
    for cpu in backends() {
        for &rows in counts {
            let mut y = vec![7.0; rows * w.rows];
            cpu.matmul_blocks(w, groups, x, rows, &mut y);
            for (i, (a, b)) in y.iter().zip(&expected).enumerate() {
                assert!(
                    same(*a, *b),
                    "{cpu:?} {} [{}, {}] in {groups}, {rows} rows: row {} output {}: {a} is not {b}",
                    w.format,
                    w.rows,
                    w.cols,
                    i / w.rows,
                    i % w.rows
                );
            }
        }
    }
}

const FORMATS: [WeightFormat; 5] =
    [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Fp8, WeightFormat::Fp8Rows, WeightFormat::Fp4];

#[test]
fn every_path_of_every_format_has_the_bits_of_the_definition_at_odd_shapes() {
    let mut random = Random(1);
    for format in FORMATS {
        for (outs, cols) in
            [(1, 2), (3, 30), (5, 32), (31, 34), (33, 62), (37, 96), (67, 130), (4, 1090), (33, 2082)]
        {
            let w = weight(&mut random, format, outs, cols, 120..=131);
            let x = random.floats(101 * cols);
            check(&w, 1, &x, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17, 33, 35, 97, 101]);
        }
    }
}

#[test]
fn odd_numbers_of_columns_work_where_the_format_allows_them() {
    let mut random = Random(2);
    for format in [WeightFormat::F32, WeightFormat::Bf16, WeightFormat::Fp8, WeightFormat::Fp8Rows] {
        for cols in [1, 3, 31, 33, 1025] {
            let w = weight(&mut random, format, 35, cols, 120..=131);
            let x = random.floats(39 * cols);
            check(&w, 1, &x, &[1, 2, 39]);
        }
    }
}

#[test]
fn more_inputs_than_a_panel_holds_are_all_multiplied() {
    let mut random = Random(7);
    for format in [WeightFormat::Bf16, WeightFormat::Fp8] {
        let w = weight(&mut random, format, 9, 16_390, 120..=131);
        let x = random.floats(131 * 16_390);
        check(&w, 1, &x, &[131]);
    }
}

#[test]
fn groups_that_cut_through_blocks_use_their_own_inputs_and_scales() {
    let mut random = Random(3);
    for format in FORMATS {
        for (groups, outs) in [(2, 7), (3, 33), (8, 4), (5, 1)] {
            let w = weight(&mut random, format, groups * outs, 98, 120..=131);
            let x = random.floats(38 * groups * 98);
            check(&w, groups, &x, &[1, 2, 5, 8, 38]);
        }
    }
}

#[test]
fn scales_from_one_end_of_float32_to_the_other_are_exact() {
    let mut random = Random(4);
    for format in [WeightFormat::Fp8, WeightFormat::Fp8Rows, WeightFormat::Fp4] {
        for scales in [0..=3, 244..=248, 247..=254, 0..=254, 255..=255] {
            let w = weight(&mut random, format, 40, 70, scales);
            let x = random.floats(36 * 70);
            check(&w, 1, &x, &[1, 3, 36]);
        }
    }
}

#[test]
fn a_nan_byte_makes_its_row_nan_and_no_other() {
    let mut random = Random(5);
    for byte in [0x7f, 0xff] {
        for at in [0, 31, 45 * 40 + 3, 45 * 64 + 44, 45 * 69 + 44] {
            let mut w = weight(&mut random, WeightFormat::Fp8, 70, 45, 120..=131);
            let mut data = w.data.to_vec();
            data[at] = byte;
            w.data = ByteView::owned(data);
            // A zero times NaN is NaN.
            let x = vec![0.0; 36 * 45];
            check(&w, 1, &x, &[1, 4, 36]);
            let x = random.floats(36 * 45);
            check(&w, 1, &x, &[1, 4, 36]);
        }
    }
}

#[test]
fn huge_tiny_and_infinite_inputs_have_the_bits_of_the_definition() {
    let mut random = Random(6);
    for format in FORMATS {
        let w = weight(&mut random, format, 20, 66, 100..=150);
        let mut x = random.floats(36 * 66);
        for (i, v) in x.iter_mut().enumerate() {
            *v *= [1e-38, 1e30, 1e-44, 1.0, 0.0][i % 5];
        }
        x[5] = f32::INFINITY;
        x[66 * 3] = f32::NAN;
        check(&w, 1, &x, &[1, 4, 36]);
    }
}
