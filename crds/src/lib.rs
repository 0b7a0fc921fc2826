//! The Kubernetes API of the product: the kinds, their CRDs and the validation of what users write.
//!
//! One source for everything: the Rust types. Their doc comments are the descriptions of the CRDs, their
//! attributes are the bounds and the CEL rules, and [`manifest`] checks a file against the very schema that
//! an API server gets.
//! Invariants: no I/O, no clock; nothing in a spec has a value by default.

pub mod cel;
pub mod cluster;
pub mod condition;
pub mod crd;
pub mod fuzzing;
pub mod manifest;
pub mod names;
mod path;
pub mod placement;
pub mod policy;
pub mod pool;
pub mod schema;
pub mod source;
pub mod supernode;
pub mod table;
pub mod yaml;

pub use cluster::{ClusterStatus, DeepInferCluster, DeepInferClusterSpec};
pub use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
pub use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta, Time};
pub use path::FieldPath;
pub use placement::{ExpertPlacement, ExpertPlacementSpec, ExpertPlacementStatus};
pub use pool::{DeepInferPool, DeepInferPoolSpec, PoolMode, PoolRole, PoolStatus};
pub use supernode::{Supernode, SupernodePhase, SupernodeSpec, SupernodeStatus};
