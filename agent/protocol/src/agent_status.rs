//! What an agent says about itself (`GET /v1/status`, operator.md 9.1).

use serde::{Deserialize, Serialize};

use crate::ids::{AgentId, Epoch, Generation, SupernodeId};

/// What an agent's engines do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Runs prompts.
    Prefill,
    /// Generates tokens.
    Decode,
}

/// Life of an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AgentPhase {
    /// Weights load, the engine opens.
    Starting,
    /// A real step runs before traffic is taken.
    Warming,
    /// Takes work.
    Serving,
    /// Finishes what it has.
    Draining,
    /// Nothing left to do.
    Drained,
    /// Does not come back by itself.
    Failed,
}

/// Words of [`AgentStatus::reason_code`].
pub mod reason_code {
    /// The model's folder is not there, or its files are incomplete or cannot be read.
    pub const SOURCE_UNREACHABLE: &str = "SourceUnreachable";
    /// The model is not the one that was asked for.
    pub const CHECKSUM_MISMATCH: &str = "ChecksumMismatch";
    /// What the flags ask for is not built.
    pub const NOT_SUPPORTED: &str = "NotSupported";
    /// A peer of the supernode does not answer yet.
    pub const FABRIC_NOT_READY: &str = "FabricNotReady";
}

/// State of a drain (operator.md 9.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DrainState {
    /// No drain: work is accepted.
    Accepting,
    /// Finishing what runs.
    Draining,
    /// Nothing runs.
    Drained,
}

/// `GET /v1/drain`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DrainStatus {
    /// Where the drain stands.
    pub state: DrainState,
    /// Requests that still run or wait here.
    pub inflight: u32,
    /// Requests given to another supernode.
    pub handed_off: u32,
    /// Requests cut at the deadline.
    pub cut: u32,
    /// Bytes of KV still held for others.
    pub remaining_kv_bytes: u64,
}

/// `POST /v1/drain`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DrainRequest {
    /// Seconds from now after which what runs is cut; 0 cuts at once.
    pub deadline_seconds: u32,
    /// Where running sequences go; only `None` (they finish here) is built.
    #[serde(default)]
    pub handoff: Option<String>,
    /// For people.
    #[serde(default)]
    pub reason: String,
}

/// `GET /v1/status`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentStatus {
    /// Name of the agent's pod.
    pub name: AgentId,
    /// What it does.
    pub role: Role,
    /// Its supernode, for decode.
    pub supernode: Option<SupernodeId>,
    /// Index of its pod in the supernode.
    pub index: u16,
    /// Ranks that it runs.
    pub ranks: u16,
    /// Where it stands.
    pub phase: AgentPhase,
    /// Why, where the phase does not say it.
    pub reason: String,
    /// Whether new work is taken.
    pub accepting: bool,
    /// Requests that wait, load, run or are parked here.
    pub inflight: u32,
    /// KV blocks in use by requests, over all ranks.
    pub kv_blocks_used: u64,
    /// Unreferenced blocks whose contents may be reused.
    pub kv_blocks_cached: u64,
    /// KV blocks.
    pub kv_blocks_total: u64,
    /// Bytes of KV parked in host memory.
    pub parked_bytes: u64,
    /// Steps run.
    pub steps: u64,
    /// Engine threads abandoned because they hung.
    pub abandoned_threads: u32,
    /// Engines replaced after a panic.
    pub replaced_engines: u32,
    /// FleetView last followed.
    pub fleet_generation: Generation,
    /// If this agent leads a pool or group: under which epoch.
    pub leads: Option<Epoch>,
    /// Expert placement held.
    pub placement: Generation,
    /// Backend, SIMD level, numerics: what runs here.
    pub engine: String,
    /// Who can read whose KV.
    pub kv_epoch: String,
    /// One word for `reason` where a program reads it: `SourceUnreachable`, `ChecksumMismatch`, `NotSupported`,
    /// `FabricNotReady`; empty if there is none.
    #[serde(default)]
    pub reason_code: String,
    /// Digest of the checkpoint that is served, hex; empty before it was read.
    #[serde(default)]
    pub model_digest: String,
    /// Outcome of the last self-test of the fabric: `ok`, or which peer does not answer; empty before the first.
    #[serde(default)]
    pub fabric: String,
    /// Health of the devices: `ok`, or what is wrong with which.
    #[serde(default)]
    pub device_health: String,
    /// Seconds since start.
    pub uptime_seconds: u64,
}
