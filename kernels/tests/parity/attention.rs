//! Attention over window and selected keys, and the pooling of the compressor.

use std::ops::Range;

use deepinfer_kernels::{AttentionArgs, Backend, GlobalKeys, RowFormat, Selection};

use crate::data::{HALF_ULP, Rng, TestTables, filled_store};
use crate::harness::{Answer, Case, Tolerance, floats, output, upload, upload_u32};

struct Selected {
    format: RowFormat,
    store: Vec<f32>,
    tables: TestTables,
    top_k: usize,
    /// Entries of each row, ascending.
    entries: Vec<Vec<u32>>,
}

/// `attention`.
pub struct Attention {
    heads: usize,
    width: usize,
    /// Standard deviation of the logits.
    sharpness: f32,
    query: Vec<f32>,
    sink: Vec<f32>,
    window_format: RowFormat,
    window: Vec<f32>,
    /// Window rows of each row.
    lists: Vec<Vec<u32>>,
    selected: Option<Selected>,
}

impl Case for Attention {
    fn label(&self) -> String {
        let selected = self.selected.as_ref().map(|s| {
            let counts: Vec<usize> = s.entries.iter().map(Vec::len).take(4).collect();
            format!("{:?} selected {counts:?}", s.format)
        });
        let lists: Vec<usize> = self.lists.iter().map(Vec::len).take(4).collect();
        format!(
            "{} rows, {} heads of {}, {:?} window {lists:?}, {selected:?}, sharpness {}",
            self.rows(),
            self.heads,
            self.width,
            self.window_format,
            self.sharpness
        )
    }

    fn rows(&self) -> usize {
        self.lists.len()
    }

    fn run<B: Backend>(&self, backend: &B, rows: Range<usize>) -> Answer {
        let stride = self.heads * self.width;
        let query = upload(backend, &self.query[rows.start * stride..rows.end * stride]);
        let sink = upload(backend, &self.sink);
        let window = filled_store(backend, self.window_format, self.width, &self.window);
        let window_rows: Vec<u32> = self.lists[rows.clone()].concat();
        let mut end = 0;
        let window_ends: Vec<u32> = self.lists[rows.clone()]
            .iter()
            .map(|list| {
                end += list.len() as u32;
                end
            })
            .collect();
        let global = self.selected.as_ref().map(|s| {
            let store = filled_store(backend, s.format, self.width, &s.store);
            let mut indices = vec![u32::MAX; rows.len() * s.top_k];
            let mut counts = Vec::new();
            for (r, entries) in s.entries[rows.clone()].iter().enumerate() {
                indices[r * s.top_k..r * s.top_k + entries.len()].copy_from_slice(entries);
                counts.push(entries.len() as u32);
            }
            let (indices, counts) = (upload_u32(backend, &indices), upload_u32(backend, &counts));
            (store, Selection { indices, counts, top_k: s.top_k }, s.tables.view(rows.clone()))
        });
        let args = AttentionArgs {
            rows: rows.len(),
            heads: self.heads,
            width: self.width,
            scale: 1.0 / (self.width as f32).sqrt(),
            query: &query,
            sink: &sink,
            window: &window,
            window_rows: &window_rows,
            window_ends: &window_ends,
            global: global.as_ref().map(|(store, selection, tables)| GlobalKeys {
                store,
                selection,
                tables: *tables,
            }),
        };
        let mut out = output(backend, rows.len() * stride);
        backend.attention(&args, &mut out);
        vec![floats(backend, "out", &out)]
    }

    /// A logit of `sharpness` standard deviations is off by about as many units in the last place of itself times
    /// the root of the chain's length, and that is the relative error of a probability; a value is a mean of
    /// numbers below 4. Forty half units: random errors with room, far below any wrong or missing key.
    fn tolerances(&self, _: &Answer) -> Vec<Tolerance> {
        let absolute = 40.0 * HALF_ULP * 4.0 * f64::from(1.0 + self.sharpness);
        vec![Tolerance::Near { relative: 0.0, absolute }]
    }
}

/// Lengths of window lists and numbers of selected entries, by row.
type Lengths = fn(usize) -> usize;

#[allow(clippy::too_many_arguments)]
fn attention_case(
    rng: &mut Rng,
    rows: usize,
    heads: usize,
    width: usize,
    sharpness: f32,
    window_format: RowFormat,
    window: Lengths,
    selected: Option<(RowFormat, usize, Lengths)>,
) -> Attention {
    let ring = (0..rows).map(window).max().unwrap_or(0) + 3;
    let lists = (0..rows)
        .map(|r| {
            // Windows wrap around their ring; the order is that of positions.
            let first = rng.below(ring);
            (0..window(r)).map(|i| ((first + i) % ring) as u32).collect()
        })
        .collect();
    let selected = selected.map(|(format, entries_per_block, count)| {
        let sequences = 1 + rows / 3;
        let most = (0..rows).map(count).max().unwrap_or(0);
        let entries: Vec<usize> = (0..sequences).map(|s| most + 1 + s * 17 % 50).collect();
        let row_sequence: Vec<u32> = (0..rows).map(|r| (r * sequences / rows) as u32).collect();
        let tables = TestTables::new(rng, row_sequence, &entries, entries_per_block);
        let picks = (0..rows)
            .map(|r| {
                let mut picks = rng.permutation(entries[tables.sequence(r)])[..count(r)].to_vec();
                picks.sort_unstable();
                picks
            })
            .collect();
        let store = rng.awkward(tables.store_rows() * width);
        Selected { format, store, tables, top_k: most.max(1) + rows % 2, entries: picks }
    });
    let factor = sharpness;
    Attention {
        heads,
        width,
        sharpness,
        query: rng.awkward(rows * heads * width).iter().map(|v| v * factor).collect(),
        sink: (0..heads).map(|h| [0.0, -3.0, 4.0, -60.0, 30.0][h % 5] * rng.normal().abs()).collect(),
        window_format,
        window: rng.awkward(ring * width),
        lists,
        selected,
    }
}

/// Empty, short, odd and long lists; no, few and 512 selected entries; heads and widths around every tile.
pub fn attentions() -> Vec<Attention> {
    let mut rng = Rng::new(30);
    let mut cases = Vec::new();
    let lengths: [Lengths; 5] = [|_| 0, |_| 1, |r| r % 4, |r| 15 + r % 19, |r| 128 - r % 2];
    let counts: [Lengths; 4] = [|_| 0, |r| r % 3, |r| 7 + r % 11, |r| 61 + r % 7];
    let formats = [
        (RowFormat::F32, RowFormat::F32),
        (RowFormat::Fp8, RowFormat::Fp4Main),
        (RowFormat::F32, RowFormat::Fp4Main),
        (RowFormat::Fp8, RowFormat::F32),
    ];
    let shapes = [
        (1, 1, 32),
        (2, 3, 64),
        (5, 8, 96),
        (13, 2, 32),
        (3, 17, 64),
        (7, 1, 160),
        (33, 4, 32),
        (2, 64, 128),
    ];
    for (i, (rows, heads, width)) in shapes.into_iter().enumerate() {
        for (j, window) in lengths.into_iter().enumerate() {
            let (window_format, global_format) = formats[(i + j) % 4];
            let sharpness = [1.0, 5.0, 20.0][(i + j) % 3];
            cases.push(attention_case(&mut rng, rows, heads, width, sharpness, window_format, window, None));
            for count in counts {
                let selected = Some((global_format, [128, 64, 1, 32][j % 4], count));
                let case =
                    attention_case(&mut rng, rows, heads, width, sharpness, window_format, window, selected);
                cases.push(case);
            }
        }
    }
    // Widths that only float32 rows can have.
    for width in [1, 2, 7, 15, 16, 17, 33, 50] {
        let selected = Some((RowFormat::F32, 64, counts[2]));
        cases.push(attention_case(&mut rng, 3, 5, width, 2.0, RowFormat::F32, lengths[3], selected));
    }
    // The real shape, with full lists.
    let selected = Some((RowFormat::Fp4Main, 128, (|r| 512 - r % 2) as Lengths));
    cases.push(attention_case(&mut rng, 3, 64, 512, 3.0, RowFormat::Fp8, |_| 128, selected));
    let selected = Some((RowFormat::Fp4Main, 64, (|_| 512) as Lengths));
    cases.push(attention_case(&mut rng, 1, 7, 64, 1.0, RowFormat::Fp8, |_| 0, selected));
    cases
}

/// Attention of any shape.
pub fn any_attention(rng: &mut Rng) -> Attention {
    let lengths: [Lengths; 3] = [|r| r * 7 % 5, |r| 30 + r * 13 % 37, |r| 128 - r % 2];
    let counts: [Lengths; 3] = [|r| r * 5 % 3, |r| 20 + r * 11 % 29, |r| 64 + r % 3];
    let formats = [RowFormat::F32, RowFormat::Fp8, RowFormat::Fp4Main];
    let (rows, heads, width) = (1 + rng.below(12), 1 + rng.below(20), 32 * (1 + rng.below(5)));
    let selected = match rng.below(3) {
        0 => None,
        _ => Some((formats[rng.below(3)], 1 << rng.below(8), counts[rng.below(3)])),
    };
    let (window_format, window) = (formats[rng.below(2)], lengths[rng.below(3)]);
    attention_case(rng, rows, heads, width, 3.0, window_format, window, selected)
}

/// `compress_pool`; a row is a group.
pub struct Pool {
    groups: usize,
    ratio: usize,
    width: usize,
    values: Vec<f32>,
    gates: Vec<f32>,
}

impl Case for Pool {
    fn label(&self) -> String {
        format!("{} groups of {}, width {}", self.groups, self.ratio, self.width)
    }

    fn rows(&self) -> usize {
        self.groups
    }

    fn run<B: Backend>(&self, backend: &B, rows: Range<usize>) -> Answer {
        let stride = self.ratio * self.width;
        let values = upload(backend, &self.values[rows.start * stride..rows.end * stride]);
        let gates = upload(backend, &self.gates[rows.start * stride..rows.end * stride]);
        let mut out = output(backend, rows.len() * self.width);
        backend.compress_pool(&values, &gates, rows.len(), self.ratio, self.width, &mut out);
        vec![floats(backend, "out", &out)]
    }

    /// A mean of numbers below 4 with weights that are good to a few units in the last place.
    fn tolerances(&self, _: &Answer) -> Vec<Tolerance> {
        let absolute = 4.0 * (10.0 + self.ratio as f64) * HALF_ULP;
        vec![Tolerance::Near { relative: 0.0, absolute }]
    }
}

/// Ratios from 1 to 8, gates from equal to far apart.
pub fn pools() -> Vec<Pool> {
    let mut rng = Rng::new(31);
    let mut cases = Vec::new();
    for ratio in [1, 2, 3, 4, 8] {
        for width in [1, 15, 16, 33, 64, 130] {
            for groups in [1, 2, 7, 33] {
                let factor = [1.0, 0.0, 100.0][(ratio + groups) % 3];
                let gates = rng.awkward(groups * ratio * width).iter().map(|v| v * factor).collect();
                let values = rng.awkward(groups * ratio * width);
                cases.push(Pool { groups, ratio, width, values, gates });
            }
        }
    }
    cases
}
