//! Shape of the pods of a pool. What is not here is in a PodTemplate that `templateRef` names.
//! Invariant: no type of Kubernetes is embedded, so that the CRD stays small.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::EnvVar;
use crate::cel::{self, rules};

/// Shape of the pods of a pool.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PodShape {
    /// Further labels. Those of the operator win.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64, "additionalProperties" = {"type": "string", "maxLength": 63}))]
    pub labels: BTreeMap<String, String>,
    /// Further annotations. Those of the operator win.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64, "additionalProperties" = {"type": "string", "maxLength": 4096}))]
    pub annotations: BTreeMap<String, String>,
    /// Labels that nodes must have.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64, "additionalProperties" = {"type": "string", "maxLength": 63}))]
    pub node_selector: BTreeMap<String, String>,
    /// Taints that pods tolerate.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), extend("x-kubernetes-list-type" = "atomic"))]
    pub tolerations: Vec<Toleration>,
    /// CPU, memory and further resources of the engine container. Accelerators are added by the operator.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
    /// PriorityClass. Default: spec.scheduling.priorityClassName.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub priority_class_name: Option<String>,
    /// ServiceAccount; its token is not mounted. Default: that of the cluster, CLUSTER-engine.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub service_account_name: Option<String>,
    /// RuntimeClass. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub runtime_class_name: Option<String>,
    /// Volumes of the pod.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 32),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"])
    )]
    pub volumes: Vec<Volume>,
    /// Where the engine container sees the volumes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 32),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["mountPath"])
    )]
    pub mounts: Vec<Mount>,
    /// Containers beside the engine.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 8),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"])
    )]
    pub sidecars: Vec<Sidecar>,
    /// A PodTemplate in the namespace: the base that everything else is laid over.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template_ref: Option<TemplateRef>,
}

/// A PodTemplate of the namespace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TemplateRef {
    /// Name of the PodTemplate.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

/// How a toleration compares values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::crd::without_description)]
pub enum TolerationOperator {
    /// The value must be equal.
    Equal,
    /// Any value.
    Exists,
}

/// What a taint does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::crd::without_description)]
pub enum TolerationEffect {
    /// Keeps new pods away.
    NoSchedule,
    /// Keeps new pods away if there is another node.
    PreferNoSchedule,
    /// Removes running pods.
    NoExecute,
}

/// A taint that pods tolerate.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Toleration {
    /// Key of the taint. Default: all keys, with operator Exists.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 317))]
    pub key: Option<String>,
    /// Equal or Exists. Default Equal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub operator: Option<TolerationOperator>,
    /// Value of the taint. Default empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub value: Option<String>,
    /// NoSchedule, PreferNoSchedule or NoExecute. Default: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effect: Option<TolerationEffect>,
    /// How long a NoExecute taint is tolerated, in seconds. Default: for ever.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 604800))]
    pub toleration_seconds: Option<u32>,
}

/// Resources of one container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Resources {
    /// What the container gets at least.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32))]
    pub requests: BTreeMap<String, Quantity>,
    /// What the container gets at most.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 32))]
    pub limits: BTreeMap<String, Quantity>,
}

/// A volume: a name and exactly one source.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules(&[cel::VOLUME_ONE_SOURCE])))]
pub struct Volume {
    /// Name that mounts refer to.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
    /// A PersistentVolumeClaim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub claim: Option<ClaimSource>,
    /// A ConfigMap.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_map: Option<ConfigMapSource>,
    /// A Secret.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret: Option<SecretSource>,
    /// An empty folder that lives as long as the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub empty_dir: Option<EmptyDirSource>,
    /// A folder of the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_path: Option<HostPathSource>,
}

/// A PersistentVolumeClaim as a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ClaimSource {
    /// Name of the claim.
    #[schemars(length(min = 1, max = 253))]
    pub claim_name: String,
    /// Whether it can not be written. Default false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_only: Option<bool>,
}

/// A ConfigMap as a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ConfigMapSource {
    /// Name of the ConfigMap.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

/// A Secret as a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SecretSource {
    /// Name of the Secret.
    #[schemars(length(min = 1, max = 253))]
    pub secret_name: String,
}

/// An empty folder as a volume.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct EmptyDirSource {
    /// Memory for the node's memory. Default: its disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63))]
    pub medium: Option<String>,
    /// Most bytes. Default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size_limit: Option<Quantity>,
}

/// A folder of the node as a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HostPathSource {
    /// The folder.
    #[schemars(length(min = 1, max = 4096))]
    pub path: String,
}

/// Where a container sees a volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Mount {
    /// Name of the volume.
    #[schemars(length(min = 1, max = 63))]
    pub name: String,
    /// Folder in the container.
    #[schemars(length(min = 1, max = 4096))]
    pub mount_path: String,
    /// Folder in the volume. Default: its root.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4096))]
    pub sub_path: Option<String>,
    /// Whether it can not be written. Default false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub read_only: Option<bool>,
}

/// A container beside the engine.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Sidecar {
    /// Name of the container; engine and agent are taken.
    #[schemars(length(min = 1, max = 63), extend("x-kubernetes-validations" = rules(&[cel::SIDECAR_NAME])))]
    pub name: String,
    /// Its image.
    #[schemars(length(min = 1, max = 1024))]
    pub image: String,
    /// Its command. Default: that of the image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 4096)), extend("x-kubernetes-list-type" = "atomic"))]
    pub command: Vec<String>,
    /// Its arguments. Default: those of the image.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), inner(length(max = 4096)), extend("x-kubernetes-list-type" = "atomic"))]
    pub args: Vec<String>,
    /// Its environment.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 64),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"])
    )]
    pub env: Vec<EnvVar>,
    /// Its ports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 16),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["containerPort"])
    )]
    pub ports: Vec<ContainerPort>,
    /// Its resources.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
}

/// A port of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ContainerPort {
    /// Name of the port. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 15))]
    pub name: Option<String>,
    /// The port, 1 to 65535.
    #[schemars(range(min = 1, max = 65535))]
    pub container_port: u32,
}
