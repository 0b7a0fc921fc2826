//! The control port: HTTP with JSON, every call signed with the cluster's key but probes and metrics.
//!
//! | call | meaning |
//! | --- | --- |
//! | `GET /v1/status` | what this agent is and how it is |
//! | `POST /v1/drain` | stop taking work; asked again it says the same |
//! | `POST /v1/undrain` | only while something is left; 409 later |
//! | `GET /v1/drain` | where the drain stands |
//! | `GET /v1/experts/load?detail=sums\|steps\|total` | which experts were chosen; 404 before the first window. Index 0 of a supernode of several agents answers for all; `&scope=agent`: for itself |
//! | `GET /healthz`, `/readyz`, `/metrics` | probes and figures, not signed |
//!
//! A second port, for scrapers, answers `/metrics` and nothing else.
//!
//! Invariant: an answer never waits for an engine.

mod answers;
mod listener;
mod supernode;

pub use self::answers::{ControlState, Face};
pub use self::listener::serve;
