//! What each test stands on: the shared control plane, nodes and an operator of its own, and a namespace.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use deepinfer_controlplane::binaries::workspace_binary;
use deepinfer_controlplane::nodes::{NodeOptions, NodeSpec, ProcessNodes};
use deepinfer_controlplane::{ControlPlane, Operator, OperatorOptions, install, shared};
use deepinfer_crds::{DeepInferCluster, DeepInferPool, Supernode, condition};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::{Value, json};
use tokio::sync::{Mutex, MutexGuard, OnceCell};

/// Tests take turns: each has the machine's cores and all nodes to itself.
static TURN: Mutex<()> = Mutex::const_new(());
static INSTALLED: OnceCell<()> = OnceCell::const_new();
/// Namespaces and nodes of tests that have begun and not ended.
static LEFT: std::sync::Mutex<Vec<(String, Vec<String>)>> = std::sync::Mutex::new(Vec::new());
/// How long pods of real engines may take to serve on a busy machine.
pub const SERVES: Duration = Duration::from_secs(120);

/// A control plane with nodes and operators.
pub struct Bed {
    pub plane: &'static ControlPlane,
    pub nodes: ProcessNodes,
    pub operators: Vec<Operator>,
    pub namespace: String,
    _turn: MutexGuard<'static, ()>,
}

impl Bed {
    /// Nodes without accelerators and one operator; `None` where there can be no control plane.
    pub async fn cpu(nodes: usize) -> Option<Self> {
        let specs = (0..nodes).map(|index| NodeSpec::new(format!("cpu-{index}"))).collect();
        Self::start(specs, 1, &[]).await
    }

    /// These nodes and so many replicas of the operator.
    pub async fn start(specs: Vec<NodeSpec>, operators: usize, flags: &[&str]) -> Option<Self> {
        let turn = TURN.lock().await;
        let plane = shared().await?;
        let bed = Self::begin(plane, specs, operators, flags, turn).await;
        Some(bed.expect("the bed is made"))
    }

    async fn begin(
        plane: &'static ControlPlane,
        specs: Vec<NodeSpec>,
        operators: usize,
        flags: &[&str],
        turn: MutexGuard<'static, ()>,
    ) -> anyhow::Result<Self> {
        INSTALLED.get_or_try_init(|| install::all(plane)).await?;
        // A test that failed is not to spoil the next one: nobody runs the pods of its nodes any more.
        for (namespace, nodes) in left(std::mem::take) {
            let all: Api<Node> = Api::all(plane.client());
            for node in nodes {
                let _ = all.delete(&node, &DeleteParams::default()).await;
            }
            abandon(plane, &namespace).await;
        }
        let agent = tokio::task::spawn_blocking(|| workspace_binary("deepinfer-agent")).await??;
        let gateway = tokio::task::spawn_blocking(|| workspace_binary("deepinfer-gateway")).await??;
        let options = NodeOptions::default()
            .image("gateway", gateway)
            .image("engine", agent)
            .host_path("/models", models());
        let namespace = plane.namespace("serving").await?;
        let names = specs.iter().map(|spec| spec.name.clone()).collect();
        left(|left| left.push((namespace.clone(), names)));
        let nodes = ProcessNodes::start(plane.client(), options, specs).await?;
        let options = OperatorOptions {
            fleet_host: nodes.host_address().into(),
            flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
            ..OperatorOptions::default()
        };
        let operators = Operator::start_replicas(plane, options, operators).await?;
        for operator in &operators {
            operator.wait_ready(Duration::from_secs(60)).await?;
        }
        Ok(Self { plane, nodes, operators, namespace, _turn: turn })
    }

    pub fn client(&self) -> Client {
        self.plane.client()
    }

    pub fn clusters(&self) -> Api<DeepInferCluster> {
        Api::namespaced(self.client(), &self.namespace)
    }

    pub fn supernodes(&self) -> Api<Supernode> {
        Api::namespaced(self.client(), &self.namespace)
    }

    pub fn pools(&self) -> Api<DeepInferPool> {
        Api::namespaced(self.client(), &self.namespace)
    }

    pub fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client(), &self.namespace)
    }

    /// `kubectl apply` of the example, changed by a merge patch.
    pub async fn apply(&self, change: Value) -> anyhow::Result<DeepInferCluster> {
        let mut value: Value =
            serde_yaml::from_str(include_str!("../../../examples/clusters/kubernetes.yaml"))?;
        merge(&mut value, &change);
        let name = value["metadata"]["name"].as_str().context("the example has a name")?.to_owned();
        let params = PatchParams::apply("kubectl").force();
        Ok(self.clusters().patch(&name, &params, &Patch::Apply(&value)).await?)
    }

    /// Edits one cluster by a merge patch, as `kubectl edit` does.
    pub async fn edit(&self, change: Value) -> anyhow::Result<DeepInferCluster> {
        Ok(self.clusters().patch("quickstart", &PatchParams::default(), &Patch::Merge(&change)).await?)
    }

    pub async fn cluster(&self) -> anyhow::Result<DeepInferCluster> {
        Ok(self.clusters().get("quickstart").await?)
    }

    /// Waits until the cluster is Ready for its newest generation.
    pub async fn ready(&self) -> anyhow::Result<DeepInferCluster> {
        self.wait_cluster("is Ready", |cluster| is(cluster, "Ready", "True")).await
    }

    /// Waits for a state of the cluster; the error says what it was instead.
    pub async fn wait_cluster(
        &self,
        what: &str,
        holds: impl Fn(&DeepInferCluster) -> bool,
    ) -> anyhow::Result<DeepInferCluster> {
        let deadline = Instant::now() + SERVES;
        loop {
            let cluster = self.cluster().await?;
            let seen = cluster.status.as_ref().and_then(|status| status.observed_generation);
            if seen == cluster.metadata.generation && holds(&cluster) {
                return Ok(cluster);
            }
            if Instant::now() > deadline {
                let status = serde_json::to_string_pretty(&cluster.status)?;
                bail!("the cluster never {what}; its status:\n{status}\n{}", self.pod_states().await);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Waits for anything else.
    pub async fn wait<F>(&self, what: &str, at_most: Duration, mut holds: F) -> anyhow::Result<()>
    where
        F: AsyncFnMut() -> anyhow::Result<bool>,
    {
        let deadline = Instant::now() + at_most;
        while !holds().await? {
            if Instant::now() > deadline {
                bail!("it never came true that {what}\n{}", self.pod_states().await);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        Ok(())
    }

    /// Supernodes that are not being deleted, by name.
    pub async fn living(&self) -> anyhow::Result<Vec<Supernode>> {
        let all = self.supernodes().list(&ListParams::default()).await?;
        Ok(all.items.into_iter().filter(|sn| sn.metadata.deletion_timestamp.is_none()).collect())
    }

    /// Base URLs of the gateways' pods that are ready.
    pub async fn gateways(&self) -> anyhow::Result<Vec<String>> {
        self.gateways_off("").await
    }

    /// The same, but for those on this node.
    pub async fn gateways_off(&self, node: &str) -> anyhow::Result<Vec<String>> {
        let params = ListParams::default().labels("deepinfer.io/role=gateway");
        let pods = self.pods().list(&params).await?;
        let ready =
            pods.items.iter().filter(|pod| pod_is_ready(pod) && pod.metadata.deletion_timestamp.is_none());
        let elsewhere =
            ready.filter(|pod| pod.spec.as_ref().and_then(|s| s.node_name.as_deref()) != Some(node));
        let ips = elsewhere.filter_map(|pod| pod.status.as_ref()?.pod_ip.clone());
        Ok(ips.map(|ip| format!("http://{ip}:8000")).collect())
    }

    /// Pods of a role.
    pub async fn pods_of(&self, role: &str) -> anyhow::Result<Vec<Pod>> {
        let params = ListParams::default().labels(&format!("deepinfer.io/role={role}"));
        Ok(self.pods().list(&params).await?.items)
    }

    async fn pod_states(&self) -> String {
        let args = ["get", "pods,sn,dip,events", "-n", self.namespace.as_str(), "-o", "wide"];
        let states = self.plane.kubectl_ok(&args).await.unwrap_or_default();
        let log = self.operators.first().map(|operator| operator.logs()).unwrap_or_default();
        let lines: Vec<&str> = log.lines().rev().take(25).collect();
        format!(
            "{states}\nthe operator's log ends with:\n{}",
            lines.into_iter().rev().collect::<Vec<_>>().join("\n")
        )
    }

    /// Deletes the cluster and waits until it and all that belonged to it is gone.
    pub async fn delete(&self) -> anyhow::Result<()> {
        self.clusters().delete("quickstart", &DeleteParams::default()).await?;
        self.wait("the cluster is gone", SERVES, async || {
            Ok(self.clusters().get_opt("quickstart").await?.is_none())
        })
        .await?;
        self.wait("nothing is left of it", SERVES, async || Ok(self.leftovers().await?.is_empty())).await
    }

    /// Objects in the namespace that carry our label.
    pub async fn leftovers(&self) -> anyhow::Result<Vec<String>> {
        const KINDS: &str = "deepinferpools,supernodes,expertplacements,pods,services,deployments,replicasets,\
            configmaps,secrets,serviceaccounts,controllerrevisions,networkpolicies,poddisruptionbudgets,podgroups";
        let args = ["get", KINDS, "-n", &self.namespace, "-l", "deepinfer.io/cluster", "-o", "name"];
        let names = self.plane.kubectl_ok(&args).await?;
        Ok(names.lines().map(str::to_owned).collect())
    }

    /// Ends operators and nodes; the namespace is left to the control plane.
    pub async fn end(self) {
        abandon(self.plane, &self.namespace).await;
        for operator in &self.operators {
            let _ = operator.terminate(Duration::from_secs(10)).await;
        }
        let _ = self.nodes.stop().await;
        left(|left| left.retain(|(namespace, _)| *namespace != self.namespace));
    }
}

fn left<T>(change: impl FnOnce(&mut Vec<(String, Vec<String>)>) -> T) -> T {
    change(&mut LEFT.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
}

/// Deletes a namespace whose clusters nobody looks after any more; does not wait for it.
async fn abandon(plane: &ControlPlane, namespace: &str) {
    let clusters: Api<DeepInferCluster> = Api::namespaced(plane.client(), namespace);
    let all = clusters.list(&ListParams::default()).await.map(|list| list.items).unwrap_or_default();
    for cluster in all {
        let bare = json!({"metadata": {"finalizers": null}});
        let _ = clusters.patch(&cluster.name_any(), &PatchParams::default(), &Patch::Merge(&bare)).await;
    }
    let namespaces: Api<Namespace> = Api::all(plane.client());
    let _ = namespaces.delete(namespace, &DeleteParams::default()).await;
}

/// Folder of the example models.
pub fn models() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples/models")
}

/// Whether a condition of the cluster has this status.
pub fn is(cluster: &DeepInferCluster, kind: &str, status: &str) -> bool {
    let conditions = cluster.status.as_ref().map(|s| s.conditions.as_slice()).unwrap_or_default();
    condition::get(conditions, kind).is_some_and(|c| c.status == status)
}

/// A condition's reason and message.
pub fn why(cluster: &DeepInferCluster, kind: &str) -> (String, String) {
    let conditions = cluster.status.as_ref().map(|s| s.conditions.as_slice()).unwrap_or_default();
    condition::get(conditions, kind).map(|c| (c.reason.clone(), c.message.clone())).unwrap_or_default()
}

pub fn pod_is_ready(pod: &Pod) -> bool {
    let conditions = pod.status.as_ref().and_then(|s| s.conditions.as_deref()).unwrap_or_default();
    conditions.iter().any(|c| c.type_ == "Ready" && c.status == "True")
}

/// JSON merge patch.
pub fn merge(value: &mut Value, change: &Value) {
    match (value, change) {
        (Value::Object(value), Value::Object(change)) => {
            for (key, change) in change {
                if change.is_null() {
                    value.remove(key);
                } else {
                    merge(value.entry(key.clone()).or_insert(Value::Null), change);
                }
            }
        }
        (value, change) => *value = change.clone(),
    }
}
