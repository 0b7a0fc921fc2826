//! The operator's driver: five calls (gather, plan, check, commit, execute) around the pure planner.
//!
//! ```text
//!  watches -> cache -> gather -> World -> plan -> check -> commit -> execute -> API server
//!               ^         ^                                             |
//!               |         words of agents, what the API server offers   |
//!               +----------------- answers to own writes ---------------+
//! ```
//!
//! Every replica watches and serves the fleet from the committed blueprints; only the holder of the lease plans and
//! writes. Whatever is needed to go on after a crash is at the API server.

pub mod agents;
pub mod args;
pub mod cache;
pub mod commit;
pub mod error;
pub mod execute;
pub mod fleet_server;
pub mod gather;
pub mod health;
pub mod keys;
pub mod lease;
pub mod manifests;
pub mod metrics;
pub mod probe;
pub mod reconcile;
pub mod recorder;
pub mod requeue;
pub mod rest;
pub mod run;
pub mod serve;
pub mod telemetry;
