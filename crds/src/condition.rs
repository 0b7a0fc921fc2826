//! Conditions: their types, their reasons, and how one is set.
//! Invariant: `lastTransitionTime` moves only when the status does, so that an unchanged condition is never
//! written.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// Longest message, in characters, so that a status stays below its 16 KiB.
pub const MESSAGE_MAX: usize = 1024;

/// Types of the conditions of a DeepInferCluster. The first three follow kstatus.
pub mod kind {
    /// Wanted capacity, current revision, gateway up.
    pub const READY: &str = "Ready";
    /// Work is in progress.
    pub const RECONCILING: &str = "Reconciling";
    /// A human is needed.
    pub const STALLED: &str = "Stalled";
    /// Requests can be served now.
    pub const AVAILABLE: &str = "Available";
    /// Below the wanted capacity for too long, or masked ranks.
    pub const DEGRADED: &str = "Degraded";
    /// Weights are there.
    pub const MODEL_READY: &str = "ModelReady";
    /// Prefill workers are ready.
    pub const PREFILL_READY: &str = "PrefillReady";
    /// Supernodes are ready.
    pub const DECODE_READY: &str = "DecodeReady";
    /// Vision workers are ready.
    pub const VISION_READY: &str = "VisionReady";
    /// Gateways are ready.
    pub const GATEWAY_READY: &str = "GatewayReady";
    /// The KV tier is ready.
    pub const KV_CACHE_READY: &str = "KVCacheReady";
    /// Needed labels and domains exist.
    pub const TOPOLOGY_AVAILABLE: &str = "TopologyAvailable";
    /// Imbalance is below the trigger, or balancing is off.
    pub const EXPERTS_BALANCED: &str = "ExpertsBalanced";
    /// More than one scaler, or a scaler on an owned child.
    pub const SCALING_CONFLICT: &str = "ScalingConflict";
    /// `operation.pause` is not None.
    pub const PAUSED: &str = "Paused";
    /// Fields that are accepted and do nothing yet.
    pub const FIELDS_IGNORED: &str = "FieldsIgnored";

    /// All types of a DeepInferCluster.
    pub const ALL: [&str; 16] = [
        READY,
        RECONCILING,
        STALLED,
        AVAILABLE,
        DEGRADED,
        MODEL_READY,
        PREFILL_READY,
        DECODE_READY,
        VISION_READY,
        GATEWAY_READY,
        KV_CACHE_READY,
        TOPOLOGY_AVAILABLE,
        EXPERTS_BALANCED,
        SCALING_CONFLICT,
        PAUSED,
        FIELDS_IGNORED,
    ];

    /// Types of the conditions of a DeepInferPool (beside `Ready`).
    pub mod pool {
        /// The number of replicas is being followed.
        pub const SCALING_ACTIVE: &str = "ScalingActive";
        /// The bounds changed the number.
        pub const SCALING_LIMITED: &str = "ScalingLimited";
    }

    /// Types of the conditions of a Supernode (beside `Degraded`).
    pub mod supernode {
        /// All pods have nodes of one domain.
        pub const PLACED: &str = "Placed";
        /// All agents are up.
        pub const STARTED: &str = "Started";
        /// Work may come.
        pub const ROUTABLE: &str = "Routable";
        /// Nothing runs any more.
        pub const DRAINED: &str = "Drained";
    }

    /// Types of the conditions of an ExpertPlacement.
    pub mod placement {
        /// Imbalance is below the trigger.
        pub const BALANCED: &str = "Balanced";
        /// Statistics are recent.
        pub const STATS_FRESH: &str = "StatsFresh";
        /// The ranks hold the wanted plan.
        pub const PLAN_APPLIED: &str = "PlanApplied";
    }
}

/// Reasons, one word each.
pub mod reason {
    /// Ready: everything wanted serves.
    pub const SERVING: &str = "Serving";
    /// Ready: nothing is wanted right now.
    pub const SCALED_TO_ZERO: &str = "ScaledToZero";
    /// Not Ready, Reconciling: the first replicas start.
    pub const CREATING: &str = "Creating";
    /// Not Ready: old replicas are still there.
    pub const ROLLOUT_INCOMPLETE: &str = "RolloutIncomplete";
    /// Not Ready: fewer replicas than wanted.
    pub const CAPACITY_BELOW_DESIRED: &str = "CapacityBelowDesired";
    /// Not Ready: no gateway.
    pub const GATEWAY_UNAVAILABLE: &str = "GatewayUnavailable";
    /// Not Ready, Stalled: the weights are not there.
    pub const MODEL_UNAVAILABLE: &str = "ModelUnavailable";
    /// Not Ready, Paused: the user asked for zero.
    pub const SUSPENDED: &str = "Suspended";
    /// Reconciling: gangs wait for nodes.
    pub const PLACING: &str = "Placing";
    /// Reconciling: a new revision replaces the old one.
    pub const ROLLING_OUT: &str = "RollingOut";
    /// Reconciling: the number of replicas changes.
    pub const SCALING: &str = "Scaling";
    /// Reconciling: lost replicas are replaced.
    pub const REPLACING: &str = "Replacing";
    /// Reconciling: replicas leave.
    pub const DRAINING: &str = "Draining";
    /// Reconciling, model not ready: nodes load weights.
    pub const PREFETCHING: &str = "Prefetching";
    /// Not Reconciling.
    pub const IDLE: &str = "Idle";
    /// Stalled: the spec contradicts itself or the cluster.
    pub const INVALID_SPEC: &str = "InvalidSpec";
    /// Stalled: a field that is not built yet.
    pub const NOT_SUPPORTED: &str = "NotSupported";
    /// Stalled: an object that the spec names is missing.
    pub const REF_NOT_FOUND: &str = "RefNotFound";
    /// Stalled: no node can take a gang.
    pub const UNPLACEABLE: &str = "Unplaceable";
    /// Stalled: no step forward for too long.
    pub const PROGRESS_DEADLINE_EXCEEDED: &str = "ProgressDeadlineExceeded";
    /// Stalled: too many failures.
    pub const RETRIES_EXHAUSTED: &str = "RetriesExhausted";
    /// Stalled: the CRD is older than the operator.
    pub const CRD_SKEW: &str = "CRDSkew";
    /// Not Stalled.
    pub const PROGRESSING: &str = "Progressing";
    /// Available.
    pub const MINIMUM_AVAILABLE: &str = "MinimumAvailable";
    /// Not Available.
    pub const BELOW_MINIMUM: &str = "BelowMinimum";
    /// Degraded: fewer replicas than wanted.
    pub const CAPACITY_LOST: &str = "CapacityLost";
    /// Degraded: ranks without experts.
    pub const MASKED_RANKS: &str = "MaskedRanks";
    /// Degraded: the KV tier is away.
    pub const KV_CACHE_DOWN: &str = "KVCacheDown";
    /// Degraded: the fabric fails its test.
    pub const FABRIC_FAULT: &str = "FabricFault";
    /// Not Degraded.
    pub const NOMINAL: &str = "Nominal";
    /// Model not ready: the source does not answer.
    pub const SOURCE_UNREACHABLE: &str = "SourceUnreachable";
    /// Model not ready: bytes differ from their digest.
    pub const CHECKSUM_MISMATCH: &str = "ChecksumMismatch";
    /// Model not ready: no credentials.
    pub const CREDENTIALS_MISSING: &str = "CredentialsMissing";
    /// Topology: everything needed is there.
    pub const FOUND: &str = "Found";
    /// Topology: no node has the domain label.
    pub const LABEL_MISSING: &str = "LabelMissing";
    /// Topology: no domain can ever fit a gang.
    pub const DOMAIN_TOO_SMALL: &str = "DomainTooSmall";
    /// Topology: nodes can not be read.
    pub const NODES_UNREADABLE: &str = "NodesUnreadable";
    /// Experts: balanced.
    pub const BALANCED: &str = "Balanced";
    /// Experts: balancing is off.
    pub const OFF: &str = "Off";
    /// Experts: imbalanced.
    pub const IMBALANCED: &str = "Imbalanced";
    /// Experts: no plan could be applied.
    pub const PLAN_FAILED: &str = "PlanFailed";
    /// Experts: statistics are old.
    pub const STATS_STALE: &str = "StatsStale";
    /// Scaling conflict: two scalers on one pool.
    pub const TWO_SCALERS: &str = "TwoScalers";
    /// Scaling conflict: a scaler on an owned child.
    pub const WRONG_TARGET: &str = "WrongTarget";
    /// No scaling conflict; no field ignored.
    pub const NONE: &str = "None";
    /// Paused: rollouts.
    pub const PAUSED_ROLLOUTS: &str = "PausedRollouts";
    /// Paused: everything.
    pub const PAUSED_ALL: &str = "PausedAll";
    /// Not paused.
    pub const RUNNING: &str = "Running";
    /// Fields that do nothing yet.
    pub const NOT_BUILT: &str = "NotBuilt";
    /// A part is ready.
    pub const READY: &str = "Ready";
    /// A part is not ready.
    pub const NOT_READY: &str = "NotReady";
}

/// Status of a condition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Truth {
    /// It holds.
    True,
    /// It does not hold.
    False,
    /// Nobody knows.
    Unknown,
}

impl Truth {
    /// As Kubernetes spells it.
    pub fn as_str(self) -> &'static str {
        match self {
            Truth::True => "True",
            Truth::False => "False",
            Truth::Unknown => "Unknown",
        }
    }
}

impl From<bool> for Truth {
    fn from(holds: bool) -> Self {
        if holds { Truth::True } else { Truth::False }
    }
}

/// Sets one condition in a list that is kept sorted by type. `now` is used only if the status changes.
/// Returns whether anything changed.
pub fn set(
    list: &mut Vec<Condition>,
    (kind, status): (&str, Truth),
    (reason, message): (&str, &str),
    generation: Option<i64>,
    now: &Time,
) -> bool {
    let place = list.binary_search_by(|c| c.type_.as_str().cmp(kind));
    let since = match place {
        Ok(i) if list[i].status == status.as_str() => list[i].last_transition_time.clone(),
        _ => now.clone(),
    };
    let wanted = Condition {
        type_: kind.to_owned(),
        status: status.as_str().to_owned(),
        reason: reason.to_owned(),
        message: message.chars().take(MESSAGE_MAX).collect(),
        observed_generation: generation,
        last_transition_time: since,
    };
    match place {
        Ok(i) if list[i] == wanted => false,
        Ok(i) => {
            list[i] = wanted;
            true
        }
        Err(i) => {
            list.insert(i, wanted);
            true
        }
    }
}

/// The condition of a type.
pub fn get<'a>(list: &'a [Condition], kind: &str) -> Option<&'a Condition> {
    list.iter().find(|c| c.type_ == kind)
}

/// Whether the condition of a type is there and True.
pub fn is_true(list: &[Condition], kind: &str) -> bool {
    get(list, kind).is_some_and(|c| c.status == "True")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Time {
        Time(k8s_openapi::jiff::Timestamp::from_second(seconds).unwrap())
    }

    #[test]
    fn the_time_of_a_condition_moves_only_with_its_status() {
        let mut list = Vec::new();
        assert!(set(&mut list, (kind::READY, Truth::False), (reason::CREATING, "0/1"), Some(1), &at(10)));
        assert!(set(&mut list, (kind::READY, Truth::False), (reason::CREATING, "1/2"), Some(1), &at(20)));
        assert_eq!(list[0].last_transition_time, at(10));
        assert_eq!(list[0].message, "1/2");
        assert!(set(&mut list, (kind::READY, Truth::True), (reason::SERVING, "2/2"), Some(1), &at(30)));
        assert_eq!(list[0].last_transition_time, at(30));
        assert!(is_true(&list, kind::READY));
    }

    #[test]
    fn setting_a_condition_to_what_it_is_changes_nothing() {
        let mut list = Vec::new();
        set(&mut list, (kind::READY, Truth::True), (reason::SERVING, ""), Some(3), &at(10));
        let before = list.clone();
        assert!(!set(&mut list, (kind::READY, Truth::True), (reason::SERVING, ""), Some(3), &at(99)));
        assert_eq!(list, before);
    }

    #[test]
    fn conditions_stand_in_one_order_however_they_were_set() {
        let (mut one, mut other) = (Vec::new(), Vec::new());
        for k in kind::ALL {
            set(&mut one, (k, Truth::Unknown), (reason::NONE, ""), None, &at(1));
        }
        for k in kind::ALL.into_iter().rev() {
            set(&mut other, (k, Truth::Unknown), (reason::NONE, ""), None, &at(1));
        }
        assert_eq!(one, other);
        assert_eq!(one.len(), kind::ALL.len());
    }

    #[test]
    fn a_long_message_is_cut_between_characters() {
        let mut list = Vec::new();
        set(&mut list, (kind::STALLED, Truth::True), (reason::INVALID_SPEC, &"ä".repeat(5000)), None, &at(1));
        assert_eq!(list[0].message.chars().count(), MESSAGE_MAX);
    }
}
