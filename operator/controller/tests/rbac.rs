//! The operator's role (operator.md 12.5) against the audit log of a real API server: nothing is refused, and no verb is
//! there for nothing.

use std::collections::BTreeSet;
use std::time::Duration;

use deepinfer_controlplane::nodes::NodeSpec;
use deepinfer_controlplane::pretend::{Agents, PretendNodes, PretendOptions};
use deepinfer_controlplane::{ControlPlane, Operator, OperatorOptions, Options, install};
use deepinfer_crds::names::{manager, rbac as names};
use deepinfer_operator::manifests::rbac;
use k8s_openapi::api::rbac::v1::PolicyRule;

/// Group, resource with subresource, verb.
type Right = (String, String, String);

/// Group, resources, verbs, and why.
type Rare = (&'static str, &'static [&'static str], &'static [&'static str], &'static str);

const WHOSE: &str = "after AlreadyExists or a conflict, to see whose object is there";
/// The audit log has such a call as a patch.
const APPLIED: &str = "asked for by the API server when an apply makes an object";
const GIVEN_UP: &str = "a supernode that failed too often gives everything back";

/// Rights that this test does not see used, and when they are.
const RARE: &[Rare] = &[
    (
        "deepinfer.io",
        &["deepinferclusters/finalizers", "deepinferpools/finalizers", "supernodes/finalizers"],
        &["update"],
        "never called: the admission plugin OwnerReferencesPermissionEnforcement asks for it where it is on",
    ),
    ("deepinfer.io", &["deepinferclusters", "supernodes"], &["get"], WHOSE),
    ("deepinfer.io", &["deepinferpools"], &["create"], APPLIED),
    ("", &["services", "serviceaccounts"], &["create"], APPLIED),
    ("apps", &["deployments"], &["create"], APPLIED),
    ("policy", &["poddisruptionbudgets"], &["create"], APPLIED),
    ("networking.k8s.io", &["networkpolicies"], &["create"], APPLIED),
    ("", &["pods", "configmaps"], &["get"], WHOSE),
    ("apps", &["controllerrevisions"], &["get"], WHOSE),
    ("apps", &["controllerrevisions"], &["delete"], "more revisions than revisionHistoryLimit"),
    ("apps", &["deployments"], &["delete"], "a new kv-epoch, or workers that have become gangs"),
    ("scheduling.k8s.io", &["podgroups"], &["get"], WHOSE),
    ("scheduling.k8s.io", &["podgroups"], &["delete"], GIVEN_UP),
    ("scheduling.volcano.sh", &["podgroups"], &["get"], WHOSE),
    ("scheduling.volcano.sh", &["podgroups"], &["delete"], GIVEN_UP),
    ("scheduling.run.ai", &["podgroups"], &["get"], WHOSE),
    ("scheduling.run.ai", &["podgroups"], &["delete"], GIVEN_UP),
    ("resource.nvidia.com", &["computedomains"], &["get"], WHOSE),
    ("resource.nvidia.com", &["computedomains"], &["delete"], GIVEN_UP),
    ("events.k8s.io", &["events"], &["patch"], "the same event again within six minutes"),
];

/// Kinds of other people's schedulers and drivers, as far as the API server must know them.
fn foreign_kinds() -> String {
    let kinds = [
        ("scheduling.volcano.sh", "v1beta1", "podgroups", "PodGroup"),
        ("scheduling.run.ai", "v2alpha2", "podgroups", "PodGroup"),
        ("resource.nvidia.com", "v1beta1", "computedomains", "ComputeDomain"),
    ];
    let one = |(group, version, plural, kind): (&str, &str, &str, &str)| {
        format!(
            "---\napiVersion: apiextensions.k8s.io/v1\nkind: CustomResourceDefinition\n\
             metadata: {{name: {plural}.{group}}}\nspec:\n  group: {group}\n  scope: Namespaced\n  \
             names: {{plural: {plural}, kind: {kind}, singular: {singular}}}\n  versions:\n  - name: {version}\n    \
             served: true\n    storage: true\n    subresources: {{status: {{}}}}\n    schema:\n      \
             openAPIV3Schema: {{type: object, x-kubernetes-preserve-unknown-fields: true}}\n",
            singular = kind.to_lowercase(),
        )
    };
    kinds.into_iter().map(one).collect()
}

/// One worker and one supernode of two machines with four accelerators.
fn cluster(name: &str, namespace: &str, backend: &str, compute_domain: &str, image: &str) -> String {
    let queue = if backend == "Kai" { ", queue: main" } else { "" };
    format!(
        "---\napiVersion: deepinfer.io/v1alpha1\nkind: DeepInferCluster\n\
         metadata: {{name: {name}, namespace: {namespace}}}\nspec:\n  \
         accelerator: {{vendor: nvidia, acceleratorsPerNode: 4, topologyProfile: nvl72, computeDomain: \"{compute_domain}\"}}\n  \
         engine: {{image: \"deepinfer-agent:{image}\"}}\n  \
         model: {{name: tiny, source: {{uri: \"file:///models/tiny\"}}}}\n  \
         prefill: {{replicas: 1, drain: {{handoff: None}}}}\n  \
         decode:\n    replicas: 1\n    supernode: {{nodes: 2, minReadySeconds: 0}}\n    \
         experts: {{mode: \"Off\"}}\n    drain: {{timeoutSeconds: 5, handoff: None}}\n  \
         gateway: {{replicas: 1}}\n  scheduling: {{backend: {backend}{queue}}}\n"
    )
}

fn rights(rules: &[PolicyRule]) -> BTreeSet<Right> {
    let mut rights = BTreeSet::new();
    for rule in rules {
        for group in rule.api_groups.iter().flatten() {
            for resource in rule.resources.iter().flatten() {
                for verb in &rule.verbs {
                    rights.insert((group.clone(), resource.clone(), verb.clone()));
                }
            }
        }
    }
    rights
}

fn rare() -> BTreeSet<Right> {
    let mut all = BTreeSet::new();
    for (group, resources, verbs, _) in RARE {
        for resource in *resources {
            for verb in *verbs {
                all.insert(((*group).to_owned(), (*resource).to_owned(), (*verb).to_owned()));
            }
        }
    }
    all
}

/// Waits until a cluster says so in a condition.
async fn wait(plane: &ControlPlane, namespace: &str, condition: &str, cluster: &str) {
    let condition = format!("--for={condition}");
    let object = format!("deepinferclusters/{cluster}");
    let arguments = ["wait", &condition, "-n", namespace, &object, "--timeout=120s"];
    if let Err(error) = plane.kubectl_ok(&arguments).await {
        let all = plane
            .kubectl_ok(&["get", "deepinfer,pods,podgroups,events", "-n", namespace, "-o", "wide"])
            .await;
        let cluster = plane.kubectl_ok(&["get", &object, "-n", namespace, "-o", "yaml"]).await;
        panic!("{error:#}\n{}\n{}", all.unwrap_or_default(), cluster.unwrap_or_default());
    }
}

/// Waits until `kubectl get` of something prints a line.
async fn appears(plane: &ControlPlane, namespace: &str, what: &str) {
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    loop {
        let text = plane.kubectl_ok(&["get", what, "-n", namespace, "-o", "name"]).await.unwrap_or_default();
        if !text.trim().is_empty() {
            return;
        }
        assert!(std::time::Instant::now() < deadline, "{what} did not appear");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Supernodes of cluster `a`, with a space between two.
async fn supernodes(plane: &ControlPlane, namespace: &str) -> String {
    let names = "jsonpath={.items[*].metadata.name}";
    let arguments = ["get", "supernodes", "-n", namespace, "-l", "deepinfer.io/cluster=a", "-o", names];
    plane.kubectl_ok(&arguments).await.expect("supernodes can be listed").trim().to_owned()
}

/// Waits until cluster `a` has one supernode, another one than `before`. A condition could have come and gone by now.
async fn replaced(plane: &ControlPlane, namespace: &str, before: &str) {
    let deadline = std::time::Instant::now() + Duration::from_secs(120);
    loop {
        let now = supernodes(plane, namespace).await;
        if now != before && !now.is_empty() && !now.contains(' ') {
            return;
        }
        assert!(std::time::Instant::now() < deadline, "{before} is not replaced: {now}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// Waits until an event of this reason was written.
async fn appears_event(plane: &ControlPlane, namespace: &str, reason: &str) {
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    let selector = format!("reason={reason}");
    let arguments = ["get", "events", "-n", namespace, "-o", "name", "--field-selector", &selector];
    while plane.kubectl_ok(&arguments).await.unwrap_or_default().trim().is_empty() {
        assert!(std::time::Instant::now() < deadline, "no event {reason}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_role_is_enough_from_apply_to_delete_and_each_verb_of_it_is_used() {
    if deepinfer_controlplane::skipped() {
        return;
    }
    let plane = ControlPlane::start(Options::audited()).await.unwrap();
    install::all(&plane).await.unwrap();
    plane.apply_yaml(&foreign_kinds()).await.unwrap();
    // Room for all: two pods of a supernode and a worker of each of four clusters.
    let machines = (0..24).map(|i| {
        NodeSpec::new(format!("gpu-{i}"))
            .label("nvidia.com/gpu.clique", format!("rack-{}", i / 6))
            .resource("nvidia.com/gpu", "4")
    });
    let kubeconfig = plane.kubeconfig().unwrap();
    let nodes =
        PretendNodes::start(plane.client(), &kubeconfig, machines.collect(), &PretendOptions::default())
            .await;
    let nodes = nodes.unwrap();
    nodes.wait_ready(Duration::from_secs(60)).await.unwrap();
    let agents = Agents::start(plane.client()).await.unwrap();
    let options = OperatorOptions::default()
        .flag(format!("--agent-proxy={}", agents.address()))
        .flag("--probe-seconds=2")
        .flag("--agent-first-seconds=0.5");
    let operator = Operator::start(&plane, options).await.unwrap();
    operator.wait_ready(Duration::from_secs(60)).await.unwrap();
    let namespace = plane.namespace("rights").await.unwrap();

    // Create and serve.
    plane.apply_yaml(&cluster("a", &namespace, "Builtin", "Off", "one")).await.unwrap();
    wait(&plane, &namespace, "condition=Ready", "a").await;
    // What the other backends and the driver of ComputeDomains get; nobody schedules these.
    plane.apply_yaml(&cluster("b", &namespace, "Native", "Required", "one")).await.unwrap();
    plane.apply_yaml(&cluster("c", &namespace, "Volcano", "Off", "one")).await.unwrap();
    plane.apply_yaml(&cluster("d", &namespace, "Kai", "Off", "one")).await.unwrap();
    for what in [
        "computedomains.resource.nvidia.com",
        "podgroups.scheduling.k8s.io",
        "podgroups.scheduling.volcano.sh",
        "podgroups.scheduling.run.ai",
    ] {
        appears(&plane, &namespace, what).await;
    }
    // A hand edit is undone, and the event names who did it.
    for edit in [
        ["patch", "deployment/a-gateway", "-p", "{\"spec\":{\"replicas\":3}}"],
        ["patch", "service/a-gateway", "-p", "{\"spec\":{\"selector\":{\"a\":\"b\"}}}"],
    ] {
        plane.kubectl_ok(&[&edit[..], &["-n", &namespace]].concat()).await.unwrap();
    }
    appears_event(&plane, &namespace, "DriftCorrected").await;
    let first = supernodes(&plane, &namespace).await;
    assert_eq!(first.split(' ').count(), 1, "{first}");
    // Edit: a field that shapes pods, so that a revision is made and a supernode is replaced.
    plane.apply_yaml(&cluster("a", &namespace, "Builtin", "Off", "two")).await.unwrap();
    replaced(&plane, &namespace, &first).await;
    wait(&plane, &namespace, "condition=Ready", "a").await;
    // Delete.
    for name in ["a", "b", "c", "d"] {
        let object = format!("deepinferclusters/{name}");
        plane.kubectl_ok(&["delete", &object, "-n", &namespace, "--timeout=120s"]).await.unwrap();
    }
    // Watches are in the log when they end.
    operator.terminate(Duration::from_secs(20)).await.unwrap();

    let audit = plane.audit().unwrap();
    let ours: Vec<_> = audit.into_iter().filter(|event| event.user == names::OPERATOR_USER).collect();
    let refused: Vec<_> = ours.iter().filter(|event| event.code == 403).collect();
    assert!(refused.is_empty(), "refused: {refused:#?}");
    let used: BTreeSet<Right> = ours
        .iter()
        .filter(|event| !event.resource.is_empty())
        .map(|event| {
            let slash = if event.subresource.is_empty() { "" } else { "/" };
            let resource = format!("{}{slash}{}", event.resource, event.subresource);
            (event.group.clone(), resource, event.verb.clone())
        })
        .collect();
    let given = rights(&[rbac::namespaced_rules(), rbac::own_rules(), rbac::global_rules(true)].concat());
    let useless: Vec<&Right> = given.difference(&used).filter(|right| !rare().contains(*right)).collect();
    assert!(useless.is_empty(), "{} gives rights that nothing uses: {useless:#?}", manager::MAIN);
    drop((nodes, agents));
}

/// OP-052: nothing depends on the default namespace, and an operator of some namespaces has no rights in another.
#[tokio::test(flavor = "multi_thread")]
async fn an_operator_in_an_odd_namespace_works_with_roles_in_two_others_and_leaves_the_rest_alone() {
    let Some(plane) = deepinfer_controlplane::shared().await else { return };
    install::crds(plane).await.unwrap();
    let home = plane.namespace("odd-home").await.unwrap();
    let watched = [plane.namespace("odd-work").await.unwrap(), plane.namespace("odd-work").await.unwrap()];
    let elsewhere = plane.namespace("odd-else").await.unwrap();
    let choices = install::InstallOptions {
        namespace: home.clone(),
        policies: true,
        watch_namespaces: watched.to_vec(),
    };
    install::operator(plane, &choices).await.unwrap();
    let options = OperatorOptions { namespace: home.clone(), ..OperatorOptions::default() }
        .flag(format!("--watch-namespace={}", watched.join(",")));
    let operator = Operator::start(plane, options).await.unwrap();
    operator.wait_ready(Duration::from_secs(60)).await.unwrap();
    for namespace in watched.iter().chain([&elsewhere]) {
        plane.apply_yaml(&cluster("a", namespace, "Auto", "Off", "one")).await.unwrap();
    }
    for namespace in &watched {
        appears(plane, namespace, "supernodes").await;
        wait(plane, namespace, "jsonpath={.status.observedGeneration}=1", "a").await;
    }
    let logs = operator.logs();
    assert!(!logs.contains("403") && !logs.contains("orbidden"), "{logs}");
    let path =
        ["get", "deepinferclusters/a", "-n", &elsewhere, "-o", "jsonpath={.status}{.metadata.finalizers}"];
    assert_eq!(plane.kubectl_ok(&path).await.unwrap().trim(), "");
}
