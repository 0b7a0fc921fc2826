//! The comparison of serving.md B.3, small: ranks in lockstep, requests of very different lengths that come and go,
//! and the rules of other systems beside ours. What must hold is the order, not the figures.

use std::collections::VecDeque;

use deepinfer_protocol::{Rank, RankId};
use deepinfer_serving::leader::choose::{OVERCOMMIT_PERCENT, RankLoad, SequenceNeed, choose};

const RANKS: usize = 32;
const REQUESTS: usize = 64;
const STEPS: usize = 400;
const COUNTED: usize = 200;

#[derive(Clone, Copy, Debug)]
enum Rule {
    Random,
    RoundRobin,
    ShortestQueue,
    LeastKv,
    TwoPhase,
}

/// How old reports are and whether the leader adds what it assigned since.
#[derive(Clone, Copy, Debug)]
struct View {
    age: usize,
    optimistic: bool,
}

struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }

    /// Lengths as in conversations: most are short, a few are a hundred times as long.
    fn length(&mut self) -> u64 {
        500 << self.below(7) << (self.below(4) / 3)
    }
}

/// (length, steps left) of a rank's requests.
type Running = Vec<(u64, u64)>;

fn load(running: &Running) -> (u32, u64) {
    (running.len() as u32, running.iter().map(|r| r.0).sum())
}

fn pick(rule: Rule, known: &[(u32, u64)], length: u64, turn: usize, dice: &mut Dice) -> usize {
    let least = |key: &dyn Fn(&(u32, u64)) -> u64| {
        (0..RANKS).min_by_key(|r| (key(&known[*r]), *r)).expect("there are ranks")
    };
    match rule {
        Rule::Random => dice.below(RANKS as u64) as usize,
        Rule::RoundRobin => turn % RANKS,
        Rule::ShortestQueue => least(&|l| u64::from(l.0)),
        Rule::LeastKv => least(&|l| l.1),
        Rule::TwoPhase => {
            let ranks: Vec<RankLoad> = known.iter().enumerate().map(|(r, l)| rank(r, *l)).collect();
            let need = SequenceNeed { length, growth: 0, percent: OVERCOMMIT_PERCENT };
            choose(&ranks, need).expect("there is always room")
        }
    }
}

fn rank(rank: usize, (requests, tokens): (u32, u64)) -> RankLoad {
    RankLoad {
        id: RankId { agent: "d".into(), rank: Rank(rank as u16) },
        group: 0,
        closed: None,
        requests,
        tokens,
        free_blocks: 10_000_000,
        total_blocks: 10_000_000,
        free_slots: 100_000,
        max_requests: 100_000,
    }
}

/// Mean over steps of max/mean over ranks, of requests and of tokens.
fn simulate(rule: Rule, view: View, seed: u64) -> (f64, f64) {
    let mut dice = Dice(seed);
    let mut ranks: Vec<Running> = vec![Vec::new(); RANKS];
    let mut reports: VecDeque<Vec<(u32, u64)>> = VecDeque::new();
    let mut recent: VecDeque<Vec<(usize, u64)>> = VecDeque::new();
    let (mut n_sum, mut k_sum, mut turn) = (0.0, 0.0, 0);
    for step in 0..STEPS {
        for running in &mut ranks {
            running.iter_mut().for_each(|r| *r = (r.0 + 3, r.1 - 1));
            running.retain(|r| r.1 > 0);
        }
        reports.push_back(ranks.iter().map(load).collect());
        recent.push_back(Vec::new());
        if reports.len() > view.age + 1 {
            reports.pop_front();
            recent.pop_front();
        }
        let mut known = reports[0].clone();
        if view.optimistic {
            for (to, length) in recent.iter().flatten() {
                known[*to] = (known[*to].0 + 1, known[*to].1 + length);
            }
        }
        let running: usize = ranks.iter().map(Vec::len).sum();
        for _ in running..RANKS * REQUESTS {
            let length = dice.length();
            let to = pick(rule, &known, length, turn, &mut dice);
            turn += 1;
            ranks[to].push((length, 20 + dice.below(120)));
            recent.back_mut().expect("this step").push((to, length));
            if view.optimistic {
                known[to] = (known[to].0 + 1, known[to].1 + length);
            }
        }
        if step >= STEPS - COUNTED {
            n_sum += peak(ranks.iter().map(|r| load(r).0 as f64));
            k_sum += peak(ranks.iter().map(|r| load(r).1 as f64));
        }
    }
    (n_sum / COUNTED as f64, k_sum / COUNTED as f64)
}

fn peak(loads: impl Iterator<Item = f64> + Clone) -> f64 {
    let mean = loads.clone().sum::<f64>() / RANKS as f64;
    loads.fold(0.0, f64::max) / mean
}

const FRESH: View = View { age: 0, optimistic: true };
const STALE: View = View { age: 5, optimistic: true };
const STALE_AND_NAIVE: View = View { age: 5, optimistic: false };

#[test]
fn two_phase_is_near_the_best_on_requests_and_on_tokens_and_no_other_rule_is() {
    for view in [FRESH, STALE] {
        let run = |rule| simulate(rule, view, 42);
        let (n, k) = run(Rule::TwoPhase);
        let shortest = run(Rule::ShortestQueue);
        let least = run(Rule::LeastKv);
        assert!(n <= shortest.0 * 1.03, "{view:?} requests: two-phase {n}, shortest queue {shortest:?}");
        assert!(k <= least.1 * 1.03, "{view:?} tokens: two-phase {k}, least KV {least:?}");
        for rule in [Rule::Random, Rule::RoundRobin, Rule::ShortestQueue, Rule::LeastKv] {
            let (other_n, other_k) = run(rule);
            let worst = (other_n / n).max(other_k / k);
            assert!(worst > 1.15, "{view:?} {rule:?}: {other_n} {other_k}, two-phase {n} {k}");
        }
    }
}

#[test]
fn on_old_reports_without_own_assignments_every_rule_that_minimises_is_worse_than_dice() {
    let random = simulate(Rule::Random, STALE_AND_NAIVE, 42);
    for rule in [Rule::ShortestQueue, Rule::LeastKv, Rule::TwoPhase] {
        let naive = simulate(rule, STALE_AND_NAIVE, 42);
        let corrected = simulate(rule, STALE, 42);
        assert!(naive.0 > 1.5 * random.0, "{rule:?}: {naive:?}, random {random:?}");
        assert!(naive.1 > 1.5 * random.1, "{rule:?}: {naive:?}, random {random:?}");
        let (sum, dice) = (corrected.0 + corrected.1, random.0 + random.1);
        assert!(sum < 0.95 * dice, "{rule:?}: {corrected:?}, random {random:?}");
    }
}
