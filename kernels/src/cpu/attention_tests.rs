//! Attention: the result is a function of the row's query and list of keys, and close to the definition.

use super::super::testing::{Random, assert_bits, assert_close, same_bits};
use super::*;
use crate::Reference;
use crate::formats::RowFormat;
use crate::host::HostBuf;
use crate::ops::{Backend, BlockTables, GlobalKeys, Selection};

/// A step: stores, lists of keys and queries of several rows in two sequences.
struct Case {
    heads: usize,
    width: usize,
    rows: usize,
    window_format: RowFormat,
    global_format: RowFormat,
    window: Vec<f32>,
    global: Vec<f32>,
    query: Vec<f32>,
    sink: Vec<f32>,
    window_rows: Vec<Vec<u32>>,
    entries: Vec<Vec<u32>>,
    sequence: Vec<u32>,
    top_k: usize,
}

const WINDOW_ROWS: usize = 200;
const ENTRIES_PER_BLOCK: usize = 4;
const BLOCKS: [u32; 20] = [7, 3, 11, 0, 19, 5, 2, 8, 13, 1, 12, 4, 6, 18, 10, 17, 9, 14, 16, 15];
/// Blocks of the first and of both sequences.
const ENDS: [u32; 2] = [8, 20];

impl Case {
    fn new(
        random: &mut Random,
        heads: usize,
        width: usize,
        formats: (RowFormat, RowFormat),
        counts: &[(usize, usize)],
    ) -> Self {
        let mut pick = |n: usize, most: usize| {
            let mut all: Vec<u32> = (0..most as u32).collect();
            for i in 0..n {
                let j = i + random.below(most - i);
                all.swap(i, j);
            }
            all.truncate(n);
            all.sort_unstable();
            all
        };
        let rows = counts.len();
        let sequence: Vec<u32> = (0..rows).map(|r| u32::from(r >= rows / 2)).collect();
        let window_rows = counts.iter().map(|&(window, _)| pick(window, WINDOW_ROWS)).collect();
        let entries = counts.iter().map(|&(_, selected)| pick(selected, 8 * ENTRIES_PER_BLOCK)).collect();
        Self {
            heads,
            width,
            rows,
            window_format: formats.0,
            global_format: formats.1,
            window: random.floats(WINDOW_ROWS * width),
            global: random.floats(20 * ENTRIES_PER_BLOCK * width),
            query: random.floats(rows * heads * width),
            sink: random.floats(heads),
            window_rows,
            entries,
            sequence,
            top_k: 8 * ENTRIES_PER_BLOCK,
        }
    }

    /// Attention of the rows `rows`.
    fn run<B>(&self, b: &B, rows: std::ops::Range<usize>) -> Vec<f32>
    where
        B: Backend<Buf<f32> = HostBuf<f32>, Buf<u32> = HostBuf<u32>>,
    {
        let mut window = b.store(self.window_format, self.width, WINDOW_ROWS);
        let all: Vec<u32> = (0..WINDOW_ROWS as u32).collect();
        b.store_rows(&HostBuf(self.window.clone()), &mut window, &all);
        let mut global = b.store(self.global_format, self.width, 20 * ENTRIES_PER_BLOCK);
        let all: Vec<u32> = (0..20 * ENTRIES_PER_BLOCK as u32).collect();
        b.store_rows(&HostBuf(self.global.clone()), &mut global, &all);
        let size = self.heads * self.width;
        let lists = &self.window_rows[rows.clone()];
        let ends: Vec<u32> = lists
            .iter()
            .scan(0, |end, list| {
                *end += list.len() as u32;
                Some(*end)
            })
            .collect();
        let mut selection = Selection {
            indices: HostBuf(vec![99; rows.len() * self.top_k]),
            counts: HostBuf(self.entries[rows.clone()].iter().map(|e| e.len() as u32).collect()),
            top_k: self.top_k,
        };
        for (row, entries) in self.entries[rows.clone()].iter().enumerate() {
            selection.indices.0[row * self.top_k..][..entries.len()].copy_from_slice(entries);
        }
        let mut out = HostBuf(vec![f32::NAN; rows.len() * size]);
        let args = AttentionArgs {
            rows: rows.len(),
            heads: self.heads,
            width: self.width,
            scale: (self.width as f32).sqrt().recip(),
            query: &HostBuf(self.query[rows.start * size..rows.end * size].to_vec()),
            sink: &HostBuf(self.sink.clone()),
            window: &window,
            window_rows: &lists.concat(),
            window_ends: &ends,
            global: Some(GlobalKeys {
                store: &global,
                selection: &selection,
                tables: BlockTables {
                    row_sequence: &self.sequence[rows.clone()],
                    blocks: &BLOCKS,
                    ends: &ENDS,
                    entries_per_block: ENTRIES_PER_BLOCK,
                },
            }),
        };
        b.attention(&args, &mut out);
        out.0
    }

    fn check(&self, what: &str) {
        let all = same_bits(what, |cpu| self.run(cpu, 0..self.rows));
        for cpu in [Cpu::new(1), Cpu::new(3)] {
            let by_row: Vec<f32> = (0..self.rows).flat_map(|r| self.run(&cpu, r..r + 1)).collect();
            assert_bits(&format!("{what}, row by row"), &by_row, &all);
        }
        assert_close(what, &all, &self.run(&Reference, 0..self.rows), 1e-5);
    }
}

/// Window and selected keys of the rows: none, one, around a tile, many.
const COUNTS: [(usize, usize); 9] =
    [(0, 0), (1, 0), (0, 1), (31, 1), (32, 0), (33, 32), (64, 1), (127, 32), (128, 17)];

#[test]
fn attention_depends_on_nothing_but_the_row_and_its_keys() {
    use RowFormat::{F32, Fp4Main, Fp8};
    let mut random = Random(21);
    for (heads, width) in [(1, 32), (5, 64), (16, 512), (3, 96)] {
        Case::new(&mut random, heads, width, (Fp8, Fp4Main), &COUNTS).check("quantised keys");
    }
    for (heads, width) in [(1, 1), (7, 20), (4, 64), (64, 16)] {
        Case::new(&mut random, heads, width, (F32, F32), &COUNTS).check("float keys");
    }
}

#[test]
fn a_row_without_keys_gives_zeros() {
    let case = Case::new(&mut Random(3), 4, 32, (RowFormat::F32, RowFormat::F32), &[(0, 0), (0, 0)]);
    assert_eq!(case.run(&Cpu::new(2), 0..2), vec![0.0; 2 * 4 * 32]);
}

#[test]
fn large_logits_and_sinks_do_not_overflow() {
    let mut case = Case::new(&mut Random(4), 4, 32, (RowFormat::F32, RowFormat::F32), &[(40, 20), (90, 32)]);
    case.query.iter_mut().for_each(|q| *q *= 500.0);
    case.sink = vec![1e4, -1e4, f32::NEG_INFINITY, 0.0];
    let out = same_bits("large logits", |cpu| case.run(cpu, 0..2));
    assert!(out.iter().all(|v| v.is_finite()));
    assert_close("large logits", &out, &case.run(&Reference, 0..2), 1e-4);
}
