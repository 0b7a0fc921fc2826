//! What many requests came to.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use serde::Serialize;

use super::args::LoadArgs;
use super::client::Sample;
use crate::report;

/// Quantiles of a time in milliseconds; zeros without samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Quantiles {
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Arithmetic mean.
    pub mean: f64,
}

impl Quantiles {
    /// Of times.
    pub fn of(mut times: Vec<Duration>) -> Self {
        if times.is_empty() {
            return Self::default();
        }
        times.sort_unstable();
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let quantile = |percent: usize| ms(times[(times.len() * percent).div_ceil(100).max(1) - 1]);
        let mean = ms(times.iter().sum::<Duration>()) / times.len() as f64;
        Self { p50: quantile(50), p90: quantile(90), p99: quantile(99), mean }
    }
}

/// All of it.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Requests that were sent and have ended.
    pub requests: usize,
    /// Of these, without an error.
    pub good: usize,
    /// Errors by status or word.
    pub errors: BTreeMap<String, usize>,
    /// Seconds from the first request to the end of the last.
    pub seconds: f64,
    /// Tokens as the server counts them.
    pub prompt_tokens: u64,
    /// The cached part.
    pub cached_tokens: u64,
    /// Of answers.
    pub output_tokens: u64,
    /// Output tokens per second.
    pub tokens_per_second: f64,
    /// Requests per second that met both limits.
    pub goodput_requests_per_second: f64,
    /// Share of all requests that did.
    pub goodput_ratio: f64,
    /// First token, ms.
    pub ttft_ms: Quantiles,
    /// Between tokens, ms.
    pub inter_token_ms: Quantiles,
    /// Whole requests, ms.
    pub request_ms: Quantiles,
}

impl Summary {
    /// Of samples that took `elapsed` together.
    pub fn of(samples: &[Sample], elapsed: Duration, args: &LoadArgs) -> Self {
        let good: Vec<&Sample> = samples.iter().filter(|sample| sample.error.is_none()).collect();
        let mut errors = BTreeMap::new();
        for error in samples.iter().filter_map(|sample| sample.error.clone()) {
            *errors.entry(error).or_insert(0) += 1;
        }
        let seconds = elapsed.as_secs_f64().max(1e-9);
        let sum = |of: fn(&Sample) -> u64| samples.iter().map(of).sum::<u64>();
        let output_tokens = sum(|sample| sample.output_tokens);
        let meets = good.iter().filter(|sample| meets(sample, args)).count();
        Self {
            requests: samples.len(),
            good: good.len(),
            errors,
            seconds,
            prompt_tokens: sum(|sample| sample.prompt_tokens),
            cached_tokens: sum(|sample| sample.cached_tokens),
            output_tokens,
            tokens_per_second: output_tokens as f64 / seconds,
            goodput_requests_per_second: meets as f64 / seconds,
            goodput_ratio: meets as f64 / samples.len().max(1) as f64,
            ttft_ms: Quantiles::of(good.iter().filter_map(|sample| sample.first).collect()),
            inter_token_ms: Quantiles::of(
                good.iter().flat_map(|sample| sample.gaps.iter().copied()).collect(),
            ),
            request_ms: Quantiles::of(good.iter().map(|sample| sample.total).collect()),
        }
    }

    /// For people.
    pub fn text(&self, args: &LoadArgs) -> String {
        let number = report::three_digits;
        let mut text = format!(
            "{} requests in {} s: {} good",
            report::count(self.requests as u64),
            number(self.seconds),
            report::count(self.good as u64)
        );
        for (error, count) in &self.errors {
            let _ = write!(text, ", {count} x {error}");
        }
        let _ = writeln!(
            text,
            "\ntokens         {} prompt ({} cached), {} output, {} output/s",
            report::count(self.prompt_tokens),
            report::count(self.cached_tokens),
            report::count(self.output_tokens),
            number(self.tokens_per_second)
        );
        let rows = [
            ("first token", self.ttft_ms),
            ("inter-token", self.inter_token_ms),
            ("request", self.request_ms),
        ];
        for (name, q) in rows {
            let _ = writeln!(
                text,
                "{name:14} p50 {} ms, p90 {} ms, p99 {} ms, mean {} ms",
                number(q.p50),
                number(q.p90),
                number(q.p99),
                number(q.mean)
            );
        }
        let _ = writeln!(
            text,
            "goodput        {} requests/s, {} % of all (first token <= {} ms, inter-token mean <= {} ms)",
            number(self.goodput_requests_per_second),
            number(self.goodput_ratio * 100.0),
            args.goodput_ttft_ms,
            args.goodput_inter_token_ms
        );
        text
    }
}

/// Whether a request was as fast as it should be.
fn meets(sample: &Sample, args: &LoadArgs) -> bool {
    let first = sample.first.is_some_and(|first| first.as_secs_f64() * 1e3 <= args.goodput_ttft_ms);
    let sum: Duration = sample.gaps.iter().sum();
    let mean = sum.as_secs_f64() * 1e3 / sample.gaps.len().max(1) as f64;
    first && mean <= args.goodput_inter_token_ms
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_samples_at_their_rank() {
        let times = (1..=100).rev().map(Duration::from_millis).collect();
        assert_eq!(Quantiles::of(times), Quantiles { p50: 50.0, p90: 90.0, p99: 99.0, mean: 50.5 });
        let one = Quantiles::of(vec![Duration::from_millis(7)]);
        assert_eq!((one.p50, one.p99), (7.0, 7.0));
        assert_eq!(Quantiles::of(Vec::new()), Quantiles::default());
    }
}
