//! Scoring chunks of entries: one thread's scratch, keys made ready, scores streamed to collectors.

use super::Cpu;
use super::index_best::Best;
use super::simd::attention::TILE;
use super::simd::bytes::{GROUP_LINES, Line};
use super::simd::codec;
use super::simd::index::{self, Queries};
use crate::formats::{GROUP, RowFormat};
use crate::ops::IndexQuery;

/// Entries that are unpacked at a time: with 128 channels, 32 KiB.
pub(super) const CHUNK: usize = 256;
/// Rows that share unpacked keys.
pub(super) const ROWS: usize = 8;

/// Scratch of one thread.
#[derive(Default)]
pub(super) struct Worker {
    lines: Vec<Line>,
    scales: Vec<f32>,
    /// Keys of other formats, as floats.
    keys: Vec<f32>,
    dots: Vec<f32>,
    pub(super) scores: Vec<f32>,
    pub(super) rows: [RowWorker; ROWS],
}

/// Scratch for one row of a task.
#[derive(Default)]
pub(super) struct RowWorker {
    /// Stored form of the row's queries, then taken apart.
    stored: Vec<u8>,
    queries: Queries,
    /// Queries as floats, padded.
    floats: Vec<f32>,
    pub(super) entries: Best,
    pub(super) blocks: Best,
    /// The block whose best score is being collected.
    pub(super) block: Option<(u32, f32)>,
}

impl RowWorker {
    /// Shows the scores of the entries `first ..` to the collector of blocks of `size`; the block of the newest
    /// of `visible` entries beats all others.
    pub(super) fn collect_blocks(&mut self, scores: &[f32], first: usize, size: usize, visible: usize) {
        if scores.is_empty() {
            return;
        }
        let newest = (visible - 1) / size;
        let mut done = 0;
        while done < scores.len() {
            let block = (first + done) / size;
            let run = (size - (first + done) % size).min(scores.len() - done);
            let mut best = scores[done];
            for &score in &scores[done + 1..done + run] {
                best = if score > best { score } else { best };
            }
            done += run;
            match &mut self.block {
                Some((open, so_far)) if *open == block as u32 => {
                    *so_far = if best > *so_far { best } else { *so_far };
                }
                _ => {
                    self.finish_block();
                    self.block = Some((block as u32, best));
                }
            }
            if block == newest {
                self.block = None;
                if (first + done) == visible {
                    self.blocks.push_first(block as u32);
                }
            }
        }
    }

    /// Shows the open block.
    pub(super) fn finish_block(&mut self) {
        if let Some((block, best)) = self.block.take() {
            self.blocks.push(best, block);
        }
    }
}

impl Worker {
    /// Makes the queries of `count` rows ready.
    pub(super) fn prepare(&mut self, cpu: &Cpu, query: &IndexQuery<'_, Cpu>, first: usize, count: usize) {
        let (heads, width) = (query.heads, query.width);
        let size = heads * width;
        self.scores.resize(CHUNK, 0.0);
        for (i, row) in self.rows[..count].iter_mut().enumerate() {
            let floats = &query.query.0[(first + i) * size..(first + i + 1) * size];
            if query.keys.format == RowFormat::Fp4Index {
                let row_bytes = RowFormat::Fp4Index.row_bytes(width);
                row.stored.resize(heads * row_bytes, 0);
                let stored = row.stored.chunks_exact_mut(row_bytes);
                for (stored, floats) in stored.zip(floats.chunks_exact(width)) {
                    codec::encode_row(cpu.level, RowFormat::Fp4Index, floats, stored);
                }
                row.queries.unpack(&row.stored, heads, width);
            } else {
                let stride = width.next_multiple_of(16);
                row.floats.clear();
                row.floats.resize(heads * stride, 0.0);
                for (padded, floats) in row.floats.chunks_exact_mut(stride).zip(floats.chunks_exact(width)) {
                    padded[..width].copy_from_slice(floats);
                }
            }
        }
    }

    /// Makes the keys in `rows` (at most [`CHUNK`]) ready.
    pub(super) fn unpack(&mut self, cpu: &Cpu, query: &IndexQuery<'_, Cpu>, rows: &[u32]) {
        let (store, width) = (query.keys, query.width);
        if rows.is_empty() {
            return;
        }
        if store.format == RowFormat::Fp4Index {
            let groups = width / GROUP;
            let lines = CHUNK / 16 * groups * GROUP_LINES;
            if self.lines.len() < lines {
                self.lines.resize(lines, Line([0; 64]));
                self.scales.resize(CHUNK * groups, 0.0);
            }
            let row_bytes = store.row_bytes;
            index::unpack(cpu.level, &store.data, row_bytes, width, rows, &mut self.lines, &mut self.scales);
        } else {
            let stride = width.next_multiple_of(16);
            if self.keys.len() < CHUNK * stride {
                self.keys.resize(CHUNK * stride, 0.0);
            }
            for (padded, &row) in self.keys.chunks_exact_mut(stride).zip(rows) {
                codec::decode_row(cpu.level, store.format, store.row(row as usize), &mut padded[..width]);
                padded[width..].fill(0.0);
            }
        }
    }

    /// Scores of the first `count` unpacked keys for row `r`, whose queries are the `i`-th.
    pub(super) fn score(&mut self, cpu: &Cpu, query: &IndexQuery<'_, Cpu>, r: usize, i: usize, count: usize) {
        let heads = query.heads;
        let weights = &query.weights.0[r * heads..(r + 1) * heads];
        if self.dots.len() < heads * TILE {
            self.dots.resize(heads * TILE, 0.0);
        }
        let row = &self.rows[i];
        if query.keys.format == RowFormat::Fp4Index {
            let out = &mut self.scores[..count.next_multiple_of(16)];
            index::score(cpu.level, &self.lines, &self.scales, &row.queries, weights, &mut self.dots, out);
            return;
        }
        let stride = query.width.next_multiple_of(16);
        for start in (0..count).step_by(TILE) {
            let n = TILE.min(count - start);
            let keys = &self.keys[start * stride..(start + n) * stride];
            let out = &mut self.scores[start..start + TILE];
            index::score_floats(cpu.level, &row.floats, weights, keys, n, stride, &mut self.dots, out);
        }
    }
}
