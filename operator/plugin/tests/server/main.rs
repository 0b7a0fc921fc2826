//! The plugin against a real API server, with objects as an operator would have written them.

mod kit;
mod objects;
mod reading;
mod releasing;
mod tracing;
