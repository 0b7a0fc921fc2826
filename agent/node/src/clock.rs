//! The only clock of an agent: monotonic nanoseconds since it started.

use std::time::Instant;

use deepinfer_protocol::Time;

/// Makes [`Time`]s. Copies agree with each other.
#[derive(Clone, Copy, Debug)]
pub struct Clock(Instant);

impl Clock {
    /// Starts at 0.
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// Now.
    pub fn now(self) -> Time {
        Time(u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX))
    }
}
