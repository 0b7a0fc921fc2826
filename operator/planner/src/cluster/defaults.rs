//! Every default of the spec, once, as a value, with the reason that `deepinfer plan --explain` prints. The descriptions of the
//! CRD name the same values; a test compares.

/// A default value and why it is what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Default<T> {
    /// The value.
    pub value: T,
    /// Why.
    pub why: &'static str,
}

macro_rules! defaults {
    ($($(#[$doc:meta])* $name:ident: $type:ty = $value:expr, $why:literal;)*) => {
        /// The defaults of a release. A revision freezes what it resolved, so that other defaults of a newer release
        /// change nothing that runs.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub struct Defaults {
            $($(#[$doc])* pub $name: Default<$type>,)*
        }

        impl std::default::Default for Defaults {
            fn default() -> Self {
                Self { $($name: Default { value: $value, why: $why },)* }
            }
        }

        impl Defaults {
            /// Sets a default by its name, for an operator that plays another release.
            ///
            /// # Errors
            /// If there is no such default, or the value is not of its type.
            pub fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
                match name {
                    $(stringify!($name) => {
                        self.$name.value = value.parse().map_err(|_| format!("{name}: {value:?} is not a {}", stringify!($type)))?;
                    })*
                    _ => return Err(format!("no default is called {name:?}: {}", [$(stringify!($name)),*].join(", "))),
                }
                Ok(())
            }
        }
    };
}

defaults! {
    /// `accelerator.acceleratorsPerNode` with accelerators.
    accelerators_per_node: u32 = 8, "the most common machine has 8 accelerators";
    /// The same for vendor `cpu`.
    cpu_per_node: u32 = 1, "one rank a pod on CPUs";
    /// `prefill.nodesPerWorker`.
    nodes_per_worker: u32 = 1, "a worker is one machine";
    /// `prefill.replicas`, `decode.replicas` where neither replicas nor scaling were given.
    replicas: u32 = 1, "one of each serves";
    /// `gateway.replicas`.
    gateway_replicas: u32 = 2, "one may be lost or replaced without a pause";
    /// `gateway.replicas` on one machine.
    local_gateway_replicas: u32 = 1, "one address, one gateway";
    /// `prefill.chunkBudgetMs`.
    chunk_budget_ms: u32 = 100, "serving.md PF-4";
    /// The same on CPUs, where the smallest chunk already takes longer.
    cpu_chunk_budget_ms: u32 = 200, "the smallest useful chunk takes about this long on a CPU";
    /// `decode.supernode.startupDeadlineSeconds`.
    startup_deadline: u32 = 1800, "half a terabyte of weights loads in this time from a slow disk";
    /// `decode.supernode.minReadySeconds`.
    min_ready: u32 = 30, "early crashes show before the old one goes";
    /// The same on one machine.
    local_min_ready: u32 = 0, "a person waits";
    /// `decode.experts.extraSlotsPerRank`.
    extra_slots: u32 = 1, "one extra slot a rank gives most of the balance (serving.md EB-4)";
    /// `*.drain.timeoutSeconds`.
    drain_timeout: u32 = 600, "long answers end within ten minutes";
    /// `*.rollout.maxSurge`.
    max_surge: u32 = 1, "one more than wanted, so that nothing is missing meanwhile";
    /// `*.rollout.maxUnavailable`.
    max_unavailable: u32 = 1, "a rollout goes on where nothing can be added";
    /// `decode.recovery.maxRestarts`.
    max_restarts: u32 = 5, "more of the same fails in the same way";
    /// `decode.recovery.backoffSeconds`.
    backoff: u32 = 10, "a node that comes back needs about this long";
    /// `decode.recovery.maxBackoffSeconds`.
    max_backoff: u32 = 600, "ten minutes: often enough to heal by itself";
    /// `decode.recovery.resetAfterSeconds`.
    reset_after: u32 = 3600, "an hour without failure is a fresh start";
    /// `availability.minDecode`.
    min_decode: u32 = 1, "one supernode answers";
    /// `availability.minPrefill`.
    min_prefill: u32 = 1, "one worker answers";
    /// `availability.degradedAfterSeconds`.
    degraded_after: u32 = 300, "shorter gaps heal by themselves";
    /// `operation.deletionTimeoutSeconds`.
    deletion_timeout: u32 = 900, "drains end first";
    /// `gateway.defaultThinking`.
    thinking: bool = true, "as the model's own recipe";
    /// `scheduling.gangTimeoutSeconds`.
    gang_timeout: u32 = 600, "a gang that is half bound for ten minutes holds accelerators for nothing";
    /// `scheduling.unplaceableAfterSeconds`.
    unplaceable_after: u32 = 900, "a person should know after a quarter of an hour";
    /// `decode.recovery.nodeLostGraceSeconds`.
    node_lost_grace: u32 = 30, "a kubelet that restarts is back by then";
    /// `decode.recovery.terminatingTimeoutSeconds`.
    terminating_timeout: u32 = 120, "a node that comes back has ended its pods by then";
    /// `decode.rollout.surgeTimeoutSeconds`.
    surge_timeout: u32 = 600, "room that is not there after ten minutes does not come by itself";
    /// `revisionHistoryLimit`.
    revision_history: u32 = 10, "enough to look back over a bad week";
}
