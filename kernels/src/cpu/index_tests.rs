//! Selections: exact against a sort of the scores, the same in any company; scores close to the definition.

use super::super::testing::{Random, assert_bits, assert_close, backends, same_bits};
use super::*;
use crate::Reference;
use crate::formats::RowFormat;
use crate::host::HostBuf;
use crate::ops::{Backend, BlockTables, Candidates, Selection};

/// A step of several rows in two sequences.
struct Case {
    heads: usize,
    width: usize,
    format: RowFormat,
    keys: Vec<f32>,
    query: Vec<f32>,
    weights: Vec<f32>,
    visible: Vec<u32>,
    sequence: Vec<u32>,
    blocks: Vec<u32>,
    ends: Vec<u32>,
    per_block: usize,
}

/// Picks and candidate blocks.
type Picked = (Vec<Vec<u32>>, Option<Vec<Vec<u32>>>);

impl Case {
    fn new(
        random: &mut Random,
        heads: usize,
        width: usize,
        format: RowFormat,
        per_block: usize,
        visible: &[u32],
    ) -> Self {
        let rows = visible.len();
        let sequence: Vec<u32> = (0..rows).map(|r| u32::from(r >= rows.div_ceil(2))).collect();
        let longest = visible.iter().copied().max().unwrap_or(0) as usize;
        let blocks = longest.div_ceil(per_block).max(1);
        // Both sequences have their own blocks, in an order that is not that of the store.
        let mut order: Vec<u32> = (0..2 * blocks as u32).collect();
        for i in 0..order.len() {
            let j = random.below(order.len());
            order.swap(i, j);
        }
        Self {
            heads,
            width,
            format,
            keys: random.floats(2 * blocks * per_block * width),
            query: random.floats(rows * heads * width),
            weights: random.floats(rows * heads),
            visible: visible.to_vec(),
            sequence,
            blocks: order,
            ends: vec![blocks as u32, 2 * blocks as u32],
            per_block,
        }
    }

    fn rows(&self) -> usize {
        self.visible.len()
    }

    /// Calls `f` with the query of the rows `rows`.
    fn with<B, T>(&self, b: &B, rows: std::ops::Range<usize>, f: impl FnOnce(&IndexQuery<'_, B>) -> T) -> T
    where
        B: Backend<Buf<f32> = HostBuf<f32>, Buf<u32> = HostBuf<u32>>,
    {
        let count = self.keys.len() / self.width;
        let mut keys = b.store(self.format, self.width, count);
        b.store_rows(&HostBuf(self.keys.clone()), &mut keys, &(0..count as u32).collect::<Vec<_>>());
        let size = self.heads * self.width;
        f(&IndexQuery {
            rows: rows.len(),
            heads: self.heads,
            width: self.width,
            query: &HostBuf(self.query[rows.start * size..rows.end * size].to_vec()),
            weights: &HostBuf(self.weights[rows.start * self.heads..rows.end * self.heads].to_vec()),
            keys: &keys,
            visible: &self.visible[rows.clone()],
            tables: BlockTables {
                row_sequence: &self.sequence[rows],
                blocks: &self.blocks,
                ends: &self.ends,
                entries_per_block: self.per_block,
            },
        })
    }

    fn scores<B>(&self, b: &B, rows: std::ops::Range<usize>) -> Vec<f32>
    where
        B: Backend<Buf<f32> = HostBuf<f32>, Buf<u32> = HostBuf<u32>>,
    {
        let entries = self.visible.iter().copied().max().unwrap_or(0) as usize + 3;
        let mut out = HostBuf(vec![f32::NAN; rows.len() * entries]);
        self.with(b, rows, |query| b.index_scores(query, entries, &mut out));
        out.0
    }

    /// Selection of `top_k`, with candidates `(max_blocks, block_size)` produced or `restrict`ed to.
    fn select(
        &self,
        cpu: &Cpu,
        rows: std::ops::Range<usize>,
        top_k: usize,
        shape: Option<(usize, usize)>,
        restrict: Option<&[Vec<u32>]>,
    ) -> Picked {
        let n = rows.len();
        let mut selection =
            Selection { indices: HostBuf(vec![u32::MAX; n * top_k]), counts: HostBuf(vec![0; n]), top_k };
        let (max_blocks, block_size) = shape.unwrap_or((0, 1));
        let mut candidates = Candidates {
            indices: HostBuf(vec![u32::MAX; n * max_blocks]),
            counts: HostBuf(vec![0; n]),
            max_blocks,
            block_size,
        };
        if let Some(lists) = restrict {
            for (r, list) in lists[rows.clone()].iter().enumerate() {
                candidates.indices.0[r * max_blocks..][..list.len()].copy_from_slice(list);
                candidates.counts.0[r] = list.len() as u32;
            }
        }
        self.with(cpu, rows, |query| {
            let usage = match (shape, restrict) {
                (None, _) => CandidateUse::Ignore,
                (_, None) => CandidateUse::Produce(&mut candidates),
                (_, Some(_)) => CandidateUse::Restrict(&candidates),
            };
            cpu.index_select(query, usage, &mut selection);
        });
        let lists = |indices: &HostBuf<u32>, counts: &HostBuf<u32>, stride: usize| {
            (0..n).map(|r| indices.0[r * stride..][..counts.0[r] as usize].to_vec()).collect::<Vec<_>>()
        };
        let blocks = shape.map(|_| lists(&candidates.indices, &candidates.counts, max_blocks));
        (lists(&selection.indices, &selection.counts, top_k), blocks)
    }
}

/// The best `keep` by sorting.
fn sorted(scores: impl Iterator<Item = (u32, f32)>, keep: usize) -> Vec<u32> {
    let mut all: Vec<(u32, f32)> = scores.collect();
    all.sort_by(|a, b| b.1.partial_cmp(&a.1).expect("scores are numbers").then(a.0.cmp(&b.0)));
    all.truncate(keep);
    let mut picked: Vec<u32> = all.into_iter().map(|(i, _)| i).collect();
    picked.sort_unstable();
    picked
}

/// What [`Case::select`] has to answer for one row, from its scores.
fn expected_blocks(scores: &[f32], (max_blocks, block_size): (usize, usize)) -> Vec<u32> {
    let blocks = scores.chunks(block_size).map(|b| b.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let newest = scores.len().div_ceil(block_size).wrapping_sub(1);
    let forced = blocks.enumerate().map(|(i, s)| (i as u32, if i == newest { f32::INFINITY } else { s }));
    sorted(forced, max_blocks)
}

fn check_selection(case: &Case, top_k: usize, shape: (usize, usize)) {
    let rows = case.rows();
    let scores = case.scores(&Cpu::new(1), 0..rows);
    let entries = scores.len() / rows;
    let row_scores = |r: usize| &scores[r * entries..][..case.visible[r] as usize];
    let plain: Vec<Vec<u32>> =
        (0..rows).map(|r| sorted((0..).zip(row_scores(r).iter().copied()), top_k)).collect();
    let blocks: Vec<Vec<u32>> = (0..rows).map(|r| expected_blocks(row_scores(r), shape)).collect();
    let inside: Vec<Vec<u32>> = (0..rows)
        .map(|r| {
            let all = (0..).zip(row_scores(r).iter().copied());
            let in_block = |entry: u32| blocks[r].contains(&(entry / shape.1 as u32));
            sorted(all.filter(|&(entry, _)| in_block(entry)), top_k)
        })
        .collect();
    for cpu in backends() {
        assert_eq!(case.select(&cpu, 0..rows, top_k, None, None).0, plain, "all entries, {cpu:?}");
        let (picked, produced) = case.select(&cpu, 0..rows, top_k, Some(shape), None);
        assert_eq!(picked, plain, "while producing, {cpu:?}");
        assert_eq!(produced, Some(blocks.clone()), "blocks, {cpu:?}");
        let (picked, _) = case.select(&cpu, 0..rows, top_k, Some(shape), Some(&blocks));
        assert_eq!(picked, inside, "inside blocks, {cpu:?}");
    }
    let cpu = Cpu::new(2);
    for r in 0..rows {
        assert_eq!(case.select(&cpu, r..r + 1, top_k, None, None).0[0], plain[r], "row {r} alone");
        let alone = case.select(&cpu, r..r + 1, top_k, Some(shape), None).1.expect("blocks were asked for");
        assert_eq!(alone[0], blocks[r], "blocks of row {r} alone");
    }
}

#[test]
fn selections_are_those_of_a_sort() {
    let mut random = Random(31);
    let visible = [0, 1, 15, 16, 17, 100, 255, 256, 257, 300, 700, 700];
    for (heads, width, format, per_block) in [
        (16, 32, RowFormat::Fp4Index, 64),
        (3, 96, RowFormat::Fp4Index, 1),
        (4, 20, RowFormat::F32, 128),
        (1, 64, RowFormat::Fp8, 32),
    ] {
        let case = Case::new(&mut random, heads, width, format, per_block, &visible);
        for (top_k, shape) in [(16, (8, 8)), (1, (1, 3)), (300, (40, 16)), (64, (3, 300)), (1000, (1000, 5))]
        {
            check_selection(&case, top_k, shape);
        }
    }
}

#[test]
fn one_long_row_is_shared_by_threads_and_keeps_its_answer() {
    let mut random = Random(32);
    let case = Case::new(&mut random, 2, 32, RowFormat::Fp4Index, 128, &[20_000, 9_001]);
    check_selection(&case, 512, (300, 8));
}

#[test]
fn equal_scores_go_to_the_lowest_entries() {
    let mut case = Case::new(&mut Random(33), 2, 32, RowFormat::Fp4Index, 64, &[9_000]);
    // Relu leaves 0 everywhere, with both signs of weights; a few entries repeat one better key.
    case.query = vec![-1.0; 64];
    case.keys.iter_mut().for_each(|k| *k = 1.0);
    case.weights = vec![-0.5, 1.0];
    let first_block = case.blocks[5] as usize * 64 * 32;
    case.keys[first_block..first_block + 3 * 32].fill(-1.0);
    for cpu in backends() {
        let (picked, blocks) = case.select(&cpu, 0..1, 10, Some((4, 8)), None);
        assert_eq!(picked[0], [0, 1, 2, 3, 4, 5, 6, 320, 321, 322], "{cpu:?}");
        assert_eq!(blocks.expect("blocks were asked for")[0], [0, 1, 40, 1124], "{cpu:?}");
    }
}

#[test]
fn scores_depend_on_nothing_but_the_row() {
    let mut random = Random(34);
    for (heads, width, format) in [
        (32, 128, RowFormat::Fp4Index),
        (3, 32, RowFormat::Fp4Index),
        (5, 48, RowFormat::Fp4Main),
        (2, 1, RowFormat::F32),
        (16, 32, RowFormat::F32),
    ] {
        let case = Case::new(&mut random, heads, width, format, 16, &[0, 5, 300, 513]);
        let all = same_bits("index_scores", |cpu| case.scores(cpu, 0..4));
        let cpu = Cpu::new(1);
        let by_row: Vec<f32> = (0..4).flat_map(|r| case.scores(&cpu, r..r + 1)).collect();
        assert_bits("index_scores, row by row", &by_row, &all);
        let finite = |v: Vec<f32>| v.into_iter().map(|s| s.max(-1e9)).collect::<Vec<_>>();
        assert_close("index_scores", &finite(all), &finite(case.scores(&Reference, 0..4)), 2e-5);
    }
}
