//! ComputeDomains: the NVLink memory of one incarnation, made before its pods and gone with them (operator.md 6.3).
//!
//! Readiness comes from the self-test of the agents; what the driver says is for diagnosis only.

use std::collections::BTreeSet;
use std::fmt;

use deepinfer_crds::Supernode;
use deepinfer_crds::cluster::{ComputeDomainMode, Vendor};
use deepinfer_crds::names::label;
use serde_json::{Value, json};

use super::gang::apart;
use crate::cluster::children::typed;
use crate::naming::{self, Component};
use crate::nodes::{Apis, Nodes};
use crate::object::Foreign;
use crate::topology::{COMPUTE_DOMAIN_LABEL, Profile};

/// Seconds after which the remains of an old ComputeDomain put its nodes in quarantine.
pub(crate) const CLEANUP_SECONDS: i64 = 300;
/// Nodes that a message names.
const NAMED: usize = 3;
/// Name of the claim inside a pod.
pub(crate) const CLAIM: &str = "imex";

/// Whether new incarnations get a ComputeDomain.
///
/// # Errors
/// If it is required and cannot be had: names the API and the fix.
pub(crate) fn wanted(
    asked: Option<ComputeDomainMode>,
    vendor: Vendor,
    profile: &Profile,
    apis: &Apis,
) -> Result<bool, String> {
    match asked.unwrap_or(ComputeDomainMode::Auto) {
        ComputeDomainMode::Off => Ok(false),
        ComputeDomainMode::Auto => {
            Ok(vendor == Vendor::Nvidia && profile.compute_domain && apis.compute_domain)
        }
        ComputeDomainMode::Required if vendor != Vendor::Nvidia => {
            Err("spec.accelerator.computeDomain: Required is for vendor nvidia; set Auto or \"Off\""
                .to_owned())
        }
        ComputeDomainMode::Required if !apis.compute_domain => Err(
            "spec.accelerator.computeDomain: Required, and the API server does not serve ComputeDomains of \
             resource.nvidia.com/v1beta1: install the NVIDIA DRA driver with compute domains, or set Auto"
                .to_owned(),
        ),
        ComputeDomainMode::Required => Ok(true),
    }
}

/// The ComputeDomain of an incarnation: it has its name, so there is exactly one.
pub(crate) fn object(supernode: &Supernode) -> Foreign {
    let name = supernode.metadata.name.as_deref().unwrap_or_default();
    let mut labels = naming::labels(&supernode.spec.cluster_name, Some(Component::Decode));
    labels.insert(label::SUPERNODE.to_owned(), name.to_owned());
    Foreign {
        api_version: "resource.nvidia.com/v1beta1".to_owned(),
        kind: "ComputeDomain".to_owned(),
        metadata: typed(json!({"name": name, "labels": labels})),
        spec: json!({
            "numNodes": 0,
            "channel": {
                "resourceClaimTemplate": {"name": claim_template(name)},
                "allocationMode": "Single",
            },
        }),
        status: Value::Null,
    }
}

/// Lets a pod of the supernode `name` claim its channel. A node can be in one ComputeDomain only: pods stay apart.
pub(crate) fn dress(name: &str, pod: &mut Value) {
    push(
        &mut pod["spec"]["resourceClaims"],
        json!({"name": CLAIM, "resourceClaimTemplateName": claim_template(name)}),
    );
    push(&mut pod["spec"]["containers"][0]["resources"]["claims"], json!({"name": CLAIM}));
    apart(pod);
}

/// The template that the driver makes for a ComputeDomain.
fn claim_template(name: &str) -> String {
    format!("{name}-imex")
}

fn push(list: &mut Value, item: Value) {
    match list.as_array_mut() {
        Some(list) => list.push(item),
        None => *list = json!([item]),
    }
}

/// What the driver says of a ComputeDomain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// It is not there.
    Absent,
    /// It is being deleted.
    Ending,
    /// The driver has not said anything.
    Unknown,
    /// Some daemons are not ready.
    Forming {
        /// Names of the nodes, at most a few.
        waiting: Vec<String>,
        /// Nodes that have a daemon.
        members: usize,
    },
    /// All daemons are ready.
    Ready {
        /// Nodes that have a daemon.
        members: usize,
    },
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Absent => f.write_str("no ComputeDomain"),
            Self::Ending => f.write_str("the ComputeDomain is being deleted"),
            Self::Unknown => f.write_str("the driver has not looked at the ComputeDomain"),
            Self::Forming { waiting, members } => {
                write!(f, "the ComputeDomain has {members} nodes, not ready: {}", waiting.join(", "))
            }
            Self::Ready { members } => write!(f, "the ComputeDomain is ready on {members} nodes"),
        }
    }
}

/// Reads a live ComputeDomain.
pub(crate) fn state(live: Option<&Foreign>) -> State {
    let Some(live) = live else { return State::Absent };
    if live.metadata.deletion_timestamp.is_some() {
        return State::Ending;
    }
    if live.status.is_null() {
        return State::Unknown;
    }
    let nodes = live.status["nodes"].as_array().map(Vec::as_slice).unwrap_or_default();
    let ready = |node: &&Value| node["status"].as_str() == Some("Ready");
    let name = |node: &Value| node["name"].as_str().unwrap_or("?").to_owned();
    let waiting: Vec<String> = nodes.iter().filter(|node| !ready(node)).take(NAMED).map(name).collect();
    if waiting.is_empty() && live.status["status"].as_str() == Some("Ready") {
        State::Ready { members: nodes.len() }
    } else {
        State::Forming { waiting, members: nodes.len() }
    }
}

/// Whether nodes that an old incarnation used can be used again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cleanup {
    /// Nothing is left of the old ComputeDomain.
    Clean,
    /// Something is; look again.
    Waiting {
        /// For people.
        message: String,
    },
    /// It does not go away: event FabricCleanupStuck, and these nodes go into quarantine.
    Stuck {
        /// Where something is left.
        nodes: BTreeSet<String>,
        /// For people.
        message: String,
    },
}

/// Looks for what is left of the ComputeDomain `old`, whose supernode was deleted at `since`, on the nodes that a new
/// incarnation would use again.
pub(crate) fn cleanup(
    nodes: &Nodes,
    reused: &BTreeSet<String>,
    old: Option<&Foreign>,
    since: i64,
    now: i64,
) -> Cleanup {
    let marked = |name: &&String| {
        nodes.by_name.get(name.as_str()).is_some_and(|node| node.labels.contains_key(COMPUTE_DOMAIN_LABEL))
    };
    let marked: BTreeSet<String> = reused.iter().filter(marked).cloned().collect();
    if reused.is_empty() || (old.is_none() && marked.is_empty()) {
        return Cleanup::Clean;
    }
    let left = match old {
        Some(old) => {
            let name = old.metadata.name.as_deref().unwrap_or_default();
            format!("ComputeDomain {name} is not gone")
        }
        None => {
            let named: Vec<&str> = marked.iter().take(NAMED).map(String::as_str).collect();
            let more = marked.len().saturating_sub(NAMED);
            let more = if more > 0 { format!(" and {more} more nodes") } else { String::new() };
            format!("label {COMPUTE_DOMAIN_LABEL} is still on {}{more}", named.join(", "))
        }
    };
    if now - since <= CLEANUP_SECONDS {
        return Cleanup::Waiting { message: left };
    }
    let message = format!("{left} {CLEANUP_SECONDS} s after its supernode: see the driver's daemons there");
    let nodes = if marked.is_empty() { reused.clone() } else { marked };
    Cleanup::Stuck { nodes, message }
}

#[cfg(test)]
mod tests;
