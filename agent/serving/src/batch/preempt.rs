//! Who gives way when blocks run out (DR-3). The victim loses nothing: it is parked and placed again.

/// A sequence is preempted at most this often; after that it runs to its end.
pub const MAX_PREEMPTIONS: u32 = 3;
/// The victim is among the newest of the running ones: one in this many.
const NEWEST_SHARE: usize = 4;

/// A running sequence as a possible victim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Running {
    /// Counts admissions: larger is newer. Unique.
    pub admitted: u64,
    /// Tokens that it may still grow by.
    pub growth: u32,
    /// How often it gave way already.
    pub preemptions: u32,
}

/// Place of the victim in `running`: the one that may grow most among the newest quarter (at least one) of those
/// that may give way once more; the newer of two equal ones. `None`: nobody may.
pub fn choose_victim(running: &[Running]) -> Option<usize> {
    let mut order: Vec<usize> =
        (0..running.len()).filter(|&i| running[i].preemptions < MAX_PREEMPTIONS).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(running[i].admitted));
    order.truncate(order.len().div_ceil(NEWEST_SHARE));
    order.into_iter().max_by_key(|&i| (running[i].growth, running[i].admitted))
}
