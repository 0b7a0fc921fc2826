//! Index scores and the two-level selection of compressed entries (model.md 6.4).
//!
//! Work is cut in tasks of some neighbouring rows of one sequence (they share unpacked keys) and a segment of the
//! entries. A task walks its segment in chunks of [`CHUNK`] entries: keys are unpacked once, then scored and
//! streamed into a [`super::index_best::Best`] per row. If a row has several segments their bests are merged. The order in which
//! scores are added is fixed by the kernel, and the best of a set does not depend on how the set was cut: so rows,
//! threads and segments change no bit.

use std::sync::{Mutex, MutexGuard, PoisonError};

use super::Cpu;
use super::index_scan::{CHUNK, ROWS, RowWorker, Worker};
use super::pool::DisjointSlice;
use super::simd::codec;
use super::vector::{F32, U32, part, part_mut};
use crate::ops::{CandidateUse, Candidates, IndexQuery, Selection};

/// Entries (times rows) of a task that is worth a thread.
const TASK_ENTRIES: usize = 2048;

/// Some rows and a segment of what they look at. With candidates, positions count the entries of their blocks.
#[derive(Clone, Copy, Debug)]
struct Task {
    first_row: usize,
    rows: usize,
    start: usize,
    end: usize,
    /// Which of the rows' segments this is, and how many there are.
    segment: usize,
    segments: usize,
    /// Where the first row's first segment lies in [`Plan::partial`]; segments of a row lie together.
    partial: usize,
}

/// Memory of index operations.
pub(super) struct Scratch {
    workers: Vec<Mutex<Worker>>,
    plan: Mutex<Plan>,
}

/// What is decided before the threads begin.
#[derive(Default)]
struct Plan {
    tasks: Vec<Task>,
    /// Bests of rows that were cut in segments.
    partial: Vec<Part>,
}

/// What one segment of one row found.
#[derive(Default)]
struct Part {
    entries: Vec<u64>,
    blocks: Vec<u64>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Scratch holds nothing that a panic could leave half done.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Scratch {
    pub(super) fn new(threads: usize) -> Self {
        Self { workers: (0..threads).map(|_| Mutex::default()).collect(), plan: Mutex::default() }
    }
}

/// What a selection does with blocks, in a form that tasks can share.
#[derive(Clone, Copy)]
enum Blocks<'a> {
    Ignore,
    Produce { keep: usize, size: usize },
    Restrict(&'a Candidates<U32>),
}

impl Blocks<'_> {
    /// How many positions row `r` looks at.
    fn positions(&self, query: &IndexQuery<'_, Cpu>, r: usize) -> usize {
        match self {
            Blocks::Restrict(candidates) => candidates.counts.0[r] as usize * candidates.block_size,
            _ => query.visible[r] as usize,
        }
    }
}

/// `out[r, j] = S(r, j)` for `j < visible[r]`, else -inf.
pub(super) fn scores(cpu: &Cpu, query: &IndexQuery<'_, Cpu>, entries: usize, out: &mut F32) {
    check(query);
    let out = part_mut(out, query.rows * entries, "out");
    if out.is_empty() {
        return;
    }
    cpu.pool.run_pieces(out, entries, &|r, thread, out| {
        let visible = (query.visible[r] as usize).min(entries);
        out[visible..].fill(f32::NEG_INFINITY);
        let mut worker = lock(&cpu.index.workers[thread]);
        worker.prepare(cpu, query, r, 1);
        for start in (0..visible).step_by(CHUNK) {
            let end = visible.min(start + CHUNK);
            let mut rows = [0; CHUNK];
            store_rows(query, r, start, end, &mut rows);
            worker.unpack(cpu, query, &rows[..end - start]);
            worker.score(cpu, query, r, 0, end - start);
            out[start..end].copy_from_slice(&worker.scores[..end - start]);
        }
    });
}

/// Picks at most `selection.top_k` entries per row; see [`CandidateUse`] for what candidates do.
pub(super) fn select(
    cpu: &Cpu,
    query: &IndexQuery<'_, Cpu>,
    candidates: CandidateUse<'_, U32>,
    selection: &mut Selection<U32>,
) {
    check(query);
    let (rows, top_k) = (query.rows, selection.top_k);
    let indices = DisjointSlice::new(part_mut(&mut selection.indices, rows * top_k, "selected entries"));
    let counts = DisjointSlice::new(part_mut(&mut selection.counts, rows, "counts of selected entries"));
    let (mut no_indices, mut no_counts) = ([], []);
    let (blocks, block_indices, block_counts) = match candidates {
        CandidateUse::Ignore => (Blocks::Ignore, &mut no_indices[..], &mut no_counts[..]),
        CandidateUse::Restrict(c) => {
            part(&c.indices, rows * c.max_blocks, "candidate blocks");
            part(&c.counts, rows, "counts of candidate blocks");
            (Blocks::Restrict(c), &mut no_indices[..], &mut no_counts[..])
        }
        CandidateUse::Produce(c) => {
            assert!(c.block_size > 0, "a candidate block has at least one entry");
            let produce = Blocks::Produce { keep: c.max_blocks, size: c.block_size };
            let indices = part_mut(&mut c.indices, rows * c.max_blocks, "candidate blocks");
            (produce, indices, part_mut(&mut c.counts, rows, "counts of candidate blocks"))
        }
    };
    let job = Job {
        cpu,
        query,
        blocks,
        top_k,
        indices,
        counts,
        block_indices: DisjointSlice::new(block_indices),
        block_counts: DisjointSlice::new(block_counts),
    };
    job.run();
}

/// Asserts the shapes.
fn check(query: &IndexQuery<'_, Cpu>) {
    let (rows, heads, width) = (query.rows, query.heads, query.width);
    assert!(heads > 0 && width > 0, "{heads} index heads of {width} channels");
    assert_eq!(query.keys.width, width, "channels of an index key");
    assert!(query.visible.len() >= rows, "visible entries of {rows} rows");
    assert!(query.tables.row_sequence.len() >= rows, "sequences of {rows} rows");
    part(query.query, rows * heads * width, "query");
    part(query.weights, rows * heads, "weights");
}

/// Store rows of the entries `start .. end` as row `r` sees them.
fn store_rows(query: &IndexQuery<'_, Cpu>, r: usize, start: usize, end: usize, out: &mut [u32; CHUNK]) {
    let per_block = query.tables.entries_per_block;
    let mut entry = start;
    while entry < end {
        let run = (per_block - entry % per_block).min(end - entry);
        let first = query.tables.store_row(r, entry) as u32;
        for (out, row) in out[entry - start..entry - start + run].iter_mut().zip(first..) {
            *out = row;
        }
        entry += run;
    }
}

/// One call of [`select`].
struct Job<'a> {
    cpu: &'a Cpu,
    query: &'a IndexQuery<'a, Cpu>,
    blocks: Blocks<'a>,
    top_k: usize,
    indices: DisjointSlice<'a, u32>,
    counts: DisjointSlice<'a, u32>,
    block_indices: DisjointSlice<'a, u32>,
    block_counts: DisjointSlice<'a, u32>,
}

impl Job<'_> {
    fn run(&self) {
        let mut plan = lock(&self.cpu.index.plan);
        let Plan { tasks, partial } = &mut *plan;
        let partials = self.plan(tasks);
        if partial.len() < partials {
            partial.resize_with(partials, Part::default);
        }
        self.scan_all(tasks, &mut partial[..partials]);
        self.merge_all(tasks, &partial[..partials]);
    }

    /// Runs all tasks; writes the rows that are in one piece, and what was found of others to `partial`.
    fn scan_all(&self, tasks: &[Task], partial: &mut [Part]) {
        let partial = DisjointSlice::new(partial);
        self.cpu.pool.run(tasks.len(), &|i, thread| {
            let task = &tasks[i];
            let mut worker = lock(&self.cpu.index.workers[thread]);
            self.scan(task, &mut worker);
            for (r, row) in worker.rows[..task.rows].iter_mut().enumerate() {
                if task.segments == 1 {
                    self.write(task.first_row + r, row);
                    continue;
                }
                let part = &mut partial.claim(task.partial + r * task.segments + task.segment, 1)[0];
                part.entries.clear();
                part.entries.extend_from_slice(row.entries.packed());
                part.blocks.clear();
                part.blocks.extend_from_slice(row.blocks.packed());
            }
        });
    }

    /// Puts the segments of the rows together that were cut.
    fn merge_all(&self, tasks: &[Task], partial: &[Part]) {
        let cut = |task: &&Task| task.segments > 1 && task.segment == 0;
        self.cpu.pool.run(tasks.iter().filter(cut).count(), &|i, thread| {
            let task = tasks.iter().filter(cut).nth(i).expect("i counts the cut tasks");
            let mut worker = lock(&self.cpu.index.workers[thread]);
            let row = &mut worker.rows[0];
            for r in 0..task.rows {
                self.start(row);
                for part in &partial[task.partial + r * task.segments..][..task.segments] {
                    row.entries.merge(&part.entries);
                    row.blocks.merge(&part.blocks);
                }
                self.write(task.first_row + r, row);
            }
        });
    }

    /// Decides the tasks; answers how many partial results they need. Rows that need no scores are done here.
    fn plan(&self, tasks: &mut Vec<Task>) -> usize {
        tasks.clear();
        let rows = self.query.rows;
        let (mut r, mut total) = (0, 0);
        while r < rows {
            if self.is_plain(r) {
                self.write_all(r);
                r += 1;
                continue;
            }
            let mut count = 1;
            let shares = !matches!(self.blocks, Blocks::Restrict(_));
            let sequence = |r: usize| self.query.tables.row_sequence[r];
            while shares
                && count < ROWS
                && r + count < rows
                && sequence(r + count) == sequence(r)
                && !self.is_plain(r + count)
            {
                count += 1;
            }
            let end = (r..r + count).map(|r| self.blocks.positions(self.query, r)).max().unwrap_or(0);
            total += end * count;
            tasks.push(Task {
                first_row: r,
                rows: count,
                start: 0,
                end,
                segment: 0,
                segments: 1,
                partial: 0,
            });
            r += count;
        }
        let threads = self.cpu.threads();
        if threads == 1 {
            return 0;
        }
        self.split(tasks, TASK_ENTRIES.max(total.div_ceil(4 * threads)))
    }

    /// Cuts tasks that are larger than `target` entries times rows.
    fn split(&self, tasks: &mut Vec<Task>, target: usize) -> usize {
        let mut partials = 0;
        for i in 0..tasks.len() {
            let task = tasks[i];
            let wanted = (task.end * task.rows).div_ceil(target);
            // A block of candidates belongs to one segment.
            let unit = match self.blocks {
                Blocks::Produce { size, .. } => size,
                _ => 1,
            };
            let length = task.end.div_ceil(wanted.max(1)).next_multiple_of(unit).max(unit);
            let segments = task.end.div_ceil(length);
            if segments < 2 {
                continue;
            }
            for s in 0..segments {
                let part = Task {
                    start: s * length,
                    end: task.end.min((s + 1) * length),
                    segment: s,
                    segments,
                    partial: partials,
                    ..task
                };
                if s == 0 {
                    tasks[i] = part;
                } else {
                    tasks.push(part);
                }
            }
            partials += segments * task.rows;
        }
        partials
    }

    /// Whether row `r` takes everything it may look at.
    fn is_plain(&self, r: usize) -> bool {
        let all_blocks = match self.blocks {
            Blocks::Produce { keep, size } => (self.query.visible[r] as usize).div_ceil(size) <= keep,
            _ => true,
        };
        all_blocks && self.blocks.positions(self.query, r) <= self.top_k
    }

    /// Writes everything that row `r` may look at.
    fn write_all(&self, r: usize) {
        let visible = self.query.visible[r];
        let out = self.indices.claim(r * self.top_k, self.top_k);
        let mut count = 0;
        match self.blocks {
            Blocks::Restrict(c) => {
                let held = &c.indices.0[r * c.max_blocks..][..c.counts.0[r] as usize];
                let size = c.block_size as u32;
                for entry in held.iter().flat_map(|&b| b * size..visible.min((b + 1) * size)) {
                    out[count] = entry;
                    count += 1;
                }
            }
            _ => {
                for entry in 0..visible {
                    out[count] = entry;
                    count += 1;
                }
            }
        }
        self.counts.claim(r, 1)[0] = count as u32;
        if let Blocks::Produce { keep, size } = self.blocks {
            let count = visible.div_ceil(size as u32);
            for (out, block) in self.block_indices.claim(r * keep, keep).iter_mut().zip(0..count) {
                *out = block;
            }
            self.block_counts.claim(r, 1)[0] = count;
        }
    }

    /// Empties the collectors of a row.
    fn start(&self, row: &mut RowWorker) {
        row.entries.start(self.top_k);
        row.blocks.start(match self.blocks {
            Blocks::Produce { keep, .. } => keep,
            _ => 0,
        });
        row.block = None;
    }

    /// Writes what a row's collectors hold.
    fn write(&self, r: usize, row: &mut RowWorker) {
        let out = self.indices.claim(r * self.top_k, self.top_k);
        self.counts.claim(r, 1)[0] = row.entries.write_ascending(out) as u32;
        if let Blocks::Produce { keep, .. } = self.blocks {
            let out = self.block_indices.claim(r * keep, keep);
            self.block_counts.claim(r, 1)[0] = row.blocks.write_ascending(out) as u32;
        }
    }

    /// Scores a task's entries and shows them to the collectors of its rows.
    fn scan(&self, task: &Task, worker: &mut Worker) {
        let (cpu, query) = (self.cpu, self.query);
        worker.prepare(cpu, query, task.first_row, task.rows);
        for row in &mut worker.rows[..task.rows] {
            self.start(row);
        }
        let mut start = task.start;
        while start < task.end {
            let end = task.end.min(start + CHUNK);
            let (mut rows, mut entries) = ([0; CHUNK], [0; CHUNK]);
            let count = self.look(task.first_row, start, end, &mut rows, &mut entries);
            worker.unpack(cpu, query, &rows[..count]);
            self.prefetch(task, end);
            for i in 0..task.rows {
                let r = task.first_row + i;
                let visible = query.visible[r] as usize;
                match self.blocks {
                    Blocks::Restrict(_) => {
                        worker.score(cpu, query, r, i, count);
                        worker.rows[i].entries.push_some(&worker.scores[..count], &entries[..count]);
                    }
                    _ => {
                        let count = count.min(visible.saturating_sub(start));
                        worker.score(cpu, query, r, i, count);
                        let scores = &worker.scores[..count];
                        worker.rows[i].entries.push_run(scores, start as u32);
                        if let Blocks::Produce { size, .. } = self.blocks {
                            worker.rows[i].collect_blocks(scores, start, size, visible);
                        }
                    }
                }
            }
            start = end;
        }
        for row in &mut worker.rows[..task.rows] {
            row.finish_block();
        }
    }

    /// Asks for the keys of the chunk that begins at `start`: they travel while the one before is scored.
    fn prefetch(&self, task: &Task, start: usize) {
        let end = task.end.min(start + CHUNK);
        let (mut rows, mut entries) = ([0; CHUNK], [0; CHUNK]);
        let count = self.look(task.first_row, start, end, &mut rows, &mut entries);
        for &row in &rows[..count] {
            codec::prefetch(self.query.keys.row(row as usize));
        }
    }

    /// Store rows and entries of the positions `start .. end` of row `r`; answers how many are visible.
    fn look(
        &self,
        r: usize,
        start: usize,
        end: usize,
        rows: &mut [u32; CHUNK],
        entries: &mut [u32; CHUNK],
    ) -> usize {
        let Blocks::Restrict(c) = self.blocks else {
            store_rows(self.query, r, start, end, rows);
            return end.saturating_sub(start);
        };
        let held = &c.indices.0[r * c.max_blocks..][..c.counts.0[r] as usize];
        let mut count = 0;
        let mut position = start;
        while position < end {
            let (block, inside) = (position / c.block_size, position % c.block_size);
            let run = (c.block_size - inside).min(end - position);
            let first = held[block] as usize * c.block_size + inside;
            for entry in first..(first + run).min(self.query.visible[r] as usize) {
                rows[count] = self.query.tables.store_row(r, entry) as u32;
                entries[count] = entry as u32;
                count += 1;
            }
            position += run;
        }
        count
    }
}

#[cfg(test)]
#[path = "index_tests.rs"]
mod tests;
