//! Products with stored weights, and the experts, at the shapes of one layer of the real model.
//!
//! `cargo bench -p deepinfer-kernels --bench ops -- [--threads N] [--quick] [--json] [NAME]`; without `--threads`
//! one thread and all cores. Each run reads another copy of the weight; the copies are more than four times the
//! last-level cache. From 128 rows on, the `gemm` crate does the same product in float32 in turns with ours
//! (its weights are dequantised beforehand).

mod support;
#[path = "support/yardstick.rs"]
mod yardstick;

use deepinfer_kernels::formats::decode_weight_row;
use deepinfer_kernels::host::{HostBuf, HostWeight};
use deepinfer_kernels::{
    Backend, ByteView, Cpu, ExpertParams, ExpertSet, ExpertWeights, MatrixSource, WeightFormat,
};
use support::{Budget, Random, Roof};

const HIDDEN: usize = 5120;
const CHANNELS: usize = 2304;
const TOP_K: usize = 6;
const ROWS: [usize; 7] = [1, 2, 4, 8, 32, 128, 512];

/// A weight of one layer: `groups` blocks of `outs / groups` outputs with `cols` inputs each.
struct Case {
    name: &'static str,
    format: WeightFormat,
    outs: usize,
    cols: usize,
    groups: usize,
}

const CASES: [Case; 7] = [
    Case { name: "head, a slice", format: WeightFormat::Bf16, outs: 8192, cols: HIDDEN, groups: 1 },
    Case { name: "wq_a", format: WeightFormat::Fp8, outs: 1280, cols: HIDDEN, groups: 1 },
    Case { name: "wq_b", format: WeightFormat::Fp8, outs: 32768, cols: 1280, groups: 1 },
    Case { name: "wo_a", format: WeightFormat::Fp8, outs: 8192, cols: 4096, groups: 8 },
    Case { name: "wo_b", format: WeightFormat::Fp8, outs: HIDDEN, cols: 8192, groups: 1 },
    Case { name: "expert w1", format: WeightFormat::Fp4, outs: CHANNELS, cols: HIDDEN, groups: 1 },
    Case { name: "expert w2", format: WeightFormat::Fp4, outs: HIDDEN, cols: CHANNELS, groups: 1 },
];

struct Options {
    threads: Vec<usize>,
    budget: Budget,
    json: bool,
    filter: Option<String>,
}

fn main() {
    let options = options();
    for &threads in &options.threads {
        let cpu = Cpu::new(threads);
        let roof = Roof::of(&cpu);
        let mut table = Table { options: &options, cpu: &cpu, roof, lines: 0 };
        table.begin();
        for case in CASES.iter().filter(|case| options.wants(case.name)) {
            table.case(case);
        }
        if options.wants("experts") {
            table.experts();
        }
        table.end();
    }
}

fn options() -> Options {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut options = Options {
        threads: if cores > 1 { vec![1, cores] } else { vec![1] },
        budget: Budget::default(),
        json: false,
        filter: None,
    };
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--threads" => {
                let threads = args.next().and_then(|n| n.parse().ok());
                options.threads = vec![threads.expect("--threads takes a number")];
            }
            "--quick" => options.budget = Budget::quick(),
            "--json" => options.json = true,
            // Cargo passes it to every benchmark.
            "--bench" => {}
            name => options.filter = Some(name.to_owned()),
        }
    }
    options
}

impl Options {
    fn wants(&self, name: &str) -> bool {
        self.filter.as_ref().is_none_or(|filter| name.contains(filter.as_str()))
    }
}

/// Prints lines as they come, for people or as JSON.
struct Table<'a> {
    options: &'a Options,
    cpu: &'a Cpu,
    roof: Roof,
    lines: usize,
}

impl Table<'_> {
    fn begin(&self) {
        let Roof { bandwidth, peak } = self.roof;
        if self.options.json {
            println!(
                "{{\"backend\": \"{}\", \"bytes_per_s\": {bandwidth:.0}, \"flops_per_s\": {peak:.0}, \"ops\": [",
                self.cpu.name()
            );
            return;
        }
        println!("\n{}: {:.1} GB/s, {:.0} GFLOP/s", self.cpu.name(), bandwidth / 1e9, peak / 1e9);
        println!(
            "{:<14} {:<6} {:>13} {:>5} {:>10} {:>9} {:>9} {:>7} {:>8} {:>8}  vs gemm",
            "op", "format", "shape", "rows", "median", "MB", "MFLOP", "GB/s", "GFLOP/s", "of roof"
        );
    }

    fn end(&self) {
        if self.options.json {
            println!("]}}");
            return;
        }
        let Roof { bandwidth, peak } = self.roof;
        println!("best measured in between: {:.1} GB/s, {:.0} GFLOP/s", bandwidth / 1e9, peak / 1e9);
    }

    fn line(&mut self, case: &Case, rows: usize, bytes: f64, flops: f64, seconds: f64, gemm: Option<f64>) {
        let of_roof = self.roof.seconds(bytes, flops) / seconds;
        let Case { name, format, outs, cols, .. } = case;
        if self.options.json {
            let comma = if self.lines > 0 { "," } else { "" };
            let gemm = gemm.map_or_else(|| "null".to_owned(), |s| format!("{s:.3e}"));
            println!(
                "{comma}{{\"op\": \"{name}\", \"format\": \"{format}\", \"shape\": [{outs}, {cols}], \"rows\": {rows}, \
                 \"seconds\": {seconds:.3e}, \"bytes\": {bytes:.0}, \"flops\": {flops:.0}, \"of_roof\": {of_roof:.3}, \
                 \"gemm_seconds\": {gemm}}}"
            );
        } else {
            println!(
                "{name:<14} {:<6} {:>13} {rows:>5} {:>10} {:>9.2} {:>9.1} {:>7.1} {:>8.1} {:>6.0} %  {}",
                format.to_string(),
                format!("{outs}x{cols}"),
                support::time(seconds),
                bytes / 1e6,
                flops / 1e6,
                bytes / seconds / 1e9,
                flops / seconds / 1e9,
                of_roof * 100.0,
                gemm.map_or_else(String::new, |s| format!("{:.2}", s / seconds)),
            );
        }
        self.lines += 1;
    }

    /// The roof is the best that was measured so far: others on the machine can only lower it.
    fn measure_again(&mut self) {
        let now = Roof::of(self.cpu);
        self.roof.bandwidth = self.roof.bandwidth.max(now.bandwidth);
        self.roof.peak = self.roof.peak.max(now.peak);
    }

    fn case(&mut self, case: &Case) {
        self.measure_again();
        let mut random = Random(1);
        let weights = weights(&mut random, self.cpu, case.format, case.outs, case.cols, self.options.budget);
        let most = ROWS[ROWS.len() - 1];
        let x = HostBuf(random.floats(most * case.groups * case.cols));
        let mut y = HostBuf(vec![0.0; most * case.outs]);
        let plain: Vec<f32> = (0..case.outs)
            .flat_map(|row| {
                let mut out = vec![0.0; case.cols];
                decode_weight_row(&weights[0], row, &mut out);
                out
            })
            .collect();
        let mut other = vec![0.0; most * case.outs];
        for rows in ROWS {
            let ours = |i: usize| {
                let w = &weights[i % weights.len()];
                self.cpu.matmul_grouped(w, case.groups, &x, rows, &mut y);
            };
            let theirs = |_: usize| {
                yardstick::product(self.cpu.threads(), &x.0, &plain, rows, case.outs, case.cols, &mut other);
            };
            let (seconds, gemm) = if rows < 128 || case.groups > 1 {
                (self.options.budget.median(ours), None)
            } else {
                let (ours, theirs) = self.options.budget.medians(ours, theirs);
                (ours, Some(theirs))
            };
            let stored = (case.format.data_bytes(case.outs, case.cols) + scale_bytes(case)) as f64;
            let bytes = stored + 4.0 * (rows * (case.groups * case.cols + case.outs)) as f64;
            let flops = 2.0 * (rows * case.outs * case.cols) as f64;
            self.line(case, rows, bytes, flops, seconds, gemm);
        }
    }

    /// `TOP_K` of 16 experts; bytes and FLOPs are those of the experts that were picked.
    fn experts(&mut self) {
        self.measure_again();
        let mut random = Random(2);
        let w1 = weights(&mut random, self.cpu, WeightFormat::Fp4, CHANNELS, HIDDEN, self.options.budget);
        let w2 = weights(&mut random, self.cpu, WeightFormat::Fp4, HIDDEN, CHANNELS, self.options.budget);
        let count = 16;
        let set = ExpertSet {
            slots: (0..count)
                .map(|e| ExpertWeights {
                    w1: w1[2 * e % w1.len()].clone(),
                    w3: w1[(2 * e + 1) % w1.len()].clone(),
                    w2: w2[e % w2.len()].clone(),
                })
                .collect(),
            slot_of: (0..count as u32).collect(),
        };
        let case =
            Case { name: "experts", format: WeightFormat::Fp4, outs: CHANNELS, cols: HIDDEN, groups: 1 };
        let p = ExpertParams { top_k: TOP_K, limit: 10.0, quantize: true };
        for rows in ROWS {
            let x = HostBuf(random.floats(rows * HIDDEN));
            let weights = HostBuf(vec![0.25; rows * TOP_K]);
            let mut y = HostBuf(vec![0.0; rows * HIDDEN]);
            let mut arrivals = vec![0; count];
            // Consecutive experts, so that the rows of a run share them as little as possible.
            let ids = |i: usize| {
                let id = |pick: usize| ((i * 7 + pick) % count) as u32;
                HostBuf((0..rows * TOP_K).map(id).collect::<Vec<u32>>())
            };
            let picks: Vec<_> = (0..count).map(ids).collect();
            let seconds = self.options.budget.median(|i| {
                self.cpu.experts(&x, rows, &picks[i % count], &weights, &set, p, &mut y, &mut arrivals);
            });
            let touched = (rows * TOP_K).min(count);
            let matrix = WeightFormat::Fp4.data_bytes(CHANNELS, HIDDEN) + CHANNELS * HIDDEN / 32;
            let bytes = (touched * 3 * matrix) as f64 + 4.0 * (2 * rows * HIDDEN) as f64;
            let flops = 2.0 * (rows * TOP_K * 3 * CHANNELS * HIDDEN) as f64;
            self.line(&case, rows, bytes, flops, seconds, None);
        }
    }
}

fn scale_bytes(case: &Case) -> usize {
    let (rows, cols) = case.format.scale_shape(case.outs, case.cols);
    rows * cols
}

/// As many copies of a weight as fill four last-level caches, of random numbers near 1.
fn weights(
    random: &mut Random,
    cpu: &Cpu,
    format: WeightFormat,
    outs: usize,
    cols: usize,
    budget: Budget,
) -> Vec<HostWeight> {
    let bytes = format.data_bytes(outs, cols);
    let copies = (4 * support::last_level_cache()).div_ceil(bytes).max(if budget.is_quick() { 1 } else { 2 });
    let data: Vec<u8> = (0..bytes * copies)
        .map(|i| match format {
            // Upper bytes of BF16: exponents just below that of 1.
            WeightFormat::Bf16 if i % 2 == 1 => random.next() as u8 & 0x83 | 0x3c,
            WeightFormat::Fp8 => random.next() as u8 & 0xbf,
            _ => random.next() as u8,
        })
        .collect();
    let data = ByteView::owned(data);
    let (scale_rows, scale_cols) = format.scale_shape(outs, cols);
    let scales = (0..scale_rows * scale_cols).map(|_| 122 + (random.next() % 4) as u8).collect();
    let scales = ByteView::owned(scales);
    (0..copies)
        .map(|copy| {
            cpu.weight(MatrixSource {
                format,
                rows: outs,
                cols,
                data: data.slice(copy * bytes, bytes),
                scales: (!scales.is_empty()).then(|| scales.clone()),
            })
        })
        .collect()
}
