//! The operator while things go wrong: the API server refuses, loses, stays silent; watches are cut; the process is
//! killed at every step; two replicas want to lead. Pods run on pretend nodes, and pretend agents answer for them.
//!
//! One after the other: each wants the machine for itself. Some run with all other tests; all of them, in about a quarter
//! of an hour: `cargo test -p deepinfer-e2e --test operator_faults -- --include-ignored`.

mod fabric;
mod kills;
mod leaders;
mod quiet;
mod rig;
mod room;
mod snapshot;
mod watches;
mod writes;
