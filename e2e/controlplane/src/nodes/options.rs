//! What a test says about its nodes: names, labels, resources, which binary an image means, how fast things repeat.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use k8s_openapi::api::core::v1::Taint;

use crate::network::NetworkKind;

/// One node to register.
#[derive(Clone, Debug)]
pub struct NodeSpec {
    /// The name of the Node object.
    pub name: String,
    /// Its labels besides `kubernetes.io/hostname`, `os` and `arch`.
    pub labels: BTreeMap<String, String>,
    /// What it offers, by resource name. Quantities as in YAML.
    pub allocatable: BTreeMap<String, String>,
    /// Taints that it registers with.
    pub taints: Vec<Taint>,
}

impl NodeSpec {
    /// A node with room for many processes and no accelerators.
    pub fn new(name: impl Into<String>) -> Self {
        let plain = [("cpu", "64"), ("memory", "256Gi"), ("ephemeral-storage", "200Gi"), ("pods", "110")];
        NodeSpec {
            name: name.into(),
            labels: BTreeMap::new(),
            allocatable: plain.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
            taints: Vec::new(),
        }
    }

    /// The same node with a label.
    #[must_use]
    pub fn label(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.labels.insert(key.into(), value.into());
        self
    }

    /// The same node with this much of a resource, e.g. `("nvidia.com/gpu", "8")`.
    #[must_use]
    pub fn resource(mut self, name: impl Into<String>, quantity: impl Into<String>) -> Self {
        self.allocatable.insert(name.into(), quantity.into());
        self
    }

    /// The same node with a taint; `effect` is NoSchedule, PreferNoSchedule or NoExecute.
    #[must_use]
    pub fn taint(mut self, key: impl Into<String>, value: impl Into<String>, effect: &str) -> Self {
        let value = Some(value.into());
        self.taints.push(Taint { key: key.into(), value, effect: effect.to_owned(), time_added: None });
        self
    }
}

/// How all nodes of one [`ProcessNodes`](super::ProcessNodes) behave.
#[derive(Clone, Debug)]
pub struct NodeOptions {
    /// Which program an image is: the first pattern that the image or the container's name contains.
    pub images: Vec<(String, PathBuf)>,
    /// Folders behind PersistentVolumeClaims, by `claim` or `namespace/claim`; others are looked up as hostPath volumes.
    pub claims: BTreeMap<String, PathBuf>,
    /// Folders behind hostPath volumes, by the path on the node that they begin with; others are paths of this machine.
    pub host_paths: BTreeMap<PathBuf, PathBuf>,
    /// Names that pods can resolve (namespaces only; read when a container starts).
    pub hosts: Vec<(String, IpAddr)>,
    /// Added to the environment of every container; what the container says itself wins.
    pub env: Vec<(String, String)>,
    /// Where pods get their addresses.
    pub network: NetworkKind,
    /// How often the lease of a node is renewed.
    pub lease_period: Duration,
    /// First back-off of a container that ends again and again; doubles.
    pub crash_backoff: Duration,
    /// Longest back-off of a container.
    pub crash_backoff_max: Duration,
    /// First back-off after an image that is not there; doubles to `crash_backoff_max`.
    pub pull_backoff: Duration,
    /// How often a missing Secret, ConfigMap or volume is looked for again.
    pub retry_period: Duration,
}

impl Default for NodeOptions {
    fn default() -> Self {
        NodeOptions {
            images: Vec::new(),
            claims: BTreeMap::new(),
            host_paths: BTreeMap::new(),
            hosts: Vec::new(),
            env: Vec::new(),
            network: NetworkKind::Auto,
            lease_period: Duration::from_secs(10),
            crash_backoff: Duration::from_secs(1),
            crash_backoff_max: Duration::from_secs(60),
            pull_backoff: Duration::from_secs(1),
            retry_period: Duration::from_secs(1),
        }
    }
}

impl NodeOptions {
    /// The same options, where images or containers with `pattern` in their name run `program`.
    #[must_use]
    pub fn image(mut self, pattern: impl Into<String>, program: impl Into<PathBuf>) -> Self {
        self.images.push((pattern.into(), program.into()));
        self
    }

    /// The same options, where a claim (`name` or `namespace/name`) is this folder.
    #[must_use]
    pub fn claim(mut self, claim: impl Into<String>, folder: impl Into<PathBuf>) -> Self {
        self.claims.insert(claim.into(), folder.into());
        self
    }

    /// The same options, where what lies under `prefix` on a node is in `folder` of this machine.
    #[must_use]
    pub fn host_path(mut self, prefix: impl Into<PathBuf>, folder: impl Into<PathBuf>) -> Self {
        self.host_paths.insert(prefix.into(), folder.into());
        self
    }

    /// Where a path of a node is on this machine; the longest prefix wins.
    pub(crate) fn on_this_machine(&self, path: &Path) -> PathBuf {
        let found = self.host_paths.iter().rev().find_map(|(prefix, folder)| {
            let rest = path.strip_prefix(prefix).ok()?;
            Some(if rest.as_os_str().is_empty() { folder.clone() } else { folder.join(rest) })
        });
        found.unwrap_or_else(|| path.to_path_buf())
    }

    /// The program of an image, if one is known.
    pub(crate) fn program(&self, image: &str, container: &str) -> Option<&Path> {
        let found =
            self.images.iter().find(|(pattern, _)| image.contains(pattern) || container.contains(pattern));
        found.map(|(_, program)| program.as_path())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_prefix_says_where_a_path_of_a_node_is() {
        let options = NodeOptions::default().host_path("/models", "/here").host_path("/models/big", "/there");
        let at = |path: &str| options.on_this_machine(Path::new(path));
        assert_eq!(at("/models/tiny"), Path::new("/here/tiny"));
        assert_eq!(at("/models"), Path::new("/here"));
        assert_eq!(at("/models/big/a"), Path::new("/there/a"));
        assert_eq!(at("/modelsx"), Path::new("/modelsx"));
    }
}
