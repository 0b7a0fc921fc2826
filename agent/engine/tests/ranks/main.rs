//! Engines beside each other: experts spread over ranks, and sequences that move from one engine to another.
//! Logits are compared bit by bit with one engine that did everything.

// Helpers of tests unwrap like tests; the lint knows functions marked as tests only.
#![allow(clippy::unwrap_used)]

#[path = "../support/mod.rs"]
mod support;

mod faults;
mod group;
mod moves;
mod spread;
