//! When a ComputeDomain is wanted, what its driver says, and when its remains are gone.

use deepinfer_crds::cluster::SchedulingBackend;
use deepinfer_crds::{PoolRole, SupernodeSpec};

use super::*;
use crate::nodes::NodeFacts;

fn supernode(name: &str) -> Supernode {
    Supernode::new(
        name,
        SupernodeSpec {
            cluster_name: "chat".to_owned(),
            pool_name: "chat-decode".to_owned(),
            role: PoolRole::Decode,
            revision: "chat-1".to_owned(),
            kv_epoch: "a".to_owned(),
            nodes: 16,
            accelerators_per_node: 4,
            spare_nodes: None,
            backend: SchedulingBackend::Builtin,
            compute_domain: Some(true),
            domain_preference: Vec::new(),
            plan_hash: None,
            replaces: None,
            drain: None,
            rank_map: Vec::new(),
        },
    )
}

#[test]
fn a_compute_domain_is_made_where_it_is_served_and_means_something() {
    let all = Profile::built_in();
    let served = Apis { compute_domain: true, ..Apis::default() };
    let wanted = |asked, vendor, profile: &str, apis: &Apis| wanted(asked, vendor, &all[profile], apis);
    assert_eq!(wanted(None, Vendor::Nvidia, "nvl72", &served), Ok(true));
    assert_eq!(wanted(None, Vendor::Nvidia, "hgx", &served), Ok(false));
    assert_eq!(wanted(None, Vendor::Nvidia, "nvl72", &Apis::default()), Ok(false));
    assert_eq!(wanted(None, Vendor::Ascend, "superpod", &served), Ok(false));
    assert_eq!(wanted(Some(ComputeDomainMode::Off), Vendor::Nvidia, "nvl72", &served), Ok(false));
    assert_eq!(wanted(Some(ComputeDomainMode::Required), Vendor::Nvidia, "hgx", &served), Ok(true));
    let required = Some(ComputeDomainMode::Required);
    let why = wanted(required, Vendor::Nvidia, "nvl72", &Apis::default()).expect_err("not served");
    assert!(why.contains("install the NVIDIA DRA driver"), "{why}");
    wanted(required, Vendor::Cpu, "none", &served).expect_err("not NVIDIA");
}

/// OP-130: two incarnations never share a ComputeDomain or a claim template: both have their names.
#[test]
fn each_incarnation_has_a_compute_domain_of_its_own() {
    let (one, other) = (object(&supernode("chat-decode-a")), object(&supernode("chat-decode-b")));
    assert_eq!(one.metadata.name.as_deref(), Some("chat-decode-a"));
    assert_eq!(one.spec["channel"]["resourceClaimTemplate"]["name"], "chat-decode-a-imex");
    assert_ne!(one.spec, other.spec);
    let mut pod = json!({"spec": {"containers": [{"name": "engine", "resources": {"claims": [{"name": "rdma"}]}}],
        "resourceClaims": [{"name": "rdma", "resourceClaimTemplateName": "r"}]}});
    dress("chat-decode-a", &mut pod);
    assert_eq!(pod["spec"]["resourceClaims"][1]["resourceClaimTemplateName"], "chat-decode-a-imex");
    assert_eq!(
        pod["spec"]["containers"][0]["resources"]["claims"],
        json!([{"name": "rdma"}, {"name": "imex"}])
    );
}

#[test]
fn the_word_of_the_driver_is_read_for_diagnosis() {
    assert_eq!(state(None), State::Absent);
    let mut live = object(&supernode("s"));
    assert_eq!(state(Some(&live)), State::Unknown);
    live.status = json!({"status": "NotReady", "nodes": [
        {"name": "n1", "status": "Ready"}, {"name": "n2", "status": "NotReady"},
    ]});
    let forming = State::Forming { waiting: vec!["n2".to_owned()], members: 2 };
    assert_eq!(state(Some(&live)), forming);
    assert_eq!(forming.to_string(), "the ComputeDomain has 2 nodes, not ready: n2");
    live.status = json!({"status": "Ready", "nodes": [{"name": "n1", "status": "Ready"}]});
    assert_eq!(state(Some(&live)), State::Ready { members: 1 });
    live.metadata.deletion_timestamp = Some(crate::apply::time(1));
    assert_eq!(state(Some(&live)), State::Ending);
}

#[test]
fn nodes_are_used_again_when_nothing_is_left_of_the_old_domain_and_given_up_after_300_seconds() {
    let mut nodes = Nodes::default();
    for (name, labels) in [("n1", vec![COMPUTE_DOMAIN_LABEL]), ("n2", vec![])] {
        let labels = labels.into_iter().map(|label| (label, "uid-1")).collect();
        nodes.insert(NodeFacts { name: name.to_owned(), labels, ..NodeFacts::default() });
    }
    let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<String>>();
    let old = object(&supernode("old"));
    let look = |reused: &[&str], old: Option<&Foreign>, now| cleanup(&nodes, &set(reused), old, 1000, now);
    assert_eq!(look(&["n2"], None, 1001), Cleanup::Clean);
    assert_eq!(look(&[], Some(&old), 1001), Cleanup::Clean, "nothing is reused");
    assert!(matches!(look(&["n2"], Some(&old), 1300), Cleanup::Waiting { .. }), "the object is there");
    let Cleanup::Waiting { message } = look(&["n1", "n2"], None, 1300) else { panic!("the label is there") };
    assert!(message.contains("is still on n1"), "{message}");
    let Cleanup::Stuck { nodes: stuck, .. } = look(&["n1", "n2"], None, 1301) else { panic!("time is up") };
    assert_eq!(stuck, set(&["n1"]), "only where something is left");
    let Cleanup::Stuck { nodes: stuck, .. } = look(&["n2"], Some(&old), 1301) else { panic!("time is up") };
    assert_eq!(stuck, set(&["n2"]));
}
