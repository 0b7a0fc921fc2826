//! One pod on a process node.

mod container;
pub(crate) mod context;
mod ending;
pub(crate) mod env;
mod expand;
mod fields;
mod files;
mod http;
mod probe;
pub(crate) mod publish;
mod status;
pub(crate) mod view;
mod volumes;
pub(crate) mod worker;
