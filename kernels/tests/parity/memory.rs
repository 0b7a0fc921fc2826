//! Rows in cache formats, and operations that only move rows.

use std::ops::Range;

use deepinfer_kernels::{Backend, RowFormat};

use crate::data::{HALF_ULP, ROW_FORMATS, ROWS, Rng, TestWeight, WEIGHT_FORMATS, fits};
use crate::harness::{Answer, Case, Output, Tolerance, Values, floats, output, upload, upload_in_place};

/// Stores rows in scattered places, loads them, copies them to another store, exports and imports them.
pub struct Store {
    format: RowFormat,
    width: usize,
    x: Vec<f32>,
    /// Where row i goes.
    places: Vec<u32>,
}

impl Case for Store {
    fn label(&self) -> String {
        format!("{:?} rows of {}, {} of them", self.format, self.width, self.places.len())
    }

    fn rows(&self) -> usize {
        self.places.len()
    }

    fn run<B: Backend>(&self, backend: &B, rows: Range<usize>) -> Answer {
        let total = self.places.len() + 3;
        let places = &self.places[rows.clone()];
        let x = upload(backend, &self.x[rows.start * self.width..rows.end * self.width]);
        let mut store = backend.store(self.format, self.width, total);
        backend.store_rows(&x, &mut store, places);
        let mut stored = Vec::new();
        backend.export_rows(&store, places, &mut stored);
        let mut all = Vec::new();
        backend.export_rows(&store, &(0..total as u32).collect::<Vec<_>>(), &mut all);
        let written: usize = all.iter().filter(|b| **b != 0).count();
        assert_eq!(written, stored.iter().filter(|b| **b != 0).count(), "only the named rows are written");

        let mut loaded = output(backend, rows.len() * self.width);
        backend.load_rows(&store, places, &mut loaded);

        let mut second = backend.store(self.format, self.width, total);
        let reversed: Vec<u32> = places.iter().map(|place| total as u32 - 1 - place).collect();
        backend.copy_rows(&store, places, &mut second, &reversed);
        let mut copied = vec![7];
        backend.export_rows(&second, &reversed, &mut copied);
        assert_eq!(copied.remove(0), 7, "exported bytes are appended");

        let mut third = backend.store(self.format, self.width, total);
        backend.import_rows(&mut third, &reversed, &stored);
        let mut imported = output(backend, rows.len() * self.width);
        backend.load_rows(&third, &reversed, &mut imported);

        let mut rounded = upload_in_place(backend, &self.x[rows.start * self.width..rows.end * self.width]);
        backend.fake_quantize(&mut rounded, rows.len(), self.width, self.format);
        vec![
            Output { name: "stored", values: Values::Bytes(stored) },
            floats(backend, "loaded", &loaded),
            Output { name: "copied", values: Values::Bytes(copied) },
            floats(backend, "imported", &imported),
            floats(backend, "rounded", &rounded),
        ]
    }

    /// Formats are exact to the bit.
    fn tolerances(&self, want: &Answer) -> Vec<Tolerance> {
        want.iter().map(|_| Tolerance::Exact).collect()
    }
}

/// Every format; values that are ordinary, awkward, huge, tiny, or exactly between two codes.
pub fn stores() -> Vec<Store> {
    let mut rng = Rng::new(10);
    let mut cases = Vec::new();
    for format in ROW_FORMATS {
        let widths: &[usize] = match format {
            RowFormat::F32 => &[1, 3, 16, 33, 64, 130],
            RowFormat::Fp4Main => &[16, 32, 48, 64, 112, 512],
            RowFormat::Fp8 | RowFormat::Fp4Index => &[32, 64, 96, 160, 512],
        };
        for &width in widths {
            for rows in [1, 2, 3, 7, 17, 40] {
                let mut x = rng.awkward(rows * width);
                for (r, row) in x.chunks_exact_mut(width).enumerate() {
                    let factor = [1.0, 0.0, 1e5, 1e-4, 1e30, 1e-30, 7.0][(r + rows) % 7];
                    row.iter_mut().for_each(|v| *v *= factor);
                    if r % 3 == 2 {
                        // Quarters up to 6 under a scale of one: half of them are ties of E2M1, many of E4M3.
                        row.iter_mut().enumerate().for_each(|(i, v)| *v = (i % 49) as f32 / 4.0 - 6.0);
                        row.iter_mut().step_by(16).for_each(|v| *v = 6.0);
                    }
                    if r % 7 == 4 {
                        // Broken numbers, in the first and the last group, must be stored as NaN everywhere.
                        row[width - 1] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][rows % 3];
                        row[width / 40] = f32::NAN;
                    }
                }
                let places = rng.permutation(rows);
                cases.push(Store { format, width, x, places });
            }
        }
    }
    cases
}

/// `gather` from a table in any weight format.
pub struct Gather {
    table: TestWeight,
    ids: Vec<u32>,
}

impl Case for Gather {
    fn label(&self) -> String {
        let t = &self.table;
        format!("{} of a {} table [{}, {}]", self.ids.len(), t.format(), t.rows(), t.cols())
    }

    fn rows(&self) -> usize {
        self.ids.len()
    }

    fn run<B: Backend>(&self, backend: &B, rows: Range<usize>) -> Answer {
        let table = backend.weight(self.table.source());
        let mut out = output(backend, rows.len() * self.table.cols());
        backend.gather(&table, &self.ids[rows], &mut out);
        vec![floats(backend, "out", &out)]
    }

    /// Decoding is exact.
    fn tolerances(&self, _: &Answer) -> Vec<Tolerance> {
        vec![Tolerance::Exact]
    }
}

/// Every format and code, scales from end to end, ragged tables, repeated ids, the first and the last row.
pub fn gathers() -> Vec<Gather> {
    let mut rng = Rng::new(11);
    let mut cases = Vec::new();
    for format in WEIGHT_FORMATS {
        for (rows, cols) in [(1, 1), (1, 2), (33, 31), (40, 32), (65, 34), (7, 64), (70, 130), (300, 256)] {
            if !fits(format, cols) {
                continue;
            }
            let mut table = TestWeight::any_codes(&mut rng, format, rows, cols);
            if rows == 7 {
                let (scale_rows, scale_cols) = format.scale_shape(rows, cols);
                // Every legal scale, also where the product leaves the range of float32.
                let scales = (0..scale_rows * scale_cols).map(|_| rng.below(255) as u8).collect();
                table = TestWeight::stored(format, rows, cols, table.source().data.to_vec(), scales);
            }
            let mut ids = vec![0, rows as u32 - 1];
            ids.extend((0..11).map(|_| rng.below(rows) as u32));
            cases.push(Gather { table, ids });
        }
    }
    cases
}

/// `take_rows`, `broadcast_copies` and `mean_copies` of the same stream.
pub struct Copies {
    rows: usize,
    copies: usize,
    width: usize,
    stream: Vec<f32>,
    ids: Vec<u32>,
}

impl Case for Copies {
    fn label(&self) -> String {
        format!("[{}, {}, {}]", self.rows, self.copies, self.width)
    }

    fn rows(&self) -> usize {
        self.rows
    }

    fn run<B: Backend>(&self, backend: &B, rows: Range<usize>) -> Answer {
        let (n, copies, width) = (rows.len(), self.copies, self.width);
        let all = upload(backend, &self.stream);
        let mut taken = output(backend, n * width);
        backend.take_rows(&all, width, &self.ids[rows.clone()], &mut taken);

        let first = upload(backend, &self.stream[rows.start * width..rows.end * width]);
        let mut copied = output(backend, n * copies * width);
        backend.broadcast_copies(&first, n, copies, width, &mut copied);

        // The means go to the middle of wider rows, whose other columns must stay.
        let (stride, at) = (width + 5, 2);
        let stream = upload(backend, &self.stream[rows.start * copies * width..rows.end * copies * width]);
        let mut means = output(backend, n * stride);
        backend.mean_copies(&stream, n, copies, width, &mut means, stride, at);
        vec![
            floats(backend, "taken", &taken),
            floats(backend, "copied", &copied),
            floats(backend, "means", &means),
        ]
    }

    /// Means of numbers below 4 lose a rounding for each addition and one for the division.
    fn tolerances(&self, _: &Answer) -> Vec<Tolerance> {
        let absolute = 4.0 * (self.copies as f64 + 1.0) * HALF_ULP;
        vec![Tolerance::Exact, Tolerance::Exact, Tolerance::Near { relative: 0.0, absolute }]
    }
}

/// Widths around the lane counts, one to five copies.
pub fn copies() -> Vec<Copies> {
    let mut rng = Rng::new(12);
    let mut cases = Vec::new();
    for (i, rows) in ROWS.into_iter().enumerate() {
        for width in [1, 8, 15, 33, 64, 100] {
            let copies = 1 + (i + width) % 5;
            let stream = rng.awkward(rows * copies * width);
            let ids = (0..rows).map(|_| rng.below(rows * copies) as u32).collect();
            cases.push(Copies { rows, copies, width, stream, ids });
        }
    }
    cases
}
