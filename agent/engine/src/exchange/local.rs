//! The exchange of ranks in one process: rows and results lie in shared memory, each written by one rank and
//! read by the others between two meetings.
//!
//! A layer has two meetings of all ranks. Before the first a rank writes its rows; after it the rows of all
//! are read and results written; after the second the results are read. A rank writes its rows again only
//! when all have passed the second meeting, and results only when all have passed the next first one: nobody
//! reads them then.
//!
//! Nothing waits for ever: a rank that is dropped (a panic unwinds through it), an [`Aborter`] or the time
//! limit ends the exchange for all.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use super::{Arrival, ExchangeError, ExpertExchange, Pick};

/// Makes exchanges within this process.
#[derive(Debug)]
pub struct LocalExchange;

impl LocalExchange {
    /// The ends of a new exchange, one for each of `ranks` engines, in order. `limit`: how long a rank waits
    /// for the others at one meeting; it must cover the longest layer of the slowest rank.
    ///
    /// # Panics
    /// If `ranks` is 0.
    #[expect(clippy::new_ret_no_self, reason = "an exchange is its ends")]
    pub fn new(ranks: usize, limit: Duration) -> Vec<LocalEnd> {
        assert!(ranks > 0, "an exchange has at least one rank");
        let shared = Arc::new(Shared {
            limit,
            gate: Mutex::new(Gate { phases: vec![0; ranks], over: None }),
            moved: Condvar::new(),
            posts: (0..ranks).map(|_| RwLock::default()).collect(),
            results: (0..ranks).map(|_| RwLock::default()).collect(),
        });
        let end = |rank| LocalEnd {
            shared: shared.clone(),
            rank,
            phase: 0,
            width: 0,
            arrivals: Vec::new(),
            origins: Vec::new(),
            order: Vec::new(),
            offsets: vec![0; ranks],
            picks: Vec::new(),
        };
        (0..ranks).map(end).collect()
    }
}

/// What all ranks see.
#[derive(Debug)]
struct Shared {
    limit: Duration,
    gate: Mutex<Gate>,
    moved: Condvar,
    /// Rows and picks by rank.
    posts: Vec<RwLock<Post>>,
    /// Results by the rank that computed them: of all picks for it, by rank of the row, then in the order of
    /// that rank's picks.
    results: Vec<RwLock<Vec<f32>>>,
}

/// Where the ranks stand.
#[derive(Debug)]
struct Gate {
    /// Meetings that each rank has come to.
    phases: Vec<u64>,
    over: Option<ExchangeError>,
}

/// What one rank gives to a layer.
#[derive(Debug, Default)]
struct Post {
    layer: usize,
    width: usize,
    rows: Vec<f32>,
    picks: Vec<Pick>,
}

/// Where an arrival came from and where its result goes.
#[derive(Clone, Copy, Debug)]
struct Origin {
    rank: u32,
    row: u32,
    place: u32,
}

impl Shared {
    fn gate(&self) -> MutexGuard<'_, Gate> {
        // Its data are valid after every statement: a panic elsewhere does not matter.
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, error: ExchangeError) -> ExchangeError {
        let over = self.gate().over.get_or_insert(error).clone();
        self.moved.notify_all();
        over
    }

    /// What rank `rank` posted. A lock that a panic has poisoned: that rank is as good as gone.
    fn post(&self, rank: usize) -> Result<RwLockReadGuard<'_, Post>, ExchangeError> {
        self.posts[rank].read().map_err(|_| self.end(ExchangeError::RankGone { rank }))
    }

    fn post_mut(&self, rank: usize) -> Result<RwLockWriteGuard<'_, Post>, ExchangeError> {
        self.posts[rank].write().map_err(|_| self.end(ExchangeError::RankGone { rank }))
    }

    /// What rank `rank` computed.
    fn results(&self, rank: usize) -> Result<RwLockReadGuard<'_, Vec<f32>>, ExchangeError> {
        self.results[rank].read().map_err(|_| self.end(ExchangeError::RankGone { rank }))
    }

    fn results_mut(&self, rank: usize) -> Result<RwLockWriteGuard<'_, Vec<f32>>, ExchangeError> {
        self.results[rank].write().map_err(|_| self.end(ExchangeError::RankGone { rank }))
    }

    /// Says that `rank` has come to the meeting `phase`.
    fn arrive(&self, rank: usize, phase: u64) -> Result<(), ExchangeError> {
        let mut gate = self.gate();
        if let Some(over) = &gate.over {
            return Err(over.clone());
        }
        gate.phases[rank] = phase;
        if gate.missing(phase).is_none() {
            drop(gate);
            self.moved.notify_all();
        }
        Ok(())
    }

    /// Waits until all have come to the meeting `phase`.
    fn wait(&self, phase: u64) -> Result<(), ExchangeError> {
        let mut gate = self.gate();
        let mut deadline = None;
        loop {
            // Whoever left after it had come to this meeting has left all that is needed here.
            let Some(rank) = gate.missing(phase) else {
                return Ok(());
            };
            if let Some(over) = &gate.over {
                return Err(over.clone());
            }
            let now = Instant::now();
            let deadline = *deadline.get_or_insert_with(|| now.checked_add(self.limit));
            let left = deadline.map_or(self.limit, |deadline| deadline.saturating_duration_since(now));
            if left.is_zero() {
                drop(gate);
                return Err(self.end(ExchangeError::TimedOut { rank, limit: self.limit }));
            }
            gate = self.moved.wait_timeout(gate, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Gate {
    fn missing(&self, phase: u64) -> Option<usize> {
        self.phases.iter().position(|&p| p < phase)
    }
}

/// One rank's end. Dropping it ends the exchange for all.
#[derive(Debug)]
pub struct LocalEnd {
    shared: Arc<Shared>,
    rank: usize,
    phase: u64,
    width: usize,
    arrivals: Vec<Arrival>,
    /// Of each arrival.
    origins: Vec<Origin>,
    /// Arrivals before they are sorted.
    order: Vec<(Arrival, Origin)>,
    /// Where this rank's results begin in those of each rank.
    offsets: Vec<usize>,
    /// This rank's picks of the layer.
    picks: Vec<Pick>,
}

impl LocalEnd {
    /// A handle that can end the exchange from another thread: for a watchdog.
    pub fn aborter(&self) -> Aborter {
        Aborter { shared: self.shared.clone() }
    }

    fn arrive(&mut self) -> Result<(), ExchangeError> {
        self.phase += 1;
        self.shared.arrive(self.rank, self.phase)
    }

    /// Reads what all ranks posted: what arrives here, and where results of this rank's rows will lie.
    fn read_posts(&mut self, layer: usize) -> Result<(), ExchangeError> {
        let me = self.rank as u32;
        self.order.clear();
        self.offsets.fill(0);
        let mut place = 0;
        for rank in 0..self.shared.posts.len() {
            let post = self.shared.post(rank)?;
            if (post.layer, post.width) != (layer, self.width) {
                drop(post);
                return Err(self.shared.end(ExchangeError::OutOfStep { rank: self.rank, other: rank }));
            }
            for pick in &post.picks {
                if pick.rank == me {
                    let arrival = Arrival { slot: pick.slot, weight: pick.weight };
                    self.order.push((arrival, Origin { rank: rank as u32, row: pick.row, place }));
                    place += 1;
                }
                if rank < self.rank {
                    self.offsets[pick.rank as usize] += 1;
                }
            }
        }
        self.order.sort_unstable_by_key(|(arrival, origin)| (arrival.slot, origin.place));
        self.arrivals.clear();
        self.arrivals.extend(self.order.iter().map(|(arrival, _)| *arrival));
        self.origins.clear();
        self.origins.extend(self.order.iter().map(|(_, origin)| *origin));
        Ok(())
    }
}

impl ExpertExchange for LocalEnd {
    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> usize {
        self.shared.posts.len()
    }

    fn dispatch(
        &mut self,
        layer: usize,
        width: usize,
        rows: &[f32],
        picks: &[Pick],
    ) -> Result<(), ExchangeError> {
        self.width = width;
        self.picks.clear();
        self.picks.extend_from_slice(picks);
        {
            let mut post = self.shared.post_mut(self.rank)?;
            post.layer = layer;
            post.width = width;
            post.rows.clear();
            post.rows.extend_from_slice(rows);
            post.picks.clear();
            post.picks.extend_from_slice(picks);
        }
        self.arrive()?;
        self.shared.wait(self.phase)?;
        self.read_posts(layer)?;
        let mut results = self.shared.results_mut(self.rank)?;
        results.resize(self.arrivals.len() * width, 0.0);
        Ok(())
    }

    fn arrivals(&self) -> &[Arrival] {
        &self.arrivals
    }

    fn load(&mut self, first: usize, rows: &mut [f32]) -> Result<(), ExchangeError> {
        for (origin, row) in self.origins[first..].iter().zip(rows.chunks_exact_mut(self.width)) {
            let rank = origin.rank as usize;
            let post = self.shared.post(rank)?;
            let at = origin.row as usize * self.width;
            row.copy_from_slice(&post.rows[at..at + self.width]);
        }
        Ok(())
    }

    fn store(&mut self, first: usize, results: &[f32]) -> Result<(), ExchangeError> {
        let mut all = self.shared.results_mut(self.rank)?;
        for (origin, result) in self.origins[first..].iter().zip(results.chunks_exact(self.width)) {
            let at = origin.place as usize * self.width;
            all[at..at + self.width].copy_from_slice(result);
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<(), ExchangeError> {
        self.arrive()
    }

    fn collect(&mut self, sums: &mut [f32]) -> Result<(), ExchangeError> {
        self.shared.wait(self.phase)?;
        for i in 0..self.picks.len() {
            let Pick { rank, row, .. } = self.picks[i];
            let (rank, row) = (rank as usize, row as usize);
            let results = self.shared.results(rank)?;
            let at = self.offsets[rank] * self.width;
            let sum = &mut sums[row * self.width..(row + 1) * self.width];
            for (sum, result) in sum.iter_mut().zip(&results[at..at + self.width]) {
                *sum += result;
            }
            drop(results);
            self.offsets[rank] += 1;
        }
        Ok(())
    }
}

impl Drop for LocalEnd {
    fn drop(&mut self) {
        self.shared.end(ExchangeError::RankGone { rank: self.rank });
    }
}

/// Ends an exchange from outside.
#[derive(Clone, Debug)]
pub struct Aborter {
    shared: Arc<Shared>,
}

impl Aborter {
    /// Ends the exchange: the step on every rank returns an error at its next meeting at the latest.
    pub fn abort(&self, reason: &str) {
        self.shared.end(ExchangeError::Aborted { reason: reason.to_string() });
    }

    /// Why the exchange is over, if it is.
    pub fn over(&self) -> Option<ExchangeError> {
        self.shared.gate().over.clone()
    }
}

#[cfg(test)]
#[path = "local_tests.rs"]
mod tests;
