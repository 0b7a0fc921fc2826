//! The choice of a backend and what pods carry, apart from the golden files.

use deepinfer_crds::PoolRole;
use deepinfer_crds::SupernodeSpec;
use k8s_openapi::api::core::v1::Pod;

use super::*;
use crate::cluster::children::typed;
use crate::nodes::NativeVersion;
use crate::object::Foreign;

pub(super) fn supernode(nodes: u32, per_node: u32, backend: SchedulingBackend) -> Supernode {
    let mut supernode = Supernode::new(
        "chat-decode-x7k2p",
        SupernodeSpec {
            cluster_name: "chat".to_owned(),
            pool_name: "chat-decode".to_owned(),
            role: PoolRole::Decode,
            revision: "chat-5b2f0a11".to_owned(),
            kv_epoch: "a1b2c3".to_owned(),
            nodes,
            accelerators_per_node: per_node,
            spare_nodes: None,
            backend,
            compute_domain: None,
            domain_preference: Vec::new(),
            plan_hash: None,
            replaces: None,
            drain: None,
            rank_map: Vec::new(),
        },
    );
    supernode.metadata.uid = Some("5d1c".to_owned());
    supernode
}

fn apis() -> Apis {
    Apis {
        native_gang: Some(NativeVersion::V1Alpha2),
        native_topology: true,
        volcano: true,
        kai: true,
        kueue: true,
        compute_domain: true,
    }
}

fn nvl72() -> Profile {
    Profile::built_in()["nvl72"].clone()
}

fn choose(queue: Option<&str>, apis: &Apis) -> SchedulingBackend {
    backend(None, queue, apis, false, &nvl72()).expect("Auto finds one").0
}

#[test]
fn auto_takes_the_first_backend_that_works() {
    let mut apis = apis();
    let queue = Some("team-a");
    assert_eq!(choose(queue, &apis), SchedulingBackend::Native);
    apis.native_gang = None;
    assert_eq!(choose(queue, &apis), SchedulingBackend::Kueue);
    assert_eq!(choose(None, &apis), SchedulingBackend::Volcano);
    apis.volcano = false;
    assert_eq!(choose(None, &apis), SchedulingBackend::Builtin);
    apis.kueue = false;
    assert_eq!(choose(queue, &apis), SchedulingBackend::Kai);
    apis.kai = false;
    assert_eq!(choose(queue, &apis), SchedulingBackend::Builtin);
}

#[test]
fn a_named_backend_that_is_not_there_is_an_error_with_the_fix() {
    let named = |name, queue| {
        backend(Some(name), queue, &Apis::default(), false, &nvl72()).expect_err("nothing is installed")
    };
    assert!(named(SchedulingBackend::Native, None).contains("GenericWorkload"));
    assert!(named(SchedulingBackend::Volcano, None).contains("scheduling.volcano.sh/v1beta1"));
    assert!(named(SchedulingBackend::Kai, None).contains("scheduling.run.ai/v2alpha2"));
    assert!(named(SchedulingBackend::Kueue, Some("q")).contains("install Kueue"));
    for name in [SchedulingBackend::Kai, SchedulingBackend::Kueue] {
        let why = backend(Some(name), None, &apis(), false, &nvl72()).expect_err("no queue");
        assert!(why.contains("spec.scheduling.queue"), "{why}");
    }
    let (chosen, note) = backend(Some(SchedulingBackend::Builtin), None, &Apis::default(), false, &nvl72())
        .expect("always there");
    assert_eq!((chosen, note), (SchedulingBackend::Builtin, None));
}

#[test]
fn without_the_right_to_read_nodes_only_schedulers_that_know_topology_are_chosen() {
    let blind = |apis: &Apis, profile: &Profile| backend(None, None, apis, true, profile);
    let mut apis = apis();
    assert_eq!(blind(&apis, &nvl72()).map(|(backend, _)| backend), Ok(SchedulingBackend::Native));
    apis.native_topology = false;
    assert_eq!(blind(&apis, &nvl72()).map(|(backend, _)| backend), Ok(SchedulingBackend::Volcano));
    let why = blind(&Apis::default(), &nvl72()).expect_err("Builtin needs nodes");
    assert!(why.contains("topology.readNodes"), "{why}");
    // No domains, nothing to choose.
    let none = Profile::built_in()["none"].clone();
    assert_eq!(blind(&Apis::default(), &none).map(|(backend, _)| backend), Ok(SchedulingBackend::Builtin));
}

#[test]
fn the_user_is_told_what_a_backend_does_not_do() {
    let apis = Apis { native_topology: false, ..apis() };
    let (_, note) = backend(None, Some("team-a"), &apis, false, &nvl72()).expect("Native");
    let note = note.expect("two things are missing");
    assert!(note.contains("TopologyAwareWorkloadScheduling") && note.contains("team-a"), "{note}");
}

#[test]
fn with_a_compute_domain_the_operator_chooses_the_domain_whatever_the_backend() {
    let profile = Profile { kai_topology: "racks".to_owned(), ..nvl72() };
    for backend in [
        SchedulingBackend::Native,
        SchedulingBackend::Volcano,
        SchedulingBackend::Kai,
        SchedulingBackend::Kueue,
    ] {
        assert!(chooses_domain(backend, false, &profile, &apis()), "{backend:?}");
        assert!(!chooses_domain(backend, true, &profile, &apis()), "{backend:?}");
    }
    assert!(!chooses_domain(SchedulingBackend::Builtin, false, &profile, &apis()));
}

/// What [`dress`] makes of an empty pod.
fn dressed(
    supernode: &Supernode,
    placement: Option<&Placement>,
    excluded: (&[&str], &[&str]),
    pod: &Value,
) -> Value {
    let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<String>>();
    let (nodes, domains) = (set(excluded.0), set(excluded.1));
    let (profile, apis) = (nvl72(), apis());
    let gang = Gang {
        supernode,
        profile: &profile,
        placement,
        excluded_nodes: &nodes,
        excluded_domains: &domains,
        priority_class: Some("serving"),
        queue: None,
        resource: None,
        vendor: Vendor::Nvidia,
        apis: &apis,
    };
    let mut pod = pod.clone();
    dress(&gang, &mut pod);
    let _: Pod = typed(pod.clone());
    pod
}

fn rack_a() -> Placement {
    Placement { label: "nvidia.com/gpu.clique".to_owned(), domain: "rack-a".to_owned() }
}

#[test]
fn affinity_is_merged_into_every_alternative_that_the_user_gave() {
    let own = json!({"metadata": {"name": "p"}, "spec": {"containers": [], "affinity": {"nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
            {"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]},
            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n9"]}]},
        ]},
    }}}});
    let supernode = supernode(16, 4, SchedulingBackend::Builtin);
    let excluded: (&[&str], &[&str]) = (&["bad-1", "bad-2"], &["rack-z"]);
    let pod = dressed(&supernode, Some(&rack_a()), excluded, &own);
    let required = &pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    let terms = required["nodeSelectorTerms"].as_array().expect("terms");
    assert_eq!(terms.len(), 2);
    for (term, own) in terms.iter().zip([(1, 0), (0, 1)]) {
        assert_eq!(term["matchExpressions"].as_array().map(Vec::len), Some(own.0 + 1), "{term}");
        assert_eq!(term["matchFields"].as_array().map(Vec::len), Some(own.1 + 2), "{term}");
    }
    // Not bound to a domain: neither label may name the one in quarantine.
    let pod =
        dressed(&supernode, None, excluded, &json!({"metadata": {"name": "p"}, "spec": {"containers": []}}));
    let required = &pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"];
    let wishes = required["nodeSelectorTerms"][0]["matchExpressions"].as_array().expect("wishes").clone();
    let keys: Vec<&str> = wishes.iter().filter_map(|wish| wish["key"].as_str()).collect();
    assert_eq!(keys, ["nvidia.com/gpu.clique", "deepinfer.io/nvlink-domain"]);
}

#[test]
fn a_pod_that_needs_no_domain_and_avoids_nothing_has_no_affinity() {
    let supernode = supernode(16, 4, SchedulingBackend::Builtin);
    let bare = json!({"metadata": {"name": "p"}, "spec": {"containers": []}});
    let pod = dressed(&supernode, None, (&[], &[]), &bare);
    assert!(pod["spec"]["affinity"].is_null(), "{pod}");
    assert_eq!(pod["spec"]["schedulingGates"], json!([{"name": GANG_GATE}]));
    assert_eq!(pod["spec"]["priorityClassName"], "serving");
}

#[test]
fn the_priority_that_a_pod_names_itself_stays() {
    let supernode = supernode(16, 4, SchedulingBackend::Builtin);
    let own = json!({"metadata": {"name": "p"}, "spec": {"containers": [], "priorityClassName": "own"}});
    assert_eq!(dressed(&supernode, None, (&[], &[]), &own)["spec"]["priorityClassName"], "own");
}

/// operator.md 6.1.3: what the collective library needs is in the pod, once.
#[test]
fn host_folders_of_a_profile_are_mounted_once() {
    let profile = Profile::built_in()["superpod"].clone();
    let mut pod = json!({"spec": {"containers": [{"name": "engine", "volumeMounts": [
        {"name": "mine", "mountPath": "/etc/hccn.conf"},
    ]}], "volumes": [{"name": "mine", "emptyDir": {}}]}});
    host_mounts(&profile, &mut pod);
    host_mounts(&profile, &mut pod);
    let mounts = pod["spec"]["containers"][0]["volumeMounts"].as_array().expect("mounts").clone();
    assert_eq!(mounts.len(), 2, "{mounts:?}");
    assert_eq!(mounts[1]["mountPath"], "/usr/local/Ascend/driver");
    assert_eq!(pod["spec"]["volumes"].as_array().map(Vec::len), Some(2));
}

fn unscheduled(reason: &str, message: &str) -> Pod {
    typed(json!({"metadata": {"name": "p"}, "spec": {"containers": []}, "status": {"conditions": [
        {"type": "PodScheduled", "status": "False", "reason": reason, "message": message},
    ]}}))
}

#[test]
fn the_message_of_most_pods_is_told_and_gates_are_not_news() {
    let gated = unscheduled("SchedulingGated", "gated");
    assert_eq!(scheduler_message(&[&gated], None), None);
    let (one, other) = (unscheduled("Unschedulable", "no GPU"), unscheduled("Unschedulable", "no CPU"));
    let pods = [&other, &one, &one, &gated];
    assert_eq!(scheduler_message(&pods, None).as_deref(), Some("no GPU"));
    let long = unscheduled("Unschedulable", &"ä".repeat(400));
    let told = scheduler_message(&[&long], None).expect("a message");
    assert!(told.len() <= 300 && told.ends_with("..."), "{told}");
}

#[test]
fn the_word_of_the_gang_object_comes_before_that_of_pods() {
    let gang = |status: Value| Foreign { status, ..Foreign::default() };
    let told =
        |status: Value| scheduler_message(&[&unscheduled("Unschedulable", "pod")], Some(&gang(status)));
    let native = json!({"conditions": [
        {"type": "PodGroupScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 placements"},
    ]});
    assert_eq!(told(native).as_deref(), Some("0/2 placements"));
    let volcano = json!({"conditions": [
        {"type": "Unschedulable", "status": "True", "reason": "NotEnoughResources", "message": "14/16 tasks"},
    ]});
    assert_eq!(told(volcano).as_deref(), Some("14/16 tasks"));
    let kai = json!({"schedulingConditions": [
        {"type": "UnschedulableOnNodePool", "status": "True", "reason": "", "message": "queue is full"},
    ]});
    assert_eq!(told(kai).as_deref(), Some("queue is full"));
    let placed = json!({"conditions": [{"type": "PodGroupScheduled", "status": "True"}]});
    assert_eq!(told(placed).as_deref(), Some("pod"));
}
