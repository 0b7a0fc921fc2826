//! How many tokens each expert received: exact sums over a closed window of steps.

use serde::{Deserialize, Serialize};

use crate::ids::{AgentId, Generation, Rank, SupernodeId};

/// Steps of a window (EB-1).
pub const WINDOW_STEPS: u32 = 100;

/// Counts by layer and logical expert.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertCounts {
    /// Backbone layers.
    pub layers: u32,
    /// Logical experts of a layer.
    pub experts: u32,
    /// (token, choice) pairs, `[layers][experts]` flattened.
    pub counts: Vec<u64>,
}

/// Role of the engine whose tokens were counted; prefill and decode are never mixed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LoadRole {
    /// A prefill worker.
    Prefill,
    /// A rank of a decode supernode.
    Decode,
}

/// Tokens that each rank received in a window, and balancedness over ranks (decisions.md, EB-1, C.2).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Balance {
    /// `mean over (step, layer) of mean_r(load) / max_r(load)`, in (0, 1]; steps and layers without load are left
    /// out. `None` without any load.
    pub balancedness: Option<f64>,
    /// Ratio of sums: `mean over (layer, step) of mean_r(load) / mean over (layer, step) of max_r(load)` (C.2).
    pub balancedness_c2: Option<f64>,
    /// By layer, mean over steps of max_r(load) / mean_r(load): what the rebalance trigger reads. Layers without
    /// load are 1.
    pub peak_by_layer: Vec<f64>,
}

/// A window, or everything since the start, of one agent's engines summed, or of all agents of a supernode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ExpertLoadReport {
    /// Who reports.
    pub agent: AgentId,
    /// Its supernode; `None` for a prefill worker.
    pub supernode: Option<SupernodeId>,
    /// Whose tokens.
    pub role: LoadRole,
    /// Number of the window, from 0; for `total` the number of the open one.
    pub window: u64,
    /// First step counted, and how many.
    pub first_step: u64,
    /// Steps in the sums.
    pub steps: u32,
    /// Token rows run in these steps, over all ranks: `layers x top_k x rows` is the sum of the counts.
    pub rows: u64,
    /// Experts each row chooses.
    pub top_k: u32,
    /// Placement in force.
    pub placement: Generation,
    /// The window spans a change (of placement or of ranks) or misses a rank: not to be used for a decision.
    pub spans_change: bool,
    /// Sums by logical expert.
    pub counts: ExpertCounts,
    /// Counts of each step, oldest first, if asked for (`detail=steps`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub by_step: Vec<ExpertCounts>,
    /// (token, choice) pairs that arrived at each rank.
    pub by_rank: Vec<(Rank, u64)>,
    /// Nanoseconds each rank spent in steps.
    pub busy_ns: Vec<(Rank, u64)>,
    /// How even the ranks were.
    pub balance: Balance,
    /// Agents of the supernode whose counts could not be had: the sums are too small by theirs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub missing: Vec<AgentId>,
}
