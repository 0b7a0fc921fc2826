//! Index scores and the two-level selection.
//!
//! Selections must be equal. Random inputs are drawn again until no score stands so near to the border of the
//! selection that float32 noise could move it across; other inputs are small integers, whose scores are exact in
//! any order and full of ties.

use std::ops::Range;

use deepinfer_kernels::{Backend, CandidateUse, Candidates, IndexQuery, Reference, RowFormat, Selection};

use crate::data::{HALF_ULP, Rng, TestTables, filled_store};
use crate::harness::{
    Answer, Case, Tolerance, Values, floats, output, output_u32, upload, upload_u32, valid_indices,
};

/// What a selection does with candidates.
#[derive(Clone, Debug)]
pub enum Use {
    /// Only scores are asked for.
    Scores,
    /// All entries.
    Ignore,
    /// Also the best `max_blocks` blocks of `block_size`.
    Produce { max_blocks: usize, block_size: usize },
    /// Only inside these blocks of each row.
    Restrict { blocks: Vec<Vec<u32>>, block_size: usize },
}

/// `index_scores` or `index_select`.
pub struct Index {
    heads: usize,
    width: usize,
    format: RowFormat,
    tables: TestTables,
    keys: Vec<f32>,
    query: Vec<f32>,
    weights: Vec<f32>,
    visible: Vec<u32>,
    top_k: usize,
    what: Use,
}

impl Index {
    fn with_query<B: Backend, T>(
        &self,
        backend: &B,
        rows: Range<usize>,
        call: impl FnOnce(&IndexQuery<'_, B>) -> T,
    ) -> T {
        let stride = self.heads * self.width;
        let query = upload(backend, &self.query[rows.start * stride..rows.end * stride]);
        let weights = upload(backend, &self.weights[rows.start * self.heads..rows.end * self.heads]);
        let keys = filled_store(backend, self.format, self.width, &self.keys);
        call(&IndexQuery {
            rows: rows.len(),
            heads: self.heads,
            width: self.width,
            query: &query,
            weights: &weights,
            keys: &keys,
            visible: &self.visible[rows.clone()],
            tables: self.tables.view(rows),
        })
    }

    /// One more than any row sees.
    fn entries(&self) -> usize {
        self.visible.iter().copied().max().unwrap_or(0) as usize + 1
    }

    fn scores<B: Backend>(&self, backend: &B, rows: Range<usize>) -> B::Buf<f32> {
        let mut out = output(backend, rows.len() * self.entries());
        self.with_query(backend, rows, |query| backend.index_scores(query, self.entries(), &mut out));
        out
    }

    /// Magnitude that rounding errors of a row's scores are relative to.
    fn magnitude(&self, row: usize) -> f64 {
        let q = &self.query[row * self.heads * self.width..(row + 1) * self.heads * self.width];
        let rms = (q.iter().map(|q| f64::from(q * q)).sum::<f64>() / q.len() as f64).sqrt();
        let weights = &self.weights[row * self.heads..(row + 1) * self.heads];
        weights.iter().map(|w| f64::from(w.abs())).sum::<f64>() * rms * (self.width as f64).sqrt()
    }

    /// Whether picking `keep` of `scores` is beyond doubt: whatever does not equal the score at the border is
    /// further from it than `noise`, and several scores at the border are all exactly zero.
    fn is_clear(mut scores: Vec<f32>, keep: usize, noise: f64) -> bool {
        scores.sort_by(|a, b| b.total_cmp(a));
        if keep == 0 || keep >= scores.len() {
            return true;
        }
        let border = scores[keep - 1];
        let clear = scores.iter().all(|s| *s == border || f64::from((s - border).abs()) > noise);
        clear && (border == 0.0 || scores[keep] != border)
    }

    /// Draws queries of doubtful rows again.
    fn screen(mut self, rng: &mut Rng) -> Self {
        let stride = self.heads * self.width;
        for row in 0..self.visible.len() {
            while !self.row_is_clear(row) {
                let fresh = rng.normals(stride);
                self.query[row * stride..(row + 1) * stride].copy_from_slice(&fresh);
            }
        }
        self
    }

    fn row_is_clear(&self, row: usize) -> bool {
        let noise = 64.0 * HALF_ULP * self.magnitude(row);
        let buffer = self.scores(&Reference, row..row + 1);
        let scores = &buffer.0[..self.visible[row] as usize];
        match &self.what {
            Use::Scores => true,
            Use::Ignore => Self::is_clear(scores.to_vec(), self.top_k, noise),
            Use::Produce { max_blocks, block_size } => {
                let mut best: Vec<f32> = scores
                    .chunks(*block_size)
                    .map(|block| block.iter().copied().fold(f32::NEG_INFINITY, f32::max))
                    .collect();
                // The newest block is always in.
                best.pop();
                Self::is_clear(scores.to_vec(), self.top_k, noise)
                    && Self::is_clear(best, max_blocks.saturating_sub(1), noise)
            }
            Use::Restrict { blocks, block_size } => {
                let inside = |j: usize| blocks[row].contains(&((j / block_size) as u32));
                let scores = (0..scores.len()).filter(|j| inside(*j)).map(|j| scores[j]).collect();
                Self::is_clear(scores, self.top_k, noise)
            }
        }
    }
}

impl Case for Index {
    fn label(&self) -> String {
        let visible: Vec<u32> = self.visible.iter().copied().take(4).collect();
        let what = match &self.what {
            Use::Restrict { blocks, block_size } => {
                format!("inside {:?}.. blocks of {block_size}", blocks.iter().map(Vec::len).max())
            }
            other => format!("{other:?}"),
        };
        format!(
            "{:?} keys, {} rows, {} heads of {}, visible {visible:?}, top {}, {what}",
            self.format,
            self.rows(),
            self.heads,
            self.width,
            self.top_k
        )
    }

    fn rows(&self) -> usize {
        self.visible.len()
    }

    fn run<B: Backend>(&self, backend: &B, rows: Range<usize>) -> Answer {
        let n = rows.len();
        let mut selection = Selection {
            indices: output_u32(backend, n * self.top_k),
            counts: output_u32(backend, n),
            top_k: self.top_k,
        };
        let mut answer = Answer::new();
        match &self.what {
            Use::Scores => return vec![floats(backend, "scores", &self.scores(backend, rows))],
            Use::Ignore => self.with_query(backend, rows, |query| {
                backend.index_select(query, CandidateUse::Ignore, &mut selection);
            }),
            Use::Produce { max_blocks, block_size } => {
                let mut candidates = Candidates {
                    indices: output_u32(backend, n * max_blocks),
                    counts: output_u32(backend, n),
                    max_blocks: *max_blocks,
                    block_size: *block_size,
                };
                self.with_query(backend, rows, |query| {
                    backend.index_select(query, CandidateUse::Produce(&mut candidates), &mut selection);
                });
                answer.extend(valid_indices(backend, &candidates.indices, &candidates.counts, *max_blocks));
            }
            Use::Restrict { blocks, block_size } => {
                let blocks = &blocks[rows.clone()];
                let max_blocks = blocks.iter().map(Vec::len).max().unwrap_or(0) + 1;
                let mut indices = vec![u32::MAX; n * max_blocks];
                for (row, blocks) in indices.chunks_exact_mut(max_blocks).zip(blocks) {
                    row[..blocks.len()].copy_from_slice(blocks);
                }
                let counts: Vec<u32> = blocks.iter().map(|blocks| blocks.len() as u32).collect();
                let candidates = Candidates {
                    indices: upload_u32(backend, &indices),
                    counts: upload_u32(backend, &counts),
                    max_blocks,
                    block_size: *block_size,
                };
                self.with_query(backend, rows, |query| {
                    backend.index_select(query, CandidateUse::Restrict(&candidates), &mut selection);
                });
            }
        }
        answer.extend(valid_indices(backend, &selection.indices, &selection.counts, self.top_k));
        answer
    }

    /// Scores: random errors of the dots and of the sum over heads. Selections: none.
    fn tolerances(&self, want: &Answer) -> Vec<Tolerance> {
        let entries = self.entries();
        let of = |output: &crate::harness::Output| match &output.values {
            Values::F32(scores) => {
                let bounds = (0..scores.len()).map(|i| 32.0 * HALF_ULP * self.magnitude(i / entries) + 1e-30);
                Tolerance::Each(bounds.collect())
            }
            _ => Tolerance::Exact,
        };
        want.iter().map(of).collect()
    }
}

/// Shape of a case before its numbers are drawn.
struct Shape {
    rows: usize,
    heads: usize,
    width: usize,
    format: RowFormat,
    entries_per_block: usize,
    visible: fn(usize) -> usize,
    top_k: usize,
}

/// What kind of numbers to draw.
#[derive(Clone, Copy, PartialEq)]
enum Numbers {
    /// Normal, screened.
    Normal,
    /// -1, 0 and 1 everywhere: exact scores, many ties.
    Signs,
    /// All keys equal: nothing but ties.
    Equal,
}

fn index_case(rng: &mut Rng, shape: &Shape, numbers: Numbers, what: Use) -> Index {
    let Shape { rows, heads, width, format, entries_per_block, top_k, .. } = *shape;
    let visible: Vec<u32> = (0..rows).map(|r| (shape.visible)(r) as u32).collect();
    let sequences = 1 + rows / 4;
    let row_sequence: Vec<u32> = (0..rows).map(|r| (r * sequences / rows) as u32).collect();
    let entries: Vec<usize> = (0..sequences as u32)
        .map(|s| {
            (0..rows).filter(|r| row_sequence[*r] == s).map(|r| visible[r] as usize).max().unwrap_or(0) + 2
        })
        .collect();
    let tables = TestTables::new(rng, row_sequence, &entries, entries_per_block);
    let count = tables.store_rows() * width;
    let draw = |rng: &mut Rng, n: usize| {
        if numbers == Numbers::Normal { rng.awkward(n) } else { rng.signs(n) }
    };
    let case = Index {
        heads,
        width,
        format,
        keys: if numbers == Numbers::Equal { vec![1.0; count] } else { draw(rng, count) },
        tables,
        query: draw(rng, rows * heads * width),
        weights: draw(rng, rows * heads),
        visible,
        top_k,
        what,
    };
    if numbers == Numbers::Normal { case.screen(rng) } else { case }
}

/// All uses that fit a shape: candidate blocks that do not divide the entries, too many and too few of them.
fn uses(rng: &mut Rng, shape: &Shape) -> Vec<Use> {
    let mut all = vec![Use::Scores, Use::Ignore];
    for (max_blocks, block_size) in [(3, 5), (8, 8), (2, 1), (1000, 8)] {
        all.push(Use::Produce { max_blocks, block_size });
        let blocks = (0..shape.rows)
            .map(|r| {
                let total = (shape.visible)(r).div_ceil(block_size);
                let mut blocks = rng.permutation(total);
                // Every fourth row has no candidates at all, or only some of them.
                blocks.truncate(if r % 4 == 3 { 0 } else { max_blocks });
                blocks.sort_unstable();
                blocks
            })
            .collect();
        all.push(Use::Restrict { blocks, block_size });
    }
    all
}

/// Nothing, one, a few and many visible entries, above and below the number of picks.
pub fn indexes() -> Vec<Index> {
    let mut rng = Rng::new(40);
    let mut cases = Vec::new();
    let few: fn(usize) -> usize = |r| r % 4;
    let some: fn(usize) -> usize = |r| 17 + r % 23;
    let many: fn(usize) -> usize = |r| 300 + 7 * r;
    let shapes = [
        (1, 1, 32, 128, some, 1),
        (2, 3, 64, 64, many, 16),
        (7, 2, 32, 128, few, 3),
        (13, 4, 64, 32, some, 16),
        (3, 32, 128, 128, many, 64),
        (33, 5, 96, 16, some, 7),
        (3, 8, 64, 64, many, 512),
    ];
    for (rows, heads, width, entries_per_block, visible, top_k) in shapes {
        for format in [RowFormat::F32, RowFormat::Fp4Index] {
            let shape = Shape { rows, heads, width, format, entries_per_block, visible, top_k };
            for numbers in [Numbers::Normal, Numbers::Signs, Numbers::Equal] {
                // Where nothing but ties is to be found, one block size and one number of blocks say it.
                let uses = uses(&mut rng, &shape);
                let uses = uses.into_iter().take(if numbers == Numbers::Equal { 6 } else { usize::MAX });
                for what in uses {
                    cases.push(index_case(&mut rng, &shape, numbers, what));
                }
            }
        }
    }
    // Widths that only float32 keys can have.
    for width in [1, 2, 15, 33] {
        let format = RowFormat::F32;
        let shape =
            Shape { rows: 3, heads: 3, width, format, entries_per_block: 32, visible: some, top_k: 5 };
        cases.push(index_case(&mut rng, &shape, Numbers::Normal, Use::Scores));
        cases.push(index_case(&mut rng, &shape, Numbers::Signs, Use::Ignore));
    }
    // Long contexts: more blocks than are kept, picks far below the number of entries.
    let visible: fn(usize) -> usize = |r| 3003 - r;
    for format in [RowFormat::F32, RowFormat::Fp4Index] {
        let shape =
            Shape { rows: 2, heads: 8, width: 64, format, entries_per_block: 128, visible, top_k: 512 };
        cases.push(index_case(&mut rng, &shape, Numbers::Normal, Use::Ignore));
        for numbers in [Numbers::Normal, Numbers::Signs] {
            let what = Use::Produce { max_blocks: 256, block_size: 8 };
            cases.push(index_case(&mut rng, &shape, numbers, what));
        }
    }
    cases
}

/// An index of any shape, not screened: for comparisons of bits, where noise is no excuse.
pub fn any_index(rng: &mut Rng) -> Index {
    let visible: [fn(usize) -> usize; 3] = [|r| r * 5 % 7, |r| 40 + r * 17 % 41, |r| 600 + 31 * r];
    let shape = Shape {
        rows: 1 + rng.below(9),
        heads: 1 + rng.below(9),
        width: 32 * (1 + rng.below(4)),
        format: [RowFormat::F32, RowFormat::Fp4Index][rng.below(2)],
        entries_per_block: 1 << rng.below(8),
        visible: visible[rng.below(3)],
        top_k: 1 + rng.below(90),
    };
    let mut uses = uses(rng, &shape);
    let what = uses.swap_remove(rng.below(uses.len()));
    let mut case = index_case(rng, &shape, Numbers::Signs, what);
    if rng.below(3) > 0 {
        case.query = rng.awkward(case.query.len());
        case.keys = rng.awkward(case.keys.len());
        case.weights = rng.awkward(case.weights.len());
    }
    case
}
