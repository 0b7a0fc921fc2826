//! The operator while things go wrong: the API server refuses, loses, stays silent; watches are cut; the process is
//! killed at every step; two replicas want to lead. Pods run on pretend nodes, and pretend agents answer for them.
//!
//! Minutes each, one after the other: `cargo test -p deepinfer-e2e --test operator_faults -- --ignored`.

mod kills;
mod leaders;
mod quiet;
mod rig;
mod snapshot;
mod watches;
mod writes;
