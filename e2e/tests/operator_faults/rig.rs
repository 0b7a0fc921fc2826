//! What every test here starts from: one control plane with pretend nodes for the process, and for each test a namespace
//! with an operator of its own, behind a proxy.

use std::future::Future;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use deepinfer_controlplane::nodes::NodeSpec;
use deepinfer_controlplane::pretend::{Agents, PretendNodes, PretendOptions};
use deepinfer_controlplane::proxy::Proxy;
use deepinfer_controlplane::{ControlPlane, Operator, OperatorOptions, install};
use deepinfer_crds::names::rbac;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::{ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams};
use kube::core::GroupVersionKind;
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::time::Instant;

/// Time for whatever a test waits for, on a machine that does much else.
pub const PATIENCE: Duration = Duration::from_secs(240);
/// Pause between two looks.
const POLL: Duration = Duration::from_millis(50);
/// Name of the cluster of every test.
pub const CLUSTER: &str = "c";
/// Pretend nodes: two domains of eight nodes with four accelerators.
pub const NODES: usize = 16;

/// The operator's default.
const LEASE_NAME: &str = "deepinfer-operator";
/// Seconds of the Lease, short enough for a test that kills leaders all the time.
const LEASE: [&str; 3] =
    ["--lease-duration-seconds=2", "--lease-renew-seconds=1.5", "--lease-retry-seconds=0.2"];

struct Stage {
    plane: &'static ControlPlane,
    _nodes: PretendNodes,
    agents: Agents,
}

/// A namespace, an operator that watches only it, and what stands around them.
pub struct Rig {
    pub plane: &'static ControlPlane,
    pub agents: &'static Agents,
    pub namespace: String,
    pub proxy: Proxy,
    pub client: Client,
    operators: u32,
}

/// Runs a test with a rig, one test at a time: each wants the machine for itself. Nothing runs where there is no control
/// plane.
pub fn run<F: Future<Output = Result<()>>>(name: &str, test: impl FnOnce(Rig) -> F) {
    static TURN: Mutex<()> = Mutex::new(());
    // Clients and kwok outlive single tests, so all tests share one runtime.
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    static STAGE: OnceLock<Option<Stage>> = OnceLock::new();
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let runtime = RUNTIME.get_or_init(|| Runtime::new().expect("a runtime can be made"));
    let stage =
        STAGE.get_or_init(|| runtime.block_on(stage()).expect("the control plane with pretend nodes"));
    let Some(stage) = stage else { return };
    let began = std::time::Instant::now();
    let result = runtime.block_on(async {
        let rig = Rig::new(stage).await?;
        forget_lease(&rig.client).await?;
        let left = (rig.client.clone(), rig.namespace.clone());
        let result = test(rig).await;
        if let Err(error) = &result {
            // Now, in case cleaning up goes wrong too.
            println!("{}\n{name}: {error:#}", last_log(stage.plane.folder()));
        }
        stage.agents.forget_scripts();
        // The next test wants the nodes for itself.
        let cleaned = clean(stage.plane, left.0, &left.1).await.context("cleaning up");
        result.and(cleaned)
    });
    println!("{name}: {:.1} s", began.elapsed().as_secs_f64());
    if let Err(error) = result {
        panic!("{name}: {error:#}");
    }
}

/// Name of a pretend node.
pub fn node_name(n: usize) -> String {
    format!("pretend-{n:02}")
}

async fn stage() -> Result<Option<Stage>> {
    let Some(plane) = deepinfer_controlplane::shared().await else { return Ok(None) };
    install::all(plane).await?;
    let node = |n: usize| {
        NodeSpec::new(node_name(n))
            .label("nvidia.com/gpu.clique", format!("rack-{}", n / 8))
            .resource("nvidia.com/gpu", "4")
    };
    let nodes = (0..NODES).map(node).collect();
    let options = PretendOptions::default();
    let nodes = PretendNodes::start(plane.client(), &plane.kubeconfig()?, nodes, &options).await?;
    nodes.wait_ready(PATIENCE).await?;
    let agents = Agents::start(plane.client()).await?;
    Ok(Some(Stage { plane, _nodes: nodes, agents }))
}

/// The operator's role knows one Lease by name, so all tests share it, one after the other.
async fn forget_lease(client: &Client) -> Result<()> {
    let leases: Api<Lease> = Api::namespaced(client.clone(), rbac::OPERATOR_NAMESPACE);
    match leases.delete(LEASE_NAME, &DeleteParams::default()).await {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        other => other.map(|_| ()).context("deleting the operator's Lease"),
    }
}

/// The end of the log of the last operator.
fn last_log(folder: &std::path::Path) -> String {
    const LINES: usize = 200;
    let files = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let logs = files.filter(|file| {
        let name = file.file_name().to_string_lossy().into_owned();
        name.starts_with("operator-") && name.contains("log")
    });
    let last = logs.max_by_key(|file| file.metadata().and_then(|meta| meta.modified()).ok());
    let Some(last) = last else { return format!("no log in {}", folder.display()) };
    let text = std::fs::read_to_string(last.path()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

/// What has gone by itself meanwhile is no error.
fn there<T>(answer: kube::Result<T>) -> Result<()> {
    match answer {
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(()),
        other => Ok(other.map(|_| ())?),
    }
}

/// Removes a namespace with everything in it, without the help of an operator.
async fn clean(plane: &ControlPlane, client: Client, namespace: &str) -> Result<()> {
    // The operator's objects may be written by it and by administrators of the system.
    let mut config = kube::Config::from_custom_kubeconfig(
        kube::config::Kubeconfig::read_from(plane.kubeconfig()?)?,
        &kube::config::KubeConfigOptions::default(),
    )
    .await?;
    config.auth_info.impersonate = Some("cleaner".to_owned());
    config.auth_info.impersonate_groups =
        Some(vec!["system:masters".to_owned(), rbac::ADMINS_GROUP.to_owned()]);
    let admin = Client::try_from(config)?;
    for kind in ["DeepInferCluster", "Supernode"] {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("deepinfer.io", "v1alpha1", kind));
        let api: Api<DynamicObject> = Api::namespaced_with(admin.clone(), namespace, &resource);
        for object in api.list(&ListParams::default()).await?.items {
            let name = object.name_any();
            there(api.delete(&name, &DeleteParams::default()).await)?;
            let free = json!({"metadata": {"finalizers": null}});
            there(api.patch(&name, &PatchParams::default(), &Patch::Merge(free)).await)?;
        }
    }
    let namespaces: Api<Namespace> = Api::all(client);
    let _ = namespaces.delete(namespace, &DeleteParams::default()).await;
    let mut last = None;
    let gone = until(PATIENCE, async || {
        last = namespaces.get_opt(namespace).await?;
        Ok(last.is_none().then_some(()))
    });
    gone.await.with_context(|| format!("{namespace} stays: {:#?}", last.and_then(|n| n.status?.conditions)))
}

impl Rig {
    async fn new(stage: &'static Stage) -> Result<Self> {
        let namespace = stage.plane.namespace("faults").await?;
        let proxy = Proxy::start(stage.plane.url(), stage.plane.ca_pem().as_bytes(), 11).await?;
        let client = stage.plane.client();
        let (plane, agents) = (stage.plane, &stage.agents);
        Ok(Self { plane, agents, namespace, proxy, client, operators: 0 })
    }

    /// The flags of an operator for this rig.
    pub fn options(&self) -> OperatorOptions {
        let mut options = OperatorOptions { via: Some(self.proxy.url()), ..OperatorOptions::default() };
        options.flags.extend(LEASE.map(str::to_owned));
        options.flags.extend([
            format!("--watch-namespace={}", self.namespace),
            format!("--agent-proxy={}", self.agents.address()),
            "--request-timeout-seconds=2".to_owned(),
            // As a Service has it: the same for every replica and after each restart. Pretend pods do not ask there.
            "--fleet-url=http://127.0.0.1:1".to_owned(),
        ]);
        options
    }

    /// Takes the Lease away from an operator that has been killed, so that the next one need not wait for its end.
    pub async fn forget_lease(&self) -> Result<()> {
        forget_lease(&self.client).await
    }

    /// Starts an operator and waits until it leads.
    pub async fn operator(&mut self) -> Result<Operator> {
        self.operator_with(&[]).await
    }

    /// Starts an operator with more flags, and waits until it leads.
    pub async fn operator_with(&mut self, flags: &[&str]) -> Result<Operator> {
        let mut options = self.options();
        self.operators += 1;
        options.flags.push(format!("--identity=operator-{}", self.operators));
        options.flags.extend(flags.iter().map(|flag| (*flag).to_owned()));
        let operator = Operator::start(self.plane, options).await?;
        operator.wait_leading(PATIENCE).await?;
        Ok(operator)
    }

    /// Objects of one of our kinds, in this namespace.
    pub fn api(&self, kind: &str) -> Api<DynamicObject> {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("deepinfer.io", "v1alpha1", kind));
        Api::namespaced_with(self.client.clone(), &self.namespace, &resource)
    }

    /// Pods of this namespace.
    pub fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Creates or changes the cluster as a user does.
    pub async fn apply(&self, cluster: &Value) -> Result<()> {
        let name = cluster["metadata"]["name"].as_str().context("a cluster without a name")?;
        let apply = PatchParams::apply("user").force();
        self.api("DeepInferCluster").patch(name, &apply, &Patch::Apply(cluster)).await?;
        Ok(())
    }

    /// Deletes the cluster as a user does.
    pub async fn delete(&self, name: &str) -> Result<()> {
        self.api("DeepInferCluster").delete(name, &DeleteParams::default()).await?;
        Ok(())
    }

    /// Waits until the cluster is Ready as it is written now.
    pub async fn ready(&self, name: &str) -> Result<()> {
        let api = self.api("DeepInferCluster");
        let mut last = Value::Null;
        let ready = until(PATIENCE, async || {
            let object = api.get(name).await?;
            let generation = object.metadata.generation;
            last = object.data["status"].clone();
            Ok((is_ready(&last) && last["observedGeneration"].as_i64() == generation).then_some(()))
        });
        ready.await.with_context(|| format!("{name} is not Ready: {last:#}"))
    }

    /// Waits until the cluster and every object that it owned are gone.
    pub async fn gone(&self, name: &str) -> Result<()> {
        let api = self.api("DeepInferCluster");
        until(PATIENCE, async || Ok(api.get_opt(name).await?.is_none().then_some(())))
            .await
            .with_context(|| format!("{name} is still there"))?;
        let mut left = Vec::new();
        let empty = until(PATIENCE, async || {
            left = super::snapshot::take(self).await?;
            Ok(left.is_empty().then_some(()))
        });
        empty.await.with_context(|| format!("left behind: {left:#?}"))
    }

    /// The supernodes there are.
    pub async fn supernodes(&self) -> Result<Vec<DynamicObject>> {
        Ok(self.api("Supernode").list(&ListParams::default()).await?.items)
    }

    /// Incarnations of supernodes that were ever created through the proxy.
    pub fn incarnations(&self) -> std::collections::BTreeSet<String> {
        use deepinfer_controlplane::proxy::{On, Verb};
        let log = self.proxy.log(&On::verbs(&[Verb::Create, Verb::Apply]).kind("supernodes"));
        let good = log.into_iter().filter(|entry| matches!(entry.status, Some(200 | 201)));
        good.map(|entry| entry.asked.name).collect()
    }

    /// Removes the namespace; does not wait for it.
    pub async fn drop_namespace(&self) -> Result<()> {
        let api: Api<Namespace> = Api::all(self.client.clone());
        api.delete(&self.namespace, &DeleteParams::default()).await?;
        Ok(())
    }
}

/// A small cluster: one prefill worker, supernodes of two nodes with four accelerators, one gateway.
pub fn cluster(name: &str, decode: u32) -> Value {
    json!({
        "apiVersion": "deepinfer.io/v1alpha1",
        "kind": "DeepInferCluster",
        "metadata": {"name": name},
        "spec": {
            "accelerator": {"vendor": "nvidia", "acceleratorsPerNode": 4},
            "engine": {"image": "registry.example/deepinfer@sha256:0"},
            "model": {"name": "pretend", "source": {"uri": "file:///models/pretend"}},
            "prefill": {"replicas": 1},
            "decode": {"replicas": decode, "supernode": {"nodes": 2, "minReadySeconds": 0}},
            "gateway": {"replicas": 1},
            "scheduling": {"backend": "Builtin"},
        },
    })
}

/// Ready, and nothing is on its way.
fn is_ready(status: &Value) -> bool {
    let is = |kind: &str, word: &str| {
        let mut conditions = status["conditions"].as_array().into_iter().flatten();
        conditions.any(|c| c["type"] == kind && c["status"] == word)
    };
    is("Ready", "True") && !is("Reconciling", "True")
}

/// Asks again and again until there is an answer.
pub async fn until<T>(within: Duration, mut ask: impl AsyncFnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + within;
    loop {
        if let Some(answer) = ask().await? {
            return Ok(answer);
        }
        ensure!(Instant::now() < deadline, "not within {} s", within.as_secs());
        tokio::time::sleep(POLL).await;
    }
}

/// Names of objects, in order.
pub fn names<K: kube::Resource>(objects: &[K]) -> Vec<String> {
    let mut names: Vec<String> = objects.iter().map(ResourceExt::name_any).collect();
    names.sort_unstable();
    names
}
