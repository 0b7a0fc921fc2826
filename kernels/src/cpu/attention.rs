//! Attention over window and selected keys: a task is one row and some of its heads.
//!
//! A task decodes its row's keys a tile at a time into its thread's scratch and adds the tile to all its heads, so
//! decoded keys never leave the second-level cache. How heads are grouped into tasks changes no bit.

use super::Cpu;
use super::pool::{AlignedBuf, DisjointSlice};
use super::simd::attention::{self, Softmax, TILE};
use super::simd::codec;
use super::vector::{F32, part, part_mut};
use crate::host::HostStore;
use crate::ops::AttentionArgs;

/// Multiply-adds below which a call stays on one thread.
const PARALLEL_WORK: usize = 1 << 19;

/// The keys of one row, in the order of the sum.
struct Keys<'a> {
    args: &'a AttentionArgs<'a, Cpu>,
    row: usize,
    window_rows: &'a [u32],
    entries: &'a [u32],
}

impl<'a> Keys<'a> {
    fn of(args: &'a AttentionArgs<'a, Cpu>, row: usize) -> Self {
        let first = if row == 0 { 0 } else { args.window_ends[row - 1] as usize };
        let entries = args.global.as_ref().map_or(&[][..], |global| {
            let (stride, count) = (global.selection.top_k, global.selection.counts.0[row] as usize);
            assert!(count <= stride, "{count} entries of {stride}");
            &global.selection.indices.0[row * stride..row * stride + count]
        });
        Self { args, row, window_rows: &args.window_rows[first..args.window_ends[row] as usize], entries }
    }

    fn len(&self) -> usize {
        self.window_rows.len() + self.entries.len()
    }

    /// Store and stored bytes of the `i`-th key.
    fn get(&self, i: usize) -> (&'a HostStore, &'a [u8]) {
        match self.window_rows.get(i) {
            Some(&row) => (self.args.window, self.args.window.row(row as usize)),
            None => {
                let global = self.args.global.as_ref().expect("entries come from a global store");
                let entry = self.entries[i - self.window_rows.len()] as usize;
                (global.store, global.store.row(global.tables.store_row(self.row, entry)))
            }
        }
    }
}

/// Scratch of a task, cut from one buffer.
struct Work<'a> {
    tile: &'a mut [f32],
    weights: &'a mut [f32],
    max: &'a mut [f32],
    sum: &'a mut [f32],
    alpha: &'a mut [f32],
    /// Queries and accumulators with padding; empty if rows need none.
    query: &'a mut [f32],
    acc: &'a mut [f32],
}

impl<'a> Work<'a> {
    fn cut(buffer: &'a mut AlignedBuf, heads: usize, width: usize, stride: usize) -> Self {
        let padded = if stride == width { 0 } else { heads * stride };
        let line = heads.next_multiple_of(16);
        let sizes = TILE * stride + heads * TILE + 3 * line + 2 * padded;
        let (tile, rest) = buffer.get(sizes).split_at_mut(TILE * stride);
        let (weights, rest) = rest.split_at_mut(heads * TILE);
        let (max, rest) = rest.split_at_mut(line);
        let (sum, rest) = rest.split_at_mut(line);
        let (alpha, rest) = rest.split_at_mut(line);
        let (query, acc) = rest.split_at_mut(padded);
        Self {
            tile,
            weights,
            max: &mut max[..heads],
            sum: &mut sum[..heads],
            alpha: &mut alpha[..heads],
            query,
            acc,
        }
    }
}

/// Attention of every row; see [`crate::Backend::attention`].
pub(super) fn attention(cpu: &Cpu, args: &AttentionArgs<'_, Cpu>, out: &mut F32) {
    let (rows, heads, width) = (args.rows, args.heads, args.width);
    assert!(heads > 0 && width > 0, "attention of {heads} heads of {width} channels");
    assert!(args.window_ends.len() >= rows, "an end of window rows for each row");
    assert_eq!(args.window.width, width, "channels of a window key");
    if let Some(global) = &args.global {
        assert_eq!(global.store.width, width, "channels of a compressed key");
    }
    let query = part(args.query, rows * heads * width, "query");
    let sink = part(args.sink, heads, "sink");
    let out = DisjointSlice::new(part_mut(out, rows * heads * width, "out"));
    let work = total_keys(args) * heads * width * 2;
    let groups = if work < PARALLEL_WORK { 1 } else { head_groups(cpu.threads(), rows, heads) };
    let per_group = heads.div_ceil(groups).next_multiple_of(4).min(heads);
    let groups = heads.div_ceil(per_group);
    let task = |task: usize, thread: usize| {
        let (row, first) = (task / groups, task % groups * per_group);
        let count = per_group.min(heads - first);
        let at = (row * heads + first) * width;
        let (query, sink) = (&query[at..at + count * width], &sink[first..first + count]);
        let out = out.claim(at, count * width);
        attend(cpu, &Keys::of(args, row), args.scale, query, sink, thread, out);
    };
    if work < PARALLEL_WORK {
        // One task, so that nobody is woken.
        cpu.pool.run(rows.min(1), &|_, thread| (0..rows * groups).for_each(|i| task(i, thread)));
    } else {
        cpu.pool.run(rows * groups, &task);
    }
}

fn total_keys(args: &AttentionArgs<'_, Cpu>) -> usize {
    let selected = args
        .global
        .as_ref()
        .map_or(0, |global| global.selection.counts.0[..args.rows].iter().map(|&n| n as usize).sum());
    args.window_rows.len() + selected
}

/// Into how many groups the heads of a row are cut: every group decodes all keys again, so no more than it takes to
/// keep the threads evenly busy.
fn head_groups(threads: usize, rows: usize, heads: usize) -> usize {
    let most = heads.div_ceil(4);
    (1..=most)
        .find(|groups| (rows * groups).is_multiple_of(threads) || rows * groups >= 4 * threads)
        .unwrap_or(most)
}

/// Some heads of one row. `query` and `out` are `[heads, width]`.
fn attend(
    cpu: &Cpu,
    keys: &Keys<'_>,
    scale: f32,
    query: &[f32],
    sink: &[f32],
    thread: usize,
    out: &mut [f32],
) {
    out.fill(0.0);
    if keys.len() == 0 {
        return;
    }
    let (heads, width) = (sink.len(), keys.args.width);
    let stride = width.next_multiple_of(16);
    let mut buffer = cpu.scratch.of(thread);
    let work = Work::cut(&mut buffer, heads, width, stride);
    work.max.copy_from_slice(sink);
    work.sum.fill(1.0);
    let mut state = Softmax { max: work.max, sum: work.sum, alpha: work.alpha };
    if stride == width {
        run_tiles(cpu, keys, scale, query, stride, work.tile, work.weights, &mut state, out);
        attention::finish(cpu.level, out, stride, state.sum);
        return;
    }
    work.acc.fill(0.0);
    work.query.fill(0.0);
    work.tile.fill(0.0);
    for (padded, row) in work.query.chunks_exact_mut(stride).zip(query.chunks_exact(width)) {
        padded[..width].copy_from_slice(row);
    }
    run_tiles(cpu, keys, scale, work.query, stride, work.tile, work.weights, &mut state, work.acc);
    attention::finish(cpu.level, work.acc, stride, state.sum);
    for (row, padded) in out.chunks_exact_mut(width).zip(work.acc.chunks_exact(stride)) {
        row.copy_from_slice(&padded[..width]);
    }
}

/// Decodes tile after tile and adds it.
#[allow(clippy::too_many_arguments)]
fn run_tiles(
    cpu: &Cpu,
    keys: &Keys<'_>,
    scale: f32,
    query: &[f32],
    stride: usize,
    tile: &mut [f32],
    weights: &mut [f32],
    state: &mut Softmax<'_>,
    acc: &mut [f32],
) {
    let (width, len) = (keys.args.width, keys.len());
    for first in (0..len).step_by(TILE) {
        let n = TILE.min(len - first);
        for (i, row) in tile.chunks_exact_mut(stride).take(n).enumerate() {
            let (store, bytes) = keys.get(first + i);
            codec::decode_row(cpu.level, store.format, bytes, &mut row[..width]);
        }
        // Selected keys lie anywhere: the next tile travels while this one is worked on.
        for i in first + n..len.min(first + 2 * TILE) {
            codec::prefetch(keys.get(i).1);
        }
        attention::tile(cpu.level, query, tile, n, stride, scale, weights, state, acc);
    }
}

#[cfg(test)]
#[path = "attention_tests.rs"]
mod tests;
