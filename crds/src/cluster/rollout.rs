//! How a new revision replaces the old one, and how replicas leave.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cel::{self, rules};

/// How a new revision replaces the old one.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(
    extend("x-kubernetes-validations" = rules(&[cel::ROLLOUT_CAN_MOVE, cel::PREFER_SURGE_NEEDS_SURGE]))
)]
pub struct Rollout {
    /// Replicas above the wanted number while rolling, 0 to 64. Default 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 64))]
    pub max_surge: Option<u32>,
    /// Replicas that may be away at any time, 0 to 64: failures, node drains and rollouts together. Default
    /// 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 64))]
    pub max_unavailable: Option<u32>,
    /// Whether a new replica is tried before an old one leaves. Default true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefer_surge: Option<bool>,
    /// How long a new replica may wait for its place before an old one leaves, in seconds. Default 600.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 86400))]
    pub surge_timeout_seconds: Option<u32>,
    /// How long a rollout may make no step before it is Stalled, in seconds. Default 7200.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 604800))]
    pub progress_deadline_seconds: Option<u32>,
    /// Most replicas of the new revision (a canary). Default: no ceiling.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1024))]
    pub max_updated: Option<u32>,
    /// Holds a rollout that makes the service worse. Default: off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub analysis: Option<RolloutAnalysis>,
    /// Whether a held rollout goes back by itself. Default false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auto_rollback: Option<bool>,
}

/// Bounds on what a new revision may make worse.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RolloutAnalysis {
    /// Window over which revisions are compared, in seconds. Default 300.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 10, max = 86400))]
    pub window_seconds: Option<u32>,
    /// Most failed requests of the new revision, as a share from 0 to 1. Default 0.01.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1.0))]
    pub max_error_ratio: Option<f64>,
    /// Most increase of the time between tokens over the old revision, as a share (0.1 = 10 %). Default 0.1.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 10.0))]
    pub max_tpot_regression: Option<f64>,
}

/// What happens to running sequences of a replica that leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::crd::without_description)]
pub enum HandoffMode {
    /// They are written to the KV tier and go on elsewhere.
    KvTier,
    /// They are sent to another replica and go on there.
    Peer,
    /// They finish where they are.
    None,
}

/// How replicas leave.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Drain {
    /// How long running sequences may go on, in seconds, at most 7200. Default 600.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0), extend("x-kubernetes-validations" = rules(&[cel::DRAIN_TIMEOUT])))]
    pub timeout_seconds: Option<u32>,
    /// What happens to running sequences: KvTier, Peer or None. Default Peer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub handoff: Option<HandoffMode>,
}
