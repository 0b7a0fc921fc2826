//! How many sequences a rank takes, so that each can run to its end (DR-1, DR-3).
//!
//! Growth is not held in advance: a sequence gets a block when it needs it, and when none is left another gives
//! way. To keep that rare and bounded:
//! - a fresh request may overcommit reserved growth by [`OVERCOMMIT_PERCENT`];
//! - one that gave way before may not, so that it is not sent to and fro;
//! - one that gave way [`MAX_PREEMPTIONS`] times is protected: it is taken only if all protected ones fit to their
//!   last possible token, and it never gives way again. So there is always somebody else to give way, or nobody
//!   needs to.

use crate::batch::{MAX_PREEMPTIONS, Running};
use crate::handoff::blocks_of;

/// Reserved growth of all requests together, in percent of the blocks (DR-1).
pub const OVERCOMMIT_PERCENT: u64 = 130;

/// What a sequence needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Need {
    /// Length.
    pub tokens: u32,
    /// Tokens that it may still grow by.
    pub left: u32,
    /// Times it gave way.
    pub preemptions: u32,
}

impl Need {
    /// Length with reserved growth.
    pub fn reserved(&self, reserve: u32) -> u32 {
        self.tokens.saturating_add(self.left.min(reserve))
    }

    /// Blocks that it can ever need.
    fn most_blocks(&self) -> u64 {
        u64::from(blocks_of(self.tokens.saturating_add(self.left)))
    }

    /// As a possible victim; `order` counts acceptances.
    pub fn candidate(&self, order: u64) -> Running {
        Running { admitted: order, growth: self.left, preemptions: self.preemptions }
    }

    /// Whether it never gives way.
    pub fn protected(&self) -> bool {
        self.preemptions >= MAX_PREEMPTIONS
    }
}

/// Whether `new` may join `held` in a pool of `blocks` blocks. That its present length fits is checked apart.
pub fn admits(blocks: u32, reserve: u32, held: &[Need], new: Need) -> bool {
    if held.is_empty() {
        return true;
    }
    let all = || held.iter().copied().chain([new]);
    let reserved: u64 = all().map(|need| u64::from(blocks_of(need.reserved(reserve)))).sum();
    let percent = if new.preemptions == 0 { OVERCOMMIT_PERCENT } else { 100 };
    let protected: u64 = all().filter(Need::protected).map(|need| need.most_blocks()).sum();
    reserved * 100 <= u64::from(blocks) * percent && (!new.protected() || protected <= u64::from(blocks))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn need(tokens: u32, left: u32, preemptions: u32) -> Need {
        Need { tokens, left, preemptions }
    }

    #[test]
    fn a_request_alone_is_always_taken() {
        assert!(admits(10, 512, &[], need(1_000, 100_000, 9)));
    }

    #[test]
    fn fresh_requests_overcommit_reserved_growth_by_thirty_percent() {
        // 5 blocks each with their reserve, in a pool of 10: 15 of 13 are too many, 13 of 13 are not.
        let held = [need(128, 9_999, 0), need(128, 9_999, 0)];
        assert!(!admits(10, 512, &held, need(128, 9_999, 0)));
        assert!(admits(10, 512, &held, need(128, 256, 0)));
        assert!(!admits(10, 512, &held, need(128, 256, 1)), "it gave way before");
        assert!(admits(10, 512, &held[..1], need(128, 9_999, 1)));
    }

    #[test]
    fn protected_requests_are_taken_only_if_all_of_them_fit_to_their_end() {
        let held = [need(128, 128 * 5, MAX_PREEMPTIONS)];
        assert!(admits(10, 128, &held, need(128, 128 * 3, MAX_PREEMPTIONS)));
        assert!(!admits(10, 128, &held, need(128, 128 * 4, MAX_PREEMPTIONS)));
        assert!(admits(10, 128, &held, need(128, 128 * 4, 0)));
    }
}
