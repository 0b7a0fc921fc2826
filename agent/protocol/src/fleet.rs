//! The FleetView: who exists, where, in which state, and who leads. Served by the operator (a watch channel in
//! local mode); gateways and agents follow the highest generation they have seen.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::agent_status::Role;
use crate::ids::{AgentId, Epoch, Generation, SupernodeId};

/// One agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FleetMember {
    /// Name of its pod.
    pub name: AgentId,
    /// What it does.
    pub role: Role,
    /// Its supernode, for decode.
    pub supernode: Option<SupernodeId>,
    /// Index of its pod in the supernode.
    pub index: u16,
    /// First rank that it runs.
    pub first_rank: u16,
    /// Ranks that it runs.
    pub ranks: u16,
    /// Data port.
    pub data: SocketAddr,
    /// Control port.
    pub control: SocketAddr,
    /// New work may go there. `false` while it starts or drains; running work goes on.
    pub serving: bool,
    /// Who can read whose KV: prefill and decode are paired within one only. Empty as long as the agent does not say.
    pub kv_epoch: String,
}

/// Who decides for a pool or a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leader {
    /// The agent.
    pub agent: AgentId,
    /// Grows with every change of leader.
    pub epoch: Epoch,
}

/// The fleet at one generation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FleetView {
    /// Never goes down; an older view is refused.
    pub generation: Generation,
    /// Name of the cluster.
    pub cluster: String,
    /// Agents, by name.
    pub members: Vec<FleetMember>,
    /// Leader of the prefill pool.
    pub prefill_leader: Option<Leader>,
    /// Leader of the decode supernodes.
    pub decode_leader: Option<Leader>,
    /// Gateways stop admitting: the cluster is being deleted or suspended.
    pub closed: bool,
    /// Roles that have served, have no serving member just now and get new ones: requests wait for these instead of
    /// being refused for want of a pool.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rebuilding: Vec<Role>,
}

impl FleetView {
    /// The member with this name.
    pub fn member(&self, name: &AgentId) -> Option<&FleetMember> {
        self.members.iter().find(|m| m.name == *name)
    }
}
