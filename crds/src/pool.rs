//! `DeepInferPool`: one role of a cluster, fully resolved. Its `/scale` is what autoscalers write.
//! Invariant: its name survives rollouts, and `spec.replicas` has one writer.

#![expect(clippy::duplicated_attributes, reason = "printer columns repeat the names of their parts")]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cluster::{Drain, Recovery, Rollout};

/// What a pool is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(transform = crate::crd::without_description)]
pub enum PoolRole {
    /// Reads prompts.
    Prefill,
    /// Writes answers.
    Decode,
    /// Encodes images.
    Vision,
}

/// Who writes the replicas of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::crd::without_description)]
pub enum PoolMode {
    /// The operator, from the number in the cluster.
    Fixed,
    /// An HPA, KEDA or kubectl scale.
    External,
    /// The built-in planner.
    Planner,
}

/// A pool with every default resolved. Written by the operator; only replicas may be written by others.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "deepinfer.io",
    version = "v1alpha1",
    kind = "DeepInferPool",
    plural = "deepinferpools",
    shortname = "dip",
    category = "deepinfer",
    namespaced,
    status = "PoolStatus",
    derive = "PartialEq",
    doc = "One role of a DeepInferCluster, fully resolved. Made by the operator; scale it, do not edit it.",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    selectable = ".spec.clusterName",
    selectable = ".spec.role",
    printcolumn(name = "Role", type_ = "string", json_path = ".spec.role"),
    printcolumn(name = "Desired", type_ = "integer", json_path = ".spec.replicas"),
    printcolumn(name = "Ready", type_ = "integer", json_path = ".status.readyReplicas"),
    printcolumn(name = "Available", type_ = "integer", json_path = ".status.availableReplicas"),
    printcolumn(name = "Updated", type_ = "integer", json_path = ".status.updatedReplicas"),
    printcolumn(name = "Scaling", type_ = "string", json_path = ".spec.mode"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct DeepInferPoolSpec {
    /// The DeepInferCluster.
    #[schemars(length(min = 1, max = 253))]
    pub cluster_name: String,
    /// What the pool is for: prefill, decode or vision.
    pub role: PoolRole,
    /// Wanted replicas: workers or whole supernodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1024))]
    pub replicas: Option<u32>,
    /// Who writes replicas: Fixed, External or Planner.
    pub mode: PoolMode,
    /// Fewest replicas that take effect.
    #[schemars(range(min = 0, max = 1024))]
    pub min_replicas: u32,
    /// Most replicas that take effect.
    #[schemars(range(min = 0, max = 1024))]
    pub max_replicas: u32,
    /// Pods of one replica.
    #[schemars(range(min = 1, max = 136))]
    pub nodes_per_replica: u32,
    /// Name of the wanted revision.
    #[schemars(length(min = 1, max = 253))]
    pub revision: String,
    /// Who can read whose KV.
    #[schemars(length(min = 1, max = 63))]
    pub kv_epoch: String,
    /// Hash of the resolved pod template.
    #[schemars(length(min = 1, max = 63))]
    pub template_hash: String,
    /// How a new revision replaces the old one, resolved.
    pub rollout: Rollout,
    /// How replicas leave, resolved.
    pub drain: Drain,
    /// What happens after a loss, resolved. Absent for pools without supernodes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recovery: Option<Recovery>,
}

/// What the operator says about a pool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PoolStatus {
    /// Generation of the spec that this status belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Replicas that exist and do not drain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
    /// Replicas that are ready.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_replicas: Option<u32>,
    /// Replicas that have been ready long enough.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub available_replicas: Option<u32>,
    /// Replicas of the wanted revision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub updated_replicas: Option<u32>,
    /// Replicas that drain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub draining_replicas: Option<u32>,
    /// Wanted replicas after the bounds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effective_replicas: Option<u32>,
    /// Label selector of one pod per replica.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// Nodes and domains that are avoided after failures.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 64),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["scope", "name"])
    )]
    pub quarantine: Vec<Quarantined>,
    /// Conditions: Ready, ScalingActive, ScalingLimited.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 16),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"])
    )]
    pub conditions: Vec<Condition>,
}

/// What is avoided as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::crd::without_description)]
pub enum QuarantineScope {
    /// One node.
    Node,
    /// All nodes of a domain.
    Domain,
}

/// A node or domain that is avoided.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Quarantined {
    /// What the name names: Node or Domain.
    pub scope: QuarantineScope,
    /// Name of the node or of the domain.
    pub name: String,
    /// Why, one word.
    pub reason: String,
    /// Failures that it was blamed for within the hour.
    pub failures: u32,
    /// Until when.
    pub until: Time,
}
