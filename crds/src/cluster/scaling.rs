//! Who scales a pool, between which bounds and to which targets.
//! Invariant: one pool has one writer of its replicas.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cel::{self, rules};

/// Who writes the number of replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::crd::without_description)]
pub enum ScalingMode {
    /// An HPA, KEDA or kubectl scale, through the scale of the DeepInferPool.
    External,
    /// The built-in planner.
    Planner,
}

/// Who scales a pool, between which bounds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules(&[
    cel::SCALING_MIN_MAX,
    cel::PLANNER_TARGETS_NEED_PLANNER,
])))]
pub struct Scaling {
    /// Who writes the number of replicas: External or Planner.
    pub mode: ScalingMode,
    /// Fewest replicas, 0 to 1024. 0 needs the gateway's activator.
    #[schemars(range(min = 0, max = 1024))]
    pub min_replicas: u32,
    /// Most replicas, 1 to 1024.
    #[schemars(range(min = 1, max = 1024))]
    pub max_replicas: u32,
    /// Targets of the built-in planner; only with mode Planner.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub planner: Option<PlannerTargets>,
}

/// Targets of the built-in planner.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PlannerTargets {
    /// 95th percentile of the time to the first token, in milliseconds. Default 400.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 600000))]
    pub ttft_ms_p95: Option<u32>,
    /// 95th percentile of the time between tokens, in milliseconds. Default 5.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 60000))]
    pub tpot_ms_p95: Option<u32>,
    /// Share of KV blocks that may be in use, above 0 and up to 1. Default 0.85.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.01, max = 1.0))]
    pub kv_utilization_max: Option<f64>,
    /// How long demand must be high before a step up, in seconds. Default 10 for prefill, 30 for decode.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 86400))]
    pub up_window_seconds: Option<u32>,
    /// How long demand must be low before a step down, in seconds. Default 600 for prefill, 1800 for decode.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 86400))]
    pub down_window_seconds: Option<u32>,
    /// Most replicas that one step adds. Default 4 workers or 1 supernode. A step down is always one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 64))]
    pub max_step_up: Option<u32>,
    /// Most accelerators of prefill and decode together. Default: no cap.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1048576))]
    pub accelerator_budget: Option<u32>,
    /// Bounds on prefill workers for each decode supernode. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_per_decode: Option<PrefillPerDecode>,
    /// Bounds by the clock. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "atomic"))]
    pub schedules: Vec<ScalingSchedule>,
}

/// Bounds on prefill workers for each decode supernode.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules(&[cel::RATIO_MIN_MAX])))]
pub struct PrefillPerDecode {
    /// Fewest workers for each supernode. Default: no bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1024.0))]
    pub min: Option<f64>,
    /// Most workers for each supernode. Default: no bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1024.0))]
    pub max: Option<f64>,
}

/// Bounds that hold from one moment of a schedule to the next.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ScalingSchedule {
    /// When the bounds begin: five fields, as in cron.
    #[schemars(length(min = 9, max = 128))]
    pub cron: String,
    /// Name of the time zone, as Europe/Berlin. Default UTC.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64))]
    pub timezone: Option<String>,
    /// Fewest replicas from then on. Default: of the pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1024))]
    pub min_replicas: Option<u32>,
    /// Most replicas from then on. Default: of the pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024))]
    pub max_replicas: Option<u32>,
}
