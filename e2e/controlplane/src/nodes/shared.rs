//! What all nodes of one set share.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kube::Client;

use super::faults::Faults;
use super::guard::Run;
use super::node::Node;
use super::options::NodeOptions;
use super::pod::context::Context;
use super::process::Groups;
use super::sources::Sources;
use crate::network::Network;

/// The parts behind all nodes, in the order in which they go: processes, network, folder.
pub(crate) struct Shared {
    pub client: Client,
    pub options: NodeOptions,
    pub faults: Faults,
    pub sources: Sources,
    /// The port of the HTTPS endpoint that the API server asks for logs.
    pub port: u16,
    /// The address of the host as pods see it.
    pub host: String,
    nodes: Mutex<BTreeMap<String, Arc<Node>>>,
    /// Where logs of pods that are gone lie, by `namespace/name`.
    logs: Mutex<BTreeMap<String, PathBuf>>,
    pub groups: Groups,
    pub network: Network,
    run: Run,
}

impl Shared {
    pub(crate) fn new(client: Client, options: NodeOptions, port: u16) -> anyhow::Result<Shared> {
        let run = Run::start()?;
        let network = Network::start(options.network, &run.root)?;
        Ok(Shared {
            sources: Sources::new(client.clone()),
            faults: Faults::default(),
            port,
            host: network.host_address().to_string(),
            nodes: Mutex::default(),
            logs: Mutex::default(),
            groups: Groups::new(&run.root)?,
            client,
            options,
            network,
            run,
        })
    }

    /// The folder of this run.
    pub(crate) fn root(&self) -> &Path {
        &self.run.root
    }

    /// All nodes by name.
    pub(crate) fn nodes(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Node>>> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A pod that is on one of the nodes; the newest of its name.
    pub(crate) fn pod(&self, namespace: &str, name: &str) -> Option<Arc<Context>> {
        let nodes: Vec<_> = self.nodes().values().cloned().collect();
        let found = nodes.iter().flat_map(|node| node.contexts());
        found.filter(|c| c.namespace == namespace && c.name == name).max_by_key(|c| c.began)
    }

    /// Notes where the logs of a pod lie, for those who ask after it is gone.
    pub(crate) fn note_logs(&self, context: &Context) {
        let mut logs = self.logs.lock().unwrap_or_else(PoisonError::into_inner);
        logs.insert(format!("{}/{}", context.namespace, context.name), context.logs.clone());
    }

    /// The folder with the logs of a pod, even of one that is gone.
    pub(crate) fn logs(&self, namespace: &str, name: &str) -> Option<PathBuf> {
        self.logs.lock().unwrap_or_else(PoisonError::into_inner).get(&format!("{namespace}/{name}")).cloned()
    }
}

impl Shared {
    /// Kills everything and removes network and folder. Tasks may still hold this; they find nothing to work on.
    pub(crate) fn close(&self) {
        self.groups.close();
        self.network.remove();
        self.run.remove();
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.close();
    }
}
