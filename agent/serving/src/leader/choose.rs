//! Which rank takes a sequence: two phases (serving.md B.3), in integers.
//!
//! First the supernode with the fewest tokens among those with room; in it, among the ranks that would stay within
//! 5 % of the mean number of tokens, the one with the fewest requests. Requests set the time of a step, tokens
//! fill the memory: the rule keeps both even, and every simpler rule loses one of them.

use deepinfer_protocol::RankId;

use crate::batch::BLOCK_TOKENS;

/// What a rank is known to have, own assignments included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankLoad {
    /// Which.
    pub id: RankId,
    /// Index of its supernode.
    pub group: usize,
    /// Why it takes nothing at all now, if so.
    pub closed: Option<WhyNot>,
    /// Requests that load, run, or come.
    pub requests: u32,
    /// Their lengths and reserved growth.
    pub tokens: u64,
    /// Free blocks.
    pub free_blocks: u32,
    /// Blocks in all.
    pub total_blocks: u32,
    /// Free state slots.
    pub free_slots: u32,
    /// Most requests at once.
    pub max_requests: u32,
}

/// What a sequence needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SequenceNeed {
    /// Its length.
    pub length: u64,
    /// Tokens that are reserved for its growth (DR-1).
    pub growth: u64,
    /// Growth that may be promised in percent of the memory left: [`OVERCOMMIT_PERCENT`] for a new sequence, 100
    /// for one that gave way before, so that it does not give way again at once.
    pub percent: u64,
}

/// Reserved growth may exceed the memory left by this: most requests end before they use theirs (DR-1).
pub const OVERCOMMIT_PERCENT: u64 = 130;

/// Why a rank was not chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WhyNot {
    /// It drains, or the fleet says that it does not serve.
    Draining,
    /// Its report is too old.
    Stale,
    /// It cannot read this KV.
    KvEpoch,
    /// The request failed there and there are others.
    Excluded,
    /// No state slot is free.
    NoSlot,
    /// It runs as many requests as it may.
    MostRequests,
    /// Too few free blocks for the sequence as it is.
    NoBlocks,
    /// Too much growth is reserved already.
    Growth,
    /// It never fits there.
    TooLarge,
}

impl RankLoad {
    /// Whether the sequence finds room (DR-1, DR-2). An idle rank takes whatever fits its memory at all.
    pub fn room(&self, need: SequenceNeed) -> Result<(), WhyNot> {
        let block = BLOCK_TOKENS as u64;
        if let Some(why) = self.closed {
            return Err(why);
        }
        // The token that is drawn next needs its place too.
        let blocks = (need.length + 1).div_ceil(block);
        if blocks > u64::from(self.total_blocks) {
            return Err(WhyNot::TooLarge);
        }
        if self.free_slots == 0 {
            return Err(WhyNot::NoSlot);
        }
        if self.requests >= self.max_requests {
            return Err(WhyNot::MostRequests);
        }
        if blocks > u64::from(self.free_blocks) {
            return Err(WhyNot::NoBlocks);
        }
        if self.requests == 0 {
            return Ok(());
        }
        let used = u64::from(self.total_blocks.saturating_sub(self.free_blocks)) * block;
        let left = (u64::from(self.total_blocks) * block).saturating_sub(used + need.length);
        let reserved = self.tokens.saturating_sub(used) + need.growth;
        if reserved * 100 > left * need.percent { Err(WhyNot::Growth) } else { Ok(()) }
    }
}

/// Chooses a rank, by index, or says of each why not. `ranks` are in the order of their ids.
pub fn choose(ranks: &[RankLoad], need: SequenceNeed) -> Result<usize, Vec<WhyNot>> {
    let rooms: Vec<Result<(), WhyNot>> = ranks.iter().map(|r| r.room(need)).collect();
    let Some(group) = lightest_group(ranks, &rooms) else {
        return Err(rooms.into_iter().filter_map(Result::err).collect());
    };
    let members = || ranks.iter().enumerate().filter(|(_, r)| r.group == group);
    let count = members().count() as u128;
    let total: u128 = members().map(|(_, r)| u128::from(r.tokens)).sum();
    let own = u128::from(need.length + need.growth);
    // K + len <= Z with Z = 1.05 * (sum K + len) / ranks, both sides multiplied by 100 * ranks.
    let even = |r: &RankLoad| (u128::from(r.tokens) + own) * 100 * count <= 105 * (total + own);
    let with_room = || members().filter(|(i, _)| rooms[*i].is_ok());
    let among_even = with_room().filter(|(_, r)| even(r)).min_by_key(|(i, r)| (r.requests, r.tokens, *i));
    let chosen = among_even.or_else(|| with_room().min_by_key(|(i, r)| (r.tokens, *i)));
    Ok(chosen.expect("the group has a rank with room").0)
}

/// The supernode with the fewest tokens among those that have a rank with room; ties by the lowest index.
fn lightest_group(ranks: &[RankLoad], rooms: &[Result<(), WhyNot>]) -> Option<usize> {
    let mut best: Option<(u64, usize)> = None;
    for (rank, room) in ranks.iter().zip(rooms) {
        if room.is_err() {
            continue;
        }
        let sum = ranks.iter().filter(|r| r.group == rank.group).map(|r| r.tokens).sum();
        if best.is_none_or(|least| (sum, rank.group) < least) {
            best = Some((sum, rank.group));
        }
    }
    best.map(|(_, group)| group)
}

#[cfg(test)]
mod tests {
    use deepinfer_protocol::Rank;

    use super::*;

    fn rank(group: usize, number: u16, requests: u32, tokens: u64) -> RankLoad {
        RankLoad {
            id: RankId { agent: "d".into(), rank: Rank(number) },
            group,
            closed: None,
            requests,
            tokens,
            free_blocks: 1_000,
            total_blocks: 1_000,
            free_slots: 8,
            max_requests: 8,
        }
    }

    const NEED: SequenceNeed = need(1_000, 0);

    const fn need(length: u64, growth: u64) -> SequenceNeed {
        SequenceNeed { length, growth, percent: OVERCOMMIT_PERCENT }
    }

    #[test]
    fn the_lighter_supernode_is_chosen_first_and_then_the_rank_with_fewest_requests() {
        let ranks =
            [rank(0, 0, 1, 90_000), rank(0, 1, 1, 90_000), rank(1, 2, 5, 80_000), rank(1, 3, 4, 81_000)];
        assert_eq!(choose(&ranks, NEED), Ok(3));
    }

    #[test]
    fn a_rank_far_above_the_mean_of_tokens_is_passed_over_although_it_has_fewest_requests() {
        let ranks = [rank(0, 0, 1, 200_000), rank(0, 1, 3, 90_000), rank(0, 2, 4, 89_000)];
        assert_eq!(choose(&ranks, NEED), Ok(1));
    }

    #[test]
    fn when_no_rank_stays_near_the_mean_the_fewest_tokens_win() {
        let ranks = [rank(0, 0, 1, 1_000), rank(0, 1, 2, 900)];
        assert_eq!(choose(&ranks, need(100_000, 0)), Ok(1));
    }

    #[test]
    fn a_refusal_says_of_each_rank_why_it_was_not_chosen() {
        let mut ranks: Vec<RankLoad> = (0..6).map(|n| rank(0, n, 1, 1_000)).collect();
        ranks[0].closed = Some(WhyNot::Draining);
        ranks[1].free_slots = 0;
        ranks[2].max_requests = 1;
        ranks[3].free_blocks = 7;
        ranks[4].total_blocks = 7;
        ranks[5].tokens = 200_000;
        let why = [
            WhyNot::Draining,
            WhyNot::NoSlot,
            WhyNot::MostRequests,
            WhyNot::NoBlocks,
            WhyNot::TooLarge,
            WhyNot::Growth,
        ];
        assert_eq!(choose(&ranks, NEED), Err(why.to_vec()));
    }

    #[test]
    fn growth_is_overcommitted_by_thirty_percent_and_no_more() {
        let mut full = rank(0, 0, 1, 0);
        (full.total_blocks, full.free_blocks) = (20, 18);
        full.tokens = 2 * 128;
        // 20 blocks, 2 used: 2,304 tokens left, 1,304 after this sequence, 1,695 with the overcommitment.
        assert_eq!(full.room(need(1_000, 1_695)), Ok(()));
        assert_eq!(full.room(need(1_000, 1_696)), Err(WhyNot::Growth));
        let again = SequenceNeed { percent: 100, ..need(1_000, 1_304) };
        assert_eq!(full.room(again), Ok(()));
        let again = SequenceNeed { percent: 100, ..need(1_000, 1_305) };
        assert_eq!(full.room(again), Err(WhyNot::Growth), "it gave way before");
        full.requests = 0;
        assert_eq!(full.room(need(1_000, 9_999)), Ok(()), "alone it may try");
    }
}
