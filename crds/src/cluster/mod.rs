//! `DeepInferCluster`: the API that a user writes. Doc comments of its fields become the descriptions of the
//! CRD.
//! Invariant: nothing here has a value by default. An absent field stays absent; what it means is decided by
//! the planner and shown in `DeepInferPool.spec`.

#![expect(clippy::duplicated_attributes, reason = "printer columns repeat the names of their parts")]

mod accelerator;
mod decode;
mod engine;
mod gateway;
mod kv_cache;
mod model;
mod operation;
mod pod;
mod prefill;
mod rollout;
mod scaling;
mod status;

use kube::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use accelerator::{Accelerator, ComputeDomainMode, Network, Rdma, Vendor};
pub use decode::{
    Decode, ExpertMode, ExpertPolicy, Experts, PinnedPlan, Recovery, RecoveryMode, Spread, SpreadPolicy,
    SpreadScope, SupernodeShape,
};
pub use engine::{AgentImage, ConfigMapKeyRef, Engine, EnvVar, EnvVarSource, PullPolicy, SecretKeyRef};
pub use gateway::{
    Activator, Gateway, GatewayScaling, GatewayScalingMode, InferencePool, PickerFailureMode, PickerRef,
    Route, RouteParentRef, ServiceShape, ServiceType, Thinking,
};
pub use kv_cache::{ExternalKv, KvCache, KvMode, KvReclaim, KvRetention, KvStorage, ManagedKv};
pub use model::{CacheMode, Model, ModelCache, ModelSource};
pub use operation::{Availability, DeletionPolicy, Operation, Pause, Scheduling, SchedulingBackend};
pub use pod::{
    ClaimSource, ConfigMapSource, ContainerPort, EmptyDirSource, HostPathSource, Mount, PodShape, Resources,
    SecretSource, Sidecar, TemplateRef, Toleration, TolerationEffect, TolerationOperator, Volume,
};
pub use prefill::{Overrides, Prefill};
pub use rollout::{Drain, HandoffMode, Rollout, RolloutAnalysis};
pub use scaling::{PlannerTargets, PrefillPerDecode, Scaling, ScalingMode, ScalingSchedule};
pub use status::{
    ClusterStatus, ClusterSummary, ExpertsSummary, Phase, PoolSummary, UnavailableReason, WaitingFor,
};

use crate::cel::{self, rules};

/// What a DeepInferCluster should be: one model, prefill workers, decode supernodes, a gateway. Absent fields
/// take the defaults that their descriptions name.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[kube(
    group = "deepinfer.io",
    version = "v1alpha1",
    kind = "DeepInferCluster",
    plural = "deepinferclusters",
    shortname = "dic",
    category = "deepinfer",
    namespaced,
    status = "ClusterStatus",
    derive = "PartialEq",
    doc = "One served model: prefill pools, decode supernodes, a gateway and a KV tier, from one object.",
    printcolumn(
        name = "Ready",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].status"
    ),
    printcolumn(name = "Prefill", type_ = "string", json_path = ".status.summary.prefill"),
    printcolumn(name = "Decode", type_ = "string", json_path = ".status.summary.decode"),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Ready\")].reason"
    ),
    printcolumn(name = "Revision", type_ = "string", json_path = ".status.revision"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "URL", type_ = "string", json_path = ".status.url", priority = 1),
    printcolumn(name = "Backend", type_ = "string", json_path = ".status.backend", priority = 1),
    printcolumn(
        name = "Imbalance",
        type_ = "string",
        json_path = ".status.experts.worstImbalance",
        priority = 1
    )
)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules(&[
    cel::ZERO_DECODE_NEEDS_ACTIVATOR,
    cel::ZERO_PREFILL_NEEDS_ACTIVATOR,
    cel::SUPERNODE_NOT_TOO_SMALL,
    cel::SUPERNODE_NOT_TOO_LARGE,
])))]
pub struct DeepInferClusterSpec {
    /// The accelerators that all pools run on.
    pub accelerator: Accelerator,
    /// The engine's image and arguments.
    pub engine: Engine,
    /// The model that is served.
    pub model: Model,
    /// Workers that read prompts.
    pub prefill: Prefill,
    /// Supernodes that write answers.
    pub decode: Decode,
    /// Workers that encode images. Absent: no such pool.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vision: Option<Prefill>,
    /// The HTTP edge. Default: 2 replicas.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gateway: Option<Gateway>,
    /// The KV tier that keeps prefixes beyond one node. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_cache: Option<KvCache>,
    /// How gangs get their nodes. Default: the first backend that works.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheduling: Option<Scheduling>,
    /// Extra network interfaces of engine pods. Default: the cluster network only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<Network>,
    /// What Available and Degraded mean.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub availability: Option<Availability>,
    /// Switches of daily operation: pause, suspend, restart, deletion.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub operation: Option<Operation>,
    /// How many revisions are kept, from 2 to 50. Default 10.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2, max = 50))]
    pub revision_history_limit: Option<u32>,
}
