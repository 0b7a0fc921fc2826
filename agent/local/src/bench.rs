//! `deepinfer bench`: prefill and decode speed of a checkpoint on this machine.

use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Result, ensure};
use deepinfer_engine::sampler::Sampling;
use deepinfer_engine::sizes::Sizes;
use deepinfer_engine::{Checkpoint, ModelShape};
use deepinfer_kernels::{Backend, Cpu, cpu::measure};
use serde::Serialize;

use crate::args::{BackendChoice, BenchArgs};
use crate::machine::{self, Job};
use crate::report::{self, Spread};
use crate::runner::{Runner, RunnerOptions, Sequence};

/// Runs the benchmark and prints text or JSON.
pub fn run(args: BenchArgs) -> Result<ExitCode> {
    let checkpoint = machine::open(&args.engine)?;
    let before = bandwidth(&args);
    let engine = &args.engine;
    let job = Bench { args: &args, checkpoint: &checkpoint };
    let mut result = machine::with_backend(engine.backend, engine.threads, engine.simd, job)?;
    // Measured before and after: on a shared machine it drifts while the model runs.
    if let (Some(before), Some(after)) = (before, bandwidth(&args)) {
        let mean = (before + after) / 2.0;
        result.memory_bandwidth_bytes_per_s = Some(mean);
        result.bandwidth_fraction = Some(result.active_bytes_per_s / mean);
    }
    if args.json {
        report::print(&(serde_json::to_string_pretty(&result)? + "\n"))?;
    } else {
        report::print(&text(&result))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Read bandwidth of memory with the threads of the cpu backend.
fn bandwidth(args: &BenchArgs) -> Option<f64> {
    match args.engine.backend {
        BackendChoice::Reference => None,
        BackendChoice::Auto | BackendChoice::Cpu => {
            let threads = args.engine.threads.map_or_else(machine::cores, usize::from);
            Some(measure::read_bandwidth(&Cpu::new(threads)))
        }
    }
}

/// What `--json` prints. Speeds are over all sequences of the batch; medians unless named otherwise.
#[derive(Debug, Serialize)]
struct BenchResult {
    backend: String,
    numerics: String,
    threads: Option<u16>,
    prompt: u32,
    generate: u32,
    batch: u16,
    runs: u16,
    prefill_tokens_per_s: f64,
    prefill_tokens_per_s_low: f64,
    prefill_tokens_per_s_high: f64,
    decode_tokens_per_s: f64,
    decode_tokens_per_s_low: f64,
    decode_tokens_per_s_high: f64,
    /// Stored bytes, scales included, of all tensors that one decoded token reads.
    active_bytes_per_token: u64,
    /// Active bytes x decode steps/s: what one sequence would stream; batches share reads, so it is a lower bound.
    active_bytes_per_s: f64,
    /// Measured read bandwidth of memory with the same threads, mean of before and after; absent for the reference
    /// backend.
    memory_bandwidth_bytes_per_s: Option<f64>,
    /// `active_bytes_per_s / memory_bandwidth_bytes_per_s`.
    bandwidth_fraction: Option<f64>,
}

struct Bench<'a> {
    args: &'a BenchArgs,
    checkpoint: &'a Checkpoint,
}

impl Job for Bench<'_> {
    type Output = BenchResult;

    fn run<B: Backend>(self, backend: B) -> Result<BenchResult> {
        let args = self.args;
        let shape = &self.checkpoint.shape;
        let context = args.prompt as usize + args.generate as usize + 1;
        ensure!(
            context <= shape.max_position_embeddings,
            "--prompt {} and --generate {} exceed the model's context of {}",
            args.prompt,
            args.generate,
            shape.max_position_embeddings
        );
        let name = backend.name();
        let options = RunnerOptions {
            slots: args.batch.into(),
            context,
            chunk: args.chunk as usize,
            numerics: machine::numerics(args.engine.numerics),
        };
        let mut runner = Runner::open(backend, self.checkpoint, options)?;
        let mut prefill = Vec::new();
        let mut decode = Vec::new();
        // One run more than asked: the first one pages weights in and is not counted.
        for run in 0..=args.runs {
            let (prefill_s, decode_s) = measure_run(&mut runner, shape, args)?;
            if run > 0 {
                prefill.push(f64::from(args.batch) * f64::from(args.prompt) / prefill_s);
                decode.push(f64::from(args.batch) * f64::from(args.generate) / decode_s);
            }
        }
        let (prefill, decode) = (Spread::of(&prefill), Spread::of(&decode));
        let active = Sizes::of_checkpoint(self.checkpoint, runner.engine().numerics()).active_bytes_per_token;
        let active_per_s = active as f64 * decode.median / f64::from(args.batch);
        Ok(BenchResult {
            backend: name,
            numerics: runner.engine().numerics().to_string(),
            threads: args.engine.threads,
            prompt: args.prompt,
            generate: args.generate,
            batch: args.batch,
            runs: args.runs,
            prefill_tokens_per_s: prefill.median,
            prefill_tokens_per_s_low: prefill.low,
            prefill_tokens_per_s_high: prefill.high,
            decode_tokens_per_s: decode.median,
            decode_tokens_per_s_low: decode.low,
            decode_tokens_per_s_high: decode.high,
            active_bytes_per_token: active,
            active_bytes_per_s: active_per_s,
            memory_bandwidth_bytes_per_s: None,
            bandwidth_fraction: None,
        })
    }
}

/// Seconds of the prompts and of the decode steps.
fn measure_run<B: Backend>(
    runner: &mut Runner<B>,
    shape: &ModelShape,
    args: &BenchArgs,
) -> Result<(f64, f64)> {
    let greedy = Sampling { temperature: 0.0, top_p: 1.0, seed: 0 };
    let mut sequences: Vec<Sequence> = (0..usize::from(args.batch))
        .map(|slot| Sequence::new(slot, prompt(shape, args.prompt as usize, slot), greedy))
        .collect();
    let mut members: Vec<&mut Sequence> = sequences.iter_mut().collect();
    let started = Instant::now();
    while members.iter().any(|s| s.generated().is_empty()) {
        let mut waiting: Vec<&mut Sequence> =
            members.iter_mut().filter(|s| s.generated().is_empty()).map(|s| &mut **s).collect();
        runner.step(&mut waiting)?;
    }
    let prefill = started.elapsed().as_secs_f64();
    let started = Instant::now();
    for _ in 0..args.generate {
        runner.step(&mut members)?;
    }
    Ok((prefill, started.elapsed().as_secs_f64()))
}

/// A prompt of ordinary tokens that differs per sequence: a fixed walk through the vocabulary.
fn prompt(shape: &ModelShape, tokens: usize, slot: usize) -> Vec<u32> {
    let span = shape.vocab_size as u64;
    (0..tokens as u64).map(|i| ((i * 7919 + slot as u64 * 104_729 + 31) % span) as u32).collect()
}

fn text(r: &BenchResult) -> String {
    let line = |name: &str, median: f64, low: f64, high: f64| {
        let [median, low, high] = [median, low, high].map(report::three_digits);
        format!("{name:<10} {median} tokens/s (from {low} to {high})\n")
    };
    let mut text = format!("backend    {}, {} numerics\n", r.backend, r.numerics);
    text += &format!(
        "workload   batch {}, prompt {} tokens, {} decode steps, {} runs\n",
        r.batch, r.prompt, r.generate, r.runs
    );
    text += &line("prefill", r.prefill_tokens_per_s, r.prefill_tokens_per_s_low, r.prefill_tokens_per_s_high);
    text += &line("decode", r.decode_tokens_per_s, r.decode_tokens_per_s_low, r.decode_tokens_per_s_high);
    text += &format!(
        "weights    {} active bytes a token, {} read per sequence\n",
        report::bytes(r.active_bytes_per_token),
        report::bandwidth(r.active_bytes_per_s)
    );
    if let (Some(bandwidth), Some(fraction)) = (r.memory_bandwidth_bytes_per_s, r.bandwidth_fraction) {
        let bandwidth = report::bandwidth(bandwidth);
        text += &format!("memory     {bandwidth} measured; decode reaches {:.0} % of it\n", fraction * 100.0);
    }
    text
}
