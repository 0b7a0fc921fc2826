//! The experts of a whole step against the same picks row by row, bit for bit.

use super::super::simd::{codec, vector};
use super::super::testing::{Random, assert_bits, backends};
use super::*;
use crate::formats::{WeightFormat, encode_weight};
use crate::mapped::ByteView;

fn weight(random: &mut Random, format: WeightFormat, rows: usize, cols: usize) -> HostWeight {
    let values: Vec<f32> = random.floats(rows * cols).iter().map(|v| v * 0.3).collect();
    let (data, scales) = encode_weight(format, rows, cols, &values);
    HostWeight { format, rows, cols, data: ByteView::owned(data), scales: ByteView::owned(scales) }
}

fn set(
    random: &mut Random,
    format: WeightFormat,
    experts: usize,
    width: usize,
    channels: usize,
) -> ExpertSet<HostWeight> {
    ExpertSet {
        slots: (0..experts)
            .map(|_| ExpertWeights {
                w1: weight(random, format, channels, width),
                w3: weight(random, format, channels, width),
                w2: weight(random, format, width, channels),
            })
            .collect(),
        // Slots are not in the order of experts, and some experts have no slot that anybody picks.
        slot_of: (0..experts as u32).rev().collect(),
    }
}

/// The definition: one row, its picks in ascending expert id, each matrix on its own.
fn row_by_row(
    cpu: &Cpu,
    x: &[f32],
    ids: &[u32],
    weights: &[f32],
    set: &ExpertSet<HostWeight>,
    p: ExpertParams,
) -> Vec<f32> {
    let width = set.slots[0].w2.rows;
    let mut y = vec![0.0; x.len()];
    for (r, (x, y)) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)).enumerate() {
        let mut picks: Vec<usize> = (r * p.top_k..(r + 1) * p.top_k).collect();
        picks.sort_by_key(|&pick| ids[pick]);
        for pick in picks {
            let e = &set.slots[set.slot_of[ids[pick] as usize] as usize];
            let mut input = x.to_vec();
            if p.quantize {
                codec::quantize_row(cpu.level, RowFormat::Fp8, &mut input);
            }
            let (mut gate, mut up) = (vec![0.0; e.w1.rows], vec![0.0; e.w1.rows]);
            cpu.matmul_rows(&e.w1, &input, 1, &mut gate);
            cpu.matmul_rows(&e.w3, &input, 1, &mut up);
            vector::swiglu(cpu.level, &mut gate, &up, p.limit);
            vector::scale(cpu.level, &mut gate, weights[pick]);
            if p.quantize {
                codec::quantize_row(cpu.level, RowFormat::Fp8, &mut gate);
            }
            let mut out = vec![0.0; width];
            cpu.matmul_rows(&e.w2, &gate, 1, &mut out);
            vector::add(cpu.level, y, &out);
        }
    }
    y
}

/// Distinct experts for each row; `hot` of them get most of the picks.
fn picks(random: &mut Random, rows: usize, top_k: usize, experts: usize, hot: usize) -> Vec<u32> {
    let mut ids = Vec::new();
    for _ in 0..rows {
        let mut row: Vec<u32> = Vec::new();
        while row.len() < top_k {
            let all = if random.below(4) > 0 { hot } else { experts };
            let id = random.below(all) as u32;
            if !row.contains(&id) {
                row.push(id);
            }
        }
        ids.extend(row);
    }
    ids
}

#[test]
fn a_step_gives_each_row_the_bits_of_its_own_picks() {
    let mut random = Random(11);
    for (format, width, channels) in [
        (WeightFormat::Fp4, 96, 64),
        (WeightFormat::Fp4, 70, 34),
        (WeightFormat::Fp8, 64, 160),
        (WeightFormat::Bf16, 33, 31),
        (WeightFormat::F32, 40, 72),
    ] {
        let (experts, top_k) = (7, 3);
        let set = set(&mut random, format, experts, width, channels);
        for quantize in [false, width % 32 == 0 && channels % 32 == 0] {
            let p = ExpertParams { top_k, limit: 1.5, quantize };
            for rows in [1, 2, 7, 41, 230] {
                let x = random.floats(rows * width);
                let ids = picks(&mut random, rows, top_k, experts, 4);
                let weights = random.floats(rows * top_k);
                let expected = row_by_row(&backends()[0], &x, &ids, &weights, &set, p);
                let mut expected_arrivals = vec![5; experts];
                for &id in &ids {
                    expected_arrivals[experts - 1 - id as usize] += 1;
                }
                for cpu in backends() {
                    let mut y = vec![9.0; rows * width];
                    let mut arrivals = vec![5; experts];
                    super::experts(&cpu, &x, rows, &ids, &weights, &set, p, &mut y, &mut arrivals);
                    assert_bits(&format!("{cpu:?} {format} {rows} rows"), &y, &expected);
                    assert_eq!(arrivals, expected_arrivals);
                }
            }
        }
    }
}

#[test]
fn a_step_without_rows_or_picks_writes_zeros_and_counts_nothing() {
    let mut random = Random(12);
    let set = set(&mut random, WeightFormat::Fp4, 2, 32, 32);
    let p = ExpertParams { top_k: 0, limit: 0.0, quantize: false };
    let cpu = Cpu::new(2);
    let mut y = vec![1.0; 64];
    let mut arrivals = vec![0; 2];
    super::experts(&cpu, &[0.5; 64], 2, &[], &[], &set, p, &mut y, &mut arrivals);
    assert_eq!(y, [0.0; 64]);
    super::experts(&cpu, &[], 0, &[], &[], &set, p, &mut y, &mut arrivals);
    assert_eq!(arrivals, [0, 0]);
}
