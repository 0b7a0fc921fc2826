//! A control plane with pretend nodes and an operator, made anew for each point.

use std::time::Duration;

use anyhow::{Context as _, Result};
use deepinfer_controlplane::nodes::NodeSpec;
use deepinfer_controlplane::pretend::{Agents, PretendNodes, PretendOptions};
use deepinfer_controlplane::{ControlPlane, Operator, OperatorOptions, Options, install};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ApiResource, DynamicObject, Patch, PatchParams};
use kube::core::GroupVersionKind;
use kube::{Api, Client};
use serde_json::{Value, json};

use crate::args::Args;

/// Time for starts.
const PATIENCE: Duration = Duration::from_secs(180);

/// What a point is measured in. Fields go in the order in which they end.
pub struct World {
    pub operator: Operator,
    pub agents: Agents,
    pub nodes: PretendNodes,
    pub client: Client,
    /// Where clusters go, in turn.
    pub namespaces: Vec<String>,
    pub plane: ControlPlane,
}

impl World {
    /// Starts everything: `count` nodes with `accelerators` each, in domains of `domain` nodes, and `teams` namespaces.
    pub async fn start(
        args: &Args,
        count: usize,
        accelerators: u32,
        domain: usize,
        teams: usize,
    ) -> Result<Self> {
        let options = Options {
            native_gangs: false,
            // Thousands of leases on few cores: a late one is no dead node.
            node_grace: Duration::from_secs(600),
            api_server_flags: vec![
                "--max-requests-inflight=2000".into(),
                "--max-mutating-requests-inflight=1000".into(),
            ],
            ..Options::default()
        };
        let plane = ControlPlane::start(options).await?;
        install::all(&plane).await?;
        let node = |n: usize| {
            NodeSpec::new(format!("pretend-{n:05}"))
                .label("nvidia.com/gpu.clique", format!("rack-{:04}", n / domain))
                .resource("nvidia.com/gpu", accelerators.to_string())
        };
        let pretend = PretendOptions { lease: Duration::from_secs(1200), ..PretendOptions::default() };
        let nodes = (0..count).map(node).collect();
        let client = plane.client();
        let nodes = PretendNodes::start(client.clone(), &plane.kubeconfig()?, nodes, &pretend).await?;
        // kwok readies about twenty nodes a second on two cores.
        nodes.wait_ready(PATIENCE + Duration::from_millis(100) * u32::try_from(count)?).await?;
        let agents = Agents::start(client.clone()).await?;
        let operator = Operator::start(&plane, Self::options(args, &agents)).await?;
        operator.wait_leading(PATIENCE).await?;
        let mut namespaces = Vec::new();
        for _ in 0..teams {
            namespaces.push(plane.namespace("bench").await?);
        }
        Ok(Self { operator, agents, nodes, client, namespaces, plane })
    }

    /// Flags of the operator; the rest are its defaults.
    pub fn options(args: &Args, agents: &Agents) -> OperatorOptions {
        let mut options = OperatorOptions::default().flag(format!("--agent-proxy={}", agents.address()));
        options.flags.extend(args.operator_flags.iter().cloned());
        options
    }

    /// Clusters of all namespaces.
    pub fn all_clusters(&self) -> Api<DynamicObject> {
        Api::all_with(self.client.clone(), &resource())
    }

    /// Clusters of the namespace of the `n`th one.
    pub fn clusters(&self, n: usize) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), self.namespace(n), &resource())
    }

    /// Pods of all namespaces.
    pub fn all_pods(&self) -> Api<Pod> {
        Api::all(self.client.clone())
    }

    /// Pods of the namespace of the `n`th cluster.
    pub fn pods(&self, n: usize) -> Api<Pod> {
        Api::namespaced(self.client.clone(), self.namespace(n))
    }

    fn namespace(&self, n: usize) -> &str {
        &self.namespaces[n % self.namespaces.len()]
    }

    /// Applies the `n`th cluster as a user.
    pub async fn apply(&self, n: usize, cluster: &Value) -> Result<()> {
        let name = cluster["metadata"]["name"].as_str().context("a cluster without a name")?;
        let apply = PatchParams::apply("user").force();
        self.clusters(n).patch(name, &apply, &Patch::Apply(cluster)).await?;
        Ok(())
    }
}

fn resource() -> ApiResource {
    ApiResource::from_gvk(&GroupVersionKind::gvk("deepinfer.io", "v1alpha1", "DeepInferCluster"))
}

/// A cluster with one prefill worker and one gateway.
pub fn cluster(name: &str, supernodes: usize, nodes: usize, accelerators: u32) -> Value {
    json!({
        "apiVersion": "deepinfer.io/v1alpha1",
        "kind": "DeepInferCluster",
        "metadata": {"name": name},
        "spec": {
            "accelerator": {
                "vendor": "nvidia", "acceleratorsPerNode": accelerators, "topologyProfile": "nvl-generic",
            },
            "engine": {"image": "registry.example/deepinfer@sha256:0"},
            "model": {"name": "pretend", "source": {"uri": "file:///models/pretend"}},
            "prefill": {"replicas": 1},
            "decode": {"replicas": supernodes, "supernode": {"nodes": nodes, "minReadySeconds": 0}},
            "gateway": {"replicas": 1},
            "scheduling": {"backend": "Builtin"},
        },
    })
}

/// Whether a cluster is Ready as it is written.
pub fn is_ready(cluster: &DynamicObject) -> bool {
    let status = &cluster.data["status"];
    let mut conditions = status["conditions"].as_array().into_iter().flatten();
    status["observedGeneration"].as_i64() == cluster.metadata.generation
        && conditions.any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
}
