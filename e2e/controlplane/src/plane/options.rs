//! What a control plane can be asked to be.

use std::time::Duration;

/// How to start a control plane. The default is what a production cluster has, with faster failure detection.
#[derive(Clone, Debug)]
pub struct Options {
    /// Serve `scheduling.k8s.io/v1alpha2` and schedule gangs natively, with topology.
    pub native_gangs: bool,
    /// Without a heartbeat for so long a node is no longer ready.
    pub node_grace: Duration,
    /// How often the node controller looks.
    pub node_period: Duration,
    /// After so long on a node that is not ready, pods are evicted (unless they tolerate it otherwise).
    pub eviction: Duration,
    /// Write every request's user, verb and object to a log: [`super::ControlPlane::audit`].
    pub audit: bool,
    /// More flags of the API server.
    pub api_server_flags: Vec<String>,
    /// More flags of the controller manager.
    pub controller_manager_flags: Vec<String>,
    /// More flags of the scheduler.
    pub scheduler_flags: Vec<String>,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            native_gangs: true,
            node_grace: Duration::from_secs(20),
            node_period: Duration::from_secs(1),
            eviction: Duration::from_secs(300),
            audit: false,
            api_server_flags: Vec::new(),
            controller_manager_flags: Vec::new(),
            scheduler_flags: Vec::new(),
        }
    }
}

impl Options {
    /// With the audit log.
    pub fn audited() -> Options {
        Options { audit: true, ..Options::default() }
    }

    /// Without the alpha API of gangs, as most clusters of today.
    pub fn without_native_gangs() -> Options {
        Options { native_gangs: false, ..Options::default() }
    }
}
