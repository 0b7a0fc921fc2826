//! The experts of a mixture (model.md section 7), for all rows of a step at once.
//!
//! The picks are sorted by expert, so that a weight is read once for all rows that picked it. Two parallel regions
//! do the work: in the first a task computes some hidden channels of one expert for its rows, in the second some
//! output channels of all experts, which it adds up in ascending expert id. So the order of additions of a row is
//! that of its own picks, whatever else is in the step.

use super::Cpu;
use super::pool::{AlignedBuf, DisjointSlice, SharedScratch};
use super::simd::codec;
use super::simd::product;
use super::simd::vector;
use super::simd::weights::{Block, Inputs, deinterleave};
use crate::formats::RowFormat;
use crate::host::HostWeight;
use crate::ops::{ExpertParams, ExpertSet, ExpertWeights};

/// Channels of a task where there are many rows: whole groups of the next product and whole FP8 blocks.
const HEIGHT: usize = 32;
/// Stored bytes of one matrix that make a task worth its start.
const TASK_BYTES: usize = 64 << 10;

/// The picks of one expert.
#[derive(Clone, Copy)]
struct Load {
    slot: usize,
    /// Range in the order of picks.
    begin: usize,
    end: usize,
}

/// What a call keeps for the next one: memory only.
#[derive(Default)]
pub(crate) struct Workspace {
    /// Picks (row * top_k + k), sorted by expert.
    order: Vec<u32>,
    /// Row of each pick, in that order.
    rows: Vec<u32>,
    /// 0, 1, 2, ...: the hidden rows are in that order too.
    places: Vec<u32>,
    loads: Vec<Load>,
    inputs: AlignedBuf,
    hidden: AlignedBuf,
}

impl Workspace {
    /// Sorts the picks by expert and counts them by slot.
    fn plan(&mut self, ids: &[u32], top_k: usize, slot_of: &[u32], arrivals: &mut [u32]) {
        self.order.clear();
        self.order.extend(0..ids.len() as u32);
        self.order.sort_unstable_by_key(|&pick| (ids[pick as usize], pick));
        self.rows.clear();
        self.rows.extend(self.order.iter().map(|&pick| pick / top_k as u32));
        self.places.clear();
        self.places.extend(0..ids.len() as u32);
        self.loads.clear();
        let mut begin = 0;
        while begin < ids.len() {
            let expert = ids[self.order[begin] as usize];
            let same = self.order[begin..].iter().take_while(|&&pick| ids[pick as usize] == expert);
            let count = same.count();
            let slot = slot_of[expert as usize] as usize;
            arrivals[slot] += count as u32;
            self.loads.push(Load { slot, begin, end: begin + count });
            begin += count;
        }
    }
}

/// See [`crate::Backend::experts`].
#[allow(clippy::too_many_arguments)]
pub(super) fn experts(
    cpu: &Cpu,
    x: &[f32],
    rows: usize,
    ids: &[u32],
    weights: &[f32],
    set: &ExpertSet<HostWeight>,
    p: ExpertParams,
    y: &mut [f32],
    arrivals: &mut [u32],
) {
    assert!(arrivals.len() >= set.slots.len(), "arrivals of {} slots", set.slots.len());
    let (ids, weights) = (&ids[..rows * p.top_k], &weights[..rows * p.top_k]);
    let Some(first) = set.slots.first() else {
        assert!(ids.is_empty(), "picks of an empty set of experts");
        return;
    };
    let (width, channels) = (first.w2.rows, first.w2.cols);
    let y = &mut y[..rows * width];
    if ids.is_empty() {
        y.fill(0.0);
        return;
    }
    let mut workspace = SharedScratch::hold(&cpu.shared.experts);
    workspace.plan(ids, p.top_k, &set.slot_of, arrivals);
    let Workspace { order, rows: row_of, places, loads, inputs, hidden } = &mut *workspace;
    for load in loads.iter() {
        check_shape(&set.slots[load.slot], width, channels);
    }
    let format = p.quantize.then_some(RowFormat::Fp8);
    let inputs = cpu.deinterleave_rows(&x[..rows * width], rows, width, format, inputs);
    let step = Step { cpu, set, loads, row_of, places, order, weights, p, width, channels };
    let hidden = hidden.get(ids.len() * Inputs::stride(channels));
    step.hidden_rows(&inputs, hidden);
    step.output_rows(&Inputs::new(hidden, ids.len(), channels), rows, y);
}

/// The kernels rely on equal shapes of the experts in use.
fn check_shape(expert: &ExpertWeights<HostWeight>, width: usize, channels: usize) {
    let ExpertWeights { w1, w3, w2 } = expert;
    assert_eq!((w1.rows, w1.cols), (channels, width), "shape of w1");
    assert_eq!((w3.rows, w3.cols), (channels, width), "shape of w3");
    assert_eq!((w2.rows, w2.cols), (width, channels), "shape of w2");
}

/// One call.
struct Step<'a> {
    cpu: &'a Cpu,
    set: &'a ExpertSet<HostWeight>,
    loads: &'a [Load],
    row_of: &'a [u32],
    places: &'a [u32],
    order: &'a [u32],
    weights: &'a [f32],
    p: ExpertParams,
    width: usize,
    channels: usize,
}

impl Step<'_> {
    /// `hidden[place] = round(weight * swiglu(w1 x, w3 x))`, in the layout of [`Inputs`].
    fn hidden_rows(&self, x: &Inputs<'_>, hidden: &mut [f32]) {
        let stride = Inputs::stride(self.channels);
        let bytes = self.set.slots[0].w1.format.data_bytes(1, self.width).max(1);
        // Whole groups of the next product.
        let few = self.loads.iter().all(|load| load.end - load.begin <= product::max_inputs(self.cpu.level));
        let height = if few {
            (TASK_BYTES / bytes).next_multiple_of(HEIGHT).clamp(HEIGHT, 4 * HEIGHT)
        } else {
            HEIGHT
        };
        let chunks = self.channels.div_ceil(height);
        let hidden = DisjointSlice::new(hidden);
        self.cpu.pool.run(self.loads.len() * chunks, &|task, thread| {
            let load = self.loads[task / chunks];
            let begin = task % chunks * height;
            let count = height.min(self.channels - begin);
            let expert = &self.set.slots[load.slot];
            let (w1, w3) = (Block::of(&expert.w1), Block::of(&expert.w3));
            let picks = &self.row_of[load.begin..load.end];
            let len = (picks.len() * count).next_multiple_of(16);
            let mut scratch = self.cpu.scratch.of(thread);
            let scratch_of = |w| product::scratch_len(self.cpu.level, w, count, picks.len());
            let more = scratch_of(&w1).max(scratch_of(&w3));
            let (gate, rest) = scratch.get(2 * len + more).split_at_mut(len);
            let (up, rest) = rest.split_at_mut(len);
            // After this task mostly comes the next one, which begins with w1.
            let after = self.loads.get((task + 1) / chunks).map_or(&[][..], |load| {
                let w1 = Block::of(&self.set.slots[load.slot].w1);
                w1.rows_from((task + 1) % chunks * height)
            });
            self.cpu.piece(&expert.w1, begin, count, x, picks, w3.rows_from(begin), rest, gate);
            self.cpu.piece(&expert.w3, begin, count, x, picks, after, rest, up);
            for (t, place) in (load.begin..load.end).enumerate() {
                let gate = &mut gate[t * count..(t + 1) * count];
                vector::swiglu(self.cpu.level, gate, &up[t * count..(t + 1) * count], self.p.limit);
                vector::scale(self.cpu.level, gate, self.weights[self.order[place] as usize]);
                if self.p.quantize {
                    codec::quantize_row(self.cpu.level, RowFormat::Fp8, gate);
                }
                let row = hidden.claim(place * stride + begin, count.next_multiple_of(HEIGHT));
                deinterleave(self.cpu.level, gate, row);
            }
        });
    }

    /// `y[row] = sum of w2 . hidden over the row's places`, ascending.
    fn output_rows(&self, hidden: &Inputs<'_>, rows: usize, y: &mut [f32]) {
        let chunks = self.width.div_ceil(HEIGHT);
        let y = DisjointSlice::new(y);
        let most = self.loads.iter().map(|load| load.end - load.begin).max().unwrap_or(0);
        self.cpu.pool.run(chunks, &|task, thread| {
            let begin = task * HEIGHT;
            let count = HEIGHT.min(self.width - begin);
            let mut scratch = self.cpu.scratch.of(thread);
            let (sums, parts) = ((rows * count).next_multiple_of(16), (most * count).next_multiple_of(16));
            let more = self.loads.iter().map(|load| {
                let w2 = Block::of(&self.set.slots[load.slot].w2);
                product::scratch_len(self.cpu.level, &w2, count, load.end - load.begin)
            });
            let (sums, rest) = scratch.get(sums + parts + more.max().unwrap_or(0)).split_at_mut(sums);
            let (part, rest) = rest.split_at_mut(parts);
            sums.fill(0.0);
            for (i, load) in self.loads.iter().enumerate() {
                let w2 = &self.set.slots[load.slot].w2;
                let picks = &self.places[load.begin..load.end];
                // Then the same channels of the next expert, or the next channels of the first.
                let (load_after, begin_after) = match self.loads.get(i + 1) {
                    Some(load) => (load, begin),
                    None => (&self.loads[0], (begin + HEIGHT).min(self.width)),
                };
                let after = Block::of(&self.set.slots[load_after.slot].w2).rows_from(begin_after);
                self.cpu.piece(w2, begin, count, hidden, picks, after, rest, part);
                for (&row, part) in self.row_of[load.begin..load.end].iter().zip(part.chunks_exact(count)) {
                    let sum = &mut sums[row as usize * count..(row as usize + 1) * count];
                    vector::add(self.cpu.level, sum, part);
                }
            }
            for (row, sum) in sums.chunks_exact(count).take(rows).enumerate() {
                y.claim(row * self.width + begin, count).copy_from_slice(sum);
            }
        });
    }
}

#[cfg(test)]
#[path = "experts_tests.rs"]
mod tests;
