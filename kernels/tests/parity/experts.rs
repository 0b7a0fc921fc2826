//! The router and the experts.

use std::ops::Range;

use deepinfer_kernels::formats::{encode_row, quantize_row};
use deepinfer_kernels::{
    Backend, ExpertParams, ExpertSet, ExpertWeights, RouteParams, RowFormat, WeightFormat,
};

use crate::data::{Rng, TestWeight, WEIGHT_FORMATS};
use crate::harness::{
    Answer, Case, Output, Tolerance, Values, floats, integers, output, output_u32, upload, upload_u32,
};

/// `route`.
pub struct Route {
    rows: usize,
    gate: TestWeight,
    x: Vec<f32>,
    bias: Vec<f32>,
    bias_image: Vec<f32>,
    image: Vec<u8>,
    p: RouteParams,
}

impl Route {
    fn new(rng: &mut Rng, format: WeightFormat, rows: usize, shape: (usize, usize), p: RouteParams) -> Self {
        let (experts, width) = shape;
        let image = match rows % 3 {
            0 => Vec::new(),
            remainder => (0..rows).map(|r| u8::from(r % 2 + 1 == remainder)).collect(),
        };
        Self {
            rows,
            gate: TestWeight::normal(rng, format, experts, width),
            x: rng.awkward(rows * width),
            bias: rng.normals(experts).iter().map(|b| b * 0.1).collect(),
            bias_image: rng.normals(experts).iter().map(|b| b * 0.3).collect(),
            image,
            p,
        }
    }

    /// Draws rows again until neighbours in the order of the picks, and the first that is not picked, are further
    /// apart than noise.
    fn screen(mut self, rng: &mut Rng) -> Self {
        let (experts, width) = (self.gate.rows(), self.gate.cols());
        for row in 0..self.rows {
            loop {
                let x = &self.x[row * width..(row + 1) * width];
                let of_image = self.image.get(row).is_some_and(|flag| *flag != 0);
                let bias = if of_image { &self.bias_image } else { &self.bias };
                let mut scores: Vec<f64> = (0..experts)
                    .map(|e| {
                        let weight = &self.gate.values[e * width..(e + 1) * width];
                        let z: f64 = x.iter().zip(weight).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                        (z.exp().ln_1p()).sqrt() + f64::from(bias[e])
                    })
                    .collect();
                scores.sort_by(|a, b| b.total_cmp(a));
                let gaps = scores.windows(2).take(self.p.top_k);
                if gaps.map(|pair| pair[0] - pair[1]).all(|gap| gap > 1e-5) {
                    break;
                }
                let fresh = rng.normals(width);
                self.x[row * width..(row + 1) * width].copy_from_slice(&fresh);
            }
        }
        self
    }
}

impl Case for Route {
    fn label(&self) -> String {
        format!(
            "{} rows, {} gate [{}, {}], {:?}",
            self.rows,
            self.gate.format(),
            self.gate.rows(),
            self.gate.cols(),
            self.p
        )
    }

    fn rows(&self) -> usize {
        self.rows
    }

    fn run<B: Backend>(&self, backend: &B, rows: Range<usize>) -> Answer {
        let n = rows.len();
        let width = self.gate.cols();
        let x = upload(backend, &self.x[rows.start * width..rows.end * width]);
        let gate = backend.weight(self.gate.source());
        let (bias, bias_image) = (upload(backend, &self.bias), upload(backend, &self.bias_image));
        let image = if self.image.is_empty() { &[] } else { &self.image[rows] };
        let mut ids = output_u32(backend, n * self.p.top_k);
        let mut weights = output(backend, n * self.p.top_k);
        backend.route(&x, n, &gate, &bias, &bias_image, image, self.p, &mut ids, &mut weights);
        vec![integers(backend, "ids", &ids), floats(backend, "weights", &weights)]
    }

    /// The logits are off by some 1e-6, and that is the relative error of a softplus far below zero; the rest are a
    /// few roundings.
    fn tolerances(&self, _: &Answer) -> Vec<Tolerance> {
        vec![Tolerance::Exact, Tolerance::Near { relative: 1e-5, absolute: 1e-30 }]
    }
}

/// Expert counts around the lanes, one and all picked, both biases; logits far out; ties of everything.
pub fn routes() -> Vec<Route> {
    let mut rng = Rng::new(50);
    let mut cases = Vec::new();
    for (experts, width) in [(1, 8), (2, 33), (7, 64), (16, 64), (17, 130), (64, 32), (384, 96)] {
        for rows in [1, 2, 3, 5, 13, 33] {
            for top_k in [1, 3, 6, experts] {
                if top_k > experts || top_k > 64 {
                    continue;
                }
                let p = RouteParams { top_k, normalize: rows != 5, scale: 1.5 };
                let format = if rows == 2 { WeightFormat::F32 } else { WeightFormat::Bf16 };
                cases.push(Route::new(&mut rng, format, rows, (experts, width), p).screen(&mut rng));
            }
        }
    }
    // Logits from -100 to 100: both tails of softplus.
    let p = RouteParams { top_k: 4, normalize: true, scale: 2.5 };
    let mut far = Route::new(&mut rng, WeightFormat::Bf16, 9, (16, 64), p).screen(&mut rng);
    far.bias.fill(0.0);
    far.x.iter_mut().for_each(|x| *x *= 30.0);
    cases.push(far);
    // Zero rows: every score is the same, only the exact biases order them, and they tie as well.
    for experts in [5, 16, 100] {
        let p = RouteParams { top_k: 5, normalize: true, scale: 1.0 };
        let mut ties = Route::new(&mut rng, WeightFormat::Bf16, 7, (experts, 64), p);
        ties.x.fill(0.0);
        ties.bias = (0..experts).map(|e| (e % 3) as f32 * 0.25).collect();
        ties.bias_image.fill(-1.0);
        cases.push(ties);
    }
    cases
}

struct TestExpert {
    w1: TestWeight,
    w3: TestWeight,
    w2: TestWeight,
}

/// `experts`.
pub struct Experts {
    rows: usize,
    width: usize,
    inner: usize,
    format: WeightFormat,
    slots: Vec<TestExpert>,
    slot_of: Vec<u32>,
    x: Vec<f32>,
    ids: Vec<u32>,
    weights: Vec<f32>,
    p: ExpertParams,
    how: &'static str,
}

/// Numbers of a case of experts.
struct ExpertShape {
    rows: usize,
    experts: usize,
    top_k: usize,
    width: usize,
    inner: usize,
    format: WeightFormat,
    quantize: bool,
    limit: f32,
}

impl Experts {
    /// `pick` chooses the experts of a row.
    fn new(
        rng: &mut Rng,
        shape: &ExpertShape,
        how: &'static str,
        pick: impl Fn(&mut Rng, usize) -> Vec<u32>,
    ) -> Self {
        let ExpertShape { rows, experts, top_k, width, inner, format, quantize, limit } = *shape;
        // One slot more than experts, and no expert in the slot of its own number.
        let slots = (0..experts + 1).map(|_| TestExpert {
            w1: TestWeight::normal(rng, format, inner, width),
            w3: TestWeight::normal(rng, format, inner, width),
            w2: TestWeight::normal(rng, format, width, inner),
        });
        let slots = slots.collect();
        let ids: Vec<u32> = (0..rows).flat_map(|r| pick(rng, r)).collect();
        assert_eq!(ids.len(), rows * top_k);
        Self {
            rows,
            width,
            inner,
            format,
            slots,
            slot_of: (0..experts).map(|e| ((e * 7 + 3) % (experts + 1)) as u32).collect(),
            x: rng.awkward(rows * width),
            weights: ids.iter().map(|_| rng.normal().abs() + 0.05).collect(),
            ids,
            p: ExpertParams { top_k, limit, quantize },
            how,
        }
        .screen(rng)
    }

    /// Draws rows again until no input of w2 stands on the border between two FP8 codes: there a last place decides
    /// which way it is rounded, and the result jumps.
    fn screen(mut self, rng: &mut Rng) -> Self {
        if self.p.quantize {
            for row in 0..self.rows {
                while !self.row_is_clear(row) {
                    let fresh = rng.normals(self.width);
                    self.x[row * self.width..(row + 1) * self.width].copy_from_slice(&fresh);
                }
            }
        }
        self
    }

    fn row_is_clear(&self, row: usize) -> bool {
        let mut x = self.x[row * self.width..(row + 1) * self.width].to_vec();
        quantize_row(RowFormat::Fp8, &mut x);
        let picks = row * self.p.top_k..(row + 1) * self.p.top_k;
        picks.into_iter().all(|pick| {
            let expert = &self.slots[self.slot_of[self.ids[pick] as usize] as usize];
            let hidden: Vec<f64> = (0..self.inner)
                .map(|i| {
                    let of = |w: &TestWeight| -> f64 {
                        let w = &w.values[i * self.width..(i + 1) * self.width];
                        x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum()
                    };
                    let (mut gate, mut up) = (of(&expert.w1), of(&expert.w3));
                    if self.p.limit > 0.0 {
                        let limit = f64::from(self.p.limit);
                        (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
                    }
                    f64::from(self.weights[pick]) * gate / (1.0 + (-gate).exp()) * up
                })
                .collect();
            let moved = |sign: f64| {
                let moved: Vec<f32> =
                    hidden.iter().map(|h| (h + sign * (1e-5 * h.abs() + 1e-6)) as f32).collect();
                let mut bytes = vec![0; RowFormat::Fp8.row_bytes(self.inner)];
                encode_row(RowFormat::Fp8, &moved, &mut bytes);
                bytes
            };
            // Zero codes of either sign are the same value.
            let plain =
                |bytes: Vec<u8>| bytes.into_iter().map(|b| if b == 0x80 { 0 } else { b }).collect::<Vec<_>>();
            plain(moved(1.0)) == plain(moved(-1.0))
        })
    }
}

impl Case for Experts {
    fn label(&self) -> String {
        format!(
            "{} rows, {} experts {} [{}, {}], {}, {:?}",
            self.rows,
            self.slot_of.len(),
            self.format,
            self.inner,
            self.width,
            self.how,
            self.p
        )
    }

    fn rows(&self) -> usize {
        self.rows
    }

    fn run<B: Backend>(&self, backend: &B, rows: Range<usize>) -> Answer {
        let (n, top_k) = (rows.len(), self.p.top_k);
        let slots = self.slots.iter().map(|expert| ExpertWeights {
            w1: backend.weight(expert.w1.source()),
            w3: backend.weight(expert.w3.source()),
            w2: backend.weight(expert.w2.source()),
        });
        let set = ExpertSet { slots: slots.collect(), slot_of: self.slot_of.clone() };
        let x = upload(backend, &self.x[rows.start * self.width..rows.end * self.width]);
        let ids = upload_u32(backend, &self.ids[rows.start * top_k..rows.end * top_k]);
        let weights = upload(backend, &self.weights[rows.start * top_k..rows.end * top_k]);
        let mut y = output(backend, n * self.width);
        // Arrivals are added to what is there.
        let mut arrivals = vec![1000; set.slots.len()];
        backend.experts(&x, n, &ids, &weights, &set, self.p, &mut y, &mut arrivals);
        let arrivals = arrivals.into_iter().map(|count| count - 1000).collect();
        vec![floats(backend, "y", &y), Output { name: "arrivals", values: Values::Totals(arrivals) }]
    }

    /// Hidden values of about one unit with errors of some 1e-6 each, summed with weights whose squares sum to one;
    /// up to eight experts.
    fn tolerances(&self, _: &Answer) -> Vec<Tolerance> {
        vec![Tolerance::Near { relative: 4e-6, absolute: 8e-6 }, Tolerance::Exact]
    }
}

/// Spread and crowded picks, experts that nobody picks, every format, with and without rounding and clamp.
pub fn experts() -> Vec<Experts> {
    let mut rng = Rng::new(51);
    let mut cases = Vec::new();
    for format in WEIGHT_FORMATS {
        for (rows, experts, top_k, width, inner) in [
            (1, 4, 2, 32, 32),
            (2, 3, 1, 64, 32),
            (5, 8, 3, 64, 96),
            (13, 16, 3, 96, 64),
            (33, 7, 7, 64, 32),
            (64, 5, 2, 32, 64),
            (40, 1, 1, 64, 160),
        ] {
            for (quantize, limit) in [(false, 2.0), (true, 10.0), (false, 0.0)] {
                let shape = ExpertShape { rows, experts, top_k, width, inner, format, quantize, limit };
                let spread = |rng: &mut Rng, _: usize| rng.permutation(experts)[..top_k].to_vec();
                cases.push(Experts::new(&mut rng, &shape, "spread", spread));
                // The same experts for every row: the others stay empty.
                let crowded = |_: &mut Rng, _: usize| (0..top_k).map(|k| (experts - 1 - k) as u32).collect();
                cases.push(Experts::new(&mut rng, &shape, "crowded", crowded));
            }
        }
        // Shapes that FP8 inputs cannot have.
        for (width, inner) in [(2, 2), (34, 6), (66, 130), (50, 33)] {
            if format == WeightFormat::Fp4 && inner % 2 == 1 {
                continue;
            }
            let (rows, experts, top_k, quantize, limit) = (7, 6, 2, false, 1.0);
            let shape = ExpertShape { rows, experts, top_k, width, inner, format, quantize, limit };
            let spread = |rng: &mut Rng, _: usize| rng.permutation(experts)[..top_k].to_vec();
            cases.push(Experts::new(&mut rng, &shape, "spread", spread));
        }
    }
    cases
}

/// Experts of any shape.
pub fn any_experts(rng: &mut Rng) -> Experts {
    let experts = 1 + rng.below(12);
    let top_k = 1 + rng.below(experts.min(6));
    let quantize = rng.below(2) == 1;
    let unit = if quantize { 32 } else { 2 };
    let shape = ExpertShape {
        rows: 1 + rng.below(40),
        experts,
        top_k,
        width: unit * (1 + rng.below(96 / unit)),
        inner: unit * (1 + rng.below(128 / unit)),
        format: WEIGHT_FORMATS[rng.below(5)],
        quantize,
        limit: rng.below(3) as f32,
    };
    let spread = |rng: &mut Rng, _: usize| rng.permutation(experts)[..top_k].to_vec();
    Experts::new(rng, &shape, "spread", spread)
}
