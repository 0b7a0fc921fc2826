//! `Supernode`: one incarnation of a gang that lives and dies as one.
//! Invariant: a rebuilt supernode is a new object with a new name.

#![expect(clippy::duplicated_attributes, reason = "printer columns repeat the names of their parts")]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cel::{self, rules};
use crate::cluster::{HandoffMode, SchedulingBackend};
use crate::pool::PoolRole;

/// What one incarnation is. Immutable but for drain and rankMap.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "deepinfer.io",
    version = "v1alpha1",
    kind = "Supernode",
    plural = "supernodes",
    shortname = "sn",
    category = "deepinfer",
    namespaced,
    status = "SupernodeStatus",
    derive = "PartialEq",
    doc = "One incarnation of a gang of engine pods in one fabric domain. Made by the operator.",
    selectable = ".spec.clusterName",
    selectable = ".spec.poolName",
    selectable = ".status.phase",
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Nodes", type_ = "string", json_path = ".status.ready"),
    printcolumn(name = "Domain", type_ = "string", json_path = ".status.domain"),
    printcolumn(name = "Revision", type_ = "string", json_path = ".spec.revision"),
    printcolumn(name = "Plan", type_ = "string", json_path = ".status.plan.hash"),
    printcolumn(name = "Restarts", type_ = "integer", json_path = ".status.restartCount"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Leader", type_ = "string", json_path = ".status.leader", priority = 1),
    printcolumn(name = "Inflight", type_ = "integer", json_path = ".status.inflight", priority = 1),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.lastFailure.reason", priority = 1)
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules(&[cel::SUPERNODE_IMMUTABLE])))]
pub struct SupernodeSpec {
    /// The DeepInferCluster.
    #[schemars(length(min = 1, max = 253))]
    pub cluster_name: String,
    /// The DeepInferPool.
    #[schemars(length(min = 1, max = 253))]
    pub pool_name: String,
    /// What the gang is for.
    pub role: PoolRole,
    /// Name of the revision.
    #[schemars(length(min = 1, max = 253))]
    pub revision: String,
    /// Who can read whose KV.
    #[schemars(length(min = 1, max = 63))]
    pub kv_epoch: String,
    /// Pods that compute.
    #[schemars(range(min = 1, max = 128))]
    pub nodes: u32,
    /// Accelerators (= ranks) in each pod.
    #[schemars(range(min = 1, max = 16))]
    pub accelerators_per_node: u32,
    /// Warm pods in the same domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 8))]
    pub spare_nodes: Option<u32>,
    /// Gang backend of this incarnation.
    pub backend: SchedulingBackend,
    /// Whether it has a ComputeDomain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compute_domain: Option<bool>,
    /// Domains to try, the best first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(max = 253)), extend("x-kubernetes-list-type" = "atomic"))]
    pub domain_preference: Vec<String>,
    /// Hash of the expert plan that it starts with.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 71))]
    pub plan_hash: Option<String>,
    /// Name of the supernode that it takes the place of.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub replaces: Option<String>,
    /// The wanted drain. Absent: it serves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub drain: Option<DrainRequest>,
    /// Which pod is which rank, when it differs from the order of the pods.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 1024),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["rank"])
    )]
    pub rank_map: Vec<RankPod>,
}

/// A wanted drain.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DrainRequest {
    /// When it was asked for.
    pub requested_at: Time,
    /// When it ends, with cut sequences if need be.
    pub deadline: Time,
    /// Why, one word.
    #[schemars(length(min = 1, max = 63))]
    pub reason: String,
    /// What happens to running sequences.
    pub handoff: HandoffMode,
}

/// The pod of one rank.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RankPod {
    /// The rank.
    pub rank: u32,
    /// Name of its pod.
    #[schemars(length(min = 1, max = 253))]
    pub pod: String,
}

/// Where an incarnation is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::crd::without_description)]
pub enum SupernodePhase {
    /// Nothing has been created yet.
    Pending,
    /// Pods wait for nodes.
    Placing,
    /// Pods are bound, agents start.
    Starting,
    /// Weights load, the first step runs.
    Warming,
    /// It takes work.
    Serving,
    /// It takes work with fewer ranks.
    Degraded,
    /// It takes no new work.
    Draining,
    /// Nothing runs any more.
    Drained,
    /// Its pods go.
    Terminating,
    /// It is given up.
    Failed,
}

/// What the operator says about an incarnation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SupernodeStatus {
    /// Generation of the spec that this status belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Where it is in its life.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<SupernodePhase>,
    /// Domain that it sits in.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// Pod of index 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub leader: Option<String>,
    /// One entry for each pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 136),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["index"])
    )]
    pub nodes: Vec<SupernodeNode>,
    /// Ready of all pods: "16/16".
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready: Option<String>,
    /// Failures of this supernode and those that it replaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restart_count: Option<u32>,
    /// The last failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_failure: Option<LastFailure>,
    /// The expert plan in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<AppliedPlan>,
    /// Sequences that run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inflight: Option<u32>,
    /// Outcome of the fabric self-test, one word.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fabric: Option<String>,
    /// Why it has no place yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placement: Option<PlacementStatus>,
    /// Conditions: Placed, Started, Routable, Degraded, Drained.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 16),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"])
    )]
    pub conditions: Vec<Condition>,
}

/// One pod of an incarnation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SupernodeNode {
    /// Index in the gang, from 0.
    pub index: u32,
    /// Name of the pod.
    pub pod: String,
    /// UID of the pod: a pod that somebody made again under the name is another one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
    /// Name of the node. Absent: not bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// State of its agent, one word.
    pub state: String,
    /// Health of its devices, one word.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device_health: Option<String>,
}

/// The last failure of an incarnation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LastFailure {
    /// When.
    pub time: Time,
    /// Pod that failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// Its node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Why, one word.
    pub reason: String,
    /// Exit code of its container.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    /// The same for humans.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// The expert plan in use.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AppliedPlan {
    /// Hash of the plan.
    pub hash: String,
    /// Since when.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub applied_at: Option<Time>,
}

/// Why an incarnation has no place yet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PlacementStatus {
    /// Domain that was chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
    /// Domains that were looked at, the best first, at most 8.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8), extend("x-kubernetes-list-type" = "atomic"))]
    pub candidates: Vec<DomainCandidate>,
    /// Place in the queue of the backend.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue_position: Option<u32>,
    /// What the scheduler says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheduler_message: Option<String>,
    /// Tries so far, this one included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attempts: Option<u32>,
    /// When the next try begins. Absent: one is under way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry_at: Option<Time>,
}

/// A domain that was looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct DomainCandidate {
    /// Name of the domain.
    pub domain: String,
    /// Nodes in it.
    pub nodes: u32,
    /// Nodes with room.
    pub free: u32,
    /// What blocks the others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 10), extend("x-kubernetes-list-type" = "atomic"))]
    pub blocked_by: Vec<BlockedBy>,
}

/// What blocks nodes of a domain.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BlockedBy {
    /// The reason, one word.
    pub reason: String,
    /// Nodes that have it.
    pub count: u32,
}
