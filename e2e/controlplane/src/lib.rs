//! A real Kubernetes control plane on loopback, for tests and for people who want to try the operator.
//!
//! [`ControlPlane`] starts etcd, API server, controller manager and scheduler, built from pinned Go modules by
//! [`binaries`]; [`install`] brings our kinds and the operator's rights into it; [`Operator`] runs the real operator.

pub mod args;
pub mod binaries;
pub mod children;
pub mod install;
pub mod network;
pub mod nodes;
pub mod operator;
pub mod plane;
pub mod ports;
pub mod pretend;
pub mod proxy;
mod runs;
pub mod up;

pub use operator::{Operator, OperatorOptions};
pub use plane::{AuditEvent, ControlPlane, Options, shared, skipped};
