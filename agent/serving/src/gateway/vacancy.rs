//! Choosing without a leader (DR-5): two random candidates, the one to which this gateway gave less. Never good at
//! one thing, but safe when every gateway knows only its own requests.

use deepinfer_protocol::agent_status::Role;
use deepinfer_protocol::{AgentId, Rank, RankId, RequestId, Time};

use super::GatewayAction;
use super::machine::Gateway;
use super::peers::Which;
use super::request::{Ask, Place, Stage};

/// A small seeded generator (splitmix64): the same seed gives the same decisions.
#[derive(Clone, Debug)]
pub(super) struct Dice(u64);

impl Dice {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`; 0 if that is 0.
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.next().checked_rem(limit).unwrap_or(0)
    }
}

/// Index of the candidate to use: of two drawn ones that with the smaller count, the first of equals. `None`
/// without candidates.
pub(super) fn two_choices(dice: &mut Dice, counts: &[usize]) -> Option<usize> {
    let n = counts.len() as u64;
    if n == 0 {
        return None;
    }
    let a = dice.below(n) as usize;
    // The second is drawn from the others, so that both are never the same.
    let b = (a + 1 + dice.below(n.saturating_sub(1).max(1)) as usize) % counts.len();
    Some([a.min(b), a.max(b)].into_iter().min_by_key(|i| (counts[*i], *i)).unwrap_or(a))
}

impl Gateway {
    /// Without a leader the gateway sends requests to workers by itself, oldest first.
    pub(super) fn fill_vacancies(&mut self, now: Time, out: &mut Vec<GatewayAction>) {
        let grace = self.options.times.vacancy;
        if self.peers.vacant(now, Which::Prefill, grace) {
            self.fill_prefill(now, out);
        }
        if self.peers.vacant(now, Which::Decode, grace) {
            self.fill_decode(now, out);
        }
    }

    fn fill_prefill(&mut self, now: Time, out: &mut Vec<GatewayAction>) {
        let workers: Vec<AgentId> =
            self.peers.serving().filter(|m| m.role == Role::Prefill).map(|m| m.name.clone()).collect();
        let mut counts = vec![0usize; workers.len()];
        for worker in self.records.values().filter_map(|r| r.stage.worker()) {
            if let Some(at) = workers.iter().position(|w| w == worker) {
                counts[at] += 1;
            }
        }
        let mut waiting: Vec<(Time, RequestId)> = self
            .records
            .values()
            .filter(|r| matches!(r.stage, Stage::PrefillQueued(Ask::After(time)) if time <= now))
            .map(|r| (r.arrived, r.id))
            .collect();
        waiting.sort_unstable();
        for (_, id) in waiting {
            let Some(record) = self.records.get_mut(&id) else { continue };
            let shunned = |w: &AgentId| record.excluded.contains(w) || record.avoid.as_ref() == Some(w);
            let others = workers.iter().any(|w| !shunned(w));
            let open: Vec<usize> = (0..workers.len())
                .filter(|i| counts[*i] < self.options.vacancy_per_worker)
                .filter(|i| !(others && shunned(&workers[*i])))
                .collect();
            let open_counts: Vec<usize> = open.iter().map(|i| counts[*i]).collect();
            let Some(at) = two_choices(&mut self.dice, &open_counts).map(|i| open[i]) else { continue };
            counts[at] += 1;
            self.stats.vacancy += 1;
            let assignment = record.own_assignment(self.stats.vacancy);
            self.start_prefill(now, id, assignment, workers[at].clone(), out);
        }
    }

    /// Without a leader the gateway places sequences by itself, oldest first.
    fn fill_decode(&mut self, now: Time, out: &mut Vec<GatewayAction>) {
        let ranks: Vec<(RankId, String)> = self
            .peers
            .serving()
            .filter(|m| m.role == Role::Decode)
            .flat_map(|m| {
                (m.first_rank..m.first_rank.saturating_add(m.ranks))
                    .map(|rank| (RankId { agent: m.name.clone(), rank: Rank(rank) }, m.kv_epoch.clone()))
            })
            .collect();
        let mut counts = vec![0usize; ranks.len()];
        for rank in self.records.values().filter_map(|r| r.stage.rank()) {
            if let Some(at) = ranks.iter().position(|(r, _)| r == rank) {
                counts[at] += 1;
            }
        }
        let mut waiting: Vec<(Time, RequestId)> = self
            .records
            .values()
            .filter(|r| match &r.stage {
                Stage::Parked { place: Place::Ask(Ask::After(time)), .. } => *time <= now,
                _ => false,
            })
            .map(|r| (r.arrived, r.id))
            .collect();
        waiting.sort_unstable();
        for (_, id) in waiting {
            let Some(kv_epoch) = self.kv_epoch(id) else { continue };
            let Some(record) = self.records.get_mut(&id) else { continue };
            let open: Vec<usize> = (0..ranks.len())
                .filter(|i| counts[*i] < self.options.vacancy_per_rank && ranks[*i].1 == kv_epoch)
                .filter(|i| !record.dropped.contains(&ranks[*i].0.agent))
                .collect();
            let open_counts: Vec<usize> = open.iter().map(|i| counts[*i]).collect();
            let Some(at) = two_choices(&mut self.dice, &open_counts).map(|i| open[i]) else { continue };
            counts[at] += 1;
            self.stats.vacancy += 1;
            let assignment = record.own_assignment(self.stats.vacancy);
            if let Some(place) = record.stage.place_mut() {
                *place = Place::Found { rank: ranks[at].0.clone(), assignment };
            }
            self.start_decode(now, id, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_two_candidates_the_lighter_is_always_chosen() {
        let mut dice = Dice::new(7);
        for _ in 0..100 {
            assert_eq!(two_choices(&mut dice, &[3, 2]), Some(1));
            assert_eq!(two_choices(&mut dice, &[2, 2]), Some(0));
        }
        assert_eq!(two_choices(&mut dice, &[9]), Some(0));
        assert_eq!(two_choices(&mut dice, &[]), None);
    }

    #[test]
    fn the_heaviest_of_many_is_never_chosen_and_the_others_share() {
        let mut dice = Dice::new(1);
        let mut counts = [10usize, 0, 0, 0, 0];
        for _ in 0..35 {
            let chosen = two_choices(&mut dice, &counts).expect("there are candidates");
            counts[chosen] += 1;
        }
        assert_eq!(counts[0], 10, "{counts:?}");
        assert!(counts[1..].iter().all(|n| (6..=11).contains(n)), "{counts:?}");
    }
}
