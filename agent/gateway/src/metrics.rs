//! The gateway's metrics and their text.
//!
//! Invariants: names carry units; labels come from closed sets; a request is counted once under one result; the
//! text is one valid exposition even where texts of other processes are merged into it.

use std::sync::atomic::AtomicU64;

use deepinfer_protocol::Span;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use self::merge::merge;

mod merge;

pub use self::merge::merge as merge_metrics;

/// Content type of the text.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

type Label = [(&'static str, &'static str); 1];

/// How a request ended. Closed set: a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestResult {
    /// A finish reason or a stop string.
    Finished,
    /// The client left, or the gateway shut down.
    Cancelled,
    /// Not admitted or shed: 429, 503, or larger than any engine.
    Refused,
    /// Retries used up, or a broken promise of ours.
    Failed,
}

impl RequestResult {
    /// Label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Cancelled => "cancelled",
            Self::Refused => "refused",
            Self::Failed => "failed",
        }
    }
}

/// All metrics of one gateway. Handles are atomics; the driver and the edge update them, a scrape reads.
pub struct Metrics {
    registry: Registry,
    pub(crate) running: Gauge,
    pub(crate) waiting: Gauge,
    pub(crate) connections: Gauge,
    pub(crate) ready: Gauge,
    requests: Family<Label, Counter>,
    refusals: Family<Label, Counter>,
    pub(crate) ttft: Histogram,
    pub(crate) inter_token: Histogram,
    pub(crate) queue: Histogram,
    pub(crate) request: Histogram,
    pub(crate) prompt_tokens: Counter,
    pub(crate) cached_tokens: Counter,
    pub(crate) generated_tokens: Counter,
    pub(crate) retries: Counter,
    pub(crate) slow_clients: Counter,
    pub(crate) ignored_fields: Counter<u64, AtomicU64>,
}

impl Metrics {
    /// Registers everything; `pod` is the name of the gateway's pod and stands on every sample.
    pub fn new(pod: &str) -> Self {
        let label = ("pod".into(), pod.to_owned().into());
        let mut registry = Registry::with_prefix_and_labels("deepinfer", std::iter::once(label));
        let metrics = Self {
            running: Gauge::default(),
            waiting: Gauge::default(),
            connections: Gauge::default(),
            ready: Gauge::default(),
            requests: Family::default(),
            refusals: Family::default(),
            ttft: Histogram::new(LONG.iter().copied()),
            inter_token: Histogram::new(SHORT.iter().copied()),
            queue: Histogram::new(LONG.iter().copied()),
            request: Histogram::new(LONG.iter().copied()),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            generated_tokens: Counter::default(),
            retries: Counter::default(),
            slow_clients: Counter::default(),
            ignored_fields: Counter::default(),
            registry: Registry::default(),
        };
        metrics.register(&mut registry);
        for result in
            [RequestResult::Finished, RequestResult::Cancelled, RequestResult::Refused, RequestResult::Failed]
        {
            drop(metrics.requests.get_or_create(&[("result", result.as_str())]));
        }
        Self { registry, ..metrics }
    }

    fn register(&self, registry: &mut Registry) {
        let info = Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "What runs here", info);
        let gauges = [
            ("requests_running", "Requests that have an engine's resources", &self.running),
            ("requests_waiting", "Requests that wait for prefill", &self.waiting),
            ("gateway_connections", "Open client connections", &self.connections),
            ("gateway_ready", "1 if requests would be served", &self.ready),
        ];
        for (name, help, gauge) in gauges {
            registry.register(name, help, gauge.clone());
        }
        registry.register("requests", "Requests by how they ended", self.requests.clone());
        registry.register("refusals", "Requests turned away, by reason", self.refusals.clone());
        let histograms = [
            ("ttft", "From arrival to the first token", &self.ttft),
            ("inter_token", "Between the tokens of a request", &self.inter_token),
            ("queue", "From arrival to the start of prefill", &self.queue),
            ("request", "From arrival to the end", &self.request),
        ];
        for (name, help, histogram) in histograms {
            registry.register_with_unit(name, help, Unit::Seconds, histogram.clone());
        }
        let counters = [
            ("prompt_tokens", "Prompt tokens of requests whose prefill started", &self.prompt_tokens),
            ("cached_tokens", "Those of them that were not computed again", &self.cached_tokens),
            ("generated_tokens", "Tokens handed to clients", &self.generated_tokens),
            ("retries", "Attempts after the first", &self.retries),
            ("slow_clients", "Requests cancelled because their client did not read", &self.slow_clients),
            ("ignored_fields", "Request fields of no known API, accepted and named", &self.ignored_fields),
        ];
        for (name, help, counter) in counters {
            registry.register(name, help, counter.clone());
        }
    }

    /// A request ended.
    pub(crate) fn ended(&self, result: RequestResult, after: Span) {
        self.requests.get_or_create(&[("result", result.as_str())]).inc();
        self.request.observe(after.as_secs_f64());
    }

    /// A request was turned away.
    pub(crate) fn refused(&self, reason: &'static str) {
        self.refusals.get_or_create(&[("reason", reason)]).inc();
    }

    /// Requests that ended with this result.
    pub fn count(&self, result: RequestResult) -> u64 {
        self.requests.get_or_create(&[("result", result.as_str())]).get()
    }

    /// The exposition, with the expositions of others (agents in the same process) merged into it.
    pub fn text(&self, others: &[String]) -> String {
        let mut own = String::new();
        // Writing to a string cannot fail; an empty text would show up in the tests.
        let _ = encode(&mut own, &self.registry);
        let texts: Vec<&str> =
            std::iter::once(own.as_str()).chain(others.iter().map(String::as_str)).collect();
        merge(&texts)
    }
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

/// Bounds in seconds for waits of requests.
const LONG: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 30.0, 60.0, 120.0,
    300.0, 600.0,
];
/// Bounds in seconds for gaps between tokens.
const SHORT: &[f64] = &[
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.04, 0.06, 0.1, 0.2, 0.5, 1.0, 2.5,
    10.0, 30.0,
];

#[cfg(test)]
mod tests {
    use super::merge::check;
    use super::*;

    #[test]
    fn the_text_is_valid_and_has_every_metric_by_its_name_and_pod() {
        let metrics = Metrics::new("gw-0");
        metrics.ended(RequestResult::Finished, Span::millis(5));
        metrics.refused("queue_full");
        metrics.ttft.observe(0.3);
        let text = metrics.text(&[]);
        check(&text).unwrap_or_else(|problem| panic!("{problem}\n{text}"));
        for name in [
            "deepinfer_requests_running{pod=\"gw-0\"} 0",
            "deepinfer_requests_waiting{pod=\"gw-0\"} 0",
            "deepinfer_requests_total{pod=\"gw-0\",result=\"finished\"} 1",
            "deepinfer_requests_total{pod=\"gw-0\",result=\"cancelled\"} 0",
            "deepinfer_refusals_total{pod=\"gw-0\",reason=\"queue_full\"} 1",
            "deepinfer_ttft_seconds_count{pod=\"gw-0\"} 1",
            "deepinfer_inter_token_seconds_count{pod=\"gw-0\"} 0",
            "deepinfer_queue_seconds_count{pod=\"gw-0\"} 0",
            "deepinfer_request_seconds_count{pod=\"gw-0\"} 1",
            "deepinfer_prompt_tokens_total{pod=\"gw-0\"} 0",
            "deepinfer_cached_tokens_total{pod=\"gw-0\"} 0",
            "deepinfer_generated_tokens_total{pod=\"gw-0\"} 0",
            "deepinfer_retries_total{pod=\"gw-0\"} 0",
            "deepinfer_build_info{pod=\"gw-0\",version=",
        ] {
            assert!(text.contains(name), "{name} is missing in\n{text}");
        }
    }

    #[test]
    fn texts_of_agents_are_merged_into_one_valid_exposition() {
        let (one, two) = (Metrics::new("a"), Metrics::new("b"));
        one.prompt_tokens.inc_by(3);
        let text = Metrics::new("gw").text(&[one.text(&[]), two.text(&[])]);
        check(&text).unwrap_or_else(|problem| panic!("{problem}\n{text}"));
        assert!(text.contains("deepinfer_prompt_tokens_total{pod=\"a\"} 3"));
        assert!(text.contains("deepinfer_prompt_tokens_total{pod=\"b\"} 0"));
        assert_eq!(text.matches("# TYPE deepinfer_prompt_tokens counter").count(), 1);
        assert_eq!(text.matches("# EOF").count(), 1);
    }
}
