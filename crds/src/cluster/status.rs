//! What the operator says about a cluster.
//! Invariant: nothing here moves by itself (no heartbeats, no ages), and everything is bounded, so that an
//! unchanged cluster is not written and a status stays below 16 KiB.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One word for humans, derived from the conditions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::crd::without_description)]
pub enum Phase {
    /// Nothing has been created yet.
    Pending,
    /// The first replicas start.
    Creating,
    /// Everything wanted serves.
    Serving,
    /// A new revision or size is being reached.
    Updating,
    /// Below the wanted capacity for too long.
    Degraded,
    /// At zero because the user asked.
    Suspended,
    /// Going away.
    Deleting,
    /// Needs a human.
    Failed,
}

/// What the operator says about a cluster.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClusterStatus {
    /// Generation of the spec that this status belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// One word for humans: Pending, Creating, Serving, Updating, Degraded, Suspended, Deleting, Failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// The revision that is wanted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    /// Who can read whose KV.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_epoch: Option<String>,
    /// Where clients call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// Gang backend in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backend: Option<String>,
    /// Counts for the printer columns.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub summary: Option<ClusterSummary>,
    /// One line for each pool.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 8),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"])
    )]
    pub pools: Vec<PoolSummary>,
    /// Balance of the experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertsSummary>,
    /// What waits for what, the oldest first, at most 10.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 10), extend("x-kubernetes-list-type" = "atomic"))]
    pub waiting: Vec<WaitingFor>,
    /// Conditions; Ready, Reconciling and Stalled follow kstatus.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 32),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"])
    )]
    pub conditions: Vec<Condition>,
}

/// Counts for the printer columns, as text: "6/6".
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClusterSummary {
    /// Ready of wanted prefill workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill: Option<String>,
    /// Ready of wanted supernodes, and spares.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decode: Option<String>,
    /// Ready of wanted vision workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vision: Option<String>,
    /// Ready of wanted gateway pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gateway: Option<String>,
    /// Replicas of the wanted revision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revisions: Option<String>,
}

/// One pool in numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PoolSummary {
    /// Name of the pool.
    pub name: String,
    /// Its role.
    pub role: String,
    /// Wanted replicas.
    pub desired: u32,
    /// Replicas that are ready.
    pub ready: u32,
    /// Replicas that have been ready long enough.
    pub available: u32,
    /// Replicas of the wanted revision.
    pub updated: u32,
    /// Why replicas are not available, the most frequent first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8), extend("x-kubernetes-list-type" = "atomic"))]
    pub unavailable_reasons: Vec<UnavailableReason>,
}

/// Why replicas are not available.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct UnavailableReason {
    /// The reason, one word.
    pub reason: String,
    /// Replicas that have it.
    pub count: u32,
}

/// Balance of the experts over all supernodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ExpertsSummary {
    /// Largest imbalance of a supernode, as text with two digits: "1.08".
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worst_imbalance: Option<String>,
    /// Balanced of all supernodes: "2/2".
    #[serde(skip_serializing_if = "Option::is_none")]
    pub balanced: Option<String>,
}

/// An object that waits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WaitingFor {
    /// Kind and name of the object.
    pub object: String,
    /// What it waits for, one word.
    pub reason: String,
    /// Since when.
    pub since: Time,
    /// The same for humans.
    pub message: String,
}
