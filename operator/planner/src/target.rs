//! What a plan is for: a Kubernetes cluster, or the one machine of local mode.

use std::collections::BTreeMap;

use crate::cluster::defaults::Defaults;
use crate::topology::Profile;

/// Where the pods will run.
#[derive(Clone, Debug, PartialEq)]
#[allow(clippy::large_enum_variant)]
pub enum Target {
    /// A cluster; images and nodes are real.
    Kubernetes(KubernetesTarget),
    /// This machine and this process.
    Local(LocalTarget),
}

/// Configuration of the operator that plans look at. Values, so that a test can run an operator of another release.
#[derive(Clone, Debug, PartialEq)]
pub struct KubernetesTarget {
    /// Release of the operator, as in `build_info`.
    pub release: String,
    /// Image of the gateway of this release.
    pub gateway_image: String,
    /// Base URLs of the operator's FleetView, separated by commas, as pods reach them.
    pub fleet_urls: String,
    /// Topology profiles by name: the built-in ones and those of the configuration.
    pub profiles: BTreeMap<String, Profile>,
    /// Supernodes and multi-node workers with a ComputeDomain that may share one NVLink domain; 0 = no limit.
    pub compute_domains_per_clique: u32,
    /// Defaults of this release.
    pub defaults: Defaults,
}

impl KubernetesTarget {
    /// As the operator of this release runs without any configuration.
    pub fn new(gateway_image: impl Into<String>, fleet_urls: impl Into<String>) -> Self {
        Self {
            release: env!("CARGO_PKG_VERSION").to_owned(),
            gateway_image: gateway_image.into(),
            fleet_urls: fleet_urls.into(),
            profiles: Profile::built_in(),
            compute_domains_per_clique: 1,
            defaults: Defaults::default(),
        }
    }
}

/// What the one machine gives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalTarget {
    /// Most ranks of a supernode: more engines than this only take turns on the same cores.
    pub max_ranks: u32,
    /// Ranks of each supernode whatever the spec says (`--ranks`).
    pub ranks: Option<u32>,
    /// Most prefill workers.
    pub max_prefill: u32,
    /// Most supernodes at rest; a replacement may stand beside them.
    pub max_supernodes: u32,
    /// Folder of the model, resolved against the folder of the YAML.
    pub model_path: String,
    /// Address of the gateway, for its pod's flags.
    pub listen: String,
}

impl LocalTarget {
    /// Limits of decisions.md: at most 8 ranks, and few engines of each kind.
    pub fn new(model_path: impl Into<String>, listen: impl Into<String>) -> Self {
        Self {
            max_ranks: 8,
            ranks: None,
            max_prefill: 4,
            max_supernodes: 2,
            model_path: model_path.into(),
            listen: listen.into(),
        }
    }
}

impl Target {
    /// The local target, if it is one.
    pub fn local(&self) -> Option<&LocalTarget> {
        match self {
            Self::Local(local) => Some(local),
            Self::Kubernetes(_) => None,
        }
    }

    /// The defaults in force: those of the configured release, or of this one.
    pub fn defaults(&self) -> Defaults {
        self.kubernetes().map_or_else(Defaults::default, |target| target.defaults.clone())
    }

    /// The operator's configuration, if it plans for a cluster.
    pub fn kubernetes(&self) -> Option<&KubernetesTarget> {
        match self {
            Self::Kubernetes(target) => Some(target),
            Self::Local(_) => None,
        }
    }
}
