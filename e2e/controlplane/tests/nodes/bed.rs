//! Nodes of one test, its namespace, and waiting for what a pod becomes.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use deepinfer_controlplane::ControlPlane;
use deepinfer_controlplane::network::NetworkKind;
use deepinfer_controlplane::nodes::{NodeOptions, NodeSpec, ProcessNodes};
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use kube::api::{DeleteParams, PostParams};
use kube::{Api, Client};
use serde_json::{Value, json};

/// How long anything may take on a loaded machine.
pub const SOON: Duration = Duration::from_secs(90);

/// One test's part of the cluster.
pub struct Bed<'p> {
    pub plane: &'p ControlPlane,
    pub client: Client,
    pub nodes: ProcessNodes,
    pub namespace: String,
}

impl Bed<'static> {
    /// Nodes with 8 accelerators each that only pods of this test are sent to. None if there is no control plane.
    pub async fn start(count: usize) -> Option<Bed<'static>> {
        Bed::start_with(count, |options| options).await
    }

    /// The same with other options.
    pub async fn start_with(
        count: usize,
        change: impl FnOnce(NodeOptions) -> NodeOptions,
    ) -> Option<Bed<'static>> {
        Some(Bed::on(deepinfer_controlplane::shared().await?, count, change).await)
    }
}

impl<'p> Bed<'p> {
    /// The same on a control plane of the test's own.
    pub async fn on(
        plane: &'p ControlPlane,
        count: usize,
        change: impl FnOnce(NodeOptions) -> NodeOptions,
    ) -> Bed<'p> {
        let namespace = plane.namespace("nodes").await.unwrap();
        let client = plane.client();
        let options = NodeOptions {
            crash_backoff: Duration::from_millis(200),
            pull_backoff: Duration::from_millis(400),
            retry_period: Duration::from_millis(200),
            lease_period: Duration::from_secs(5),
            ..NodeOptions::default()
        };
        let options = options
            .image("busybox", "/bin/sh")
            .image("server", PathBuf::from(env!("CARGO_BIN_EXE_pod_server")));
        let specs = (0..count).map(|index| {
            NodeSpec::new(format!("{namespace}-{index}"))
                .label("test", &namespace)
                .resource("nvidia.com/gpu", "8")
        });
        let nodes = ProcessNodes::start(client.clone(), change(options), specs.collect()).await.unwrap();
        Bed { plane, client, nodes, namespace }
    }

    /// The name of a node.
    pub fn node(&self, index: usize) -> String {
        format!("{}-{index}", self.namespace)
    }

    pub fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Creates a pod for this test's nodes. What the spec does not say is kept short.
    pub async fn pod(&self, name: &str, spec: Value) {
        self.annotated_pod(name, json!({}), spec).await;
    }

    pub async fn annotated_pod(&self, name: &str, annotations: Value, mut spec: Value) {
        spec["nodeSelector"] = json!({ "test": self.namespace });
        if spec["terminationGracePeriodSeconds"].is_null() {
            spec["terminationGracePeriodSeconds"] = json!(5);
        }
        let labels = json!({ "app": name });
        let metadata = json!({ "name": name, "annotations": annotations, "labels": labels });
        let pod = json!({ "metadata": metadata, "spec": spec });
        let pod: Pod = serde_json::from_value(pod).unwrap();
        self.pods().create(&PostParams::default(), &pod).await.unwrap();
    }

    /// A pod with one container that runs a shell script.
    pub async fn script(&self, name: &str, policy: &str, script: &str) {
        let container = json!({ "name": "main", "image": "busybox", "args": ["-c", script] });
        self.pod(name, json!({ "restartPolicy": policy, "containers": [container] })).await;
    }

    /// Waits until a pod is as wanted.
    pub async fn until(&self, name: &str, what: &str, wanted: impl Fn(&Pod) -> bool) -> Pod {
        let deadline = Instant::now() + SOON;
        loop {
            let pod = self.pods().get_opt(name).await.unwrap();
            match pod {
                Some(pod) if wanted(&pod) => return pod,
                pod if Instant::now() > deadline => {
                    let status = pod.map(|pod| serde_json::to_string_pretty(&pod.status).unwrap());
                    panic!("{name} is not {what}: {}", status.unwrap_or_else(|| "no such pod".into()));
                }
                _ => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }

    /// Creates pods until the scheduler finds no room for one, and gives its name. The scheduler hears of nodes and of
    /// pods by separate watches: after a change of a node the first pods may still be placed as before it.
    pub async fn unplaced(&self, name: &str, spec: &Value) -> String {
        let deadline = Instant::now() + SOON;
        for attempt in 0.. {
            let name = format!("{name}-{attempt}");
            self.pod(&name, spec.clone()).await;
            let looked = |pod: &Pod| !condition(pod, "PodScheduled").0.is_empty();
            let pod = self.until(&name, "looked at by the scheduler", looked).await;
            if condition(&pod, "PodScheduled").1 == "Unschedulable" {
                return name;
            }
            assert!(Instant::now() < deadline, "{name} was placed though there is no room for it");
            self.delete(&name).await;
            self.until_gone(&name).await;
        }
        unreachable!("the deadline passes first")
    }

    /// Waits until a pod's object is gone.
    pub async fn until_gone(&self, name: &str) {
        let deadline = Instant::now() + SOON;
        while self.pods().get_opt(name).await.unwrap().is_some() {
            assert!(Instant::now() < deadline, "{name} is still there");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until the log of the container `main` holds a text.
    pub async fn until_logged(&self, name: &str, text: &str) {
        let what = format!("the log of {name} says {text:?}");
        eventually(&what, async || self.nodes.pod_log(&self.namespace, name, "main").contains(text)).await;
    }

    pub async fn delete(&self, name: &str) {
        self.pods().delete(name, &DeleteParams::default()).await.unwrap();
    }

    pub fn pid(&self, name: &str) -> u32 {
        self.nodes.pid_of(&self.namespace, name, "main").expect("the container runs")
    }

    /// The log as `kubectl logs` prints it.
    pub async fn kubectl_logs(&self, name: &str, flags: &[&str]) -> String {
        let mut args = vec!["logs", "-n", &self.namespace, name];
        args.extend(flags);
        self.plane.kubectl_ok(&args).await.unwrap()
    }

    /// Removes nodes and namespace.
    pub async fn end(self) {
        self.nodes.stop().await.unwrap();
        let namespaces = Api::<k8s_openapi::api::core::v1::Namespace>::all(self.client.clone());
        namespaces.delete(&self.namespace, &DeleteParams::default()).await.unwrap();
    }
}

/// Polls a condition until it holds.
pub async fn eventually(what: &str, condition: impl AsyncFn() -> bool) {
    let deadline = Instant::now() + SOON;
    while !condition().await {
        assert!(Instant::now() < deadline, "never: {what}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The status of the first container.
pub fn first(pod: &Pod) -> Option<&ContainerStatus> {
    pod.status.as_ref()?.container_statuses.as_ref()?.first()
}

pub fn phase(pod: &Pod) -> &str {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()).unwrap_or_default()
}

pub fn running(pod: &Pod) -> bool {
    phase(pod) == "Running"
        && first(pod).is_some_and(|c| c.state.as_ref().is_some_and(|s| s.running.is_some()))
}

/// Whether the first container waits for this reason.
pub fn waits(pod: &Pod, reason: &str) -> bool {
    let state = first(pod).and_then(|c| c.state.as_ref()).and_then(|s| s.waiting.as_ref());
    state.is_some_and(|w| w.reason.as_deref() == Some(reason))
}

/// The status of a condition, and its reason.
pub fn condition<'a>(pod: &'a Pod, kind: &str) -> (&'a str, &'a str) {
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_deref()).unwrap_or_default();
    let found = conditions.iter().find(|condition| condition.type_ == kind);
    found.map_or(("", ""), |c| (c.status.as_str(), c.reason.as_deref().unwrap_or_default()))
}

pub fn ready(pod: &Pod) -> bool {
    condition(pod, "Ready").0 == "True"
}

/// Whether a process exists.
pub fn alive(pid: u32) -> bool {
    std::path::Path::new("/proc").join(pid.to_string()).exists()
}

/// Options for pods without namespaces.
pub fn on_loopback(options: NodeOptions) -> NodeOptions {
    NodeOptions { network: NetworkKind::Loopback, ..options }
}
