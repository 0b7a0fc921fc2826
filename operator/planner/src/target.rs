//! What a plan is for: a Kubernetes cluster, or the one machine of local mode.

/// Where the pods will run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// A cluster; images and nodes are real.
    Kubernetes {
        /// Image of the gateway of this release.
        gateway_image: String,
    },
    /// This machine and this process.
    Local(LocalTarget),
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
            Self::Kubernetes { .. } => None,
        }
    }
}
