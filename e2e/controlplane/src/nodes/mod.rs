//! Process nodes: registered, leased, labelled nodes that run the pods bound to them as local processes.
//!
//! A small kubelet without containers. An image means a program of this machine; a pod has a network namespace and an
//! address of its own (as root) and a folder in which its volumes are written; a path of a mount in a command, in
//! arguments or in the environment is replaced by that folder. Everything else is as Kubernetes says: environment,
//! projected files, the downward API, probes, readiness gates, restarts and back-off, grace, exit codes, `kubectl
//! logs`. Not built: exec, attach, port-forward, cgroups, users, read-only file systems.
//!
//! ```text
//! ProcessNodes ── Shared: client, network, faults, log endpoint, process groups
//!    └─ Node: object, lease, status, watch of its pods        node.rs, register.rs, devices.rs
//!         └─ Worker: volumes, order of containers, deletion   pod/worker.rs, pod/volumes.rs
//!              ├─ Runner: one container, again and again      pod/container.rs, pod/probe.rs
//!              │    └─ Running: a process group and its log   process.rs, log.rs
//!              └─ publish: status from what is known          pod/status.rs, pod/publish.rs
//! ```
//!
//! Whatever ends this process, a guard ends the pods (`guard.rs`).

mod calls;
mod devices;
mod faults;
mod guard;
mod inject;
mod kubelet;
mod log;
mod node;
mod options;
mod pod;
mod process;
mod quantity;
mod register;
mod shared;
mod sources;

use std::net::Ipv4Addr;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use kube::Client;
use tokio::task::JoinSet;

pub use self::options::{NodeOptions, NodeSpec};

use self::kubelet::Endpoint;
use self::node::Node;
use self::shared::Shared;

/// A set of nodes. Dropping it kills all processes and removes the network; [`ProcessNodes::stop`] removes the nodes
/// from the API server too.
pub struct ProcessNodes {
    shared: Arc<Shared>,
    // Ended with the set.
    _tasks: JoinSet<()>,
}

impl ProcessNodes {
    /// Registers nodes and runs what is bound to them. Returns when all are ready in the eyes of the API server.
    ///
    /// # Errors
    /// If there is no port or network, or the API server refuses a node.
    pub async fn start(client: Client, options: NodeOptions, nodes: Vec<NodeSpec>) -> anyhow::Result<Self> {
        let endpoint = Endpoint::bind().await?;
        let port = endpoint.port()?;
        let made = tokio::task::spawn_blocking(move || Shared::new(client, options, port));
        let shared = Arc::new(made.await??);
        let mut tasks = JoinSet::new();
        let served = shared.clone();
        tasks.spawn(async move { endpoint.serve(&served).await });
        let sources = shared.clone();
        tasks.spawn(async move { sources.sources.watch().await });
        let started = ProcessNodes { shared, _tasks: tasks };
        for spec in nodes {
            started.add(spec).await?;
        }
        Ok(started)
    }

    /// Registers one more node.
    ///
    /// # Errors
    /// If there is a node of this name in the set, or the API server refuses it.
    pub async fn add(&self, spec: NodeSpec) -> anyhow::Result<()> {
        let name = spec.name.clone();
        let node = Arc::new(Node::new(spec));
        {
            let mut nodes = self.shared.nodes();
            if nodes.contains_key(&name) {
                bail!("there is a node {name} already: choose another name");
            }
            nodes.insert(name.clone(), node.clone());
        }
        register::register(&node, &self.shared).await.with_context(|| format!("node {name}"))?;
        register::renew_lease(&node, &self.shared).await.with_context(|| format!("lease of node {name}"))?;
        register::post_status(&node, &self.shared).await.with_context(|| format!("status of node {name}"))?;
        let task = tokio::spawn(node::run(node.clone(), self.shared.clone()));
        node.attach(task.abort_handle());
        Ok(())
    }

    /// Takes a node away for good: its processes are killed, its objects and the pods bound to it are deleted.
    ///
    /// # Errors
    /// If there is no such node, or the API server cannot be reached.
    pub async fn remove(&self, name: &str) -> anyhow::Result<()> {
        let node = self.node(name)?;
        node.abort();
        node.clear().await;
        self.shared.nodes().remove(name);
        register::unregister(&self.shared.client, name).await.with_context(|| format!("node {name}"))
    }

    /// Ends all processes, removes the network, and deletes the nodes and what was bound to them.
    ///
    /// # Errors
    /// If the API server cannot be reached; everything on this machine is gone nevertheless.
    pub async fn stop(self) -> anyhow::Result<()> {
        let names: Vec<_> = self.shared.nodes().keys().cloned().collect();
        let client = self.shared.client.clone();
        tokio::task::spawn_blocking(move || drop(self)).await?;
        for name in names {
            register::unregister(&client, &name).await.with_context(|| format!("node {name}"))?;
        }
        Ok(())
    }

    /// The names of all nodes.
    pub fn names(&self) -> Vec<String> {
        self.shared.nodes().keys().cloned().collect()
    }

    /// Where pods reach servers of the host that listen on this address or on all.
    pub fn host_address(&self) -> Ipv4Addr {
        self.shared.network.host_address()
    }

    /// Whether pods have network namespaces of their own; else they share loopback.
    pub fn has_namespaces(&self) -> bool {
        self.shared.network.has_namespaces()
    }

    fn node(&self, name: &str) -> anyhow::Result<Arc<Node>> {
        let node = self.shared.nodes().get(name).cloned();
        node.with_context(|| format!("there is no node {name}: it is not one of this set"))
    }
}

impl Drop for ProcessNodes {
    fn drop(&mut self) {
        let nodes = std::mem::take(&mut *self.shared.nodes());
        nodes.values().for_each(|node| node.drop_all());
        self.shared.close();
    }
}
