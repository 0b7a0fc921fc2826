//! Pretend nodes, for scale: kwok plays the kubelet of thousands of nodes, and one program answers for all their agents.
//!
//! Only tests of scale, of placement and of the failure of many use these; everything else runs real agents on process
//! nodes.
//!
//! ```text
//!   scheduler -- binds --> Pod --- kwok's stages (stages.rs) ---> Running, Ready once its readiness gates are open
//!   operator -- --agent-proxy --> Agents (agents.rs): answers operator.md 9.1 for each pod, by script
//! ```

mod addresses;
mod agents;
mod answers;
mod nodes;
mod pods;
mod script;
mod stages;

pub use self::agents::{Agents, Call};
pub use self::nodes::{PretendNodes, PretendOptions};
pub use self::script::{Answering, Drains, Script};
pub use self::stages::{Behaviour, Stages};

/// Label of the nodes that kwok manages; a node loses its power with it.
pub const PRETEND: &str = "deepinfer.io/pretend";
/// Annotation of a pod: what becomes of it ([`Behaviour`]'s word); it may be changed while the pod lives.
pub const BEHAVIOUR: &str = "deepinfer.io/pretend-pod";
/// Annotation of a pod: how long it takes to start (`1500ms`, `2m`).
pub const DELAY: &str = "deepinfer.io/pretend-delay";
