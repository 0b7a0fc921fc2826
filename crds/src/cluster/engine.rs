//! The engine: its image, arguments, environment and configuration file.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cel::{self, rules};

/// When a node pulls an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::crd::without_description)]
pub enum PullPolicy {
    /// At every start.
    Always,
    /// If the node does not have it.
    IfNotPresent,
    /// Never: the node must have it.
    Never,
}

/// The engine's image and arguments. The image holds the agent with the engine inside.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Engine {
    /// Image of the engine pods. A digest is better than a tag: a tag is noted in a condition.
    #[schemars(length(min = 1, max = 1024))]
    pub image: String,
    /// When a node pulls the image. Default: as Kubernetes decides by the tag.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image_pull_policy: Option<PullPolicy>,
    /// Names of Secrets with registry credentials.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(length(min = 1, max = 253)), extend("x-kubernetes-list-type" = "set"))]
    pub image_pull_secrets: Vec<String>,
    /// Flags of the agent, as --numerics=f32. They come after the operator's own, and the last one wins.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 64),
        inner(length(min = 1, max = 1024)),
        extend("x-kubernetes-list-type" = "atomic")
    )]
    pub extra_args: Vec<String>,
    /// Environment of the engine container.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(
        length(max = 64),
        extend("x-kubernetes-list-type" = "map", "x-kubernetes-list-map-keys" = ["name"])
    )]
    pub env: Vec<EnvVar>,
    /// Configuration that the engine finds as a file, key by key.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64, "additionalProperties" = {"type": "string", "maxLength": 4096}))]
    pub config: BTreeMap<String, String>,
    /// ABI of the KV bytes, when the image does not say it. Default: derived from the image.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub kv_abi: Option<String>,
    /// The agent as a container of its own, for engines that are not this product's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentImage>,
}

/// The agent beside a foreign engine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AgentImage {
    /// Image of the agent. Default: the operator's release. Only for foreign engines.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024))]
    pub image: Option<String>,
}

/// One environment variable: a value, or where it comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules(&[cel::ENV_ONE_SOURCE])))]
pub struct EnvVar {
    /// Name of the variable.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Its value. Default empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4096))]
    pub value: Option<String>,
    /// Where its value comes from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value_from: Option<EnvVarSource>,
}

/// A key of a Secret or of a ConfigMap: exactly one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-validations" = rules(&[cel::ENV_SOURCE_ONE_REF])))]
pub struct EnvVarSource {
    /// A key of a Secret in the namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub secret_key_ref: Option<SecretKeyRef>,
    /// A key of a ConfigMap in the namespace.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config_map_key_ref: Option<ConfigMapKeyRef>,
}

/// A key of a Secret.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SecretKeyRef {
    /// Name of the Secret.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Key in it.
    #[schemars(length(min = 1, max = 253))]
    pub key: String,
}

/// A key of a ConfigMap.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ConfigMapKeyRef {
    /// Name of the ConfigMap.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Key in it.
    #[schemars(length(min = 1, max = 253))]
    pub key: String,
}
