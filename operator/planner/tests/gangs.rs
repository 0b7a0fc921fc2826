//! Where a gang can go: examples named after what users saw elsewhere, and properties against a search that is as
//! simple as can be.

use std::collections::{BTreeMap, BTreeSet};

use deepinfer_planner::topology::{Need, Placement, Profile, Survey, Verdict, reason, survey};
use deepinfer_planner::{Labels, NodeFacts, Nodes, Promise};
use k8s_openapi::api::core::v1::{Taint, Toleration};
use proptest::prelude::*;

const GPU: &str = "nvidia.com/gpu";
const CLIQUE: &str = "nvidia.com/gpu.clique";

fn name(name: &str) -> (String, String) {
    ("serving".to_owned(), name.to_owned())
}

fn node(name: &str, domain: &str, gpus: i64) -> NodeFacts {
    NodeFacts {
        name: name.to_owned(),
        labels: [(CLIQUE, domain)].into_iter().collect(),
        ready: true,
        allocatable: BTreeMap::from([(GPU.to_owned(), gpus)]),
        ..NodeFacts::default()
    }
}

/// `count` nodes with `gpus` each in every domain.
fn racks(domains: &[&str], count: usize, gpus: i64) -> Nodes {
    let mut nodes = Nodes::default();
    for domain in domains {
        for at in 0..count {
            nodes.insert(node(&format!("{domain}-{at:02}"), domain, gpus));
        }
    }
    nodes
}

fn need(pods: u32, gpus: i64) -> Need {
    Need { me: name("me"), pods, resource: Some((GPU.to_owned(), gpus)), per_clique: 1, ..Need::default() }
}

/// Pods of `who` with `gpus` each on the first `count` nodes of a domain.
fn occupy(nodes: &mut Nodes, domain: &str, count: usize, gpus: i64, who: &str) {
    let of_domain = nodes.nodes_mut().filter(|node| node.labels.get(CLIQUE) == Some(domain));
    for node in of_domain.take(count) {
        *node.used.entry(GPU.to_owned()).or_default() += gpus;
        *node.occupants.entry(name(who)).or_default() += 1;
    }
}

fn profile(name: &str) -> Profile {
    Profile::built_in()[name].clone()
}

fn domain(survey: &Survey) -> Option<&str> {
    match &survey.verdict {
        Verdict::Fits(Some(placement)) => Some(&placement.domain),
        _ => None,
    }
}

fn blocked(survey: &Survey, domain: &str) -> BTreeMap<String, u32> {
    let candidate = survey.candidates.iter().find(|c| c.domain == domain).expect("a candidate");
    candidate.blocked_by.iter().map(|b| (b.reason.clone(), b.count)).collect()
}

#[test]
fn the_sizes_of_real_supernodes_fit_into_one_domain() {
    for (pods, gpus, rack) in [(16, 4, 18), (8, 8, 8), (16, 8, 16)] {
        let survey = survey(&racks(&["rack-a", "rack-b"], rack, gpus), &profile("nvl72"), &need(pods, gpus));
        assert_eq!(domain(&survey), Some("rack-a"), "{pods} nodes of {gpus}");
    }
}

#[test]
fn a_gang_goes_where_it_leaves_least_and_not_beside_another_of_its_pool() {
    let mut nodes = racks(&["rack-a", "rack-b", "rack-c"], 18, 4);
    occupy(&mut nodes, "rack-b", 2, 4, "other");
    let choose = |need: Need| domain(&survey(&nodes, &profile("nvl72"), &need)).map(str::to_owned);
    assert_eq!(choose(need(16, 4)).as_deref(), Some("rack-b"), "the fullest that fits");
    let occupied: BTreeSet<String> = ["rack-a", "rack-b"].map(str::to_owned).into();
    let beside = Need { occupied: occupied.clone(), ..need(16, 4) };
    assert_eq!(choose(beside.clone()).as_deref(), Some("rack-c"), "a domain of its own");
    let preferred = Need { preferred: Some("rack-a".to_owned()), ..beside };
    assert_eq!(choose(preferred).as_deref(), Some("rack-a"), "the domain of the one that it replaces");
    let all = occupied.into_iter().chain(["rack-c".to_owned()]).collect();
    let required = Need { occupied: all, spread_required: true, ..need(16, 4) };
    let found = survey(&nodes, &profile("nvl72"), &required);
    assert!(matches!(found.verdict, Verdict::NotNow { reason: reason::SPREAD_REQUIRED, .. }), "{found:?}");
}

#[test]
fn a_node_counts_once_under_the_first_reason_that_holds() {
    let mut nodes = racks(&["rack-a"], 8, 4);
    let change = |nodes: &mut Nodes, at: usize, change: &dyn Fn(&mut NodeFacts)| {
        change(nodes.node_mut(&format!("rack-a-{at:02}")).expect("a node"));
    };
    let taint =
        |key: &str| Taint { key: key.to_owned(), effect: "NoSchedule".to_owned(), ..Taint::default() };
    change(&mut nodes, 0, &|node| (node.ready, node.unschedulable) = (false, true));
    change(&mut nodes, 1, &|node| (node.unschedulable, node.taints) = (true, vec![taint("x")]));
    change(&mut nodes, 2, &|node| node.taints = vec![taint("maintenance")]);
    change(&mut nodes, 3, &|node| node.taints = vec![taint("gpu")]);
    change(&mut nodes, 5, &|node| node.used = BTreeMap::from([(GPU.to_owned(), 1)]));
    change(&mut nodes, 6, &|node| node.deleted = true);
    let tolerated = Toleration {
        key: Some("gpu".to_owned()),
        operator: Some("Exists".to_owned()),
        ..Toleration::default()
    };
    let need =
        Need { tolerations: vec![tolerated], excluded_nodes: ["rack-a-04".to_owned()].into(), ..need(7, 4) };
    let survey = survey(&nodes, &profile("nvl72"), &need);
    let expected = [
        (reason::NOT_READY, 2),
        (reason::CORDONED, 1),
        (reason::TAINT_NOT_TOLERATED, 1),
        (reason::QUARANTINED, 1),
        (reason::NOT_ENOUGH_FREE, 1),
    ];
    let expected: BTreeMap<String, u32> = expected.map(|(reason, n)| (reason.to_owned(), n)).into();
    assert_eq!(blocked(&survey, "rack-a"), expected);
    let Verdict::NotNow { reason, message } = &survey.verdict else { panic!("{survey:?}") };
    assert_eq!(*reason, reason::NOT_READY);
    assert!(
        message.starts_with("no domain has 7 nodes with 4 nvidia.com/gpu free now: rack-a has 2 of 8"),
        "{message}"
    );
}

/// Somebody takes a node between the pods of three gangs and the lifting of their gates: two of them still have room.
#[test]
fn gangs_behind_gates_that_have_one_node_too_few_do_not_wait_for_each_other() {
    let mut nodes = racks(&["rack-a"], 5, 4);
    let promise = |lifted| Promise {
        domain: "rack-a".to_owned(),
        pods: 2,
        lifted,
        resource: Some((GPU.to_owned(), 4)),
    };
    for gang in ["a", "b", "c"] {
        nodes.promised.insert(name(gang), promise(0));
    }
    let fits = |nodes: &Nodes, me: &str, gated| {
        let need = Need { me: name(me), gated, ..need(2, 4) };
        matches!(survey(nodes, &profile("nvl72"), &need).verdict, Verdict::Fits(_))
    };
    assert_eq!(["a", "b", "c"].map(|me| fits(&nodes, me, true)), [true, true, false]);
    assert!(!fits(&nodes, "0", false), "who has no pods yet takes nothing from those that wait");
    nodes.promised.insert(name("c"), promise(1));
    assert_eq!(["a", "b"].map(|me| fits(&nodes, me, true)), [true, false], "c may be bound at any moment");
    nodes.promised.insert(name("c"), promise(0));
    occupy(&mut nodes, "rack-a", 1, 4, "c");
    assert_eq!(["a", "b"].map(|me| fits(&nodes, me, true)), [true, false], "c has begun");
}

/// OP-083: without the label of feature discovery the user reads what to install, and a label of another source is as
/// good.
#[test]
fn a_missing_clique_label_is_named_with_its_remedy_and_the_fallback_label_works() {
    let mut nodes = racks(&["rack-a"], 4, 4);
    for node in nodes.nodes_mut() {
        node.labels = Labels::default();
    }
    let found = survey(&nodes, &profile("nvl72"), &need(4, 4));
    let Verdict::Never { reason: reason::LABEL_MISSING, message } = &found.verdict else {
        panic!("{found:?}")
    };
    assert!(message.contains(CLIQUE) && message.contains("GPU feature discovery"), "{message}");
    assert_eq!(blocked(&found, "(no label)"), BTreeMap::from([(reason::LABEL_MISSING.to_owned(), 4)]));
    for node in nodes.nodes_mut() {
        node.labels.insert("deepinfer.io/nvlink-domain", "by-hand");
    }
    let found = survey(&nodes, &profile("nvl72"), &need(4, 4));
    let placement =
        Placement { label: "deepinfer.io/nvlink-domain".to_owned(), domain: "by-hand".to_owned() };
    assert_eq!(found.verdict, Verdict::Fits(Some(placement)));
}

#[test]
fn a_supernode_that_no_domain_can_ever_hold_is_said_so_whoever_uses_the_nodes() {
    let mut nodes = racks(&["rack-a", "rack-b"], 12, 4);
    occupy(&mut nodes, "rack-a", 12, 4, "other");
    let found = survey(&nodes, &profile("nvl72"), &need(16, 4));
    let Verdict::Never { reason: reason::DOMAIN_TOO_SMALL, message } = &found.verdict else {
        panic!("{found:?}")
    };
    assert!(message.contains("the largest, rack-a, has 12"), "{message}");
    assert_eq!(blocked(&found, "rack-b"), BTreeMap::from([(reason::DOMAIN_TOO_SMALL.to_owned(), 12)]));
    // Larger pods than any node.
    let found = survey(&nodes, &profile("nvl72"), &need(1, 8));
    assert!(matches!(found.verdict, Verdict::Never { reason: reason::DOMAIN_TOO_SMALL, .. }), "{found:?}");
    // Nobody offers it at all.
    let need = Need { resource: Some(("huawei.com/npu".to_owned(), 8)), ..need(1, 8) };
    let found = survey(&nodes, &profile("superpod"), &need);
    let Verdict::Never { message, .. } = &found.verdict else { panic!("{found:?}") };
    assert!(message.contains("no node offers huawei.com/npu"), "{message}");
}

/// OP-029: a wish to stay together that cannot be granted is refused, not weakened; spanning hosts is asked for by
/// name.
#[test]
fn a_supernode_larger_than_a_host_needs_a_profile_that_may_span_domains() {
    let mut nodes = racks(&["-"], 8, 8);
    for node in nodes.nodes_mut() {
        let name = node.name.clone();
        node.labels.insert("kubernetes.io/hostname", &name);
    }
    let found = survey(&nodes, &profile("hgx"), &need(8, 8));
    let Verdict::Never { reason: reason::DOMAIN_TOO_SMALL, message } = &found.verdict else {
        panic!("{found:?}")
    };
    assert!(message.contains("allowCrossDomain"), "{message}");
    let spanning = Profile { allow_cross_domain: true, ..profile("hgx") };
    let found = survey(&nodes, &spanning, &need(8, 8));
    assert_eq!(found.verdict, Verdict::Fits(None));
    assert_eq!((found.candidates[0].domain.as_str(), found.candidates[0].free), ("any", 8));
    occupy(&mut nodes, "-", 1, 8, "other");
    let found = survey(&nodes, &spanning, &need(8, 8));
    assert!(matches!(found.verdict, Verdict::NotNow { reason: reason::NOT_ENOUGH_FREE, .. }), "{found:?}");
}

#[test]
fn without_domains_or_sight_the_scheduler_decides() {
    let cpu = Need { resource: None, ..need(64, 0) };
    assert_eq!(survey(&Nodes::default(), &profile("none"), &cpu).verdict, Verdict::Fits(None));
    let blind = Nodes { unreadable: true, ..Nodes::default() };
    assert_eq!(survey(&blind, &profile("nvl72"), &need(16, 4)).verdict, Verdict::Fits(None));
}

/// OP-125: the limit holds beside a supernode that runs, that is being made, and that still goes; raising it is a
/// choice of the administrator.
#[test]
fn two_compute_domains_share_a_clique_only_if_the_limit_is_raised() {
    let mut nodes = racks(&["rack-a"], 36, 4);
    nodes.fabrics.insert(name("other"));
    let need = Need { compute_domain: true, ..need(16, 4) };
    let verdict = |nodes: &Nodes, need: &Need| survey(nodes, &profile("nvl72"), need).verdict;
    assert!(matches!(verdict(&nodes, &need), Verdict::Fits(_)), "the other is elsewhere");
    let mut running = nodes.clone();
    occupy(&mut running, "rack-a", 16, 4, "other");
    let promise =
        Promise { domain: "rack-a".to_owned(), pods: 16, lifted: 0, resource: need.resource.clone() };
    let mut promised = nodes.clone();
    promised.promised.insert(name("other"), promise);
    let mut going = nodes.clone();
    for node in going.nodes_mut().take(21) {
        node.labels.insert("resource.nvidia.com/computeDomain", "uid");
    }
    for nodes in [&running, &promised, &going] {
        let verdict = verdict(nodes, &need);
        assert!(matches!(verdict, Verdict::NotNow { reason: reason::CLIQUE_BUSY, .. }), "{verdict:?}");
    }
    for per_clique in [2, 0] {
        let raised = Need { per_clique, ..need.clone() };
        assert!(matches!(verdict(&running, &raised), Verdict::Fits(_)));
        assert!(matches!(verdict(&promised, &raised), Verdict::Fits(_)));
    }
    let without = Need { compute_domain: false, ..need };
    assert!(matches!(verdict(&running, &without), Verdict::Fits(_)), "no ComputeDomain, no limit");
}

#[test]
fn what_an_incarnation_holds_itself_is_free_for_it() {
    let mut nodes = racks(&["rack-a"], 4, 4);
    occupy(&mut nodes, "rack-a", 3, 4, "me");
    let promise =
        Promise { domain: "rack-a".to_owned(), pods: 1, lifted: 0, resource: Some((GPU.to_owned(), 4)) };
    nodes.promised.insert(name("me"), promise.clone());
    let verdict = |nodes: &Nodes| survey(nodes, &profile("nvl72"), &need(4, 4)).verdict;
    assert!(matches!(verdict(&nodes), Verdict::Fits(_)));
    nodes.promised.insert(name("other"), promise);
    assert!(matches!(verdict(&nodes), Verdict::NotNow { .. }), "the last node is promised to another");
}

#[test]
fn a_status_shows_at_most_eight_domains_the_best_first() {
    let names: Vec<String> = (0..20).map(|at| format!("rack-{at:02}")).collect();
    let domains: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut nodes = racks(&domains, 4, 4);
    for (at, domain) in domains.iter().enumerate() {
        occupy(&mut nodes, domain, at % 4, 4, "other");
    }
    let found = survey(&nodes, &profile("nvl72"), &need(3, 4));
    assert_eq!(found.candidates.len(), 8);
    assert_eq!(domain(&found), Some(found.candidates[0].domain.as_str()));
    assert_eq!((found.candidates[0].domain.as_str(), found.candidates[0].free), ("rack-01", 3));
    let found = survey(&nodes, &profile("nvl72"), &Need { pods: 5, ..need(5, 4) });
    assert!(matches!(found.verdict, Verdict::Never { .. }));
}

/// A node with up to one thing that keeps pods away, and somebody on it or not.
fn any_node() -> impl Strategy<Value = (usize, i64, u8, i64)> {
    (0..4_usize, prop_oneof![Just(4_i64), Just(8)], 0..12_u8, 0..9_i64)
}

fn build(specs: &[(usize, i64, u8, i64)]) -> Nodes {
    let mut nodes = Nodes::default();
    for (at, (domain, gpus, fault, used)) in specs.iter().enumerate() {
        let mut node = node(&format!("n{at:02}"), ["a", "b", "c", ""][*domain], *gpus);
        match fault {
            0 => node.ready = false,
            1 => node.unschedulable = true,
            2 => node.deleted = true,
            3 => {
                node.taints =
                    vec![Taint { key: "t".to_owned(), effect: "NoExecute".to_owned(), ..Taint::default() }];
            }
            _ => {}
        }
        let used = (*used).min(*gpus);
        if used > 0 && used % 4 == 0 {
            node.used.insert(GPU.to_owned(), used);
        }
        nodes.insert(node);
    }
    nodes
}

/// Nodes of each domain that have what a pod needs, found the plain way.
fn free_by_domain(nodes: &Nodes, gpus: i64) -> BTreeMap<&str, u32> {
    let mut free = BTreeMap::new();
    for node in nodes.by_name.values() {
        let domain = node.labels.get(CLIQUE).expect("each has one");
        let healthy = node.ready && !node.unschedulable && !node.deleted && node.taints.is_empty();
        let left = node.allocatable[GPU] - node.used.get(GPU).copied().unwrap_or(0);
        if !domain.is_empty() {
            *free.entry(domain).or_default() += u32::from(healthy && left >= gpus);
        }
    }
    free
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_domain_is_found_exactly_if_there_is_one(
        specs in prop::collection::vec(any_node(), 0..24),
        pods in 1..8_u32,
        gpus in prop_oneof![Just(4_i64), Just(8)],
    ) {
        let nodes = build(&specs);
        let found = survey(&nodes, &profile("nvl72"), &need(pods, gpus));
        let free = free_by_domain(&nodes, gpus);
        match &found.verdict {
            Verdict::Fits(Some(place)) => prop_assert!(free[place.domain.as_str()] >= pods, "{found:?}"),
            Verdict::Fits(None) => prop_assert!(false, "there are domains"),
            Verdict::NotNow { .. } => prop_assert!(free.values().all(|free| *free < pods), "{found:?} {free:?}"),
            Verdict::Never { .. } => {
                // Never: not even with every node idle and well.
                let mut idle = nodes.clone();
                idle.by_name.retain(|_, node| !node.deleted);
                for node in idle.nodes_mut() {
                    (node.ready, node.unschedulable) = (true, false);
                    node.taints.clear();
                    node.used.clear();
                }
                let free = free_by_domain(&idle, gpus);
                prop_assert!(free.values().all(|free| *free < pods), "{found:?} {free:?}");
            }
        }
    }

    #[test]
    fn every_node_counts_once(specs in prop::collection::vec(any_node(), 0..24), pods in 1..8_u32) {
        let nodes = build(&specs);
        let found = survey(&nodes, &profile("nvl72"), &need(pods, 4));
        let blocked = |c: &deepinfer_crds::supernode::DomainCandidate| {
            c.blocked_by.iter().map(|b| b.count).sum::<u32>()
        };
        for candidate in &found.candidates {
            prop_assert_eq!(candidate.nodes, candidate.free + blocked(candidate), "{:?}", candidate);
        }
        let all: u32 = found.candidates.iter().map(|c| c.nodes).sum();
        prop_assert_eq!(all as usize, specs.len());
    }

    #[test]
    fn the_names_and_the_order_of_nodes_do_not_matter(
        specs in prop::collection::vec(any_node(), 0..24),
        shuffle in any::<u64>(),
        pods in 1..8_u32,
    ) {
        let mut other: Vec<_> = specs.clone();
        let mut state = shuffle;
        for at in (1..other.len()).rev() {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            other.swap(at, (state >> 33) as usize % (at + 1));
        }
        let look = |specs: &[_]| survey(&build(specs), &profile("nvl72"), &need(pods, 4));
        prop_assert_eq!(look(&specs), look(&other));
    }

    #[test]
    fn more_room_never_takes_a_place_away(
        specs in prop::collection::vec(any_node(), 0..24),
        more in prop::collection::vec(any_node(), 0..6),
        freed in 0..24_usize,
        pods in 1..8_u32,
    ) {
        let before = survey(&build(&specs), &profile("nvl72"), &need(pods, 4));
        let mut specs: Vec<_> = specs.into_iter().chain(more).collect();
        if let Some(node) = specs.get_mut(freed) {
            (node.2, node.3) = (9, 0);
        }
        let after = survey(&build(&specs), &profile("nvl72"), &need(pods, 4));
        let fits = |survey: &Survey| matches!(survey.verdict, Verdict::Fits(_));
        prop_assert!(!fits(&before) || fits(&after), "{:?}\n{:?}", before, after);
        let never = |survey: &Survey| matches!(survey.verdict, Verdict::Never { .. });
        prop_assert!(never(&before) || !never(&after) || specs.is_empty(), "{:?}\n{:?}", before, after);
    }
}
