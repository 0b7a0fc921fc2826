//! What the objects of clusters say, as metrics: phases, their durations, failures, pools.
//!
//! Durations are between two looks, so a phase shorter than a reconcile is not seen; a restart of the operator begins
//! a phase anew.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use deepinfer_crds::cluster::SchedulingBackend;
use deepinfer_crds::{DeepInferPool, SupernodePhase};
use deepinfer_planner::World;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::{Bounds, Histograms, LONG, Named};
use crate::keys::ClusterRef;

/// Phases in the order of a life.
const PHASES: &[(SupernodePhase, &str)] = &[
    (SupernodePhase::Pending, "Pending"),
    (SupernodePhase::Placing, "Placing"),
    (SupernodePhase::Starting, "Starting"),
    (SupernodePhase::Warming, "Warming"),
    (SupernodePhase::Serving, "Serving"),
    (SupernodePhase::Degraded, "Degraded"),
    (SupernodePhase::Draining, "Draining"),
    (SupernodePhase::Drained, "Drained"),
    (SupernodePhase::Terminating, "Terminating"),
    (SupernodePhase::Failed, "Failed"),
];
/// A supernode without an object.
const GONE: &str = "Gone";

type Ratio = Gauge<f64, std::sync::atomic::AtomicU64>;

/// A supernode in a phase.
#[derive(Clone, Copy, Debug)]
struct Stay {
    phase: &'static str,
    /// First second.
    since: i64,
    backend: &'static str,
}

/// What was seen of a cluster at the last look.
#[derive(Debug, Default)]
struct Seen {
    /// By UID of the supernode.
    phases: BTreeMap<String, Stay>,
    pools: BTreeSet<String>,
    /// Reasons of failures that were counted, for the day the cluster goes.
    reasons: BTreeSet<String>,
    /// Second of the newest failure of each pool that was counted.
    failures: BTreeMap<String, i64>,
    first: bool,
}

/// Metrics of clusters.
pub(super) struct Clusters {
    phases: Family<Named<2>, Gauge>,
    transitions: Histograms<[(&'static str, &'static str); 2]>,
    restarts: Family<Named<2>, Counter>,
    placements: Family<[(&'static str, &'static str); 2], Counter>,
    rollout: Family<Named<2>, Ratio>,
    replicas: Family<Named<3>, Gauge>,
    drains: Histogram,
    seen: Mutex<BTreeMap<ClusterRef, Seen>>,
}

impl Clusters {
    pub(super) fn new() -> Self {
        Self {
            phases: Family::default(),
            transitions: Histograms::new_with_constructor(Bounds(LONG)),
            restarts: Family::default(),
            placements: Family::default(),
            rollout: Family::default(),
            replicas: Family::default(),
            drains: Histogram::new(LONG.iter().copied()),
            seen: Mutex::default(),
        }
    }

    pub(super) fn register(&self, registry: &mut Registry) {
        registry.register("supernode_phase", "Supernodes by phase", self.phases.clone());
        let help = "Time in a phase, by the phase after it";
        registry.register_with_unit("supernode_transition", help, Unit::Seconds, self.transitions.clone());
        registry.register("supernode_restarts", "Failed incarnations", self.restarts.clone());
        let help = "Placements of supernodes by how they ended";
        registry.register("placement_attempts", help, self.placements.clone());
        registry.register("rollout_progress_ratio", "Replicas of the wanted revision", self.rollout.clone());
        registry.register("pool_replicas", "Replicas of a pool by state", self.replicas.clone());
        registry.register_with_unit("drain", "Time of drains", Unit::Seconds, self.drains.clone());
    }

    pub(super) fn observe(&self, cluster: &ClusterRef, world: &World) {
        let mut all = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let seen = all.entry(cluster.clone()).or_insert_with(|| Seen { first: true, ..Seen::default() });
        self.supernodes(cluster, world, seen);
        self.failures(cluster, world, seen);
        let pools: BTreeSet<String> = world.pools().filter_map(|pool| pool.metadata.name.clone()).collect();
        for gone in seen.pools.difference(&pools) {
            self.forget_pool(cluster, gone);
        }
        seen.pools = pools;
        for pool in world.pools() {
            self.pool(cluster, pool);
        }
        seen.first = false;
    }

    fn supernodes(&self, cluster: &ClusterRef, world: &World, seen: &mut Seen) {
        let mut now: BTreeMap<String, Stay> = BTreeMap::new();
        for supernode in world.supernodes() {
            let Some(uid) = supernode.metadata.uid.clone() else { continue };
            let phase = supernode.status.as_ref().and_then(|status| status.phase);
            let fresh = Stay {
                phase: phase.map_or("Pending", word),
                since: world.now,
                backend: backend_word(supernode.spec.backend),
            };
            let stay = match seen.phases.get(&uid) {
                Some(before) if before.phase == fresh.phase => *before,
                Some(before) => {
                    self.transition(before, fresh.phase, world.now);
                    fresh
                }
                None => fresh,
            };
            now.insert(uid, stay);
        }
        for (uid, before) in &seen.phases {
            if !now.contains_key(uid) {
                self.transition(before, GONE, world.now);
            }
        }
        for (_, phase) in PHASES {
            let count = now.values().filter(|stay| stay.phase == *phase).count();
            let labels = [("cluster", cluster.to_string()), ("phase", (*phase).to_owned())];
            self.phases.get_or_create(&labels).set(super::saturated(count));
        }
        seen.phases = now;
    }

    fn transition(&self, before: &Stay, to: &'static str, now: i64) {
        let seconds = u32::try_from(now - before.since).unwrap_or(0);
        self.transitions.get_or_create(&[("from", before.phase), ("to", to)]).observe(f64::from(seconds));
        match before.phase {
            "Draining" => self.drains.observe(f64::from(seconds)),
            "Pending" | "Placing" if to != "Placing" => {
                let placed = matches!(to, "Starting" | "Warming" | "Serving" | "Degraded");
                let result = if placed { "placed" } else { "given_up" };
                self.placements.get_or_create(&[("backend", before.backend), ("result", result)]).inc();
            }
            _ => {}
        }
    }

    /// Failures that the committed memory has and this process has not counted. Those that were there at the first look
    /// were counted by the one before.
    fn failures(&self, cluster: &ClusterRef, world: &World, seen: &mut Seen) {
        let Some(blueprint) = &world.blueprint else { return };
        for (pool, records) in &blueprint.failures {
            let known = seen.failures.get(pool).copied().unwrap_or(i64::MIN);
            for record in records.iter().filter(|record| !seen.first && record.at > known) {
                let labels = [("cluster", cluster.to_string()), ("reason", record.reason.clone())];
                self.restarts.get_or_create(&labels).inc();
                seen.reasons.insert(record.reason.clone());
            }
            if let Some(newest) = records.iter().map(|record| record.at).max() {
                seen.failures.insert(pool.clone(), newest.max(known));
            }
        }
    }

    fn pool(&self, cluster: &ClusterRef, pool: &DeepInferPool) {
        let Some(name) = &pool.metadata.name else { return };
        let Some(status) = &pool.status else { return };
        let desired = status.effective_replicas.or(pool.spec.replicas).unwrap_or(0);
        let states = [
            ("desired", Some(desired)),
            ("current", status.replicas),
            ("ready", status.ready_replicas),
            ("available", status.available_replicas),
            ("updated", status.updated_replicas),
            ("draining", status.draining_replicas),
        ];
        for (state, count) in states {
            self.replicas.get_or_create(&of_pool(cluster, name, state)).set(count.unwrap_or(0).into());
        }
        let updated = status.updated_replicas.unwrap_or(0);
        let ratio = if desired == 0 { 1.0 } else { (f64::from(updated) / f64::from(desired)).min(1.0) };
        let labels = [("cluster", cluster.to_string()), ("pool", name.clone())];
        self.rollout.get_or_create(&labels).set(ratio);
    }

    fn forget_pool(&self, cluster: &ClusterRef, pool: &str) {
        for state in ["desired", "current", "ready", "available", "updated", "draining"] {
            self.replicas.remove(&of_pool(cluster, pool, state));
        }
        self.rollout.remove(&[("cluster", cluster.to_string()), ("pool", pool.to_owned())]);
    }

    pub(super) fn forget(&self, cluster: &ClusterRef) {
        let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner).remove(cluster);
        let Some(seen) = seen else { return };
        for (_, phase) in PHASES {
            self.phases.remove(&[("cluster", cluster.to_string()), ("phase", (*phase).to_owned())]);
        }
        for reason in seen.reasons {
            self.restarts.remove(&[("cluster", cluster.to_string()), ("reason", reason)]);
        }
        for pool in seen.pools {
            self.forget_pool(cluster, &pool);
        }
    }
}

fn word(phase: SupernodePhase) -> &'static str {
    PHASES.iter().find(|(of, _)| *of == phase).map_or(GONE, |(_, word)| *word)
}

fn backend_word(backend: SchedulingBackend) -> &'static str {
    match backend {
        SchedulingBackend::Auto => "Auto",
        SchedulingBackend::Native => "Native",
        SchedulingBackend::Volcano => "Volcano",
        SchedulingBackend::Kai => "Kai",
        SchedulingBackend::Kueue => "Kueue",
        SchedulingBackend::Builtin => "Builtin",
    }
}

fn of_pool(cluster: &ClusterRef, pool: &str, state: &str) -> Named<3> {
    [("cluster", cluster.to_string()), ("pool", pool.to_owned()), ("state", state.to_owned())]
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use deepinfer_planner::{Key, Kind, Object};
    use serde_json::json;

    use super::super::Metrics;
    use super::*;
    use crate::health::Health;

    fn world(now: i64, phase: &str) -> World {
        let mut world = World::new("ns", 1);
        world.now = now;
        let supernode = json!({
            "apiVersion": "deepinfer.io/v1alpha1", "kind": "Supernode",
            "metadata": {"name": "c-decode-x", "uid": "u1"},
            "spec": {"clusterName": "c", "poolName": "c-decode", "role": "decode", "revision": "r",
                "kvEpoch": "e", "nodes": 2, "acceleratorsPerNode": 8, "backend": "Builtin"},
            "status": {"phase": phase},
        });
        let object = Object::from_value(Kind::Supernode, supernode).unwrap();
        world.objects.insert(Key::new(Kind::Supernode, "c-decode-x"), object);
        world
    }

    #[test]
    fn phases_and_their_durations_are_seen_and_go_with_the_cluster() {
        let metrics = Metrics::new("1");
        let health = Health::new(Duration::from_secs(1));
        let cluster = ClusterRef { namespace: "ns".into(), name: "c".into(), uid: "u".into() };
        metrics.observe(&cluster, &world(98, "Placing"));
        metrics.observe(&cluster, &world(100, "Starting"));
        metrics.observe(&cluster, &world(107, "Starting"));
        metrics.observe(&cluster, &world(112, "Serving"));
        let text = metrics.text(&health);
        let phase = "deepinfer_operator_supernode_phase{cluster=\"ns/c\",phase=\"Serving\"} 1";
        let sum = "deepinfer_operator_supernode_transition_seconds_sum{from=\"Starting\",to=\"Serving\"} 12";
        assert!(text.contains(phase) && text.contains(sum), "{text}");
        let placed = "deepinfer_operator_placement_attempts_total{backend=\"Builtin\",result=\"placed\"} 1";
        assert!(text.contains(placed), "{text}");
        metrics.forget(&cluster);
        let text = metrics.text(&health);
        assert!(!text.contains("ns/c"), "{text}");
    }
}
