//! The KV tier beyond one node.
//! Invariant: exactly the struct that belongs to the mode is there (CEL rule 11).

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cel::{self, rules};

/// Who runs the KV tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::crd::without_description)]
pub enum KvMode {
    /// There is none.
    None,
    /// Somebody else.
    External,
    /// The operator, as a StatefulSet.
    Managed,
}

/// The KV tier that keeps prefixes beyond one node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules(&[cel::KV_EXTERNAL_UNION, cel::KV_MANAGED_UNION])))]
pub struct KvCache {
    /// Who runs the tier: None, External or Managed. Default None.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<KvMode>,
    /// Whether the cluster is not Ready while the tier is away. Default false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub required: Option<bool>,
    /// The tier that somebody else runs; only with mode External.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub external: Option<ExternalKv>,
    /// The tier that the operator runs; only with mode Managed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub managed: Option<ManagedKv>,
    /// Host memory of each node for short-lived KV, in GiB, 0 to 16384. Default: the engine's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[serde(rename = "hostMemoryGiBPerNode")]
    #[schemars(range(min = 0, max = 16384))]
    pub host_memory_gib_per_node: Option<u32>,
}

/// A KV tier that somebody else runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ExternalKv {
    /// Address of the tier, as a URL.
    #[schemars(length(min = 1, max = 2048))]
    pub endpoint: String,
    /// Secret with credentials. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub credentials_secret_name: Option<String>,
    /// Secret with the certificate authority. Default: that of the system.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub ca_secret_name: Option<String>,
}

/// A KV tier that the operator runs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ManagedKv {
    /// Pods of the tier, 1 to 256. Default 3.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 256))]
    pub replicas: Option<u32>,
    /// Disk of each pod.
    pub storage: KvStorage,
    /// How long KV is kept.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retention: Option<KvRetention>,
    /// What happens to the claims with the cluster: Retain or Delete. Default Retain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reclaim: Option<KvReclaim>,
}

/// Disk of one pod of the tier.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules(&[cel::STORAGE_CLASS_STAYS])))]
pub struct KvStorage {
    /// StorageClass. Default: that of the Kubernetes cluster. Can not be changed afterwards.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(
        length(min = 1, max = 253),
        extend("x-kubernetes-validations" = rules(&[cel::STORAGE_CLASS_IMMUTABLE]))
    )]
    pub class_name: Option<String>,
    /// Size, as 2Ti.
    #[schemars(length(min = 1, max = 32), regex(pattern = cel::QUANTITY_PATTERN))]
    pub size: String,
}

/// How long KV is kept.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct KvRetention {
    /// Of conversations, in hours. Default 168.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 87600))]
    pub chat_hours: Option<u32>,
    /// Of agents' work, in hours. Default 72.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 87600))]
    pub agent_hours: Option<u32>,
}

/// What happens to the claims of the tier with the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::crd::without_description)]
pub enum KvReclaim {
    /// They stay.
    Retain,
    /// They go.
    Delete,
}
