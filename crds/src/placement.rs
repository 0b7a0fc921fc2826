//! `ExpertPlacement`: the wanted and the applied expert plan of one supernode.
//! Invariant: generations never go down; the plan itself is in an immutable ConfigMap.

#![expect(clippy::duplicated_attributes, reason = "printer columns repeat the names of their parts")]

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cel::{self, rules};
use crate::cluster::{ExpertMode, ExpertPolicy};

/// The wanted expert plan of one supernode.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "deepinfer.io",
    version = "v1alpha1",
    kind = "ExpertPlacement",
    plural = "expertplacements",
    shortname = "xp",
    category = "deepinfer",
    namespaced,
    status = "ExpertPlacementStatus",
    derive = "PartialEq",
    doc = "Wanted and applied placement of the experts of one Supernode. Made by the operator.",
    printcolumn(name = "Mode", type_ = "string", json_path = ".spec.mode"),
    printcolumn(name = "Hash", type_ = "string", json_path = ".status.applied.hash"),
    printcolumn(name = "Imbalance", type_ = "string", json_path = ".status.imbalance.current"),
    printcolumn(name = "State", type_ = "string", json_path = ".status.applied.state"),
    printcolumn(name = "Layers", type_ = "string", json_path = ".status.applied.layersFlipped"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct ExpertPlacementSpec {
    /// The DeepInferCluster.
    #[schemars(length(min = 1, max = 253))]
    pub cluster_name: String,
    /// The DeepInferPool.
    #[schemars(length(min = 1, max = 253))]
    pub pool_name: String,
    /// The Supernode.
    #[schemars(length(min = 1, max = 253))]
    pub supernode_name: String,
    /// Size of the plan. Can not be changed.
    #[schemars(extend("x-kubernetes-validations" = rules(&[cel::PLACEMENT_SHAPE_IMMUTABLE])))]
    pub shape: PlacementShape,
    /// Who decides: Auto, Pinned or "Off".
    pub mode: ExpertMode,
    /// When a new placement is worth its moves.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<ExpertPolicy>,
    /// The wanted plan. Absent: the uniform layout.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub plan: Option<PlanRef>,
}

/// Size of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PlacementShape {
    /// Layers with experts.
    #[schemars(range(min = 1, max = 1024))]
    pub layers: u32,
    /// Logical experts of a layer.
    #[schemars(range(min = 1, max = 65535))]
    pub experts: u32,
    /// Physical slots of a rank.
    #[schemars(range(min = 1, max = 65535))]
    pub slots_per_rank: u32,
    /// Ranks of the supernode.
    #[schemars(range(min = 1, max = 1024))]
    pub ranks: u32,
}

/// A plan in a ConfigMap.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PlanRef {
    /// Number of the plan; it never goes down.
    pub generation: u64,
    /// Hash of the plan's bytes.
    #[schemars(length(min = 1, max = 71))]
    pub hash: String,
    /// ConfigMap that holds it.
    #[schemars(length(min = 1, max = 253))]
    pub config_map: String,
    /// Hash of the plan before it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 71))]
    pub parent_hash: Option<String>,
}

/// What the operator says about a placement.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ExpertPlacementStatus {
    /// Generation of the spec that this status belongs to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Imbalance over ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub imbalance: Option<Imbalance>,
    /// Experts with the largest share of their layer, at most 16.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), extend("x-kubernetes-list-type" = "atomic"))]
    pub hot: Vec<HotExpert>,
    /// The plan that the ranks hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub applied: Option<AppliedPlacement>,
    /// What would help when no plan does: AddSlots(n) or AddSupernode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recommendation: Option<String>,
    /// Conditions: Balanced, StatsFresh, PlanApplied.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 16),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["type"])
    )]
    pub conditions: Vec<Condition>,
}

/// Imbalance over ranks: maximum over mean, as text with two digits.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Imbalance {
    /// Of the plan in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub current: Option<String>,
    /// Expected of the wanted plan.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub planned: Option<String>,
    /// Layer with the largest one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worst_layer: Option<u32>,
    /// Mean over layers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mean_of_layers: Option<String>,
}

/// An expert with much of its layer's load.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HotExpert {
    /// Layer.
    pub layer: u32,
    /// Logical expert.
    pub expert: u32,
    /// Share of the layer's tokens, as text: "0.08".
    pub share: String,
}

/// How far a plan has been applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::crd::without_description)]
pub enum PlacementState {
    /// All layers use it.
    Applied,
    /// Weights are on their way.
    Staging,
    /// Some layers use it.
    Partial,
    /// It made things worse and was undone.
    Reverted,
    /// It could not be applied.
    Failed,
}

/// The plan that the ranks hold.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AppliedPlacement {
    /// Hash of the plan.
    pub hash: String,
    /// Its generation.
    pub generation: u64,
    /// How far it has been applied.
    pub state: PlacementState,
    /// Layers that use it, of all: "40/40".
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers_flipped: Option<String>,
    /// Weights that were moved, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub moved_bytes: Option<u64>,
    /// When it was applied.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub at: Option<Time>,
}
