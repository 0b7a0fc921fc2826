//! One node as an incarnation sees it: why its pod cannot go there now, and whether it ever could.

use k8s_openapi::api::core::v1::{Taint, Toleration};

use super::{Need, reason};
use crate::nodes::NodeFacts;

/// The driver's mark on nodes of a ComputeDomain; its value is the UID of that.
pub(crate) const COMPUTE_DOMAIN_LABEL: &str = "resource.nvidia.com/computeDomain";

/// Why no pod of the incarnation can be bound to the node now; `None` if one can.
pub(super) fn blocked(node: &NodeFacts, need: &Need) -> Option<&'static str> {
    if !selected(node, need) {
        return Some(reason::NOT_SELECTED);
    }
    if !node.ready || node.deleted {
        return Some(reason::NOT_READY);
    }
    if node.unschedulable {
        return Some(reason::CORDONED);
    }
    if node.taints.iter().any(|taint| !is_tolerated(taint, &need.tolerations)) {
        return Some(reason::TAINT_NOT_TOLERATED);
    }
    if need.excluded_nodes.contains(&node.name) {
        return Some(reason::QUARANTINED);
    }
    let mine = node.occupants.get(&need.me).copied().unwrap_or(0);
    if let Some((resource, amount)) = &need.resource {
        let used = node.used.get(resource).copied().unwrap_or(0) - i64::from(mine) * amount;
        if offered(node, resource) - used.max(0) < *amount {
            return Some(reason::NOT_ENOUGH_FREE);
        }
    }
    // What an old ComputeDomain left behind must go first.
    if need.compute_domain && mine == 0 && node.labels.contains_key(COMPUTE_DOMAIN_LABEL) {
        return Some(reason::CLIQUE_BUSY);
    }
    None
}

/// Whether the node could take a pod if nobody used it and nothing was wrong with it.
pub(super) fn could_ever(node: &NodeFacts, need: &Need) -> bool {
    let enough = |(resource, amount): &(String, i64)| offered(node, resource) >= *amount;
    !node.deleted && selected(node, need) && need.resource.as_ref().is_none_or(enough)
}

/// Whether the node has the accelerators at all, be they out of order.
pub(super) fn offers(node: &NodeFacts, need: &Need) -> bool {
    need.resource.as_ref().is_none_or(|(resource, _)| node.allocatable.contains_key(resource))
}

fn offered(node: &NodeFacts, resource: &str) -> i64 {
    node.allocatable.get(resource).copied().unwrap_or(0)
}

fn selected(node: &NodeFacts, need: &Need) -> bool {
    need.node_selector.iter().all(|(label, value)| node.labels.get(label) == Some(value.as_str()))
}

/// As the scheduler judges: taints that only prefer are no obstacle.
pub(crate) fn is_tolerated(taint: &Taint, tolerations: &[Toleration]) -> bool {
    taint.effect == "PreferNoSchedule" || tolerations.iter().any(|toleration| tolerates(toleration, taint))
}

fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let empty = |text: &Option<String>| text.as_deref().unwrap_or_default().is_empty();
    if !empty(&toleration.effect) && toleration.effect.as_deref() != Some(taint.effect.as_str()) {
        return false;
    }
    let any_key = empty(&toleration.key);
    if !any_key && toleration.key.as_deref() != Some(taint.key.as_str()) {
        return false;
    }
    match toleration.operator.as_deref() {
        Some("Exists") => true,
        None | Some("" | "Equal") => {
            let value = |text: &Option<String>| text.clone().unwrap_or_default();
            !any_key && value(&toleration.value) == value(&taint.value)
        }
        // Comparisons of numbers are alpha; the scheduler of a cluster without them refuses such pods.
        Some(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taint(key: &str, value: &str, effect: &str) -> Taint {
        let value = (!value.is_empty()).then(|| value.to_owned());
        Taint { key: key.to_owned(), value, effect: effect.to_owned(), time_added: None }
    }

    fn toleration(key: &str, operator: &str, value: &str, effect: &str) -> Toleration {
        let some = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        Toleration {
            key: some(key),
            operator: some(operator),
            value: some(value),
            effect: some(effect),
            toleration_seconds: None,
        }
    }

    #[test]
    fn taints_are_judged_as_the_scheduler_does() {
        let gpu = taint("gpu", "yes", "NoSchedule");
        let cases = [
            (toleration("gpu", "", "yes", ""), true),
            (toleration("gpu", "Equal", "yes", "NoSchedule"), true),
            (toleration("gpu", "Equal", "no", ""), false),
            (toleration("gpu", "Exists", "", ""), true),
            (toleration("gpu", "Exists", "", "NoExecute"), false),
            (toleration("", "Exists", "", ""), true),
            (toleration("", "", "yes", ""), false),
            (toleration("gpu", "Gt", "1", ""), false),
            (toleration("other", "Exists", "", ""), false),
        ];
        for (toleration, tolerated) in cases {
            assert_eq!(is_tolerated(&gpu, std::slice::from_ref(&toleration)), tolerated, "{toleration:?}");
        }
        assert!(is_tolerated(&taint("gpu", "", "PreferNoSchedule"), &[]));
    }
}
