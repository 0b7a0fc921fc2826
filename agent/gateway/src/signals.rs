//! What a gateway says of itself: `GET /v1/status`, and the recent past it is made of.
//!
//! Invariant: memory is bounded whatever the traffic; times come from outside.

use std::collections::VecDeque;

use deepinfer_protocol::{Span, Time};
use serde::{Deserialize, Serialize};

/// `GET /v1/status` of a gateway: what a planner reads to scale, also at zero replicas of a pool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GatewayStatus {
    /// Name of the gateway's pod.
    pub name: String,
    /// New requests are taken and can be served.
    pub ready: bool,
    /// Why not, in one line; empty if ready.
    pub reason: String,
    /// FleetView last followed.
    pub fleet_generation: u64,
    /// Requests that have an engine's resources or wait for a rank.
    pub running: u64,
    /// Requests that wait for prefill: the queued work.
    pub waiting: u64,
    /// Prompt tokens of those that wait.
    pub waiting_tokens: u64,
    /// Requests held because no pool serves. Always 0 until the activator is built.
    pub held: u64,
    /// Times to the first token of the last minute.
    pub ttft: Digest,
    /// Output tokens per second over the last ten seconds.
    pub tokens_per_second: f64,
    /// Requests since start, all results.
    pub requests: u64,
    /// Refused since start (429, 503).
    pub refused: u64,
    /// Seconds since start.
    pub uptime_seconds: u64,
}

/// Quantiles of a time in milliseconds; zeros without samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Digest {
    /// Samples.
    pub count: u64,
    /// Median.
    pub p50_ms: f64,
    /// 95th percentile.
    pub p95_ms: f64,
    /// 99th percentile.
    pub p99_ms: f64,
}

/// Samples kept for the digest: more than a gateway can serve in the window on one machine of today.
const MAX_SAMPLES: usize = 16_384;
/// How far back the digest of first-token times looks.
const WINDOW: Span = Span::secs(60);
/// Whole seconds over which the rate of tokens is taken.
const RATE_SECONDS: u64 = 10;

/// First-token times of the last minute and tokens of the last seconds.
#[derive(Debug, Default)]
pub(crate) struct Recent {
    first_tokens: VecDeque<(Time, Span)>,
    /// (second, tokens), oldest first.
    seconds: VecDeque<(u64, u64)>,
}

impl Recent {
    /// A request got its first token after `wait`.
    pub(crate) fn first_token(&mut self, now: Time, wait: Span) {
        if self.first_tokens.len() == MAX_SAMPLES {
            self.first_tokens.pop_front();
        }
        self.first_tokens.push_back((now, wait));
    }

    /// Tokens went out.
    pub(crate) fn tokens(&mut self, now: Time, tokens: u64) {
        let second = now.0 / Span::secs(1).0;
        match self.seconds.back_mut() {
            Some((last, sum)) if *last == second => *sum += tokens,
            _ => self.seconds.push_back((second, tokens)),
        }
        if self.seconds.len() > RATE_SECONDS as usize + 1 {
            self.seconds.pop_front();
        }
    }

    /// Of the last minute.
    pub(crate) fn digest(&mut self, now: Time) -> Digest {
        while self.first_tokens.front().is_some_and(|(at, _)| now.since(*at) > WINDOW) {
            self.first_tokens.pop_front();
        }
        let mut waits: Vec<Span> = self.first_tokens.iter().map(|(_, wait)| *wait).collect();
        waits.sort_unstable();
        let quantile = |percent: usize| {
            let index = (waits.len() * percent).div_ceil(100).saturating_sub(1);
            waits.get(index).map_or(0.0, |wait| wait.as_secs_f64() * 1e3)
        };
        Digest { count: waits.len() as u64, p50_ms: quantile(50), p95_ms: quantile(95), p99_ms: quantile(99) }
    }

    /// Tokens per second over the last whole seconds.
    pub(crate) fn tokens_per_second(&self, now: Time) -> f64 {
        let second = now.0 / Span::secs(1).0;
        let recent = |at: u64| at < second && second - at <= RATE_SECONDS;
        let sum: u64 = self.seconds.iter().filter(|(at, _)| recent(*at)).map(|(_, tokens)| tokens).sum();
        sum as f64 / RATE_SECONDS as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(millis: u64) -> Time {
        Time(Span::millis(millis).0)
    }

    #[test]
    fn the_digest_forgets_what_is_older_than_a_minute() {
        let mut recent = Recent::default();
        for i in 1..=100 {
            recent.first_token(at(0), Span::millis(i));
        }
        let digest = recent.digest(at(60_000));
        assert_eq!(digest, Digest { count: 100, p50_ms: 50.0, p95_ms: 95.0, p99_ms: 99.0 });
        assert_eq!(recent.digest(at(60_001)), Digest::default());
    }

    #[test]
    fn the_rate_is_over_whole_seconds_and_goes_back_to_zero() {
        let mut recent = Recent::default();
        for millis in (0..20_000).step_by(10) {
            recent.tokens(at(millis), 1);
        }
        assert_eq!(recent.tokens_per_second(at(20_000)), 100.0);
        assert_eq!(recent.tokens_per_second(at(30_000)), 0.0);
        assert!(recent.seconds.len() <= RATE_SECONDS as usize + 1);
    }

    #[test]
    fn memory_stays_bounded_under_any_rate() {
        let mut recent = Recent::default();
        for i in 0..3 * MAX_SAMPLES as u64 {
            recent.first_token(at(i), Span::millis(1));
            recent.tokens(at(i * 1000), 1);
        }
        assert!(recent.first_tokens.len() <= MAX_SAMPLES && recent.seconds.len() <= 11);
    }
}
