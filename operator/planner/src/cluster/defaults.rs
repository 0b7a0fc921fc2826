//! Every default of the spec, once, with the reason that `deepinfer plan --explain` prints. The descriptions of the
//! CRD name the same values; a test compares.

/// A default value and why it is what it is.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Default<T> {
    /// The value.
    pub value: T,
    /// Why.
    pub why: &'static str,
}

macro_rules! defaults {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $value:expr, $why:literal;)*) => {
        $($(#[$doc])* pub(crate) const $name: Default<$type> = Default { value: $value, why: $why };)*
    };
}

defaults! {
    /// `accelerator.acceleratorsPerNode` with accelerators.
    ACCELERATORS_PER_NODE: u32 = 8, "the most common machine has 8 accelerators";
    /// The same for vendor `cpu`.
    CPU_PER_NODE: u32 = 1, "one rank a pod on CPUs";
    /// `prefill.nodesPerWorker`.
    NODES_PER_WORKER: u32 = 1, "a worker is one machine";
    /// `prefill.replicas`, `decode.replicas` where neither replicas nor scaling were given.
    REPLICAS: u32 = 1, "one of each serves";
    /// `gateway.replicas`.
    GATEWAY_REPLICAS: u32 = 2, "one may be lost or replaced without a pause";
    /// `gateway.replicas` on one machine.
    LOCAL_GATEWAY_REPLICAS: u32 = 1, "one address, one gateway";
    /// `prefill.chunkBudgetMs`.
    CHUNK_BUDGET_MS: u32 = 100, "serving.md PF-4";
    /// The same on CPUs, where the smallest chunk already takes longer.
    CPU_CHUNK_BUDGET_MS: u32 = 200, "the smallest useful chunk takes about this long on a CPU";
    /// `decode.supernode.startupDeadlineSeconds`.
    STARTUP_DEADLINE: u32 = 1800, "half a terabyte of weights loads in this time from a slow disk";
    /// `decode.supernode.minReadySeconds`.
    MIN_READY: u32 = 30, "early crashes show before the old one goes";
    /// The same on one machine.
    LOCAL_MIN_READY: u32 = 0, "a person waits";
    /// `decode.experts.extraSlotsPerRank`.
    EXTRA_SLOTS: u32 = 1, "one extra slot a rank gives most of the balance (serving.md EB-4)";
    /// `*.drain.timeoutSeconds`.
    DRAIN_TIMEOUT: u32 = 600, "long answers end within ten minutes";
    /// `*.rollout.maxSurge`.
    MAX_SURGE: u32 = 1, "one more than wanted, so that nothing is missing meanwhile";
    /// `*.rollout.maxUnavailable`.
    MAX_UNAVAILABLE: u32 = 1, "a rollout goes on where nothing can be added";
    /// `decode.recovery.maxRestarts`.
    MAX_RESTARTS: u32 = 5, "more of the same fails in the same way";
    /// `decode.recovery.backoffSeconds`.
    BACKOFF: u32 = 10, "a node that comes back needs about this long";
    /// `decode.recovery.maxBackoffSeconds`.
    MAX_BACKOFF: u32 = 600, "ten minutes: often enough to heal by itself";
    /// `decode.recovery.resetAfterSeconds`.
    RESET_AFTER: u32 = 3600, "an hour without failure is a fresh start";
    /// `availability.minDecode`.
    MIN_DECODE: u32 = 1, "one supernode answers";
    /// `availability.minPrefill`.
    MIN_PREFILL: u32 = 1, "one worker answers";
    /// `availability.degradedAfterSeconds`.
    DEGRADED_AFTER: u32 = 300, "shorter gaps heal by themselves";
    /// `operation.deletionTimeoutSeconds`.
    DELETION_TIMEOUT: u32 = 900, "drains end first";
    /// `gateway.defaultThinking`.
    THINKING: bool = true, "as the model's own recipe";
}
