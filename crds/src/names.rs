//! Every name that other programs see: group, labels, annotations, finalizers, managers, ports.
//! Invariant: a name that has been released never changes; each is spelled here and nowhere else.

/// API group of all kinds.
pub const GROUP: &str = "deepinfer.io";
/// Version of all kinds.
pub const VERSION: &str = "v1alpha1";
/// `apiVersion` of all kinds: group and version.
pub const API_VERSION: &str = "deepinfer.io/v1alpha1";
/// Category of all kinds: `kubectl get deepinfer` lists them.
pub const CATEGORY: &str = "deepinfer";

/// Longest name of a cluster, in bytes, so that the names of its pods stay below 63 bytes (CEL rule 1).
pub const CLUSTER_NAME_MAX: usize = 25;

/// Revision of the schema, in the annotation [`annotation::SCHEMA_REVISION`] of each CRD. Raised by one with
/// every change of a spec, a status or a rule: an operator that finds an older one writes nothing.
pub const SCHEMA_REVISION: u32 = 2;

/// Labels of every child object.
pub mod label {
    /// Application name; its value is [`APP_NAME_VALUE`].
    pub const APP_NAME: &str = "app.kubernetes.io/name";
    /// Value of [`APP_NAME`].
    pub const APP_NAME_VALUE: &str = "deepinfer";
    /// Name of the cluster, for tools that know only the common labels.
    pub const APP_INSTANCE: &str = "app.kubernetes.io/instance";
    /// Role, for tools that know only the common labels.
    pub const APP_COMPONENT: &str = "app.kubernetes.io/component";
    /// Who writes the object; its value is [`APP_MANAGED_BY_VALUE`].
    pub const APP_MANAGED_BY: &str = "app.kubernetes.io/managed-by";
    /// Value of [`APP_MANAGED_BY`].
    pub const APP_MANAGED_BY_VALUE: &str = "deepinfer-operator";
    /// Name of the DeepInferCluster.
    pub const CLUSTER: &str = "deepinfer.io/cluster";
    /// Name of the DeepInferPool.
    pub const POOL: &str = "deepinfer.io/pool";
    /// Role of the pool: prefill, decode, vision, gateway, kv.
    pub const ROLE: &str = "deepinfer.io/role";
    /// Revision of the pool's template.
    pub const REVISION: &str = "deepinfer.io/revision";
    /// Who can read whose KV.
    pub const KV_EPOCH: &str = "deepinfer.io/kv-epoch";
    /// Name of the Supernode.
    pub const SUPERNODE: &str = "deepinfer.io/supernode";
    /// Index of a pod inside its Supernode, from 0.
    pub const NODE_INDEX: &str = "deepinfer.io/node-index";
    /// `true` on index 0 of a Supernode and on every single-pod worker: one pod per replica.
    pub const LEAD: &str = "deepinfer.io/lead";
    /// `true` on spare pods.
    pub const SPARE: &str = "deepinfer.io/spare";
}

/// Annotations that this product reads or writes.
pub mod annotation {
    /// On a pod: the wanted drain state, so that an agent acts while the operator is away.
    pub const DRAIN: &str = "deepinfer.io/drain";
    /// On a cluster: `true` refuses its deletion (admission policy of the chart).
    pub const PROTECT: &str = "deepinfer.io/protect";
    /// On a cluster: `true` skips drains at deletion.
    pub const FORCE_DELETE: &str = "deepinfer.io/force-delete";
    /// On a CRD: [`SCHEMA_REVISION`](super::SCHEMA_REVISION).
    pub const SCHEMA_REVISION: &str = "deepinfer.io/schema-revision";
}

/// Finalizers.
pub mod finalizer {
    /// On a DeepInferCluster: pools drain before it goes.
    pub const TEARDOWN: &str = "deepinfer.io/teardown";
    /// On a Supernode: sequences leave before its pods go.
    pub const DRAIN: &str = "deepinfer.io/drain";
}

/// Field managers of server-side apply.
pub mod manager {
    /// Everything but replicas and status.
    pub const MAIN: &str = "deepinfer-operator";
    /// Status of the cluster, pools, supernodes and placements.
    pub const STATUS: &str = "deepinfer-operator-status";
    /// `DeepInferPool.spec.replicas` when the cluster fixes the number.
    pub const FIXED: &str = "deepinfer-operator-fixed";
    /// `DeepInferPool.spec.replicas` at creation when somebody else scales.
    pub const SEED: &str = "deepinfer-operator-seed";
    /// `DeepInferPool.spec.replicas` when the built-in planner scales.
    pub const PLANNER: &str = "deepinfer-planner";
}

/// Admission policies that come with the CRDs.
pub mod policy {
    /// Only the operator writes its own kinds.
    pub const OWNED_KINDS: &str = "deepinfer-owned-kinds";
    /// Clusters with the annotation [`PROTECT`](super::annotation::PROTECT) are not deleted.
    pub const DELETION_PROTECTION: &str = "deepinfer-deletion-protection";
}

/// Accounts and groups.
pub mod rbac {
    /// Namespace that the operator is installed in, unless the installer says otherwise.
    pub const OPERATOR_NAMESPACE: &str = "deepinfer-system";
    /// Its service account there.
    pub const OPERATOR_SERVICE_ACCOUNT: &str = "deepinfer-operator";
    /// The same as a user of the API server.
    pub const OPERATOR_USER: &str = "system:serviceaccount:deepinfer-system:deepinfer-operator";
    /// People who may write the operator's own kinds by hand.
    pub const ADMINS_GROUP: &str = "deepinfer:admins";
}

/// Ports of pods.
pub mod port {
    /// HTTP API of the gateway.
    pub const GATEWAY: u16 = 8000;
    /// Control port of an agent.
    pub const CONTROL: u16 = 9810;
    /// Metrics of an agent.
    pub const METRICS: u16 = 9811;
    /// Data port of an agent.
    pub const DATA: u16 = 29500;
    /// FleetView of the operator.
    pub const FLEET_VIEW: u16 = 8082;
}

/// The scheduling gate of the built-in gang backend.
pub const GANG_GATE: &str = "deepinfer.io/gang";
/// Readiness gate of engine pods: set from the agent's word.
pub const ROUTABLE_GATE: &str = "deepinfer.io/routable";
