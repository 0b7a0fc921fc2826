//! Metrics of an agent, in the OpenMetrics exposition format. Every name carries its unit, every series the pod, by its
//! exact name; the rank is a label of its own (OP-046).
//!
//! Figures that machines keep are read when somebody asks; only the step times are collected as they happen.

use std::fmt::Write as _;

use deepinfer_protocol::agent_status::{AgentStatus, Role};
use deepinfer_protocol::{AgentId, Rank, Span};
use deepinfer_serving::node::NodeStatus;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, text::encode};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

/// What is collected as it happens.
#[derive(Debug)]
pub struct Metrics {
    pod: String,
    step_seconds: Histogram,
    step_rows: Histogram,
    broken_invariants: Counter,
}

impl Metrics {
    /// Of an agent.
    pub fn new(name: &AgentId) -> Self {
        Self {
            pod: name.to_string(),
            // From 0.5 ms to 16 s.
            step_seconds: Histogram::new(exponential_buckets(0.0005, 2.0, 16)),
            step_rows: Histogram::new(exponential_buckets(1.0, 2.0, 13)),
            broken_invariants: Counter::default(),
        }
    }

    /// A step ended.
    pub fn observe_step(&self, rows: usize, elapsed: Span) {
        self.step_seconds.observe(elapsed.as_secs_f64());
        self.step_rows.observe(rows as f64);
    }

    /// Blocks or slots did not add up.
    pub fn count_broken_invariant(&self) {
        self.broken_invariants.inc();
    }

    /// Everything as text. `queued`: entries of the queue that this agent leads, if it leads.
    pub fn render(
        &self,
        status: &AgentStatus,
        node: &NodeStatus,
        ranks: &[(Rank, NodeStatus)],
        balancedness: Option<f64>,
        queued: Option<usize>,
    ) -> String {
        let labels = [("pod".into(), self.pod.clone().into())];
        let mut registry = Registry::with_labels(labels.into_iter());
        let step = self.step_seconds.clone();
        registry.register_with_unit("deepinfer_engine_step", "Time of a step", Unit::Seconds, step);
        let rows = self.step_rows.clone();
        registry.register("deepinfer_engine_step_rows", "Token rows of a step, over all ranks", rows);
        let broken = self.broken_invariants.clone();
        registry.register(
            "deepinfer_engine_broken_invariants",
            "Checks of blocks and slots that failed",
            broken,
        );
        registry.register_collector(Box::new(Snapshot::of(status, node, ranks, balancedness, queued)));
        let mut text = String::new();
        if encode(&mut text, &registry).is_err() {
            // Writing to a string does not fail; a metric that cannot be encoded is left out.
            let _ = writeln!(text, "# EOF");
        }
        text
    }
}

/// Values at one moment.
#[derive(Debug)]
struct Snapshot {
    gauges: Vec<Gauge>,
    counters: Vec<Count>,
    /// By rank, as the label has it.
    ranks: Vec<(String, NodeStatus)>,
    requests: Vec<(&'static str, u32)>,
    refused: Vec<(&'static str, u64)>,
    failed: Vec<(&'static str, u64)>,
}

impl Snapshot {
    fn of(
        status: &AgentStatus,
        node: &NodeStatus,
        ranks: &[(Rank, NodeStatus)],
        balancedness: Option<f64>,
        queued: Option<usize>,
    ) -> Self {
        let counts = &node.counts;
        Self {
            gauges: gauges_of(status, node, balancedness, queued),
            counters: counters_of(status, node),
            ranks: ranks.iter().map(|(rank, node)| (rank.to_string(), node.clone())).collect(),
            requests: vec![
                ("loading", node.loading),
                ("running", node.running),
                ("leaving", node.leaving),
                ("parked", node.parked),
            ],
            refused: counts.refused.iter().map(|(why, &n)| (why.as_str(), n)).collect(),
            failed: counts.failed.iter().map(|(why, &n)| (why.as_str(), n)).collect(),
        }
    }
}

/// Name, help and value.
type Gauge = (&'static str, &'static str, f64);
/// The same; names end in `_total` when they are written.
type Count = (&'static str, &'static str, u64);

fn gauges_of(
    status: &AgentStatus,
    node: &NodeStatus,
    balancedness: Option<f64>,
    queued: Option<usize>,
) -> Vec<Gauge> {
    let mut gauges = vec![
        ("deepinfer_kv_blocks_used", "KV blocks held by requests", node.blocks.used as f64),
        (
            "deepinfer_kv_blocks_cached",
            "KV blocks that may be reused or given away",
            node.blocks.cached as f64,
        ),
        ("deepinfer_kv_blocks_total", "KV blocks", node.blocks.total as f64),
        (
            "deepinfer_parked_bytes",
            "Sequences in host memory between prefill and decode",
            node.parked_bytes as f64,
        ),
        ("deepinfer_checkpoint_bytes", "Window checkpoints in host memory", node.checkpoints.bytes as f64),
        ("deepinfer_agent_accepting", "1 if new work is taken", f64::from(u8::from(status.accepting))),
        ("deepinfer_agent_uptime_seconds", "Time since start", status.uptime_seconds as f64),
    ];
    // What autoscalers read (operator.md 4.3).
    let share = |part: f64, whole: f64| if whole > 0.0 { part / whole } else { 0.0 };
    let used = share(node.blocks.used as f64, node.blocks.total as f64);
    gauges.push(("deepinfer_kv_utilization_ratio", "Share of the KV blocks that requests hold", used));
    gauges.push(match status.role {
        Role::Decode => {
            let (free, slots) = (f64::from(node.free_slots), f64::from(node.total_slots));
            let help = "Share of the sequences at once that are held";
            ("deepinfer_decode_slots_used_ratio", help, share(slots - free, slots))
        }
        Role::Prefill => {
            let help = "Predicted time to prefill what has not run";
            ("deepinfer_prefill_backlog_seconds", help, node.backlog.as_secs_f64())
        }
    });
    if let Some(balancedness) = balancedness.filter(|b| *b > 0.0) {
        let help = "Load of the busiest rank over the mean, last window";
        gauges.push(("deepinfer_expert_imbalance_ratio", help, 1.0 / balancedness));
    }
    if let Some(queued) = queued {
        gauges.push(("deepinfer_leader_queue_requests", "Requests waiting for a decision", queued as f64));
    }
    gauges
}

fn counters_of(status: &AgentStatus, node: &NodeStatus) -> Vec<Count> {
    let counts = &node.counts;
    vec![
        ("deepinfer_engine_steps", "Steps run", status.steps),
        ("deepinfer_engine_rows", "Token rows run", counts.rows),
        ("deepinfer_engine_replayed_rows", "Rows run again after a prefix hit", counts.replayed_rows),
        ("deepinfer_engine_prompt_tokens", "Prompt tokens taken", counts.prompt_tokens),
        ("deepinfer_engine_cached_tokens", "Prompt tokens found in blocks", counts.cached_tokens),
        ("deepinfer_engine_generated_tokens", "Tokens drawn", counts.generated_tokens),
        ("deepinfer_engine_finished_requests", "Sequences that ended here", counts.finished),
        ("deepinfer_engine_preemptions", "Sequences that gave way", counts.preempted),
        (
            "deepinfer_engine_replaced",
            "Engines opened in place of lost ones",
            u64::from(status.replaced_engines),
        ),
        (
            "deepinfer_engine_abandoned_threads",
            "Engine threads left behind",
            u64::from(status.abandoned_threads),
        ),
        ("deepinfer_kv_blocks_evicted", "Cached blocks given to new content", node.blocks.evicted),
        ("deepinfer_kv_damaged_pieces", "Pieces of sequences that came damaged", counts.damaged_pieces),
        ("deepinfer_drain_cut", "Requests cut at a drain's deadline", u64::from(node.cut)),
    ]
}

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        for (name, help, value) in &self.gauges {
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            ConstGauge::new(*value).encode(metric)?;
        }
        for (name, help, value) in &self.counters {
            let metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            ConstCounter::new(*value).encode(metric)?;
        }
        let help = "Requests held, by state";
        let mut family =
            encoder.encode_descriptor("deepinfer_engine_requests", help, None, MetricType::Gauge)?;
        for (state, value) in &self.requests {
            let labels = [("state", *state)];
            ConstGauge::new(i64::from(*value)).encode(family.encode_family(&labels)?)?;
        }
        type OfRank = (&'static str, &'static str, fn(&NodeStatus) -> f64);
        let of_rank: [OfRank; 3] = [
            ("deepinfer_rank_requests", "Requests that a rank holds", |node| f64::from(node.inflight)),
            ("deepinfer_rank_kv_blocks_used", "KV blocks of a rank held by requests", |node| {
                node.blocks.used as f64
            }),
            ("deepinfer_rank_free_slots", "Sequences that a rank could take", |node| {
                f64::from(node.free_slots)
            }),
        ];
        for (name, help, value) in of_rank.iter().filter(|_| !self.ranks.is_empty()) {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for (rank, node) in &self.ranks {
                let labels = [("rank", rank.as_str())];
                ConstGauge::new(value(node)).encode(family.encode_family(&labels)?)?;
            }
        }
        let families = [
            ("deepinfer_engine_refused_requests", "Work turned away", &self.refused),
            ("deepinfer_engine_failed_requests", "Work that could not go on here", &self.failed),
        ];
        for (name, help, values) in families {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for (reason, value) in values {
                let labels = [("reason", *reason)];
                ConstCounter::new(*value).encode(family.encode_family(&labels)?)?;
            }
        }
        Ok(())
    }
}
