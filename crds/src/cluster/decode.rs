//! Decode supernodes: their shape, their recovery and their experts.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Drain, PodShape, Rollout, Scaling};
use crate::cel::{self, rules};

/// Supernodes that write answers. Exactly one of replicas and scaling.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules(&[cel::REPLICAS_XOR_SCALING])))]
pub struct Decode {
    /// Shape of one supernode: a gang that shares the experts of the model.
    pub supernode: SupernodeShape,
    /// Whole supernodes, 0 to 1024. This or scaling.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1024))]
    pub replicas: Option<u32>,
    /// Who scales between which bounds. This or replicas.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scaling: Option<Scaling>,
    /// How a new revision replaces the old one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rollout: Option<Rollout>,
    /// What happens when a supernode loses a rank.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recovery: Option<Recovery>,
    /// How supernodes leave.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drain: Option<Drain>,
    /// Placement of experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<Experts>,
    /// Whether supernodes keep away from each other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spread: Option<Spread>,
    /// Shape of the pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodShape>,
}

/// Shape of one supernode.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules(&[cel::SPARES_AT_MOST_NODES])))]
pub struct SupernodeShape {
    /// Pods that compute, 1 to 128.
    #[schemars(range(min = 1, max = 128))]
    pub nodes: u32,
    /// Warm pods in the same domain that replace a lost one, 0 to 8. Default 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 8))]
    pub spare_nodes: Option<u32>,
    /// Accelerators (= ranks) in each pod, 1 to 16. Default: spec.accelerator.acceleratorsPerNode.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16))]
    pub accelerators_per_node: Option<u32>,
    /// From all pods bound until all agents are ready, in seconds. Default 1800.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 86400))]
    pub startup_deadline_seconds: Option<u32>,
    /// How long a supernode must serve before it counts as available, in seconds. Default 30.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 3600))]
    pub min_ready_seconds: Option<u32>,
}

/// Order of steps after a loss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::crd::without_description)]
pub enum RecoveryMode {
    /// A spare if there is one; else the successor before the old one goes where it can be placed; else after
    /// it.
    Auto,
    /// Never a second supernode beside the failed one.
    InPlace,
    /// Waits for room for the successor before the failed one goes.
    ReplaceFirst,
}

/// What happens when a supernode loses a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Recovery {
    /// Order of steps: Auto, InPlace or ReplaceFirst. Default Auto.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<RecoveryMode>,
    /// Failures inside resetAfterSeconds after which a supernode is given up, 0 to 100. Default 5.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 100))]
    pub max_restarts: Option<u32>,
    /// First pause before a new incarnation, in seconds; it doubles each time. Default 10.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 3600))]
    pub backoff_seconds: Option<u32>,
    /// Longest pause before a new incarnation, in seconds. Default 600.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 86400))]
    pub max_backoff_seconds: Option<u32>,
    /// Time without failure after which failures are forgotten, in seconds. Default 3600.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 604800))]
    pub reset_after_seconds: Option<u32>,
    /// How long a node may be NotReady before its pods count as lost, in seconds. Default 30.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 3600))]
    pub node_lost_grace_seconds: Option<u32>,
    /// How long a pod may hang in Terminating past its grace on a dead node, in seconds. Default 120.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 86400))]
    pub terminating_timeout_seconds: Option<u32>,
}

/// Who decides where experts sit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::crd::without_description)]
pub enum ExpertMode {
    /// The operator, from the measured load.
    Auto,
    /// A plan of the user.
    Pinned,
    /// Nobody: the uniform layout stays.
    Off,
}

/// Placement of experts.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules(&[cel::PINNED_NEEDS_PLAN])))]
pub struct Experts {
    /// Who decides: Auto, Pinned or "Off". Default Auto.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<ExpertMode>,
    /// Slots in each rank beyond its even share, for copies of hot experts, 0 to 64. Default 1. A supernode
    /// of one rank has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 64))]
    pub extra_slots_per_rank: Option<u32>,
    /// When a new placement is worth its moves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<ExpertPolicy>,
    /// The plan of mode Pinned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pinned_plan: Option<PinnedPlan>,
}

/// When a new placement is worth its moves.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ExpertPolicy {
    /// Maximum over mean of the ranks' load from which a plan is looked for. Default 1.10.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1.0, max = 100.0))]
    pub imbalance_trigger: Option<f64>,
    /// Smallest gain on held-out steps that is taken, as a share. Default 0.03.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1.0))]
    pub min_gain: Option<f64>,
    /// How many times its cost a plan must gain. Default 3.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1000.0))]
    pub cost_factor: Option<f64>,
    /// Steps that must be counted before a plan. Default 500.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 10000000))]
    pub min_steps: Option<u32>,
    /// Shortest time between two plans of a supernode, in seconds. Default 30.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 86400))]
    pub min_interval_seconds: Option<u32>,
    /// Share of the links that moves may take. Default 0.10.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.001, max = 1.0))]
    pub link_share: Option<f64>,
    /// Most increase of the time between tokens after a plan, as a share, before it is undone. Default 0.03.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 10.0))]
    pub max_tpot_regression: Option<f64>,
    /// Ranks that get no expert. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 1024), extend("x-kubernetes-list-type" = "set"))]
    pub exclude_ranks: Vec<u32>,
}

/// A plan of the user.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PinnedPlan {
    /// ConfigMap with the plan, in the namespace of the cluster.
    #[schemars(length(min = 1, max = 253))]
    pub config_map_name: String,
}

/// What supernodes keep away from each other in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::crd::without_description)]
pub enum SpreadScope {
    /// One fabric domain.
    Domain,
    /// One block of domains.
    Block,
}

/// How strongly supernodes keep away from each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::crd::without_description)]
pub enum SpreadPolicy {
    /// If there is room.
    Prefer,
    /// Always; without room a supernode waits.
    Require,
}

/// Whether supernodes keep away from each other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Spread {
    /// In what: Domain or Block. Default Domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scope: Option<SpreadScope>,
    /// How strongly: Prefer or Require. Default Prefer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<SpreadPolicy>,
}
