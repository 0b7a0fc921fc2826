//! Fabric domains: which nodes share one, how much room each has, and why a supernode has no place yet
//! (operator.md 6.1, 6.4).

mod node;
mod one;
mod profile;
mod room;
mod survey;

use std::collections::{BTreeMap, BTreeSet};

use deepinfer_crds::supernode::DomainCandidate;
use k8s_openapi::api::core::v1::Toleration;
use serde::{Deserialize, Serialize};

use crate::nodes::Namespaced;

pub(crate) use node::{COMPUTE_DOMAIN_LABEL, is_tolerated};
pub use one::one_domain;
pub use profile::{domain_of, free_choice};
pub use survey::survey;

/// Reasons of [`DomainCandidate`] and [`Verdict`], in the order in which a node is asked for them: it counts once, under
/// the first that holds.
pub mod reason {
    /// The node has none of the labels that name domains.
    pub const LABEL_MISSING: &str = "LabelMissing";
    /// The domain has too few nodes, whoever uses them.
    pub const DOMAIN_TOO_SMALL: &str = "DomainTooSmall";
    /// The node selector of the pods does not name the node.
    pub const NOT_SELECTED: &str = "NotSelected";
    /// The node is not Ready, or goes.
    pub const NOT_READY: &str = "NotReady";
    /// The node is cordoned.
    pub const CORDONED: &str = "Cordoned";
    /// The node has a taint that the pods do not tolerate.
    pub const TAINT_NOT_TOLERATED: &str = "TaintNotTolerated";
    /// The node or its domain failed too often.
    pub const QUARANTINED: &str = "Quarantined";
    /// Other pods hold the accelerators, or have them promised.
    pub const NOT_ENOUGH_FREE: &str = "NotEnoughFree";
    /// The limit of ComputeDomains in one NVLink domain is reached, or an old one is not cleaned up.
    pub const CLIQUE_BUSY: &str = "CliqueBusy";
    /// The domain has a supernode of the same pool, and `decode.spread.policy` is Require.
    pub const SPREAD_REQUIRED: &str = "SpreadRequired";
}

/// How nodes form domains.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Profile {
    /// Node labels whose value names the domain; the first that is present on a node wins. Empty: all nodes are one
    /// domain.
    pub domain_labels: Vec<String>,
    /// The same for a block of domains.
    pub block_labels: Vec<String>,
    /// A supernode may span domains (RDMA between hosts).
    pub allow_cross_domain: bool,
    /// Pods of one supernode may share a node, and room is what the scheduler says: CPU clusters.
    pub shared_nodes: bool,
    /// Nodes of a domain share NVLink memory through a ComputeDomain.
    pub compute_domain: bool,
    /// Host folders and files that the collective library needs in each engine pod.
    pub host_mounts: Vec<String>,
    /// Tier of Volcano's network topology that is one domain.
    pub volcano_tier: u32,
    /// Name of the KAI Topology object.
    pub kai_topology: String,
    /// Super-pod annotations and labels of the Ascend device plugin (operator.md 6.1.3).
    pub super_pod: bool,
}

/// What an incarnation needs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Need {
    /// Namespace and name of the supernode: what it holds already is its own.
    pub me: Namespaced,
    /// Pods.
    pub pods: u32,
    /// Resource of each pod and how much of it.
    pub resource: Option<(String, i64)>,
    /// Of the pods.
    pub tolerations: Vec<Toleration>,
    /// Of the pods.
    pub node_selector: BTreeMap<String, String>,
    /// Nodes in quarantine.
    pub excluded_nodes: BTreeSet<String>,
    /// Domains in quarantine.
    pub excluded_domains: BTreeSet<String>,
    /// It gets a ComputeDomain.
    pub compute_domain: bool,
    /// Most ComputeDomains of a domain; 0 = no limit.
    pub per_clique: u32,
    /// Domain of the incarnation that it takes the place of: the first choice.
    pub preferred: Option<String>,
    /// Domains with a supernode of the same pool: the last choice.
    pub occupied: BTreeSet<String>,
    /// `occupied` domains are out of question (`decode.spread.policy: Require`).
    pub spread_required: bool,
    /// All its pods are there and wait behind our gate. Gangs that wait behind theirs and come after it by name do not
    /// count then: gangs that were promised one node too few would wait for each other, and none could go.
    pub gated: bool,
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// There is room in this domain; `None`: the scheduler decides (no domains, or nodes cannot be read).
    Fits(Option<Placement>),
    /// Not now.
    NotNow {
        /// Of operator.md 6.4, the most common.
        reason: &'static str,
        /// For people, with counts.
        message: String,
    },
    /// Never with these nodes: `LabelMissing` or `DomainTooSmall`.
    Never {
        /// `LabelMissing`, `DomainTooSmall`.
        reason: &'static str,
        /// For people, with the remedy.
        message: String,
    },
}

/// A domain as the pods of an incarnation are bound to it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Placement {
    /// The node label.
    pub label: String,
    /// Its value.
    pub domain: String,
}

/// The domains as an incarnation sees them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Survey {
    /// What to do.
    pub verdict: Verdict,
    /// Domains, the best first, at most 8.
    pub candidates: Vec<DomainCandidate>,
}
