//! Every backend's object and one dressed pod, for three sizes of a supernode, as the API server would be sent them:
//! compared with `tests/golden`.
//!
//! After a change that is meant: `cargo test -p deepinfer-planner --lib golden -- --ignored`, and review the diff.

use std::fs;
use std::path::PathBuf;

use k8s_openapi::api::core::v1::Pod;

use super::tests::supernode;
use super::*;
use crate::cluster::children::typed;
use crate::nodes::NativeVersion;
use crate::object::Object;
use crate::supernode::fabric;

/// Nodes and accelerators of each.
const SIZES: [(u32, u32); 3] = [(16, 4), (8, 8), (16, 8)];

struct Case {
    name: &'static str,
    backend: SchedulingBackend,
    profile: &'static str,
    vendor: Vendor,
    apis: Apis,
    queue: Option<&'static str>,
    compute_domain: bool,
}

fn cases() -> Vec<Case> {
    let case = |name, backend, profile| Case {
        name,
        backend,
        profile,
        vendor: Vendor::Nvidia,
        apis: Apis::default(),
        queue: None,
        compute_domain: false,
    };
    let native =
        |version, native_topology| Apis { native_gang: Some(version), native_topology, ..Apis::default() };
    let queue = Some("team-a");
    let alpha = NativeVersion::V1Alpha2;
    vec![
        case("builtin", SchedulingBackend::Builtin, "nvl72"),
        Case { compute_domain: true, ..case("builtin-computedomain", SchedulingBackend::Builtin, "nvl72") },
        Case { vendor: Vendor::Cpu, ..case("builtin-cpu", SchedulingBackend::Builtin, "none") },
        Case { apis: native(alpha, true), ..case("native-v1alpha2", SchedulingBackend::Native, "nvl72") },
        Case {
            apis: native(alpha, false),
            ..case("native-v1alpha2-without-topology", SchedulingBackend::Native, "nvl72")
        },
        Case {
            apis: native(NativeVersion::V1Beta1, true),
            ..case("native-v1beta1", SchedulingBackend::Native, "nvl72")
        },
        Case {
            apis: native(NativeVersion::V1Beta1, true),
            compute_domain: true,
            ..case("native-v1beta1-computedomain", SchedulingBackend::Native, "nvl72")
        },
        Case { queue, ..case("volcano", SchedulingBackend::Volcano, "nvl72") },
        Case { vendor: Vendor::Ascend, ..case("volcano-superpod", SchedulingBackend::Volcano, "superpod") },
        Case { queue, ..case("kai", SchedulingBackend::Kai, "nvl72") },
        Case { queue, ..case("kai-topology", SchedulingBackend::Kai, "racks") },
        Case { queue, ..case("kueue", SchedulingBackend::Kueue, "nvl72") },
    ]
}

fn profile(name: &str) -> Profile {
    let all = Profile::built_in();
    match name {
        "racks" => Profile { kai_topology: "racks".to_owned(), ..all["nvl72"].clone() },
        _ => all[name].clone(),
    }
}

/// A pod as the template gives it, as far as gangs look at it.
fn plain(supernode: &Supernode, resource: Option<&(String, i64)>) -> Value {
    let name = supernode.metadata.name.as_deref().unwrap_or_default();
    let limits = resource.map_or(json!({}), |(name, amount)| json!({name: amount.to_string()}));
    json!({
        "metadata": {"name": format!("{name}-00"), "labels": {"deepinfer.io/supernode": name}},
        "spec": {
            "restartPolicy": "Never",
            "containers": [{"name": "engine", "image": "deepinfer-agent:test", "resources": {"limits": limits}}],
        },
    })
}

/// What is written for a case, as one JSON file.
fn written(case: &Case, (nodes, per_node): (u32, u32)) -> String {
    let mut supernode = supernode(nodes, per_node, case.backend);
    supernode.spec.compute_domain = case.compute_domain.then_some(true);
    let resource = match case.vendor {
        Vendor::Nvidia => Some(("nvidia.com/gpu".to_owned(), i64::from(per_node))),
        Vendor::Ascend => Some(("huawei.com/npu".to_owned(), i64::from(per_node))),
        Vendor::Cpu => None,
    };
    let profile = profile(case.profile);
    let label = profile.domain_labels.first().cloned();
    let placement = label.map(|label| Placement { label, domain: "rack-a".to_owned() });
    let gang = Gang {
        supernode: &supernode,
        profile: &profile,
        placement: placement.as_ref(),
        excluded_nodes: &BTreeSet::from(["bad-node".to_owned()]),
        excluded_domains: &BTreeSet::from(["bad-rack".to_owned()]),
        priority_class: Some("serving"),
        queue: case.queue,
        resource: resource.as_ref(),
        vendor: case.vendor,
        apis: &case.apis,
    };
    let mut objects = Vec::new();
    if case.compute_domain {
        objects.push(Object::ComputeDomain(fabric::object(&supernode)).to_value());
    }
    objects.extend(object(&gang).map(|gang| Object::Gang(gang).to_value()));
    let mut pod = plain(&supernode, resource.as_ref());
    host_mounts(&profile, &mut pod);
    dress(&gang, &mut pod);
    if case.compute_domain {
        fabric::dress(gang.name(), &mut pod);
    }
    // Through the type, as it is sent: a field that the type does not know would be lost here.
    let pod: Pod = typed(pod);
    objects.push(Object::from(pod).to_value());
    serde_json::to_string_pretty(&sorted(Value::from(objects))).expect("JSON") + "\n"
}

/// Keys in order, whatever features JSON maps are built with.
fn sorted(value: Value) -> Value {
    match value {
        Value::Object(map) => {
            let map: std::collections::BTreeMap<String, Value> = map.into_iter().collect();
            map.into_iter().map(|(key, value)| (key, sorted(value))).collect()
        }
        Value::Array(list) => list.into_iter().map(sorted).collect(),
        other => other,
    }
}

fn files() -> Vec<(PathBuf, String)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut files = Vec::new();
    for case in cases() {
        for (nodes, per_node) in SIZES {
            let name = format!("{}-{nodes}x{per_node}.json", case.name);
            files.push((folder.join(name), written(&case, (nodes, per_node))));
        }
    }
    files
}

/// OP-010: the gang object of every backend asks for all pods of the supernode.
#[test]
fn objects_and_pods_of_every_backend_are_as_the_golden_files_say() {
    for (path, text) in files() {
        let known = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert_eq!(text, known, "{}", path.display());
    }
}

#[test]
fn no_golden_file_is_left_over() {
    let known: BTreeSet<PathBuf> = files().into_iter().map(|(path, _)| path).collect();
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    for entry in fs::read_dir(folder).expect("the folder of golden files") {
        let path = entry.expect("an entry").path();
        assert!(known.contains(&path), "{} is of no case", path.display());
    }
}

#[test]
#[ignore = "writes tests/golden anew"]
fn write_golden() {
    for (path, text) in files() {
        fs::create_dir_all(path.parent().expect("a folder")).expect("the folder of golden files");
        fs::write(&path, text).expect("a file to write");
    }
}
