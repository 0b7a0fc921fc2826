//! One supernode: where it stands, its pods, its drain and its status.

pub(crate) mod drain;
pub(crate) mod phase;
pub(crate) mod pods;
pub(crate) mod status;
