//! The control plane is a real one: it stores, authorizes, validates, schedules gangs, and survives its API server.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::time::{Duration, Instant};

use deepinfer_controlplane::{ControlPlane, Options, install, shared, skipped};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};

const SETTINGS: &str = "apiVersion: v1
kind: ConfigMap
metadata: {name: settings, namespace: NAMESPACE}
data: {colour: blue}
";

fn settings(namespace: &str) -> String {
    SETTINGS.replace("NAMESPACE", namespace)
}

/// A client with the rights of a kubeconfig file.
async fn client_of(kubeconfig: &std::path::Path) -> Client {
    let parsed = Kubeconfig::read_from(kubeconfig).unwrap();
    let config = Config::from_custom_kubeconfig(parsed, &KubeConfigOptions::default()).await.unwrap();
    Client::try_from(config).unwrap()
}

#[tokio::test]
async fn what_is_applied_is_read_back_by_kubectl() {
    let Some(plane) = shared().await else { return };
    let namespace = plane.namespace("objects").await.unwrap();
    let applied = plane.apply_yaml(&settings(&namespace)).await.unwrap();
    assert_eq!(applied.len(), 1);
    let args = ["-n", &namespace, "get", "configmap", "settings", "-o", "jsonpath={.data.colour}"];
    assert_eq!(plane.kubectl_ok(&args).await.unwrap(), "blue");
    let wrong = plane.kubectl(&["-n", &namespace, "get", "configmap", "missing"]).await.unwrap();
    assert!(!wrong.status.success());
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("NotFound"));
    let version = plane.kubectl_ok(&["version"]).await.unwrap();
    assert!(version.contains("Server Version: v1.36.3"), "{version}");
}

#[tokio::test]
async fn an_account_without_rights_is_refused() {
    let Some(plane) = shared().await else { return };
    let namespace = plane.namespace("rights").await.unwrap();
    let kubeconfig = plane.kubeconfig_for(&namespace, "default").await.unwrap();
    let maps: Api<ConfigMap> = Api::namespaced(client_of(&kubeconfig).await, &namespace);
    let error = maps.get("settings").await.unwrap_err();
    assert!(matches!(&error, kube::Error::Api(status) if status.code == 403), "{error}");
    let unknown = plane.kubeconfig_for(&namespace, "nobody").await.unwrap_err();
    assert!(format!("{unknown:#}").contains("nobody"), "{unknown:#}");
}

#[tokio::test]
async fn a_cluster_that_breaks_a_rule_is_refused_with_the_rule() {
    let Some(plane) = shared().await else { return };
    install::crds(plane).await.unwrap();
    // Again, over what is there.
    install::crds(plane).await.unwrap();
    let namespace = plane.namespace("rules").await.unwrap();
    let manifest = format!(
        "apiVersion: deepinfer.io/v1alpha1
kind: DeepInferCluster
metadata: {{name: {}, namespace: {namespace}}}
spec: {{}}
",
        "a".repeat(80)
    );
    let error = plane.apply_yaml(&manifest).await.unwrap_err();
    assert!(format!("{error:#}").contains("spec"), "{error:#}");
    // The server publishes the schema of a new kind a moment after it serves the kind.
    let deadline = Instant::now() + Duration::from_secs(60);
    let help = loop {
        match plane.kubectl_ok(&["explain", "deepinferclusters.spec"]).await {
            Ok(help) => break help,
            Err(error) => assert!(Instant::now() < deadline, "{error:#}"),
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    };
    assert!(help.contains("FIELDS"), "{help}");
}

#[tokio::test]
async fn native_gangs_are_served_and_pods_keep_their_group() {
    let Some(plane) = shared().await else { return };
    let kinds = plane.kubectl_ok(&["api-resources", "--api-group=scheduling.k8s.io"]).await.unwrap();
    assert!(kinds.contains("podgroups") && kinds.contains("workloads"), "{kinds}");
    let namespace = plane.namespace("gangs").await.unwrap();
    let pod = format!(
        "apiVersion: v1
kind: Pod
metadata: {{name: member, namespace: {namespace}}}
spec:
  schedulingGroup: {{podGroupName: gang}}
  containers: [{{name: main, image: none}}]
"
    );
    plane.apply_yaml(&pod).await.unwrap();
    let group =
        ["-n", &namespace, "get", "pod", "member", "-o", "jsonpath={.spec.schedulingGroup.podGroupName}"];
    assert_eq!(plane.kubectl_ok(&group).await.unwrap(), "gang");
}

#[tokio::test]
async fn the_scheduler_says_why_a_pod_is_pending() {
    let Some(plane) = shared().await else { return };
    let namespace = plane.namespace("pending").await.unwrap();
    let pod = format!(
        "apiVersion: v1
kind: Pod
metadata: {{name: lonely, namespace: {namespace}}}
spec:
  containers: [{{name: main, image: none, resources: {{limits: {{nvidia.com/gpu: 8}}}}}}]
"
    );
    plane.apply_yaml(&pod).await.unwrap();
    let pods: Api<Pod> = Api::namespaced(plane.client(), &namespace);
    let deadline = Instant::now() + Duration::from_secs(30);
    loop {
        let status = pods.get("lonely").await.unwrap().status.unwrap_or_default();
        let conditions = status.conditions.unwrap_or_default();
        if let Some(condition) = conditions.iter().find(|c| c.type_ == "PodScheduled") {
            assert_eq!(condition.reason.as_deref(), Some("Unschedulable"));
            return;
        }
        assert!(Instant::now() < deadline, "the scheduler says nothing");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_killed_api_server_comes_back_with_its_data() {
    if skipped() {
        return;
    }
    let options = Options { audit: true, ..Options::without_native_gangs() };
    let plane = ControlPlane::start(options).await.unwrap();
    eprintln!("ready in {:.1} s, memory {:?}", plane.started_in().as_secs_f32(), plane.memory());
    let namespace = plane.namespace("restart").await.unwrap();
    plane.apply_yaml(&settings(&namespace)).await.unwrap();
    let maps: Api<ConfigMap> = Api::namespaced(plane.client(), &namespace);

    plane.kill_api_server().unwrap();
    assert!(maps.get("settings").await.is_err());
    plane.restart_api_server().await.unwrap();
    assert_eq!(maps.get("settings").await.unwrap().data.unwrap()["colour"], "blue");
    // The controllers work again too.
    plane.namespace("after").await.unwrap();

    plane.pause_api_server().unwrap();
    let answer = tokio::time::timeout(Duration::from_millis(500), maps.get("settings")).await;
    assert!(answer.is_err(), "a paused API server does not answer");
    plane.resume_api_server().unwrap();
    maps.get("settings").await.unwrap();

    // Who did what is on record, and the alpha API is off.
    let counts = plane.audit_counts("admin").unwrap();
    assert!(counts[&("patch".to_owned(), "configmaps".to_owned())] == 1, "{counts:?}");
    let audit = plane.audit().unwrap();
    assert!(audit.iter().any(|e| e.resource == "configmaps" && e.name == "settings" && e.code == 201));
    let kinds = plane.kubectl_ok(&["api-resources", "--api-group=scheduling.k8s.io"]).await.unwrap();
    assert!(!kinds.contains("podgroups"), "{kinds}");

    let folder = plane.folder().to_path_buf();
    plane.stop();
    assert!(!folder.exists(), "{} is still there", folder.display());
}

#[tokio::test]
async fn namespaces_of_tests_do_not_meet() {
    let Some(plane) = shared().await else { return };
    let (a, b) = tokio::join!(plane.namespace("same"), plane.namespace("same"));
    let (a, b) = (a.unwrap(), b.unwrap());
    assert_ne!(a, b);
    let namespaces: Api<Namespace> = Api::all(plane.client());
    namespaces.get(&a).await.unwrap();
    namespaces.get(&b).await.unwrap();
}
