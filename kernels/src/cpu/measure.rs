//! What the machine gives: memory bandwidth and multiply-adds, with the threads of a backend.
//!
//! The only place of the crate that looks at a clock. Benchmarks measure an operation's share of these two in the
//! same run, since a machine that others use is not the same machine a minute later.

use std::hint::black_box;
use std::time::Instant;

use super::Cpu;
use super::simd::probe;

/// Bytes that no last-level cache holds.
const BUFFER_BYTES: usize = 512 << 20;
/// Bytes read by one task.
const TASK_BYTES: usize = 1 << 20;
/// Runs of which the median counts.
const RUNS: usize = 7;

/// Memory bandwidth in bytes per second when all threads of `cpu` read a buffer much larger than any cache, each a
/// piece at a time from front to back; the median of a few runs.
pub fn read_bandwidth(cpu: &Cpu) -> f64 {
    let mut buffer = vec![1.0f32; BUFFER_BYTES / 4];
    // Written by the threads that will read it: pages lie where they are used.
    cpu.pool.run_pieces(&mut buffer, TASK_BYTES / 4, &|task, _, piece| {
        piece.fill(task as f32);
    });
    let pieces: Vec<&[f32]> = buffer.chunks(TASK_BYTES / 4).collect();
    let seconds = median_seconds(|| {
        cpu.pool.run(pieces.len(), &|task, _| {
            black_box(probe::sum_bits(cpu.level, pieces[task]));
        });
    });
    BUFFER_BYTES as f64 / seconds
}

/// float32 operations per second (a multiply-add is two) when all threads of `cpu` do nothing but independent
/// multiply-adds in registers; the median of a few runs.
pub fn fma_peak(cpu: &Cpu) -> f64 {
    const ROUNDS: usize = 200_000;
    let tasks = cpu.threads() * 8;
    let seconds = median_seconds(|| {
        cpu.pool.run(tasks, &|_, _| {
            black_box(probe::multiply_adds(cpu.level, ROUNDS));
        });
    });
    (tasks * ROUNDS * probe::FLOPS_PER_ROUND) as f64 / seconds
}

/// Median time of [`RUNS`] calls, after one that warms up.
fn median_seconds(f: impl Fn()) -> f64 {
    f();
    let mut seconds: Vec<f64> = (0..RUNS)
        .map(|_| {
            let start = Instant::now();
            f();
            start.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    seconds[RUNS / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_probes_do_the_work_that_they_are_credited_for() {
        let data: Vec<f32> = (0..1024).map(|i| f32::from_bits(i * 77)).collect();
        let expected = data.iter().fold(0u32, |a, v| a ^ v.to_bits());
        for level in crate::SimdLevel::available() {
            assert_eq!(probe::sum_bits(level, &data), expected, "{level}");
            let mut expected = 0.0;
            for i in 0..probe::CHAINS {
                let mut chain = i as f32;
                for _ in 0..10 {
                    chain = chain.mul_add(probe::FACTOR, probe::FACTOR);
                }
                expected += 16.0 * chain;
            }
            let sum = probe::multiply_adds(level, 10);
            assert!((sum / expected - 1.0).abs() < 1e-5, "{level}: {sum}, not {expected}");
        }
    }
}
