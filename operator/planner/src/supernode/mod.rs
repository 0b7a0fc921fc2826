//! One supernode: where it stands, its place, its pods, its drain and its status.

pub(crate) mod drain;
pub(crate) mod fabric;
pub(crate) mod gang;
pub(crate) mod phase;
pub(crate) mod place;
pub(crate) mod pods;
pub(crate) mod routable;
pub(crate) mod signals;
pub(crate) mod status;
pub(crate) mod stuck;
