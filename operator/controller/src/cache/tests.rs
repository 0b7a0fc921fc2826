//! The caches as their listener sees them.

use std::sync::Mutex;

use deepinfer_protocol::fleet::FleetView;
use serde_json::{Value, json};

use super::*;

#[derive(Clone, Default)]
struct Heard {
    woken: Arc<Mutex<Vec<String>>>,
    generations: Arc<Mutex<Vec<u64>>>,
    gone: Arc<Mutex<Vec<String>>>,
}

impl Listener for Heard {
    fn wake(&self, cluster: &Namespaced, _within: Duration) {
        self.woken.lock().expect("unpoisoned").push(cluster.1.clone());
    }

    fn committed(&self, _cluster: &ClusterRef, blueprint: &Blueprint) {
        let FleetView { generation, .. } = &blueprint.fleet;
        self.generations.lock().expect("unpoisoned").push(generation.0);
    }

    fn gone(&self, cluster: &Namespaced) {
        self.gone.lock().expect("unpoisoned").push(cluster.1.clone());
    }
}

impl Heard {
    fn woken(&self) -> Vec<String> {
        std::mem::take(&mut self.woken.lock().expect("unpoisoned"))
    }
}

fn caches() -> (Caches, Heard) {
    let heard = Heard::default();
    (Caches::new(false, Box::new(heard.clone())), heard)
}

fn key(name: &str) -> Namespaced {
    ("ns".to_owned(), name.to_owned())
}

/// A watch brings an object.
fn bring(caches: &Caches, kind: Kind, value: Value) {
    let object = Object::from_value(kind, value).expect("the test writes objects of the kind");
    let key = key(object.name());
    let version = version_of(object.meta()).expect("the test gives versions");
    caches.seen(Shelf::Kind(kind), &key, version, entry_of(object));
}

fn cluster(version: u64, generation: i64, model: &str, status: Value) -> Value {
    json!({
        "metadata": {"name": "c", "namespace": "ns", "uid": "u", "resourceVersion": version.to_string(), "generation": generation},
        "spec": {
            "accelerator": {"vendor": "cpu"},
            "engine": {"image": "i"},
            "model": {"name": "m", "source": {"uri": model}},
            "prefill": {"replicas": 1, "pod": {"templateRef": {"name": "base"}}},
            "decode": {"replicas": 1, "supernode": {"nodes": 1}},
        },
        "status": status,
    })
}

fn child(name: &str, version: u64) -> Value {
    json!({"metadata": {
        "name": name, "namespace": "ns", "uid": name, "resourceVersion": version.to_string(),
        "labels": {"deepinfer.io/cluster": "c"},
    }})
}

#[test]
fn a_cluster_is_woken_by_what_its_user_wants_and_not_by_its_status() {
    let (caches, heard) = caches();
    bring(&caches, Kind::Cluster, cluster(1, 1, "file:///m", Value::Null));
    assert_eq!(heard.woken(), ["c"]);
    bring(&caches, Kind::Cluster, cluster(2, 1, "file:///m", json!({"phase": "Serving"})));
    assert_eq!(heard.woken(), Vec::<String>::new());
    bring(&caches, Kind::Cluster, cluster(3, 2, "file:///n", json!({"phase": "Serving"})));
    assert_eq!(heard.woken(), ["c"]);
}

#[test]
fn a_cluster_is_woken_by_its_children_but_not_by_what_it_wrote_itself() {
    let (caches, heard) = caches();
    bring(&caches, Kind::Service, child("c-gateway", 5));
    assert_eq!(heard.woken(), ["c"]);
    let written = Object::from_value(Kind::Service, child("c-gateway", 6)).expect("a service");
    caches.wrote("ns", written);
    bring(&caches, Kind::Service, child("c-gateway", 6));
    assert_eq!(heard.woken(), Vec::<String>::new(), "the event of the own write says nothing new");
    caches.removed(Shelf::Kind(Kind::Service), &key("c-gateway"), "c-gateway");
    assert_eq!(heard.woken(), ["c"]);
}

#[test]
fn a_cluster_is_woken_by_what_plans_read_of_a_pod_and_not_by_the_rest() {
    let (caches, heard) = caches();
    let pod = |version: u64, phase: &str, image: &str| {
        let mut pod = child("c-decode-x-0", version);
        pod["spec"] = json!({"nodeName": "n1", "containers": [{"name": "engine", "image": "i"}]});
        pod["status"] = json!({"phase": phase, "containerStatuses": [{
            "name": "engine", "image": image, "imageID": image, "ready": false, "restartCount": 0,
        }]});
        pod
    };
    bring(&caches, Kind::Pod, pod(1, "Pending", ""));
    assert_eq!(heard.woken(), ["c"]);
    bring(&caches, Kind::Pod, pod(2, "Pending", "registry.example/deepinfer@sha256:0"));
    assert_eq!(heard.woken(), Vec::<String>::new());
    bring(&caches, Kind::Pod, pod(3, "Running", "registry.example/deepinfer@sha256:0"));
    assert_eq!(heard.woken(), ["c"]);
    caches.removed(Shelf::Kind(Kind::Pod), &key("c-decode-x-0"), "c-decode-x-0");
    assert_eq!(heard.woken(), ["c"]);
}

/// OP-068: changes of what a spec names (a PodTemplate, a claim) and of nodes trigger a reconcile.
#[test]
fn a_cluster_is_woken_by_templates_and_claims_that_it_names_and_by_nodes() {
    let (caches, heard) = caches();
    bring(&caches, Kind::Cluster, cluster(1, 1, "pvc://models/v41", Value::Null));
    heard.woken();
    let plain = |name: &str, version: u64| json!({"metadata": {"name": name, "namespace": "ns", "uid": name, "resourceVersion": version.to_string()}});
    bring(&caches, Kind::PodTemplate, plain("other", 2));
    assert!(heard.woken().is_empty());
    bring(&caches, Kind::PodTemplate, plain("base", 3));
    assert_eq!(heard.woken(), ["c"]);
    bring(&caches, Kind::Claim, plain("models", 4));
    assert_eq!(heard.woken(), ["c"]);
    let node = |version: u64, ready: &str| {
        let node = json!({"metadata": {"name": "n"}, "status": {"conditions": [{"type": "Ready", "status": ready}]}});
        let facts = pods::reduce_node(serde_json::from_value(node).expect("a node"));
        let cached = Cached::Node(Arc::new(facts));
        caches.seen(
            Shelf::Node,
            &(String::new(), "n".to_owned()),
            version,
            Some(Entry { version, uid: "n".into(), cluster: None, cached }),
        );
    };
    node(5, "True");
    assert_eq!(heard.woken(), ["c"]);
    node(6, "True");
    assert!(heard.woken().is_empty(), "a heartbeat is no news");
    node(7, "False");
    assert_eq!(heard.woken(), ["c"]);
    let kinds: Vec<Kind> =
        caches.family(&key("c"), false).objects.iter().map(|object| object.kind()).collect();
    assert_eq!(kinds, [Kind::Cluster, Kind::PodTemplate, Kind::Claim]);
}

#[test]
fn the_fleet_is_told_of_each_committed_blueprint_and_of_the_end() {
    let (caches, heard) = caches();
    bring(&caches, Kind::Cluster, cluster(1, 1, "file:///m", Value::Null));
    let mut blueprint = Blueprint::default();
    blueprint.fleet.generation = deepinfer_protocol::Generation(4);
    let mut map = child("c-blueprint", 2);
    let owner = json!({"apiVersion": "deepinfer.io/v1alpha1", "kind": "DeepInferCluster", "name": "c", "uid": "u", "controller": true});
    map["metadata"]["ownerReferences"] = json!([owner]);
    map["data"] = json!({commit::ITEM: serde_json::to_string(&blueprint).expect("JSON")});
    bring(&caches, Kind::ConfigMap, map);
    assert_eq!(*heard.generations.lock().expect("unpoisoned"), [4]);
    caches.removed(Shelf::Kind(Kind::Cluster), &key("c"), "u");
    assert_eq!(*heard.gone.lock().expect("unpoisoned"), ["c"]);
}

#[test]
fn a_secret_of_a_cluster_that_is_gone_is_not_remembered_for_the_next_of_its_name() {
    let (caches, _) = caches();
    bring(&caches, Kind::Cluster, cluster(1, 1, "file:///m", Value::Null));
    let secret = Object::from_value(Kind::Secret, child("c-agent-1", 2)).expect("a secret");
    caches.wrote("ns", secret);
    assert!(caches.get(Kind::Secret, "ns", "c-agent-1").is_some());
    caches.removed(Shelf::Kind(Kind::Cluster), &key("c"), "u");
    assert!(caches.get(Kind::Secret, "ns", "c-agent-1").is_none());
}
