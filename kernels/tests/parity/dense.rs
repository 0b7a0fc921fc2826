//! Products, norms, rotations and element-wise functions.

use std::ops::Range;

use deepinfer_kernels::{Backend, WeightFormat};

use crate::data::{HALF_ULP, ROWS, Rng, TestWeight, WEIGHT_FORMATS, dot_bound, fits, magnitude};
use crate::harness::{Answer, Case, Tolerance, floats, output, upload, upload_in_place};

/// `matmul` (one group) or `matmul_grouped`.
pub struct Product {
    weight: TestWeight,
    groups: usize,
    rows: usize,
    x: Vec<f32>,
}

impl Product {
    fn new(rng: &mut Rng, weight: TestWeight, groups: usize, rows: usize) -> Self {
        let x = rng.awkward(rows * groups * weight.cols());
        Self { weight, groups, rows, x }
    }

    fn stride(&self) -> usize {
        self.groups * self.weight.cols()
    }
}

impl Case for Product {
    fn label(&self) -> String {
        let w = &self.weight;
        format!("{} W [{}, {}] in {} groups, {} rows", w.format(), w.rows(), w.cols(), self.groups, self.rows)
    }

    fn rows(&self) -> usize {
        self.rows
    }

    fn run<B: Backend>(&self, backend: &B, rows: Range<usize>) -> Answer {
        let weight = backend.weight(self.weight.source());
        let x = upload(backend, &self.x[rows.start * self.stride()..rows.end * self.stride()]);
        let mut y = output(backend, rows.len() * self.weight.rows());
        if self.groups == 1 {
            backend.matmul(&weight, &x, rows.len(), &mut y);
        } else {
            backend.matmul_grouped(&weight, self.groups, &x, rows.len(), &mut y);
        }
        vec![floats(backend, "y", &y)]
    }

    /// The bound of a dot product.
    fn tolerances(&self, _: &Answer) -> Vec<Tolerance> {
        let (n, k) = (self.weight.rows(), self.weight.cols());
        let per_group = n / self.groups;
        let bounds = (0..self.rows * n).map(|i| {
            let (row, out) = (i / n, i % n);
            let x = &self.x[row * self.stride() + out / per_group * k..][..k];
            dot_bound(k, magnitude(x, &self.weight.values[out * k..(out + 1) * k]))
        });
        vec![Tolerance::Each(bounds.collect())]
    }
}

/// Inner lengths: below, at and above a group of 32 and its multiples.
const INNER: [usize; 13] = [1, 2, 31, 32, 33, 34, 63, 64, 65, 96, 97, 130, 257];
/// Output counts: one, primes, around powers of two and blocks of 32.
const OUTER: [usize; 14] = [1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 33, 64, 67, 129];

/// Every format over inner and outer lengths, then over rows, then shapes of no pattern.
pub fn products() -> Vec<Product> {
    let mut rng = Rng::new(1);
    let mut cases = Vec::new();
    let mut push = |rng: &mut Rng, format, n, k, rows| {
        if fits(format, k) {
            let weight = match rng.below(2) {
                0 => TestWeight::normal(rng, format, n, k),
                _ => TestWeight::any_codes(rng, format, n, k),
            };
            cases.push(Product::new(rng, weight, 1, rows));
        }
    };
    for format in WEIGHT_FORMATS {
        for k in INNER {
            for n in OUTER {
                push(&mut rng, format, n, k, 1 + n % 3);
            }
            for rows in ROWS {
                push(&mut rng, format, 35, k, rows);
            }
        }
        for rows in [1, 2, 4, 6, 9, 16, 31, 130] {
            push(&mut rng, format, 70, 1056, rows);
        }
        // The inner length of the real model: long chains.
        for rows in [1, 5, 33] {
            push(&mut rng, format, 33, 5120, rows);
        }
        for _ in 0..20 {
            let (n, k, rows) = (1 + rng.below(150), 1 + rng.below(400), 1 + rng.below(20));
            push(&mut rng, format, n, k, rows);
        }
    }
    cases
}

/// A product of any shape.
pub fn any_product(rng: &mut Rng) -> Product {
    let format = WEIGHT_FORMATS[rng.below(5)];
    let groups = 1 + rng.below(3) * rng.below(3);
    let (n, k) = (groups * (1 + rng.below(90)), 2 * (1 + rng.below(200)));
    let rows = 1 + rng.below(40);
    let weight = TestWeight::any_codes(rng, format, n, k);
    Product::new(rng, weight, groups, rows)
}

/// Several groups, whose outputs end inside blocks of 32.
pub fn grouped_products() -> Vec<Product> {
    let mut rng = Rng::new(2);
    let mut cases = Vec::new();
    for format in WEIGHT_FORMATS {
        for (groups, n, k) in
            [(2, 1, 32), (3, 7, 64), (8, 16, 96), (2, 33, 34), (4, 40, 130), (8, 128, 64), (5, 3, 2)]
        {
            for rows in [1, 2, 5, 13, 33] {
                let weight = TestWeight::any_codes(&mut rng, format, groups * n, k);
                cases.push(Product::new(&mut rng, weight, groups, rows));
            }
        }
    }
    cases
}

/// Scales at the ends of E8M0 (without overflow of the products), where tricks on exponent bits go wrong.
pub fn products_with_extreme_scales() -> Vec<Product> {
    let mut rng = Rng::new(3);
    let mut cases = Vec::new();
    for format in [WeightFormat::Fp8, WeightFormat::Fp8Rows, WeightFormat::Fp4] {
        for rows in [1, 4, 40] {
            for scale in [0, 1, 2, 3, 6, 7, 8, 9, 60, 200, 240] {
                let (n, k) = (37, 96);
                let plain = TestWeight::any_codes(&mut rng, format, n, k);
                let (scale_rows, scale_cols) = format.scale_shape(n, k);
                let data = plain.source().data.to_vec();
                let scales = vec![scale; scale_rows * scale_cols];
                let weight = TestWeight::stored(format, n, k, data, scales);
                cases.push(Product::new(&mut rng, weight, 1, rows));
            }
        }
    }
    cases
}

/// `rmsnorm`.
pub struct Norm {
    rows: usize,
    width: usize,
    eps: f32,
    x: Vec<f32>,
    weight: Vec<f32>,
}

impl Case for Norm {
    fn label(&self) -> String {
        format!("[{}, {}] eps {:e}", self.rows, self.width, self.eps)
    }

    fn rows(&self) -> usize {
        self.rows
    }

    fn run<B: Backend>(&self, backend: &B, rows: Range<usize>) -> Answer {
        let x = upload(backend, &self.x[rows.start * self.width..rows.end * self.width]);
        let weight = upload(backend, &self.weight);
        let mut y = output(backend, rows.len() * self.width);
        backend.rmsnorm(&x, rows.len(), self.width, &weight, self.eps, &mut y);
        vec![floats(backend, "y", &y)]
    }

    /// All terms of the sum of squares are positive, so its error is relative: a few units, plus a step for every
    /// 16 channels, halved by the root.
    fn tolerances(&self, _: &Answer) -> Vec<Tolerance> {
        let relative = (10.0 + self.width as f64 / 16.0) * HALF_ULP;
        vec![Tolerance::Near { relative, absolute: 1e-37 }]
    }
}

/// Widths around the lane count, rows of ordinary, large, tiny and zero values.
pub fn norms() -> Vec<Norm> {
    let mut rng = Rng::new(4);
    let mut cases = Vec::new();
    for width in [1, 2, 7, 15, 16, 17, 31, 32, 33, 64, 100, 257, 1280] {
        for rows in [1, 2, 5, 13, 33] {
            let mut x = rng.awkward(rows * width);
            for (r, row) in x.chunks_exact_mut(width).enumerate() {
                let factor = [1.0, 1e4, 1e-8, 0.0, 30.0][r % 5];
                row.iter_mut().for_each(|v| *v *= factor);
            }
            let weight = rng.normals(width);
            let eps = if rows == 2 { 1e-6 } else { 1e-20 };
            cases.push(Norm { rows, width, eps, x, weight });
        }
    }
    cases
}

/// `rope` on every head of `[rows, heads, width]`.
pub struct Rotation {
    rows: usize,
    heads: usize,
    width: usize,
    rd: usize,
    inverse: bool,
    x: Vec<f32>,
    cos_sin: Vec<f32>,
}

impl Case for Rotation {
    fn label(&self) -> String {
        format!("[{}, {}, {}], last {}, inverse {}", self.rows, self.heads, self.width, self.rd, self.inverse)
    }

    fn rows(&self) -> usize {
        self.rows
    }

    fn run<B: Backend>(&self, backend: &B, rows: Range<usize>) -> Answer {
        let stride = self.heads * self.width;
        let mut x = upload_in_place(backend, &self.x[rows.start * stride..rows.end * stride]);
        let cos_sin = upload(backend, &self.cos_sin[rows.start * self.rd..rows.end * self.rd]);
        backend.rope(&mut x, rows.len(), self.heads, self.width, self.rd, &cos_sin, self.inverse);
        vec![floats(backend, "x", &x)]
    }

    /// Two products of numbers below 4 by at most 1: two roundings.
    fn tolerances(&self, _: &Answer) -> Vec<Tolerance> {
        vec![Tolerance::Near { relative: 2.0 * HALF_ULP, absolute: 8.0 * HALF_ULP }]
    }
}

/// All channels rotated, none, and pair counts that are no multiple of any lane count.
pub fn rotations() -> Vec<Rotation> {
    let mut rng = Rng::new(5);
    let mut cases = Vec::new();
    for (width, rd) in [(2, 2), (6, 4), (32, 32), (33, 0), (64, 16), (65, 34), (96, 64), (128, 64), (512, 64)]
    {
        for (rows, heads) in [(1, 1), (2, 3), (7, 2), (13, 1), (3, 64)] {
            for inverse in [false, true] {
                let x = rng.awkward(rows * heads * width);
                let mut cos_sin = Vec::new();
                for _ in 0..rows {
                    let angles: Vec<f32> = (0..rd / 2).map(|_| rng.normal() * 100.0).collect();
                    cos_sin.extend(angles.iter().map(|a| a.cos()));
                    cos_sin.extend(angles.iter().map(|a| a.sin()));
                }
                cases.push(Rotation { rows, heads, width, rd, inverse, x, cos_sin });
            }
        }
    }
    cases
}

/// Which element-wise operation.
#[derive(Clone, Copy, Debug)]
pub enum Elementwise {
    /// `y += x`
    Add,
    /// `y *= factor`
    Scale(f32),
    /// Clamped SwiGLU with this limit.
    Swiglu(f32),
}

/// `add`, `scale`, `swiglu`; a row is one element, so the row checks move every element through every lane.
pub struct Elements {
    what: Elementwise,
    y: Vec<f32>,
    x: Vec<f32>,
}

impl Case for Elements {
    fn label(&self) -> String {
        format!("{:?} of {} elements", self.what, self.y.len())
    }

    fn rows(&self) -> usize {
        self.y.len()
    }

    fn run<B: Backend>(&self, backend: &B, rows: Range<usize>) -> Answer {
        let mut y = upload_in_place(backend, &self.y[rows.clone()]);
        let x = upload(backend, &self.x[rows.clone()]);
        match self.what {
            Elementwise::Add => backend.add(&mut y, &x, rows.len()),
            Elementwise::Scale(factor) => backend.scale(&mut y, factor, rows.len()),
            Elementwise::Swiglu(limit) => backend.swiglu(&mut y, &x, rows.len(), limit),
        }
        vec![floats(backend, "y", &y)]
    }

    fn tolerances(&self, _: &Answer) -> Vec<Tolerance> {
        vec![match self.what {
            // One rounding, the same everywhere.
            Elementwise::Add | Elementwise::Scale(_) => Tolerance::Exact,
            // An exponential good to a few units, a division and two products; silu vanishes below -100.
            Elementwise::Swiglu(_) => Tolerance::Near { relative: 16.0 * HALF_ULP, absolute: 1e-35 },
        }]
    }
}

/// Lengths around the lane counts; for SwiGLU gates far into both tails and at the limit.
pub fn elements() -> Vec<Elements> {
    let mut rng = Rng::new(6);
    let mut cases = Vec::new();
    for len in [1, 3, 7, 8, 9, 15, 16, 17, 31, 33, 127, 300] {
        for what in [
            Elementwise::Add,
            Elementwise::Scale(0.3),
            Elementwise::Swiglu(0.0),
            Elementwise::Swiglu(-1.0),
            Elementwise::Swiglu(2.0),
            Elementwise::Swiglu(10.0),
        ] {
            let mut y = rng.awkward(len);
            for (i, v) in y.iter_mut().enumerate() {
                *v *= [1.0, 3.0, 30.0, 0.1][i % 4];
            }
            if let Elementwise::Swiglu(limit) = what {
                y[len / 2] = limit;
            }
            let x = rng.awkward(len).iter().map(|v| v * 4.0).collect();
            cases.push(Elements { what, y, x });
        }
    }
    cases
}
