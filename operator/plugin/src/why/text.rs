//! An explanation as prose.

use std::fmt::Write as _;

use deepinfer_crds::supernode::DomainCandidate;

use super::Explanation;
use super::pods::PodTrouble;
use deepinfer_crds::table::{columns, or_dash, span};

/// The text of an explanation.
pub fn text(why: &Explanation, now: i64) -> String {
    let mut text = format!("{}\n", why.headline);
    body(why, &mut text);
    for part in &why.parts {
        let _ = writeln!(text, "\n{}", part.headline);
        body(part, &mut text);
    }
    let mut help: Vec<&String> = why.help.iter().collect();
    for more in why.parts.iter().flat_map(|p| &p.help) {
        if !help.contains(&more) {
            help.push(more);
        }
    }
    if !help.is_empty() {
        text += "\nWhat would help:\n";
        for line in help {
            let _ = writeln!(text, "- {line}");
        }
    }
    if !why.events.is_empty() {
        text += "\nLast warnings:\n";
        for event in &why.events {
            let ago = if event.at == 0 { "-".to_owned() } else { span(now - event.at) };
            let _ = writeln!(text, "{ago:>5} ago  {}  {}: {}", event.object, event.reason, event.note);
        }
    }
    if !why.problem && why.causes.is_empty() {
        text += "Nothing is in its way.\n";
    }
    text
}

fn body(why: &Explanation, text: &mut String) {
    for cause in &why.causes {
        let _ = writeln!(text, "- {}: {}", cause.reason, cause.message);
    }
    if !why.candidates.is_empty() {
        text.push('\n');
        *text += &candidates(&why.candidates);
    }
    if !why.pods.is_empty() {
        text.push('\n');
        *text += &pods(&why.pods);
    }
}

fn candidates(list: &[DomainCandidate]) -> String {
    let row = |c: &DomainCandidate| {
        let blocked: Vec<String> = c.blocked_by.iter().map(|b| format!("{} {}", b.count, b.reason)).collect();
        vec![c.domain.clone(), c.nodes.to_string(), c.free.to_string(), or_dash(Some(&blocked.join(", ")))]
    };
    columns(&["DOMAIN", "NODES", "FREE", "BLOCKED BY"], &list.iter().map(row).collect::<Vec<_>>())
}

fn pods(list: &[PodTrouble]) -> String {
    let row = |pod: &PodTrouble| {
        vec![
            pod.pod.clone(),
            or_dash(pod.node.as_deref()),
            pod.reason.clone(),
            pod.restarts.to_string(),
            pod.message.clone(),
        ]
    };
    columns(&["POD", "NODE", "STATE", "RESTARTS", "MESSAGE"], &list.iter().map(row).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::super::{cluster, supernode};
    use super::*;
    use crate::view::fixture;

    #[test]
    fn a_supernode_that_waits_tells_where_it_looked_and_what_would_help() {
        let view = fixture::view();
        let said = text(&supernode::explain(&view, &view.supernodes[1]), view.now);
        let wanted = "\
v41-decode-x4k2b waits for 8 nodes in one domain; it was made 15m ago.
- Cordoned: keeps 1 node out, over all candidates
- NotEnoughFree: keeps 11 nodes out, over all candidates
- BackOff: the next try is in 40s, at 2026-05-01T10:20:40Z after 3 tries
- NodeLost: its last failure, 16m ago, pod v41-decode-99999-03 on node node-17: NotReady for 30 s
- Quarantined: node node-17 is avoided until 2026-05-01T16:00:00Z after 3 failures (DeviceUnhealthy)

DOMAIN   NODES   FREE   BLOCKED BY
rack-b   9       5      1 Cordoned, 3 NotEnoughFree
rack-a   9       1      8 NotEnoughFree

POD                   NODE   STATE             RESTARTS   MESSAGE
v41-decode-x4k2b-00   -      SchedulingGated   0          Scheduling is blocked due to non-empty scheduling gates

What would help:
- Cordoned: nodes are cordoned: kubectl uncordon NODE when their maintenance is over
- NotEnoughFree: domains are large enough but busy: wait for other workloads to end, remove them, or lower the replicas
- NodeLost: a node was lost: the supernode is rebuilt on others; repair or delete the node
- SchedulingGated: the pod waits until its whole gang can start
- Quarantined: nodes or domains are avoided after repeated failures: repair them; the quarantine ends by itself
";
        assert_eq!(said, wanted);
    }

    #[test]
    fn a_supernode_that_serves_has_nothing_in_its_way() {
        let mut view = fixture::view();
        view.pools.clear();
        let why = supernode::explain(&view, &view.supernodes[0]);
        assert!(!why.problem);
        let wanted = "v41-decode-bcdfg serves: 8/8 nodes are ready in domain rack-a, 12 sequences run.\nNothing is in its way.\n";
        assert_eq!(text(&why, view.now), wanted);
    }

    #[test]
    fn a_cluster_names_its_causes_its_parts_and_its_pods() {
        let view = fixture::view();
        let why = cluster::explain(&view);
        assert!(why.problem);
        let said = text(&why, view.now);
        for wanted in [
            "v41 does not serve: prefill 0/1, decode 1/2, gateway 2/2.\n",
            "- NotEnoughFree: Supernode/v41-decode-x4k2b has waited 15m: rack-b has 5 of 8 nodes free\n",
            "- CapacityBelowDesired: 1 of 2 supernodes serves\n",
            "v41-prefill-a81f03-1   node-3   CrashLoopBackOff   4          it ended with exit code 2: error: --checkpoint \
             /m: no config.json\n",
            "\nv41-decode-x4k2b waits for 8 nodes in one domain",
            "- CrashLoopBackOff: the container ends soon after its start: kubectl logs POD --previous\n",
        ] {
            assert!(said.contains(wanted), "{wanted}\nis not in\n{said}");
        }
        let helps = said.matches("- NotEnoughFree: domains are large enough").count();
        assert_eq!(helps, 1, "the same advice is given once: {said}");
    }

    #[test]
    fn a_cluster_that_no_operator_has_seen_points_to_the_operator() {
        let mut view = fixture::view();
        view.cluster.status = None;
        let said = text(&cluster::explain(&view), view.now);
        assert!(
            said.contains("no operator has looked at it yet")
                && said.contains("deployment/deepinfer-operator")
        );
    }
}
