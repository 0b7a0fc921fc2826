//! After binding: do all pods of a supernode sit in one domain? What schedulers got wrong shows here.

use std::collections::BTreeMap;

use super::Profile;
use super::profile::label_of;
use crate::nodes::Nodes;

/// Pods that a message names.
const NAMED: usize = 3;

/// The domain that all bound pods sit in. `bound` has the names of pods and of their nodes. `None` if there are no
/// domains, nodes cannot be read, or no node is known yet.
///
/// # Errors
/// If they sit in several domains, or in none: names pods and domains.
pub fn one_domain(
    nodes: &Nodes,
    profile: &Profile,
    bound: &[(String, String)],
) -> Result<Option<String>, String> {
    if nodes.unreadable || !profile.has_domains() {
        return Ok(None);
    }
    let mut domains: BTreeMap<Option<&str>, Vec<&str>> = BTreeMap::new();
    for (pod, node) in bound {
        // A node that is not known yet says nothing.
        let Some(facts) = nodes.by_name.get(node.as_str()) else { continue };
        let domain = label_of(profile, &facts.labels).map(|(_, domain)| domain);
        domains.entry(domain).or_default().push(pod);
    }
    let mut found = domains.keys();
    match (found.next(), found.next()) {
        (None, _) => Ok(None),
        (Some(Some(domain)), None) => Ok(Some((*domain).to_owned())),
        _ => Err(violation(profile, &domains)),
    }
}

fn violation(profile: &Profile, domains: &BTreeMap<Option<&str>, Vec<&str>>) -> String {
    let part = |(domain, pods): (&Option<&str>, &Vec<&str>)| {
        let mut pods = pods.clone();
        pods.sort_unstable();
        let more = pods.len().saturating_sub(NAMED);
        let named = pods[..pods.len().min(NAMED)].join(", ");
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        match domain {
            Some(domain) => format!("{named}{more} in {domain}"),
            None => format!("{named}{more} on nodes without {}", profile.domain_labels.join(" or ")),
        }
    };
    // The fewest pods first: they are the ones that stand apart.
    let mut parts: Vec<_> = domains.iter().collect();
    parts.sort_by_key(|(domain, pods)| (pods.len(), **domain));
    let parts: Vec<String> = parts.into_iter().map(part).collect();
    format!("the pods do not share one domain: {}", parts.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nodes::NodeFacts;

    fn nodes() -> Nodes {
        let mut nodes = Nodes::default();
        for (name, domain) in [("n1", "a"), ("n2", "a"), ("n3", "b"), ("n4", "")] {
            let labels = [("nvidia.com/gpu.clique", domain)].into_iter().collect();
            nodes.insert(NodeFacts { name: name.to_owned(), labels, ..NodeFacts::default() });
        }
        nodes
    }

    fn bound(nodes: &[&str]) -> Vec<(String, String)> {
        let pod = |(at, node): (usize, &&str)| (format!("p{at}"), (*node).to_owned());
        nodes.iter().enumerate().map(pod).collect()
    }

    /// OP-085: the constraint of a scheduler is not believed, it is checked.
    #[test]
    fn pods_that_were_bound_across_domains_are_named() {
        let (nodes, profile) = (nodes(), &Profile::built_in()["nvl72"]);
        let check = |names: &[&str]| one_domain(&nodes, profile, &bound(names));
        assert_eq!(check(&["n1", "n2"]), Ok(Some("a".to_owned())));
        assert_eq!(check(&[]), Ok(None));
        assert_eq!(check(&["n1", "unknown"]), Ok(Some("a".to_owned())));
        let split = check(&["n1", "n2", "n3"]).expect_err("two domains");
        assert_eq!(split, "the pods do not share one domain: p2 in b; p0, p1 in a");
        let bare = check(&["n1", "n2", "n4"]).expect_err("a node without label");
        assert!(bare.contains("p2 on nodes without nvidia.com/gpu.clique or"), "{bare}");
        check(&["n4"]).expect_err("nothing says that these share a fabric");
    }

    #[test]
    fn nothing_is_checked_where_there_are_no_domains_or_nodes_cannot_be_read() {
        let all = Profile::built_in();
        let split = bound(&["n1", "n3"]);
        assert_eq!(one_domain(&nodes(), &all["none"], &split), Ok(None));
        let cross = Profile { allow_cross_domain: true, ..all["hgx"].clone() };
        assert_eq!(one_domain(&nodes(), &cross, &split), Ok(None));
        let blind = Nodes { unreadable: true, ..nodes() };
        assert_eq!(one_domain(&blind, &all["nvl72"], &split), Ok(None));
    }
}
