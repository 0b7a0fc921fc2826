//! Monotonic time of one process as integer nanoseconds. Only drivers make a [`Time`]; machines are given it.

use std::ops::{Add, Sub};

use serde::{Deserialize, Serialize};

/// A moment, in nanoseconds since the process started. Never compared between processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(pub u64);

/// A length of time in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Span(pub u64);

impl Span {
    /// No time.
    pub const ZERO: Self = Self(0);
    /// Longer than any process lives.
    pub const MAX: Self = Self(u64::MAX);

    /// Microseconds.
    pub const fn micros(micros: u64) -> Self {
        Self(micros * 1_000)
    }

    /// Milliseconds.
    pub const fn millis(millis: u64) -> Self {
        Self(millis * 1_000_000)
    }

    /// Seconds.
    pub const fn secs(secs: u64) -> Self {
        Self(secs * 1_000_000_000)
    }

    /// In seconds, for metrics and messages.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// Whole milliseconds, rounded down.
    pub const fn as_millis(self) -> u64 {
        self.0 / 1_000_000
    }

    /// `self * factor`, at most [`Span::MAX`].
    #[must_use]
    pub const fn times(self, factor: u64) -> Self {
        Self(self.0.saturating_mul(factor))
    }

    /// The sum, at most [`Span::MAX`].
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl Time {
    /// Time since `earlier`; zero if that is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Span {
        Span(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Span> for Time {
    type Output = Self;

    fn add(self, span: Span) -> Self {
        Self(self.0.saturating_add(span.0))
    }
}

impl Sub<Span> for Time {
    type Output = Self;

    fn sub(self, span: Span) -> Self {
        Self(self.0.saturating_sub(span.0))
    }
}

impl From<Span> for std::time::Duration {
    fn from(span: Span) -> Self {
        Self::from_nanos(span.0)
    }
}

impl From<std::time::Duration> for Span {
    fn from(duration: std::time::Duration) -> Self {
        Self(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
    }
}
