//! What the benchmarks share: timing, the machine's roof, and one line per operation.
//!
//! The roof of an operation is the time it would take if only memory or only float32 multiply-adds counted,
//! whichever is longer: `max(bytes / bandwidth, flops / peak)`, both measured in the same run with the same
//! threads. "roof" in a line is that time divided by the median of the measured ones; the best of them is printed
//! too, since on a machine that others use the two differ.

use std::hint::black_box;
use std::time::Instant;

use deepinfer_kernels::Cpu;
use deepinfer_kernels::cpu::measure;

/// How long to measure one line.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    seconds: f64,
    runs: usize,
}

impl Default for Budget {
    fn default() -> Self {
        Self { seconds: 0.6, runs: 7 }
    }
}

#[allow(dead_code)] // Each benchmark uses its part.
impl Budget {
    /// For a look.
    pub fn quick() -> Self {
        Self { seconds: 0.1, runs: 3 }
    }

    /// Whether this is [`Budget::quick`].
    pub fn is_quick(self) -> bool {
        self.runs < Self::default().runs
    }

    /// Median seconds of as many runs as fit.
    pub fn median(self, mut run: impl FnMut(usize)) -> f64 {
        seconds_within(self, &mut run).0
    }

    /// Median seconds of two things that are done in turns, so that whatever else the machine does hits both.
    pub fn medians(self, mut a: impl FnMut(usize), mut b: impl FnMut(usize)) -> (f64, f64) {
        let (mut of_a, mut of_b) = (Vec::new(), Vec::new());
        a(0);
        b(0);
        let begin = Instant::now();
        while of_a.len() < self.runs || begin.elapsed().as_secs_f64() < 2.0 * self.seconds {
            let i = of_a.len() + 1;
            of_a.push(timed(|| a(i)));
            of_b.push(timed(|| b(i)));
        }
        (median(&mut of_a), median(&mut of_b))
    }
}

fn timed(f: impl FnOnce()) -> f64 {
    let start = Instant::now();
    f();
    start.elapsed().as_secs_f64()
}

fn median(seconds: &mut [f64]) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// Bytes of the last-level cache; 32 MiB if the system does not say.
#[allow(dead_code)]
pub fn last_level_cache() -> usize {
    let kib = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index3/size")
        .ok()
        .and_then(|text| text.trim().trim_end_matches('K').parse::<usize>().ok());
    kib.unwrap_or(32 << 10) << 10
}

/// Memory bandwidth and multiply-add peak of a backend's threads.
#[derive(Clone, Copy)]
pub struct Roof {
    /// Bytes per second.
    pub bandwidth: f64,
    /// float32 operations per second.
    pub peak: f64,
}

#[allow(dead_code)]
impl Roof {
    /// Measures both.
    pub fn of(cpu: &Cpu) -> Self {
        Self { bandwidth: measure::read_bandwidth(cpu), peak: measure::fma_peak(cpu) }
    }

    /// Least possible seconds.
    pub fn seconds(&self, bytes: f64, flops: f64) -> f64 {
        (bytes / self.bandwidth).max(flops / self.peak)
    }

    /// Measures both and prints them.
    pub fn measure(cpu: &Cpu) -> Self {
        let roof = Self::of(cpu);
        println!(
            "\n{} threads, {}: {:.1} GB/s, {:.0} GFLOP/s",
            cpu.threads(),
            cpu.level(),
            roof.bandwidth / 1e9,
            roof.peak / 1e9
        );
        roof
    }

    /// Times `run(i)` (i counts the runs, to rotate what it reads) and prints a line; answers median and best
    /// seconds.
    pub fn line(&self, name: &str, bytes: f64, flops: f64, mut run: impl FnMut(usize)) -> (f64, f64) {
        let (seconds, shortest) = seconds_within(Budget::default(), &mut run);
        let best = self.seconds(bytes, flops);
        println!(
            "{name:<58} {:>9} (best {:>9}) {:>7.2} MB {:>8.1} MFLOP {:>6.1} GB/s {:>6.1} GFLOP/s {:>5.0} % of roof",
            time(seconds),
            time(shortest),
            bytes / 1e6,
            flops / 1e6,
            bytes / seconds / 1e9,
            flops / seconds / 1e9,
            100.0 * best / seconds
        );
        (seconds, shortest)
    }
}

/// Median and best of as many runs as fit in the budget, after two that warm up.
fn seconds_within(budget: Budget, run: &mut impl FnMut(usize)) -> (f64, f64) {
    run(0);
    run(1);
    let begin = Instant::now();
    let mut seconds = Vec::new();
    while seconds.len() < budget.runs || begin.elapsed().as_secs_f64() < budget.seconds {
        let i = black_box(seconds.len() + 2);
        seconds.push(timed(|| run(i)));
    }
    (median(&mut seconds), seconds[0])
}

/// For people.
pub fn time(seconds: f64) -> String {
    if seconds < 1e-3 { format!("{:.1} us", seconds * 1e6) } else { format!("{:.2} ms", seconds * 1e3) }
}

/// A reproducible stream of numbers.
pub struct Random(pub u64);

impl Random {
    /// The next number.
    pub fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    /// Roughly bell-shaped, deviation 1.
    pub fn float(&mut self) -> f32 {
        let sum: f32 = (0..4).map(|_| self.next() as f32 / (1u32 << 31) as f32).sum();
        (sum - 2.0) * 1.7
    }

    /// Many of them.
    pub fn floats(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.float()).collect()
    }
}
