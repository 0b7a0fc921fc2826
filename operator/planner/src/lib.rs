//! Planning, pure: a [`World`] in, a [`Plan`] out.
//!
//! ```text
//! gather -> World -> plan -> check -> commit the blueprint -> execute the actions -> (world changes) -> again
//! ```
//!
//! * [`World`]: every object of one cluster, the last words of its agents, and the committed [`Blueprint`].
//! * [`plan()`]: the cluster is resolved (defaults, limits of the machine), becomes revisions and pools, pools become
//!   workers and supernodes, supernodes become pods; statuses are computed from what is seen.
//! * [`Action`]s are executed in order; [`World::apply`] does what the API server would, for worlds that have none.
//! * [`Report`]: what is not done, and why.
//!
//! The same code plans for the operator, for `deepinfer up` on one machine, for scripts and for the simulator. No I/O,
//! no clock, no randomness but the world's seed; with nothing to change a plan has no actions.

mod action;
mod apply;
mod blueprint;
mod check;
mod cluster;
mod diff;
mod emulate;
mod fleet;
mod naming;
mod nodes;
mod object;
mod plan;
mod pool;
mod report;
pub mod script;
mod step;
mod supernode;
mod target;
pub mod topology;
mod world;

pub use action::{Action, AgentCall, EventKind, PodChange};
pub use apply::{Conflict, time};
pub use blueprint::{Blueprint, FailureRecord};
pub use check::{Finding, check};
pub use diff::describe;
pub use emulate::{has_ended, is_ready};
pub use naming::{Component, pool_name, supernode_pod};
pub use nodes::{Apis, Labels, Namespaced, NativeVersion, NodeFacts, Nodes, Promise};
pub use object::{Foreign, Key, Kind, Object, covers};
pub use plan::{Plan, plan};
pub use report::{Explained, Origin, Problem, Report, Waiting};
pub use target::{KubernetesTarget, LocalTarget, Target};
pub use world::{AgentWord, ModelState, Refusal, World};
