//! Experts spread over the ranks of a supernode: rows go to the ranks that hold their experts, results come
//! back.
//!
//! Invariant: a result belongs to one (row, expert) pair and depends on nothing else, and a row's results are
//! added in ascending expert id, as one rank adds them. So the number of ranks, the placement of experts and
//! the choice among replicas change no bit of the sum.
//!
//! Every backbone layer of every step is one exchange: [`ExpertExchange::dispatch`], the local experts over
//! what arrived, [`ExpertExchange::finish`], [`ExpertExchange::collect`]. A rank without rows takes part in
//! all of them.

pub mod local;
mod slots;

use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

pub use self::slots::{SlotMap, SlotMapError};

/// Why an exchange ended. It is over for all ranks then, for ever.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ExchangeError {
    /// A rank's engine is gone: dropped, or it panicked.
    #[error("rank {rank} left the expert exchange")]
    RankGone {
        /// The rank.
        rank: usize,
    },
    /// A rank did not come in time.
    #[error("rank {rank} did not reach the expert exchange within {limit:?}")]
    TimedOut {
        /// The lowest rank that is missing.
        rank: usize,
        /// How long the others waited for it.
        limit: Duration,
    },
    /// Ranks run different layers or models.
    #[error("rank {rank} is at another layer of the step than rank {other}, or runs another model")]
    OutOfStep {
        /// The rank that says so.
        rank: usize,
        /// The rank it disagrees with.
        other: usize,
    },
    /// Somebody ended it.
    #[error("expert exchange ended: {reason}")]
    Aborted {
        /// Why.
        reason: String,
    },
    /// A step of this rank panicked.
    #[error("a step of this rank panicked")]
    Panicked,
}

/// A row of this rank that wants an expert.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pick {
    /// Row of this rank's step.
    pub row: u32,
    /// Rank that holds the chosen replica.
    pub rank: u32,
    /// Local slot there.
    pub slot: u32,
    /// Router weight.
    pub weight: f32,
}

/// A row of some rank for an expert of this rank.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Arrival {
    /// Local slot.
    pub slot: u32,
    /// Router weight.
    pub weight: f32,
}

/// One rank's end of an exchange. Calls come in the order of the methods below, one round a layer.
pub trait ExpertExchange: Send {
    /// This rank, below [`ExpertExchange::ranks`].
    fn rank(&self) -> usize;

    /// Ranks that exchange.
    fn ranks(&self) -> usize;

    /// Gives this rank's rows `[rows, width]` and picks, and waits for those of all others. Rows and picks may
    /// be empty.
    ///
    /// # Errors
    /// If the exchange is over.
    fn dispatch(
        &mut self,
        layer: usize,
        width: usize,
        rows: &[f32],
        picks: &[Pick],
    ) -> Result<(), ExchangeError>;

    /// What arrived for this rank's experts, ascending by slot.
    fn arrivals(&self) -> &[Arrival];

    /// Copies the rows of the arrivals from `first` on, `[n, width]`.
    ///
    /// # Errors
    /// If the exchange is over.
    fn load(&mut self, first: usize, rows: &mut [f32]) -> Result<(), ExchangeError>;

    /// Takes the results of the arrivals from `first` on, `[n, width]`.
    ///
    /// # Errors
    /// If the exchange is over.
    fn store(&mut self, first: usize, results: &[f32]) -> Result<(), ExchangeError>;

    /// Says that all results were stored. Does not wait.
    ///
    /// # Errors
    /// If the exchange is over.
    fn finish(&mut self) -> Result<(), ExchangeError>;

    /// Waits for the results of this rank's picks and adds each to `sums[row]`, in the order of the picks.
    ///
    /// # Errors
    /// If the exchange is over.
    fn collect(&mut self, sums: &mut [f32]) -> Result<(), ExchangeError>;
}

/// An engine's place in a supernode.
pub struct RankSetup {
    /// Which experts each rank holds; the same on all ranks.
    pub map: Arc<SlotMap>,
    /// This rank's end.
    pub exchange: Box<dyn ExpertExchange>,
}
