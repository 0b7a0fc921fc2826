//! One control plane for all tests of this binary; each test has its own namespace, operator and lease.

use std::time::Duration;

use anyhow::Context as _;
use deepinfer_controlplane::{ControlPlane, Operator, OperatorOptions, install, shared};
use deepinfer_crds::DeepInferCluster;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::ListParams;
use kube::core::NamespaceResourceScope;
use serde::de::DeserializeOwned;
use tokio::sync::OnceCell;

/// Longest wait for anything: the machine may be busy with many tests.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// A namespace of a shared control plane.
pub struct Bed {
    pub plane: &'static ControlPlane,
    pub namespace: String,
}

impl Bed {
    /// `None` if there is no control plane on this machine.
    pub async fn new(prefix: &str) -> Option<Self> {
        let plane = shared().await?;
        static INSTALLED: OnceCell<()> = OnceCell::const_new();
        INSTALLED
            .get_or_init(|| async {
                install::all(plane).await.expect("the kinds and the rights are installed");
                plane.apply_yaml(LEASES).await.expect("each test may have a lease of its own");
            })
            .await;
        let namespace = plane.namespace(prefix).await.expect("a namespace");
        Some(Self { plane, namespace })
    }

    /// Options of an operator that works in this namespace only.
    pub fn options(&self) -> OperatorOptions {
        OperatorOptions::default()
            .flag(format!("--watch-namespace={}", self.namespace))
            .flag(format!("--lease-name={}", self.namespace))
            .flag("--lease-duration-seconds=10")
            .flag("--lease-renew-seconds=8")
            .flag("--lease-retry-seconds=0.5")
    }

    /// An operator that leads.
    pub async fn operator(&self) -> anyhow::Result<Operator> {
        let operator = Operator::start(self.plane, self.options()).await?;
        operator.wait_ready(PATIENCE).await?;
        operator.wait_leading(PATIENCE).await?;
        Ok(operator)
    }

    /// Objects of a kind in this namespace, as an administrator sees them.
    pub fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        Api::namespaced(self.plane.client(), &self.namespace)
    }

    /// A small cluster without accelerators: one prefill worker, one supernode of two pods.
    pub async fn create(&self, name: &str) -> anyhow::Result<DeepInferCluster> {
        let cluster = manifest(name);
        self.api::<DeepInferCluster>().create(&Default::default(), &cluster).await.context("the cluster")
    }

    /// All pods of supernodes of a cluster, by name.
    pub async fn supernode_pods(&self, cluster: &str) -> anyhow::Result<Vec<String>> {
        let selector = format!("deepinfer.io/cluster={cluster},deepinfer.io/supernode");
        let pods = self.api::<Pod>().list(&ListParams::default().labels(&selector)).await?;
        Ok(pods.items.into_iter().filter_map(|pod| pod.metadata.name).collect())
    }

    /// Waits until something holds.
    pub async fn until<F>(&self, what: &str, mut holds: impl FnMut() -> F)
    where
        F: Future<Output = anyhow::Result<bool>>,
    {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            let last = holds().await;
            if matches!(last, Ok(true)) {
                return;
            }
            assert!(
                tokio::time::Instant::now() < deadline,
                "not within {PATIENCE:?}: {what}; last: {last:?}"
            );
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Waits until an object is there.
    pub async fn wait_for<K>(&self, name: &str) -> K
    where
        K: kube::Resource<DynamicType = (), Scope = NamespaceResourceScope>
            + Clone
            + DeserializeOwned
            + std::fmt::Debug,
    {
        let api = self.api::<K>();
        self.until(&format!("{} {name} is there", K::kind(&())), || async {
            Ok(api.get_opt(name).await?.is_some())
        })
        .await;
        api.get(name).await.expect("it was there a moment ago")
    }

    /// Waits until the gang of a cluster is made; gives its pods.
    pub async fn gang(&self, cluster: &str, pods: usize) -> Vec<String> {
        self.until("the pods of the supernode are made", || async {
            Ok(self.supernode_pods(cluster).await?.len() == pods)
        })
        .await;
        self.supernode_pods(cluster).await.expect("pods are listed")
    }
}

/// What a user writes.
pub fn manifest(name: &str) -> DeepInferCluster {
    serde_yaml::from_str(&format!(
        r#"
apiVersion: deepinfer.io/v1alpha1
kind: DeepInferCluster
metadata: {{name: {name}}}
spec:
  accelerator: {{vendor: cpu}}
  engine: {{image: "deepinfer-agent:test"}}
  model: {{name: tiny, source: {{uri: "file:///models/tiny"}}}}
  prefill: {{replicas: 1}}
  decode:
    replicas: 1
    supernode: {{nodes: 2, minReadySeconds: 0}}
    experts: {{mode: "Off"}}
    drain: {{handoff: None}}
  gateway: {{replicas: 2, image: "deepinfer-gateway:test"}}
"#
    ))
    .expect("the manifest is a cluster")
}

/// The installed role names one Lease; the operators of these tests have one each.
const LEASES: &str = r#"
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: test-leases, namespace: deepinfer-system}
rules:
- {apiGroups: [coordination.k8s.io], resources: [leases], verbs: [get, create, update]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: test-leases, namespace: deepinfer-system}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: test-leases}
subjects:
- {kind: ServiceAccount, name: deepinfer-operator, namespace: deepinfer-system}
"#;
