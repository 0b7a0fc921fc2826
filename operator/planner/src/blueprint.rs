//! What must be remembered between two plans: committed with a parent, numbered, and small. Losing it costs
//! history, never capacity: everything that decides identity is also on the children.

use std::collections::BTreeMap;

use deepinfer_protocol::fleet::FleetView;
use deepinfer_protocol::{Epoch, Generation};
use serde::{Deserialize, Serialize};

/// Failures of a pool that are remembered; more say nothing new.
pub const MAX_FAILURES: usize = 20;

/// A supernode that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FailureRecord {
    /// When, in seconds since 1970.
    pub at: i64,
    /// Which incarnation.
    pub supernode: String,
    /// Under which revision; a new one starts with a clean slate.
    pub revision: String,
    /// Why.
    pub reason: String,
    /// For people.
    pub message: String,
    /// Node that it is blamed on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// Domain that it sat in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub domain: Option<String>,
}

/// The committed memory of a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Blueprint {
    /// Grows by one with each plan that changes it.
    pub generation: Generation,
    /// The one before.
    pub parent: Option<Generation>,
    /// What gateways and agents are told.
    pub fleet: FleetView,
    /// Highest epoch ever given to a leader of prefill.
    pub prefill_epoch: Epoch,
    /// Highest epoch ever given to a leader of decode.
    pub decode_epoch: Epoch,
    /// Names given so far: no name is given twice.
    pub names: u64,
    /// Failures by pool, oldest first.
    pub failures: BTreeMap<String, Vec<FailureRecord>>,
}

impl Blueprint {
    /// The successor of `parent` if `next` says something new, else the parent itself.
    #[must_use]
    pub fn succeed(parent: Option<&Self>, mut next: Self) -> Self {
        let Some(parent) = parent else {
            next.generation = Generation(1);
            next.parent = None;
            return next;
        };
        next.generation = parent.generation;
        next.parent = parent.parent;
        if next != *parent {
            next.parent = Some(parent.generation);
            next.generation = parent.generation.next();
        }
        next
    }
}
