//! kwok as a child process, and the Node objects that it manages.

use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use futures_util::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::time::Instant;

use super::{BEHAVIOUR, Behaviour, PRETEND, Stages, addresses};
use crate::binaries::{self, Need};
use crate::children::{self, Process};
use crate::nodes::NodeSpec;

/// Objects that are written at once.
const PARALLEL: usize = 24;
/// Pause between two looks.
const POLL: Duration = Duration::from_millis(200);

/// How kwok runs.
#[derive(Clone, Debug)]
pub struct PretendOptions {
    /// What becomes of pods.
    pub stages: Stages,
    /// How long a node's lease lasts; it is renewed four times in that. Must be longer than the control plane's
    /// `--node-monitor-grace-period` is short: 40 s for the grace of 20 s and more.
    pub lease: Duration,
    /// Pods that kwok moves on at once.
    pub parallel: u32,
}

impl Default for PretendOptions {
    fn default() -> Self {
        Self { stages: Stages::default(), lease: Duration::from_secs(40), parallel: 16 }
    }
}

/// Pretend nodes of one control plane. Dropping it ends kwok; the Node objects stay.
pub struct PretendNodes {
    client: Client,
    kwok: Process,
    names: Vec<String>,
    _folder: tempfile::TempDir,
}

impl PretendNodes {
    /// Builds kwok if it is missing, starts it and registers the nodes. One kwok manages all pretend nodes of a control
    /// plane: start a second one only when the first has gone.
    ///
    /// # Errors
    /// There is no kwok and no way to build it, or the API server refuses a node.
    pub async fn start(
        client: Client,
        kubeconfig: &Path,
        nodes: Vec<NodeSpec>,
        options: &PretendOptions,
    ) -> Result<Self> {
        let binary = tokio::task::spawn_blocking(|| binaries::ensure(Need::Kwok)).await??;
        let folder = tempfile::tempdir()?;
        let config = folder.path().join("kwok.yaml");
        fs::write(&config, configuration(options))?;
        let mut command = children::tied(&binary);
        command.arg("--config").arg(&config).arg("--kubeconfig").arg(kubeconfig);
        command.arg(format!("--manage-nodes-with-label-selector={PRETEND}=true"));
        command.arg(format!("--node-lease-duration-seconds={}", options.lease.as_secs()));
        command.args(["--cidr=10.64.0.1/10", "--node-ip=10.63.0.1"]);
        command.current_dir(folder.path()).env_remove("KUBECONFIG");
        let kwok = Process::start("kwok", command, folder.path()).context("starting kwok")?;
        if let Err(error) = addresses::prepare(&client).await {
            let tail = kwok.tail(20);
            return Err(error.context(format!("kwok's log ends with:\n{tail}")));
        }
        let mut started = Self { client, kwok, names: Vec::new(), _folder: folder };
        started.add(nodes).await?;
        Ok(started)
    }

    /// Registers more nodes.
    ///
    /// # Errors
    /// The API server refuses one.
    pub async fn add(&mut self, nodes: Vec<NodeSpec>) -> Result<()> {
        let api: Api<Node> = Api::all(self.client.clone());
        self.names.extend(nodes.iter().map(|node| node.name.clone()));
        let created = stream::iter(nodes.into_iter().map(|node| {
            let api = api.clone();
            async move {
                let object: Node = serde_json::from_value(object(&node))?;
                let created = api.create(&PostParams::default(), &object).await;
                created.with_context(|| format!("registering the pretend node {}", node.name))
            }
        }));
        created.buffer_unordered(PARALLEL).try_for_each(|_| async { Ok(()) }).await
    }

    /// Names of all nodes, in the order in which they were given.
    pub fn names(&self) -> &[String] {
        &self.names
    }

    /// Waits until the API server calls all of them Ready.
    ///
    /// # Errors
    /// Not all of them are in this time.
    pub async fn wait_ready(&self, within: Duration) -> Result<()> {
        let api: Api<Node> = Api::all(self.client.clone());
        let deadline = Instant::now() + within;
        loop {
            if let Some(status) = self.kwok.ended() {
                bail!("kwok ended ({status}); its log ends with:\n{}", self.kwok.tail(20));
            }
            let nodes = api.list(&ListParams::default().labels(&format!("{PRETEND}=true"))).await?;
            let ready = nodes.items.iter().filter(|node| usable(node)).count();
            if ready >= self.names.len() {
                return Ok(());
            }
            if Instant::now() > deadline {
                let tail = self.kwok.tail(20);
                bail!(
                    "{ready} of {} pretend nodes are ready; kwok's log ends with:\n{tail}",
                    self.names.len()
                );
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// Switches a node off: nobody renews its lease, reports its pods or removes them any more.
    ///
    /// # Errors
    /// The API server refuses.
    pub async fn power_off(&self, node: &str) -> Result<()> {
        self.label(node, "off").await
    }

    /// Switches a node on again.
    ///
    /// # Errors
    /// The API server refuses.
    pub async fn power_on(&self, node: &str) -> Result<()> {
        self.label(node, "true").await
    }

    async fn label(&self, node: &str, value: &str) -> Result<()> {
        let api: Api<Node> = Api::all(self.client.clone());
        let patch = json!({"metadata": {"labels": {PRETEND: value}}});
        api.patch(node, &PatchParams::default(), &Patch::Merge(&patch)).await?;
        Ok(())
    }

    /// Makes a living pod behave differently from now on.
    ///
    /// # Errors
    /// The API server refuses.
    pub async fn behave(&self, namespace: &str, pod: &str, behaviour: Behaviour) -> Result<()> {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), namespace);
        let patch = json!({"metadata": {"annotations": {BEHAVIOUR: behaviour.word()}}});
        api.patch(pod, &PatchParams::default(), &Patch::Merge(&patch)).await?;
        Ok(())
    }

    /// Removes all Node objects, so that the next test finds an empty cluster.
    ///
    /// # Errors
    /// The API server refuses.
    pub async fn remove(self) -> Result<()> {
        let api: Api<Node> = Api::all(self.client.clone());
        let list = ListParams::default().labels(PRETEND);
        api.delete_collection(&DeleteParams::default(), &list).await?;
        Ok(())
    }

    /// Resident memory of kwok in bytes.
    pub fn memory(&self) -> u64 {
        self.kwok.memory()
    }
}

fn configuration(options: &PretendOptions) -> String {
    let kwok = json!({
        "apiVersion": "config.kwok.x-k8s.io/v1alpha1",
        "kind": "KwokConfiguration",
        "options": {
            "podPlayStageParallelism": options.parallel,
            "nodePlayStageParallelism": options.parallel,
            "nodeLeaseParallelism": options.parallel,
        },
    });
    format!("---\n{kwok}\n{}", options.stages.file())
}

pub(super) fn object(node: &NodeSpec) -> serde_json::Value {
    let mut labels = node.labels.clone();
    labels.insert(PRETEND.to_owned(), "true".to_owned());
    for (key, value) in [
        ("kubernetes.io/hostname", node.name.as_str()),
        ("kubernetes.io/os", "linux"),
        ("kubernetes.io/arch", "amd64"),
    ] {
        labels.entry(key.to_owned()).or_insert_with(|| value.to_owned());
    }
    json!({
        "metadata": {"name": node.name, "labels": labels},
        "spec": {"taints": node.taints},
        "status": {
            "capacity": node.allocatable,
            "allocatable": node.allocatable,
            "addresses": [
                {"type": "InternalIP", "address": "10.63.0.1"},
                {"type": "Hostname", "address": node.name},
            ],
            "nodeInfo": {
                "architecture": "amd64", "bootID": "", "containerRuntimeVersion": "pretend", "kernelVersion": "pretend",
                "kubeProxyVersion": "", "kubeletVersion": "v1.36.3", "machineID": "", "operatingSystem": "linux",
                "osImage": "pretend", "systemUUID": "",
            },
        },
    })
}

/// Ready, and no taint of a node that is not.
fn usable(node: &Node) -> bool {
    let status = node.status.as_ref();
    let mut conditions = status.and_then(|status| status.conditions.as_ref()).into_iter().flatten();
    let mut taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref()).into_iter().flatten();
    conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
        && !taints.any(|taint| taint.key.starts_with("node.kubernetes.io/"))
}
