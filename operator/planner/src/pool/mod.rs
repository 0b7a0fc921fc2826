//! Pools: how many workers and supernodes there are, of which revision, and which leave first.

pub(crate) mod objects;
pub(crate) mod prefill;
pub(crate) mod quarantine;
pub(crate) mod retries;
pub(crate) mod rollout;
pub(crate) mod supernodes;
