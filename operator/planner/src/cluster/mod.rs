//! A cluster's own steps: what its spec means, which children it has, and its status.

pub(crate) mod children;
pub(crate) mod defaults;
pub(crate) mod model;
pub(crate) mod references;
pub(crate) mod resolve;
pub(crate) mod status;
pub(crate) mod supported;
pub(crate) mod teardown;
pub(crate) mod template;
