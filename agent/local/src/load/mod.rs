//! `deepinfer load`: sends requests to a server and says how fast it answers.
//!
//! Invariant: with a trace, a request starts at its own time whatever the server does; what could not start in time
//! because too many were running is counted, never silently shifted.

pub mod args;
mod client;
mod summary;
mod trace;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tokio::sync::{Semaphore, mpsc};
use tokio_util::sync::CancellationToken;

use self::args::LoadArgs;
use self::client::{Sample, Sender};
use self::summary::Summary;
use self::trace::Planned;
use crate::report;

/// Requests of a trace that may run at once: each is a socket of this process.
const MAX_OPEN: usize = 4096;
/// Longest sequence in tokens where neither flag nor server says it.
const ASSUMED_CONTEXT: u32 = 4096;
/// Samples that may wait for the collector.
const MAX_SAMPLES: usize = 1024;

/// Runs a load. Exit code 1 if no request was good.
pub fn run(args: LoadArgs) -> Result<ExitCode> {
    if !args.url.starts_with("http://") {
        bail!("--url {}: expected http://HOST:PORT", args.url);
    }
    let trace = match (&args.trace, args.format) {
        (Some(path), Some(format)) => Some(trace::read(path, format)?),
        _ => None,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("threads")?;
    let (samples, elapsed) = runtime.block_on(measure(&args, trace))?;
    runtime.shutdown_timeout(Duration::from_millis(100));
    let summary = Summary::of(&samples, elapsed, &args);
    let text = if args.json { serde_json::to_string_pretty(&summary)? + "\n" } else { summary.text(&args) };
    report::print(&text)?;
    Ok(if summary.good > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Scales a trace for a server and says by how much.
fn plan(args: &LoadArgs, requests: &[Planned], context: u32) -> Vec<Planned> {
    let length = args.length_scale.unwrap_or_else(|| trace::fitting_length_scale(requests, context));
    let mut scaled = trace::scaled(requests, args.scale, length);
    if let Some(seconds) = args.duration {
        scaled.retain(|request| request.at_ms < seconds as f64 * 1e3);
    }
    let last = scaled.last().map_or(0.0, |request| request.at_ms / 1e3);
    eprintln!(
        "trace: {} of {} requests over {last:.1} s; time factor {}, lengths divided by {}",
        scaled.len(),
        requests.len(),
        args.scale,
        report::three_digits(length)
    );
    scaled
}

async fn measure(args: &LoadArgs, trace: Option<Vec<Planned>>) -> Result<(Vec<Sample>, Duration)> {
    let sender = Sender::new(args, String::new());
    let (listed, longest) = sender.first_model().await.map_err(|error| anyhow::anyhow!(error))?;
    let trace = trace.map(|trace| plan(args, &trace, args.context.or(longest).unwrap_or(ASSUMED_CONTEXT)));
    let sender = Sender::new(args, args.model.clone().unwrap_or(listed));
    let stop = CancellationToken::new();
    let interrupted = stop.clone();
    tokio::spawn(async move {
        if tokio::signal::ctrl_c().await.is_ok() {
            interrupted.cancel();
        }
    });
    let (results, mut collected) = tokio::sync::mpsc::channel(MAX_SAMPLES);
    let begun = Instant::now();
    match trace {
        Some(trace) => drop(tokio::spawn(replay(sender, trace, results, stop.clone()))),
        None => constant(args, &sender, results, &stop),
    }
    let mut samples = Vec::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => break,
            sample = collected.recv() => match sample {
                Some(sample) => samples.push(sample),
                None => break,
            },
        }
    }
    Ok((samples, begun.elapsed()))
}

/// A fixed number of requests at once.
fn constant(args: &LoadArgs, sender: &Sender, results: mpsc::Sender<Sample>, stop: &CancellationToken) {
    let next = Arc::new(AtomicU64::new(0));
    let until = args.duration.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let (all, prompt, output) = (u64::from(args.requests), args.prompt_tokens, args.output_tokens);
    for _ in 0..args.concurrency.min(args.requests) {
        let (sender, results, stop, next) =
            (sender.clone(), results.clone(), stop.clone(), Arc::clone(&next));
        tokio::spawn(async move {
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let late = until.is_some_and(|until| Instant::now() > until);
                if number >= all || late || stop.is_cancelled() {
                    return;
                }
                if results.send(sender.send(number, prompt, output).await).await.is_err() {
                    return;
                }
            }
        });
    }
}

/// Each request at its own time.
async fn replay(sender: Sender, trace: Vec<Planned>, results: mpsc::Sender<Sample>, stop: CancellationToken) {
    let begun = Instant::now();
    let places = Arc::new(Semaphore::new(MAX_OPEN));
    for (number, request) in trace.into_iter().enumerate() {
        let due = begun + Duration::from_secs_f64(request.at_ms / 1e3);
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep_until(due.into()) => {}
        }
        let Ok(place) = Arc::clone(&places).try_acquire_owned() else {
            let skipped =
                Sample { error: Some("not sent: too many are open".to_owned()), ..Sample::default() };
            let _ = results.send(skipped).await;
            continue;
        };
        let (sender, results) = (sender.clone(), results.clone());
        tokio::spawn(async move {
            let sample = sender.send(number as u64, request.prompt, request.output).await;
            let _ = results.send(sample).await;
            drop(place);
        });
    }
}
