//! The machines of a node with a scripted engine: what a sequence goes through, and what must hold whatever happens.

mod clients;
mod decode;
mod engine;
mod handoff;
mod lost;
mod prefill;
mod prefix;
mod rig;
mod setup;
mod whole;
