//! The operator's metrics (operator.md 12.1), prefix `deepinfer_operator_`.
//!
//! Not there because the parts are not built: `spare_promotions_total`, `expert_imbalance_ratio`,
//! `expert_plan_changes_total`, `expert_moves_total`, `planner_decisions_total`. Cut drains are counted by the agents.
//! Invariants: labels come from closed sets, from kinds, and from names of clusters and pools; never a pod, never a node;
//! what is said of a cluster goes with it.

use std::sync::Arc;
use std::time::Duration;

use deepinfer_planner::{Kind, World};
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::{Family, MetricConstructor};
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};

use self::clusters::Clusters;
use crate::health::Health;
use crate::keys::ClusterRef;

mod clusters;

/// Content type of the text.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Kind label of our own reconciles: one world is one cluster.
const CLUSTER: &str = "DeepInferCluster";
/// Bounds in seconds for reconciles and calls.
const SHORT: &[f64] = &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];
/// Bounds in seconds for phases of supernodes and drains.
const LONG: &[f64] =
    &[0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0];

macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$of:meta])* $variant:ident = $word:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $name { $($(#[$of])* $variant,)* }

        impl $name {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// As a label.
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word,)* }
            }
        }
    };
}

words! {
    /// How a reconcile ended.
    ReconcileResult {
        /// Something was written.
        Acted = "acted",
        /// All was as it should be.
        Unchanged = "unchanged",
        /// It is tried again.
        Failed = "failed",
        /// Not looked at: not the leader, or the world is not known well enough.
        Skipped = "skipped",
    }
}

words! {
    /// What went wrong.
    ErrorClass {
        /// Somebody else wrote first.
        Conflict = "conflict",
        /// Asked to come back later.
        Throttled = "throttled",
        /// The API server failed.
        Server = "server",
        /// No answer in time.
        Timeout = "timeout",
        /// Not allowed.
        Denied = "denied",
        /// A quota is used up.
        Quota = "quota",
        /// The object was refused.
        Invalid = "invalid",
        /// The network failed.
        Transport = "transport",
        /// A plan broke a rule and was not executed.
        Invariant = "invariant",
        /// Anything else.
        Internal = "internal",
    }
}

words! {
    /// A write to the API server.
    Verb {
        /// A new object.
        Create = "create",
        /// Server-side apply.
        Apply = "apply",
        /// Another patch.
        Patch = "patch",
        /// A status.
        Status = "status",
        /// A whole object.
        Update = "update",
        /// Gone.
        Delete = "delete",
    }
}

words! {
    /// A call to an agent.
    CallKind {
        /// `GET /v1/status`.
        Status = "status",
        /// `POST /v1/drain`.
        Drain = "drain",
        /// `POST /v1/undrain`.
        Undrain = "undrain",
    }
}

type One = [(&'static str, &'static str); 1];
type Two = [(&'static str, &'static str); 2];
/// Labels with names of clusters and pools.
pub(crate) type Named<const N: usize> = [(&'static str, String); N];

/// Makes histograms with fixed bounds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds(&'static [f64]);

impl MetricConstructor<Histogram> for Bounds {
    fn new_metric(&self) -> Histogram {
        Histogram::new(self.0.iter().copied())
    }
}

type Histograms<L> = Family<L, Histogram, Bounds>;

/// All metrics of one operator. Handles are atomics; a scrape reads.
pub struct Metrics {
    registry: Registry,
    reconciles: Family<Two, Counter>,
    durations: Histograms<One>,
    errors: Family<Two, Counter>,
    queue: Family<One, Gauge>,
    writes: Family<Two, Counter>,
    watch_age: Family<Named<1>, Gauge<f64, std::sync::atomic::AtomicU64>>,
    leader: Gauge,
    drift: Family<One, Counter>,
    requests: Histograms<One>,
    plans: Histogram,
    calls: Histograms<One>,
    unreachable: Gauge,
    agents: Gauge,
    events: Family<One, Counter>,
    fleet_waiters: Gauge,
    clusters: Clusters,
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Metrics {
    /// Registers everything; `release` goes into `build_info`.
    pub fn new(release: &str) -> Arc<Self> {
        let mut metrics = Self {
            registry: Registry::default(),
            reconciles: Family::default(),
            durations: Histograms::new_with_constructor(Bounds(SHORT)),
            errors: Family::default(),
            queue: Family::default(),
            writes: Family::default(),
            watch_age: Family::default(),
            leader: Gauge::default(),
            drift: Family::default(),
            requests: Histograms::new_with_constructor(Bounds(SHORT)),
            plans: Bounds(SHORT).new_metric(),
            calls: Histograms::new_with_constructor(Bounds(SHORT)),
            unreachable: Gauge::default(),
            agents: Gauge::default(),
            events: Family::default(),
            fleet_waiters: Gauge::default(),
            clusters: Clusters::new(),
        };
        let mut registry = Registry::with_prefix("deepinfer_operator");
        metrics.register(&mut registry, release);
        metrics.registry = registry;
        metrics.zeros();
        Arc::new(metrics)
    }

    fn register(&self, registry: &mut Registry, release: &str) {
        let info = Info::new(vec![("version", release.to_owned())]);
        registry.register("build", "What runs here", info);
        registry.register("reconcile", "Reconciles by how they ended", self.reconciles.clone());
        let help = "Time of a reconcile, gather to last write";
        registry.register_with_unit("reconcile_duration", help, Unit::Seconds, self.durations.clone());
        registry.register("reconcile_errors", "What went wrong in reconciles", self.errors.clone());
        registry.register("queue_depth", "Clusters that wait for a reconcile", self.queue.clone());
        registry.register("api_writes", "Writes to the API server", self.writes.clone());
        let help = "Time of requests to the API server, watches left out";
        registry.register_with_unit("api_request", help, Unit::Seconds, self.requests.clone());
        let help = "Time of planning, the part of a reconcile that waits for nobody";
        registry.register_with_unit("plan", help, Unit::Seconds, self.plans.clone());
        let help = "Since the last event or bookmark of a watch";
        registry.register_with_unit("watch_age", help, Unit::Seconds, self.watch_age.clone());
        registry.register("leader", "1 if this replica acts", self.leader.clone());
        registry.register("drift_corrections", "Hand edits that were undone", self.drift.clone());
        let help = "Time of calls to agents";
        registry.register_with_unit("agent_call", help, Unit::Seconds, self.calls.clone());
        registry.register("agent_unreachable", "Agents that do not answer", self.unreachable.clone());
        registry.register("agents", "Agents that are followed", self.agents.clone());
        let help = "Events by what became of them";
        registry.register("events", help, self.events.clone());
        let help = "Gateways and agents that wait for a new FleetView";
        registry.register("fleet_waiters", help, self.fleet_waiters.clone());
        self.clusters.register(registry);
    }

    /// Counters that a dashboard divides by must be there before the first of their kind.
    fn zeros(&self) {
        for result in ReconcileResult::ALL {
            drop(self.reconciles.get_or_create(&[("kind", CLUSTER), ("result", result.as_str())]));
        }
        for class in ErrorClass::ALL {
            drop(self.errors.get_or_create(&[("kind", CLUSTER), ("class", class.as_str())]));
        }
        for call in CallKind::ALL {
            drop(self.calls.get_or_create(&[("call", call.as_str())]));
        }
        drop(self.durations.get_or_create(&[("kind", CLUSTER)]));
        drop(self.queue.get_or_create(&[("kind", CLUSTER)]));
    }

    /// A reconcile ended.
    pub fn reconciled(&self, result: ReconcileResult, duration: Duration) {
        self.reconciles.get_or_create(&[("kind", CLUSTER), ("result", result.as_str())]).inc();
        if result != ReconcileResult::Skipped {
            self.durations.get_or_create(&[("kind", CLUSTER)]).observe(duration.as_secs_f64());
        }
    }

    /// Something went wrong in a reconcile.
    pub fn error(&self, class: ErrorClass) {
        self.errors.get_or_create(&[("kind", CLUSTER), ("class", class.as_str())]).inc();
    }

    /// So many clusters wait.
    pub fn queue_depth(&self, waiting: usize) {
        self.queue.get_or_create(&[("kind", CLUSTER)]).set(saturated(waiting));
    }

    /// The API server took a write.
    pub fn wrote(&self, kind: Kind, verb: Verb) {
        self.writes.get_or_create(&[("kind", kind_word(kind)), ("verb", verb.as_str())]).inc();
    }

    /// The API server answered a request, or the request was given up.
    pub fn requested(&self, verb: &'static str, took: Duration) {
        self.requests.get_or_create(&[("verb", verb)]).observe(took.as_secs_f64());
    }

    /// A plan was made.
    pub fn planned(&self, took: Duration) {
        self.plans.observe(took.as_secs_f64());
    }

    /// Writes of a verb since the start, of all kinds; for tests and the log line at the end.
    pub fn writes(&self, verb: Verb) -> u64 {
        let of = |kind: &'static str| {
            self.writes.get(&[("kind", kind), ("verb", verb.as_str())]).map_or(0, |counter| counter.get())
        };
        KINDS.iter().map(|(_, word)| of(word)).sum()
    }

    /// Whether this replica acts.
    pub fn leader(&self, leads: bool) {
        self.leader.set(i64::from(leads));
    }

    /// A hand edit was undone.
    pub fn drift(&self, kind: Kind) {
        self.drift.get_or_create(&[("kind", kind_word(kind))]).inc();
    }

    /// An agent was called.
    pub(crate) fn called(&self, call: CallKind, took: Duration) {
        self.calls.get_or_create(&[("call", call.as_str())]).observe(took.as_secs_f64());
    }

    /// So many agents are followed, and so many do not answer.
    pub(crate) fn agents(&self, followed: usize, unreachable: usize) {
        self.agents.set(saturated(followed));
        self.unreachable.set(saturated(unreachable));
    }

    /// An event was `sent`, `counted` into a series, or `dropped`.
    pub(crate) fn event(&self, result: &'static str) {
        self.events.get_or_create(&[("result", result)]).inc();
    }

    /// So many wait for a FleetView.
    pub(crate) fn fleet_waiters(&self, waiting: usize) {
        self.fleet_waiters.set(saturated(waiting));
    }

    /// What a cluster looks like; once in each reconcile.
    pub fn observe(&self, cluster: &ClusterRef, world: &World) {
        self.clusters.observe(cluster, world);
    }

    /// The cluster is gone.
    pub fn forget(&self, cluster: &ClusterRef) {
        self.clusters.forget(cluster);
    }

    /// The exposition.
    pub fn text(&self, health: &Health) -> String {
        self.watch_age.clear();
        for (kind, age) in &health.ages() {
            self.watch_age.get_or_create(&[("kind", kind.clone())]).set(age.as_secs_f64());
        }
        let mut text = String::new();
        // Writing to a string cannot fail; an empty text would show up in the tests.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

fn saturated(number: usize) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Kinds as the API server names them.
const KINDS: &[(Kind, &str)] = &[
    (Kind::Cluster, CLUSTER),
    (Kind::ServiceAccount, "ServiceAccount"),
    (Kind::Secret, "Secret"),
    (Kind::ConfigMap, "ConfigMap"),
    (Kind::ControllerRevision, "ControllerRevision"),
    (Kind::NetworkPolicy, "NetworkPolicy"),
    (Kind::Pool, "DeepInferPool"),
    (Kind::Supernode, "Supernode"),
    (Kind::Placement, "ExpertPlacement"),
    (Kind::Service, "Service"),
    (Kind::Budget, "PodDisruptionBudget"),
    (Kind::Deployment, "Deployment"),
    (Kind::Pod, "Pod"),
    (Kind::PodTemplate, "PodTemplate"),
    (Kind::Claim, "PersistentVolumeClaim"),
    (Kind::Gang, "PodGroup"),
    (Kind::ComputeDomain, "ComputeDomain"),
];

fn kind_word(kind: Kind) -> &'static str {
    KINDS.iter().find(|(of, _)| *of == kind).map_or("other", |(_, word)| *word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_every_metric_by_its_name() {
        let metrics = Metrics::new("1.2.3");
        let health = Health::new(Duration::from_secs(300));
        drop(health.watch("pods"));
        metrics.reconciled(ReconcileResult::Acted, Duration::from_millis(3));
        metrics.error(ErrorClass::Quota);
        metrics.wrote(Kind::Pod, Verb::Create);
        metrics.requested("create", Duration::from_millis(7));
        metrics.planned(Duration::from_millis(1));
        metrics.drift(Kind::Service);
        metrics.leader(true);
        metrics.called(CallKind::Status, Duration::from_millis(1));
        metrics.agents(3, 1);
        let text = metrics.text(&health);
        for line in [
            "deepinfer_operator_build_info{version=\"1.2.3\"} 1",
            "deepinfer_operator_reconcile_total{kind=\"DeepInferCluster\",result=\"acted\"} 1",
            "deepinfer_operator_reconcile_total{kind=\"DeepInferCluster\",result=\"failed\"} 0",
            "deepinfer_operator_reconcile_duration_seconds_count{kind=\"DeepInferCluster\"} 1",
            "deepinfer_operator_reconcile_errors_total{kind=\"DeepInferCluster\",class=\"quota\"} 1",
            "deepinfer_operator_queue_depth{kind=\"DeepInferCluster\"} 0",
            "deepinfer_operator_api_writes_total{kind=\"Pod\",verb=\"create\"} 1",
            "deepinfer_operator_api_request_seconds_count{verb=\"create\"} 1",
            "deepinfer_operator_plan_seconds_count 1",
            "deepinfer_operator_watch_age_seconds{kind=\"pods\"}",
            "deepinfer_operator_leader 1",
            "deepinfer_operator_drift_corrections_total{kind=\"Service\"} 1",
            "deepinfer_operator_agent_call_seconds_count{call=\"status\"} 1",
            "deepinfer_operator_agent_unreachable 1",
            "deepinfer_operator_agents 3",
            "# EOF",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
        assert_eq!(metrics.writes(Verb::Create), 1);
    }
}
