//! Pools of workers: prefill and vision share one shape.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Drain, PodShape, Rollout, Scaling};
use crate::cel::{self, rules};

/// A pool of workers. Exactly one of replicas and scaling.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules(&[cel::REPLICAS_XOR_SCALING])))]
pub struct Prefill {
    /// Pods of one worker, 1 to 4. Default 1. More than one makes a gang.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 4))]
    pub nodes_per_worker: Option<u32>,
    /// Workers, 0 to 1024. This or scaling.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1024))]
    pub replicas: Option<u32>,
    /// Who scales between which bounds. This or replicas.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scaling: Option<Scaling>,
    /// How a new revision replaces the old one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rollout: Option<Rollout>,
    /// How workers leave.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drain: Option<Drain>,
    /// Shape of the pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<PodShape>,
    /// What differs from spec.engine in this pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overrides: Option<Overrides>,
    /// Longest time of one chunk of a prompt, in milliseconds, 1 to 60000. Default: the engine's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 60000))]
    pub chunk_budget_ms: Option<u32>,
}

/// What differs from spec.engine in one pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Overrides {
    /// Flags of the agent, after those of spec.engine.extraArgs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 64),
        inner(length(min = 1, max = 1024)),
        extend("x-kubernetes-list-type" = "atomic")
    )]
    pub engine_args: Vec<String>,
}
