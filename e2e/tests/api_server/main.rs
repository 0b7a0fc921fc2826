//! Our kinds on a real API server, with no operator anywhere: what it refuses, what it shows, who may write what.
//!
//! One control plane serves the whole file. The admission policies are in force, so objects that the operator owns are
//! written here as a member of `deepinfer:admins`.

mod apply;
#[path = "../../../crds/tests/cases/mod.rs"]
mod cases;
mod kit;
mod policies;
mod rules;
mod shape;
