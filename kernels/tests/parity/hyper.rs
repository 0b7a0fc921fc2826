//! Hyper-connections and the Engram gate: what changes the residual stream.

use std::ops::Range;

use deepinfer_kernels::{Backend, HcParams, WeightFormat};

use crate::data::{HALF_ULP, ROWS, Rng, TestWeight};
use crate::harness::{Answer, Case, Tolerance, floats, output, upload, upload_in_place};

/// `hc_mixes`.
pub struct Mixes {
    rows: usize,
    p: HcParams,
    f: TestWeight,
    scale: Vec<f32>,
    base: Vec<f32>,
    stream: Vec<f32>,
}

impl Case for Mixes {
    fn label(&self) -> String {
        format!("{} rows of {} copies, {} channels, {:?}", self.rows, self.p.copies, self.f.cols(), self.p)
    }

    fn rows(&self) -> usize {
        self.rows
    }

    fn run<B: Backend>(&self, backend: &B, rows: Range<usize>) -> Answer {
        let (n, m, k) = (rows.len(), self.p.copies, self.f.cols());
        let stream = upload(backend, &self.stream[rows.start * k..rows.end * k]);
        let f = backend.weight(self.f.source());
        let (scale, base) = (upload(backend, &self.scale), upload(backend, &self.base));
        let (mut pre, mut post) = (output(backend, n * m), output(backend, n * m));
        let mut comb = output(backend, n * m * m);
        backend.hc_mixes(&stream, n, &f, &scale, &base, self.p, &mut pre, &mut post, &mut comb);
        vec![floats(backend, "pre", &pre), floats(backend, "post", &post), floats(backend, "comb", &comb)]
    }

    /// Logits of a few units carry an absolute error of some 1e-6, which an exponential makes a relative one. Each
    /// of the 2 * iters divisions of the Sinkhorn loop adds a rounding or two, which the next ones shrink.
    fn tolerances(&self, _: &Answer) -> Vec<Tolerance> {
        let near = |relative| Tolerance::Near { relative, absolute: 1e-7 };
        vec![near(4e-6), near(4e-6), near(1e-5)]
    }
}

/// One to five copies, matrices in both formats that checkpoints use, streams small and large.
pub fn mixes() -> Vec<Mixes> {
    let mut rng = Rng::new(20);
    let mut cases = Vec::new();
    for (m, width) in [(1, 5), (2, 31), (4, 16), (4, 64), (3, 33), (4, 257), (5, 8)] {
        for rows in [1, 2, 7, 13, 33] {
            for iters in [1, 2, 20] {
                let (outputs, k) = (m * (2 + m), m * width);
                let format = if rows == 7 { WeightFormat::Bf16 } else { WeightFormat::F32 };
                let f = TestWeight::normal(&mut rng, format, outputs, k);
                let mut stream = rng.awkward(rows * k);
                for (r, row) in stream.chunks_exact_mut(k).enumerate() {
                    row.iter_mut().for_each(|v| *v *= [1.0, 40.0, 1e-7][r % 3]);
                }
                let p = HcParams { copies: m, iters, eps: 1e-6, norm_eps: 1e-20 };
                let (scale, base) = (vec![1.0, 0.5, 2.0], rng.normals(outputs));
                cases.push(Mixes { rows, p, f, scale, base, stream });
            }
        }
    }
    cases
}

/// `hc_collapse`, then `hc_merge` on the same stream.
pub struct Stream {
    rows: usize,
    copies: usize,
    width: usize,
    stream: Vec<f32>,
    y: Vec<f32>,
    pre: Vec<f32>,
    post: Vec<f32>,
    comb: Vec<f32>,
}

impl Case for Stream {
    fn label(&self) -> String {
        format!("[{}, {}, {}]", self.rows, self.copies, self.width)
    }

    fn rows(&self) -> usize {
        self.rows
    }

    fn run<B: Backend>(&self, backend: &B, rows: Range<usize>) -> Answer {
        let (n, m, width) = (rows.len(), self.copies, self.width);
        let part = |all: &[f32], stride: usize| all[rows.start * stride..rows.end * stride].to_vec();
        let mut stream = upload_in_place(backend, &part(&self.stream, m * width));
        let mut x = output(backend, n * width);
        backend.hc_collapse(&stream, n, m, width, &upload(backend, &part(&self.pre, m)), &mut x);
        let y = upload(backend, &part(&self.y, width));
        let post = upload(backend, &part(&self.post, m));
        let comb = upload(backend, &part(&self.comb, m * m));
        backend.hc_merge(&mut stream, n, m, width, &y, &post, &comb);
        vec![floats(backend, "x", &x), floats(backend, "stream", &stream)]
    }

    /// At most copies + 1 products of numbers below 4, 4 and 2: one rounding each.
    fn tolerances(&self, _: &Answer) -> Vec<Tolerance> {
        let absolute = 32.0 * (self.copies as f64 + 1.0) * HALF_ULP;
        let near = || Tolerance::Near { relative: 0.0, absolute };
        vec![near(), near()]
    }
}

/// Widths around the lane counts.
pub fn streams() -> Vec<Stream> {
    let mut rng = Rng::new(21);
    let mut cases = Vec::new();
    for (i, rows) in ROWS.into_iter().enumerate() {
        for width in [1, 7, 16, 33, 64, 130] {
            let copies = 1 + (i + width) % 5;
            cases.push(Stream {
                rows,
                copies,
                width,
                stream: rng.awkward(rows * copies * width),
                y: rng.awkward(rows * width),
                pre: rng.normals(rows * copies),
                post: rng.normals(rows * copies),
                comb: rng.normals(rows * copies * copies),
            });
        }
    }
    cases
}

/// `engram_gate`.
pub struct Gate {
    rows: usize,
    copies: usize,
    width: usize,
    eps: f32,
    stream: Vec<f32>,
    kv: Vec<f32>,
    q_weight: Vec<f32>,
    k_weight: Vec<f32>,
    open: Vec<u8>,
}

impl Gate {
    /// Argument of the gate's root, in float64.
    fn argument(&self, row: usize, copy: usize) -> f64 {
        let width = self.width;
        let s = &self.stream[(row * self.copies + copy) * width..][..width];
        let key = &self.kv[(row * (self.copies + 1) + copy) * width..][..width];
        let mean = |v: &[f32]| {
            v.iter().map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>() / width as f64 + f64::from(self.eps)
        };
        let sum: f64 = (0..width)
            .map(|c| {
                let weight =
                    f64::from(self.q_weight[copy * width + c]) * f64::from(self.k_weight[copy * width + c]);
                f64::from(s[c]) * f64::from(key[c]) * weight
            })
            .sum();
        sum / (mean(s) * mean(key) * width as f64).sqrt()
    }

    /// Draws rows again until no gate stands at its jump: around 0 an error of the last place flips the sign.
    fn screen(mut self, rng: &mut Rng) -> Self {
        for row in 0..self.rows {
            while (0..self.copies).any(|copy| self.argument(row, copy).abs() < 1e-3) {
                let stride = self.copies * self.width;
                let fresh = rng.normals(stride);
                self.stream[row * stride..(row + 1) * stride].copy_from_slice(&fresh);
            }
        }
        self
    }
}

impl Case for Gate {
    fn label(&self) -> String {
        format!("[{}, {}, {}] eps {:e}", self.rows, self.copies, self.width, self.eps)
    }

    fn rows(&self) -> usize {
        self.rows
    }

    fn run<B: Backend>(&self, backend: &B, rows: Range<usize>) -> Answer {
        let (n, m, width) = (rows.len(), self.copies, self.width);
        let mut stream = upload_in_place(backend, &self.stream[rows.start * m * width..rows.end * m * width]);
        let stride = (m + 1) * width;
        let kv = upload(backend, &self.kv[rows.start * stride..rows.end * stride]);
        let q_weight = upload(backend, &self.q_weight);
        let k_weight = upload(backend, &self.k_weight);
        let mut gates = output(backend, n * m);
        let open = &self.open[rows];
        backend.engram_gate(&mut stream, n, m, width, &kv, &q_weight, &k_weight, open, self.eps, &mut gates);
        vec![floats(backend, "stream", &stream), floats(backend, "gates", &gates)]
    }

    /// The argument is a sum of about-normal terms over the root of their number: some 1e-6 off; its root, from
    /// 1e-3 on, at most 16 times that, and the sigmoid a quarter. Values stay below 4.
    fn tolerances(&self, _: &Answer) -> Vec<Tolerance> {
        let near = |absolute| Tolerance::Near { relative: 4.0 * HALF_ULP, absolute };
        vec![near(1.6e-5), near(4e-6)]
    }
}

/// Open and closed rows; and rows whose argument is exactly zero, which open by the floor under the root.
pub fn gates() -> Vec<Gate> {
    let mut rng = Rng::new(22);
    let mut cases = Vec::new();
    for (copies, width) in [(1, 16), (4, 32), (4, 33), (3, 64), (2, 100), (4, 257)] {
        for rows in [1, 2, 5, 13, 33] {
            let mut case = Gate {
                rows,
                copies,
                width,
                eps: if rows == 5 { 1e-6 } else { 1e-20 },
                stream: rng.awkward(rows * copies * width),
                kv: rng.awkward(rows * (copies + 1) * width),
                q_weight: rng.normals(copies * width),
                k_weight: rng.normals(copies * width),
                open: (0..rows).map(|r| u8::from(r % 4 != 3)).collect(),
            };
            case = case.screen(&mut rng);
            if rows == 13 {
                case.stream[..copies * width].fill(0.0);
                let key = (copies + 1) * width..(copies + 1) * width + copies * width;
                case.kv[key].fill(-0.0);
            }
            cases.push(case);
        }
    }
    cases
}
