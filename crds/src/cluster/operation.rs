//! Switches of daily operation, gang scheduling and what availability means.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Who gives a gang its nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::crd::without_description)]
pub enum SchedulingBackend {
    /// The first that works: Native, Kueue, Volcano, Kai, Builtin.
    Auto,
    /// PodGroups of Kubernetes itself.
    Native,
    /// Volcano.
    Volcano,
    /// KAI scheduler.
    Kai,
    /// Kueue.
    Kueue,
    /// The operator's own gates.
    Builtin,
}

/// How gangs get their nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Scheduling {
    /// Auto, Native, Volcano, Kai, Kueue or Builtin. Default Auto.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backend: Option<SchedulingBackend>,
    /// PriorityClass of pods and gangs. Default: that of the Kubernetes cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub priority_class_name: Option<String>,
    /// Queue of the backend. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub queue: Option<String>,
    /// From the first pod bound until all are, in seconds; then the gang starts over elsewhere. Default 600.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 86400))]
    pub gang_timeout_seconds: Option<u32>,
    /// How long a gang may have no place before the cluster is Stalled, in seconds. Default 900.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 604800))]
    pub unplaceable_after_seconds: Option<u32>,
}

/// What Available and Degraded mean.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Availability {
    /// Supernodes that Available needs, 0 to 1024. Default 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1024))]
    pub min_decode: Option<u32>,
    /// Prefill workers that Available needs, 0 to 1024. Default 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1024))]
    pub min_prefill: Option<u32>,
    /// How long capacity may be below the wanted one before Degraded, in seconds. Default 300.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 86400))]
    pub degraded_after_seconds: Option<u32>,
    /// How long the budget may hold up the maintenance of a node, in seconds. Default 3600.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 604800))]
    pub maintenance_deadline_seconds: Option<u32>,
}

/// What is paused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::crd::without_description)]
pub enum Pause {
    /// Nothing.
    None,
    /// Changes of revision; failures still heal.
    Rollouts,
    /// Everything but status and drains that have begun.
    All,
}

/// What happens to running requests when the cluster is deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::crd::without_description)]
pub enum DeletionPolicy {
    /// They finish, up to deletionTimeoutSeconds.
    Drain,
    /// They are cut.
    Immediate,
}

/// Switches of daily operation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Operation {
    /// What is paused: None, Rollouts or All. Default None.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pause: Option<Pause>,
    /// Drains all pools to zero and keeps the objects. Default false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub suspend: Option<bool>,
    /// Any new text here is a new revision: a restart that Git can ask for. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub restart_token: Option<String>,
    /// Name of a revision that takes the place of the spec, for emergencies. Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253))]
    pub rollback_to: Option<String>,
    /// Release of the operator whose defaults are taken. Default: those under which the revision was made.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63))]
    pub adopt_defaults: Option<String>,
    /// What happens to running requests at deletion: Drain or Immediate. Default Drain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deletion_policy: Option<DeletionPolicy>,
    /// How long drains at deletion may last, in seconds. Default 900.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 86400))]
    pub deletion_timeout_seconds: Option<u32>,
}
