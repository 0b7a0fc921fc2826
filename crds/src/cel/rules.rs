//! Every CEL rule of the CRDs, once: the types put them into the schema, and [`super::validate`] finds them
//! there.
//! Invariant: a rule reads only fields that its place in the schema has, and guards every optional one with
//! `has`.

use serde_json::{Value, json};

/// A rule of a CRD: what must be true of the value at its place, and what to tell the user when it is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The CEL expression; `self` is the value, `oldSelf` the value before an update.
    pub rule: &'static str,
    /// What is wrong and how to fix it.
    pub message: &'static str,
    /// The field to blame, relative to the place of the rule. Absent: the value itself.
    pub field_path: Option<&'static str>,
}

impl Rule {
    const fn new(rule: &'static str, message: &'static str) -> Self {
        Self { rule, message, field_path: None }
    }

    const fn at(rule: &'static str, message: &'static str, field_path: &'static str) -> Self {
        Self { rule, message, field_path: Some(field_path) }
    }
}

/// The value of `x-kubernetes-validations` for some rules.
pub fn rules(list: &[Rule]) -> Value {
    let one = |r: &Rule| match r.field_path {
        Some(path) => json!({"rule": r.rule, "message": r.message, "fieldPath": path}),
        None => json!({"rule": r.rule, "message": r.message}),
    };
    Value::Array(list.iter().map(one).collect())
}

/// What a quantity of Kubernetes looks like: 500m, 2, 16Gi, 1e3.
pub const QUANTITY_PATTERN: &str =
    r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$";

/// Names of pods must fit (3.12 rule 1).
pub const CLUSTER_NAME: Rule = Rule::at(
    "self.metadata.name.matches('^[a-z]([-a-z0-9]{0,23}[a-z0-9])?$')",
    "must begin with a letter, hold only lower-case letters, digits and -, end with a letter or digit, and \
     have at most 25 characters",
    ".metadata.name",
);

/// A pool says how many, or who decides (rule 2).
pub const REPLICAS_XOR_SCALING: Rule =
    Rule::new("has(self.replicas) != has(self.scaling)", "needs exactly one of replicas and scaling");

/// The gateway may say how many, or who decides (rule 2, where both have a default).
pub const GATEWAY_REPLICAS_OR_SCALING: Rule =
    Rule::new("!(has(self.replicas) && has(self.scaling))", "takes at most one of replicas and scaling");

/// Bounds in order (rule 3).
pub const SCALING_MIN_MAX: Rule =
    Rule::at("self.minReplicas <= self.maxReplicas", "must not be larger than maxReplicas", ".minReplicas");

/// Targets belong to the planner (rule 3).
pub const PLANNER_TARGETS_NEED_PLANNER: Rule = Rule::at(
    "self.mode == 'Planner' || !has(self.planner)",
    "is only allowed with mode: Planner",
    ".planner",
);

/// Bounds in order, where both are optional.
pub const RATIO_MIN_MAX: Rule = Rule::at(
    "!has(self.min) || !has(self.max) || self.min <= self.max",
    "must not be larger than max",
    ".min",
);

/// Somebody must hold requests while there is no supernode (rule 4).
pub const ZERO_DECODE_NEEDS_ACTIVATOR: Rule = Rule::at(
    "!has(self.decode.scaling) || self.decode.scaling.minReplicas > 0 || !has(self.gateway) || \
     !has(self.gateway.activator) || !has(self.gateway.activator.enabled) || self.gateway.activator.enabled",
    "0 needs the gateway's activator: remove gateway.activator.enabled: false, or set 1 or more",
    ".decode.scaling.minReplicas",
);

/// Somebody must hold requests while there is no worker (rule 4).
pub const ZERO_PREFILL_NEEDS_ACTIVATOR: Rule = Rule::at(
    "!has(self.prefill.scaling) || self.prefill.scaling.minReplicas > 0 || !has(self.gateway) || \
     !has(self.gateway.activator) || !has(self.gateway.activator.enabled) || self.gateway.activator.enabled",
    "0 needs the gateway's activator: remove gateway.activator.enabled: false, or set 1 or more",
    ".prefill.scaling.minReplicas",
);

/// A gang is worth its while from 8 accelerators; on CPUs from 1 (rule 5).
pub const SUPERNODE_NOT_TOO_SMALL: Rule = Rule::at(
    "self.accelerator.vendor == 'cpu' || self.decode.supernode.nodes * \
     (has(self.decode.supernode.acceleratorsPerNode) ? self.decode.supernode.acceleratorsPerNode : \
     (has(self.accelerator.acceleratorsPerNode) ? self.accelerator.acceleratorsPerNode : 8)) >= 8",
    "nodes x acceleratorsPerNode must be at least 8 (at least 1 with vendor cpu)",
    ".decode.supernode.nodes",
);

/// A gang has at most 1024 ranks (rule 5).
pub const SUPERNODE_NOT_TOO_LARGE: Rule = Rule::at(
    "self.decode.supernode.nodes * (has(self.decode.supernode.acceleratorsPerNode) ? \
     self.decode.supernode.acceleratorsPerNode : (has(self.accelerator.acceleratorsPerNode) ? \
     self.accelerator.acceleratorsPerNode : (self.accelerator.vendor == 'cpu' ? 1 : 8))) <= 1024",
    "nodes x acceleratorsPerNode must be at most 1024",
    ".decode.supernode.nodes",
);

/// Spares stand in for nodes (rule 5).
pub const SPARES_AT_MOST_NODES: Rule = Rule::at(
    "!has(self.spareNodes) || self.spareNodes <= self.nodes",
    "must not be larger than nodes",
    ".spareNodes",
);

/// A rollout needs room to move (rule 6).
pub const ROLLOUT_CAN_MOVE: Rule = Rule::new(
    "!(has(self.maxSurge) && has(self.maxUnavailable) && self.maxSurge == 0 && self.maxUnavailable == 0)",
    "maxSurge and maxUnavailable can not both be 0: no replica could be replaced",
);

/// Surging first needs a surge (rule 7).
pub const PREFER_SURGE_NEEDS_SURGE: Rule = Rule::at(
    "!has(self.preferSurge) || !self.preferSurge || !has(self.maxSurge) || self.maxSurge > 0",
    "true needs a maxSurge above 0",
    ".preferSurge",
);

/// Another vendor is another cluster (rule 8).
pub const VENDOR_IMMUTABLE: Rule =
    Rule::new("self == oldSelf", "can not be changed: create another DeepInferCluster");

/// Claims can not change their class (rule 8).
pub const STORAGE_CLASS_IMMUTABLE: Rule =
    Rule::new("self == oldSelf", "can not be changed: claims keep their StorageClass");

/// Claims can not change their class, nor gain or lose one (rule 8).
pub const STORAGE_CLASS_STAYS: Rule = Rule::at(
    "has(self.className) == has(oldSelf.className)",
    "can not be added or removed: claims keep their StorageClass",
    ".className",
);

/// ComputeDomains are NVIDIA's (rule 9).
pub const COMPUTE_DOMAIN_NEEDS_NVIDIA: Rule = Rule::at(
    "self.vendor == 'nvidia' || !has(self.computeDomain) || self.computeDomain == 'Off'",
    "must be \"Off\" or absent unless vendor is nvidia",
    ".computeDomain",
);

/// Sources that a model can come from (rule 10).
pub const MODEL_URI_SCHEME: Rule = Rule::new(
    "self.matches('^(oci|pvc|file|hf|s3)://.+')",
    "must begin with oci://, pvc://, file://, hf:// or s3://, and name something behind it",
);

/// The struct of the mode (rule 11).
pub const KV_EXTERNAL_UNION: Rule = Rule::at(
    "(has(self.mode) && self.mode == 'External') == has(self.external)",
    "is required with mode: External and only allowed there",
    ".external",
);

/// The struct of the mode (rule 11).
pub const KV_MANAGED_UNION: Rule = Rule::at(
    "(has(self.mode) && self.mode == 'Managed') == has(self.managed)",
    "is required with mode: Managed and only allowed there",
    ".managed",
);

/// A pinned plan is somewhere (rule 12).
pub const PINNED_NEEDS_PLAN: Rule = Rule::at(
    "!has(self.mode) || self.mode != 'Pinned' || has(self.pinnedPlan)",
    "is required with mode: Pinned",
    ".pinnedPlan",
);

/// Names of our own containers (rule 13).
pub const SIDECAR_NAME: Rule = Rule::new(
    "!(self in ['engine', 'agent'])",
    "must not be engine or agent: those are the operator's containers",
);

/// A variable has one origin.
pub const ENV_ONE_SOURCE: Rule =
    Rule::new("!(has(self.value) && has(self.valueFrom))", "takes at most one of value and valueFrom");

/// A variable has one origin.
pub const ENV_SOURCE_ONE_REF: Rule = Rule::new(
    "has(self.secretKeyRef) != has(self.configMapKeyRef)",
    "needs exactly one of secretKeyRef and configMapKeyRef",
);

/// A drain ends the same day (rule 15).
pub const DRAIN_TIMEOUT: Rule = Rule::new("self <= 7200", "must be at most 7200 seconds");

/// RDMA devices have one origin (rule 16).
pub const RDMA_ONE_SOURCE: Rule = Rule::new(
    "has(self.resourceName) != has(self.resourceClaimTemplateName)",
    "needs exactly one of resourceName and resourceClaimTemplateName",
);

/// A volume has one source.
pub const VOLUME_ONE_SOURCE: Rule = Rule::new(
    "(has(self.claim) ? 1 : 0) + (has(self.configMap) ? 1 : 0) + (has(self.secret) ? 1 : 0) + \
     (has(self.emptyDir) ? 1 : 0) + (has(self.hostPath) ? 1 : 0) == 1",
    "needs exactly one of claim, configMap, secret, emptyDir and hostPath",
);

/// An incarnation is what it was created as.
pub const SUPERNODE_IMMUTABLE: Rule = Rule::new(
    "self.clusterName == oldSelf.clusterName && self.poolName == oldSelf.poolName && \
     self.role == oldSelf.role && self.revision == oldSelf.revision && self.kvEpoch == oldSelf.kvEpoch && \
     self.nodes == oldSelf.nodes && \
     self.acceleratorsPerNode == oldSelf.acceleratorsPerNode && self.backend == oldSelf.backend && \
     has(self.spareNodes) == has(oldSelf.spareNodes) && \
     (!has(self.spareNodes) || self.spareNodes == oldSelf.spareNodes) && \
     has(self.replaces) == has(oldSelf.replaces) && \
     (!has(self.replaces) || self.replaces == oldSelf.replaces) && \
     has(self.computeDomain) == has(oldSelf.computeDomain) && \
     (!has(self.computeDomain) || self.computeDomain == oldSelf.computeDomain) && \
     has(self.planHash) == has(oldSelf.planHash) && \
     (!has(self.planHash) || self.planHash == oldSelf.planHash) && \
     has(self.domainPreference) == has(oldSelf.domainPreference) && \
     (!has(self.domainPreference) || self.domainPreference == oldSelf.domainPreference)",
    "only drain and rankMap can be changed: create another Supernode",
);

/// A plan's size is the supernode's.
pub const PLACEMENT_SHAPE_IMMUTABLE: Rule =
    Rule::new("self == oldSelf", "can not be changed: another shape is another Supernode");
