//! `topology`: which nodes share a fabric, how much of it is free, and which supernodes sit in it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use anyhow::{Result, bail};
use deepinfer_crds::names::label;
use deepinfer_planner::topology::Profile;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::Api;
use kube::api::ListParams;
use serde::Serialize;

use crate::args::TopologyArgs;
use crate::client::Session;
use crate::output::{self, Outcome};
use crate::view::{self, label_of, name_of};
use deepinfer_crds::table::{columns, or_dash};

/// Resources that are accelerators.
const ACCELERATORS: [&str; 3] = ["nvidia.com/gpu", "huawei.com/npu", "huawei.com/Ascend910"];

/// A domain in numbers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Domain {
    /// Value of the label; `None` for nodes without it.
    pub name: Option<String>,
    /// Nodes in it.
    pub nodes: u32,
    /// Nodes that are Ready and not cordoned.
    pub usable: u32,
    /// Usable nodes without any accelerator in use.
    pub empty: u32,
    /// Accelerators of all nodes.
    pub accelerators: i64,
    /// Accelerators of usable nodes that no pod holds.
    pub free: i64,
    /// Supernodes with a pod in it.
    pub supernodes: BTreeSet<String>,
}

/// All domains of a profile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Map {
    /// Name of the profile.
    pub profile: String,
    /// Labels that name a domain, the first that is present wins.
    pub labels: Vec<String>,
    /// The domains by name; nodes without the label last.
    pub domains: Vec<Domain>,
    /// What the numbers leave out.
    pub remarks: Vec<String>,
}

/// Shows the domains.
///
/// # Errors
/// If the profile is unknown, or nodes cannot be read.
pub async fn run(session: &Session, args: &TopologyArgs) -> Result<Outcome> {
    let nodes = session.list(&session.cluster_wide::<Node>(), ListParams::default(), "nodes").await?;
    let (profile, labels) = profile(session, args, &nodes).await?;
    let mut remarks = Vec::new();
    let everywhere = Api::<Pod>::all(session.client.clone());
    let pods = match session.list(&everywhere, ListParams::default(), "pods").await {
        Ok(pods) => pods,
        // A person who sees one namespace only still learns where its supernodes are.
        Err(error) => {
            remarks.push(format!("only pods of namespace {} are counted ({error:#})", session.namespace));
            session.list(&session.api::<Pod>(), ListParams::default(), "pods").await?
        }
    };
    let mut map = survey(&profile, &labels, &nodes, &pods);
    map.remarks.extend(remarks);
    if args.output.is_some() {
        output::json(&map)?;
    } else {
        output::print(&text(&map))?;
    }
    Ok(Outcome::problem_if(map.domains.iter().all(|d| d.name.is_none())))
}

/// The name and labels of the profile that is meant.
async fn profile(session: &Session, args: &TopologyArgs, nodes: &[Node]) -> Result<(String, Vec<String>)> {
    let known = Profile::built_in();
    let wanted = match (&args.profile, &args.cluster) {
        (Some(name), _) => name.clone(),
        (None, Some(cluster)) => {
            let cluster = view::choose(session, Some(cluster)).await?;
            let accelerator = cluster.spec.accelerator;
            let per_node = accelerator.accelerators_per_node.unwrap_or(8);
            let by_vendor = || Profile::default_name(accelerator.vendor, per_node).to_owned();
            accelerator.topology_profile.clone().unwrap_or_else(by_vendor)
        }
        (None, None) => detect(&known, nodes),
    };
    match known.get(&wanted) {
        Some(profile) => Ok((wanted, profile.domain_labels.clone())),
        None => {
            let names: Vec<&str> = known.keys().map(String::as_str).collect();
            bail!("--profile {wanted} is not built in: there is {}", names.join(", "))
        }
    }
}

/// The profile with most nodes that have its labels; host names, which every node has, come last.
fn detect(known: &BTreeMap<String, Profile>, nodes: &[Node]) -> String {
    let score = |profile: &Profile| {
        let fabric = profile.domain_labels.iter().all(|l| l != "kubernetes.io/hostname");
        let labelled = nodes.iter().filter(|n| domain_of(n, &profile.domain_labels).is_some()).count();
        if fabric && !profile.domain_labels.is_empty() { labelled } else { 0 }
    };
    let best = known.iter().map(|(name, p)| (score(p), name)).filter(|(n, _)| *n > 0);
    // Of equals the first by name.
    best.max_by_key(|(n, name)| (*n, std::cmp::Reverse(*name)))
        .map_or_else(|| "hgx".to_owned(), |(_, n)| n.clone())
}

fn domain_of<'a>(node: &'a Node, labels: &[String]) -> Option<&'a str> {
    labels.iter().find_map(|label| label_of(&node.metadata, label).filter(|value| !value.is_empty()))
}

/// Counts, pure.
pub fn survey(profile: &str, labels: &[String], nodes: &[Node], pods: &[Pod]) -> Map {
    let mut held: BTreeMap<&str, i64> = BTreeMap::new();
    let mut sitting: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for pod in pods {
        let Some(node) = pod.spec.as_ref().and_then(|s| s.node_name.as_deref()) else { continue };
        let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
        if matches!(phase, Some("Succeeded" | "Failed")) {
            continue;
        }
        *held.entry(node).or_default() += asked(pod);
        if let Some(supernode) = label_of(&pod.metadata, label::SUPERNODE) {
            let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
            sitting.entry(node).or_default().insert(format!("{namespace}/{supernode}"));
        }
    }
    let mut domains: BTreeMap<Option<String>, Domain> = BTreeMap::new();
    for node in nodes {
        let name = if labels.is_empty() {
            Some("all nodes".to_owned())
        } else {
            domain_of(node, labels).map(str::to_owned)
        };
        let domain = domains.entry(name.clone()).or_insert_with(|| Domain { name, ..Domain::default() });
        let (total, used) = (offered(node), held.get(name_of(&node.metadata)).copied().unwrap_or(0));
        domain.nodes += 1;
        domain.accelerators += total;
        if usable(node) {
            domain.usable += 1;
            domain.empty += u32::from(used == 0);
            domain.free += (total - used).max(0);
        }
        domain.supernodes.extend(sitting.remove(name_of(&node.metadata)).unwrap_or_default());
    }
    let unlabelled = domains.remove(&None);
    let mut domains: Vec<Domain> = domains.into_values().collect();
    domains.extend(unlabelled);
    Map { profile: profile.to_owned(), labels: labels.to_vec(), domains, remarks: Vec::new() }
}

fn usable(node: &Node) -> bool {
    let cordoned = node.spec.as_ref().and_then(|s| s.unschedulable).unwrap_or(false);
    let mut conditions = node.status.iter().flat_map(|s| s.conditions.iter().flatten());
    !cordoned && conditions.any(|c| c.type_ == "Ready" && c.status == "True")
}

fn offered(node: &Node) -> i64 {
    let allocatable = node.status.as_ref().and_then(|s| s.allocatable.as_ref());
    let amount = |name: &&str| allocatable?.get(*name)?.0.parse::<i64>().ok();
    ACCELERATORS.iter().filter_map(amount).sum()
}

fn asked(pod: &Pod) -> i64 {
    let containers = pod.spec.iter().flat_map(|s| &s.containers);
    let limits = containers.filter_map(|c| c.resources.as_ref()?.limits.as_ref());
    limits.flat_map(|l| ACCELERATORS.iter().filter_map(|name| l.get(*name)?.0.parse::<i64>().ok())).sum()
}

/// The table.
pub fn text(map: &Map) -> String {
    let by = if map.labels.is_empty() {
        "all nodes are one domain".to_owned()
    } else {
        map.labels.join(", then ")
    };
    let mut text = format!("profile {}: {by}\n\n", map.profile);
    let row = |d: &Domain| {
        let supernodes: Vec<&str> = d.supernodes.iter().map(String::as_str).collect();
        vec![
            d.name.clone().unwrap_or_else(|| "(no label)".to_owned()),
            d.nodes.to_string(),
            d.usable.to_string(),
            d.empty.to_string(),
            format!("{}/{}", d.free, d.accelerators),
            or_dash(Some(&supernodes.join(", "))),
        ]
    };
    let head = ["DOMAIN", "NODES", "USABLE", "EMPTY", "FREE ACCELERATORS", "SUPERNODES"];
    text += &columns(&head, &map.domains.iter().map(row).collect::<Vec<_>>());
    if let Some(without) = map.domains.iter().find(|d| d.name.is_none()) {
        let _ = writeln!(
            text,
            "\n{} without the label take part in no domain: no supernode is placed on them",
            deepinfer_crds::table::count(without.nodes, "node")
        );
    }
    for remark in &map.remarks {
        let _ = writeln!(text, "\n{remark}");
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn node(name: &str, clique: Option<&str>, ready: bool, cordoned: bool) -> Node {
        let labels = clique.map_or_else(|| json!({}), |c| json!({"nvidia.com/gpu.clique": c}));
        let object = json!({
            "metadata": {"name": name, "labels": labels}, "spec": {"unschedulable": cordoned},
            "status": {
                "allocatable": {"nvidia.com/gpu": "4", "cpu": "8"},
                "conditions": [{"type": "Ready", "status": if ready { "True" } else { "Unknown" }}],
            },
        });
        serde_json::from_value(object).expect("a node")
    }

    fn pod(node: &str, supernode: &str, phase: &str) -> Pod {
        let object = json!({
            "metadata": {"name": "p", "namespace": "serving", "labels": {"deepinfer.io/supernode": supernode}},
            "spec": {"nodeName": node, "containers": [
                {"name": "engine", "resources": {"limits": {"nvidia.com/gpu": "4"}}}]},
            "status": {"phase": phase},
        });
        serde_json::from_value(object).expect("a pod")
    }

    #[test]
    fn domains_count_what_a_gang_could_get() {
        let nodes = [
            node("a1", Some("rack-a"), true, false),
            node("a2", Some("rack-a"), true, false),
            node("b1", Some("rack-b"), false, false),
            node("b2", Some("rack-b"), true, true),
            node("c1", None, true, false),
        ];
        let pods = [pod("a1", "v41-decode-bcdfg", "Running"), pod("a2", "old", "Succeeded")];
        let labels = ["nvidia.com/gpu.clique".to_owned()];
        let map = survey("nvl72", &labels, &nodes, &pods);
        let wanted = "\
profile nvl72: nvidia.com/gpu.clique

DOMAIN       NODES   USABLE   EMPTY   FREE ACCELERATORS   SUPERNODES
rack-a       2       2        1       4/8                 serving/v41-decode-bcdfg
rack-b       2       0        0       0/8                 -
(no label)   1       1        1       4/4                 -

1 node without the label take part in no domain: no supernode is placed on them
";
        assert_eq!(text(&map), wanted);
    }

    #[test]
    fn the_profile_is_found_by_the_labels_that_nodes_have() {
        let known = Profile::built_in();
        let labelled = [node("a1", Some("rack-a"), true, false)];
        assert!(detect(&known, &labelled).starts_with("nvl"), "{}", detect(&known, &labelled));
        assert_eq!(detect(&known, &[node("c1", None, true, false)]), "hgx");
    }
}
