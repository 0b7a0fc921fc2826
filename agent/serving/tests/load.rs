//! Expert counts: folded exactly, summed once over ranks, marked when they cannot be trusted.

use std::sync::Arc;

use deepinfer_protocol::load::{ExpertLoadReport, LoadRole};
use deepinfer_protocol::{AgentId, Generation, Rank, Span, SupernodeId};
use deepinfer_serving::load::{
    BalanceSum, CountedStep, Detail, LoadError, LoadLedger, LoadShape, LoadSource, RankCounter, SlotMap,
};
use proptest::prelude::*;

const SHAPE: LoadShape = LoadShape { layers: 3, experts: 10, top_k: 2 };

/// Experts in order over the ranks, then extra slot `i` is expert `i mod experts`.
fn maps(shape: LoadShape, ranks: usize, placement: u64) -> Vec<Arc<SlotMap>> {
    let experts = shape.experts as usize;
    let slots = experts.div_ceil(ranks);
    let logical: Vec<u32> = (0..ranks * slots).map(|i| (i % experts) as u32).collect();
    let map =
        |of: &[u32]| SlotMap::new(Generation(placement), shape.experts, &vec![of.to_vec(); shape.layers]);
    logical.chunks(slots).map(|of| Arc::new(map(of).expect("experts exist"))).collect()
}

/// A supernode whose router follows a script: row `i` of the run chooses experts by a formula.
struct Supernode {
    shape: LoadShape,
    maps: Vec<Arc<SlotMap>>,
    counters: Vec<RankCounter>,
    ledger: LoadLedger,
    next_row: u64,
    expected: Vec<u64>,
}

/// Experts that a row chooses in a layer, all different.
fn script(shape: LoadShape, row: u64, layer: usize) -> Vec<u32> {
    let first = (row * row + 3 * row + 5 * layer as u64) % u64::from(shape.experts);
    (0..shape.top_k).map(|i| (first as u32 + i * (1 + layer as u32)) % shape.experts).collect()
}

impl Supernode {
    fn new(shape: LoadShape, ranks: usize) -> Self {
        let ids = (0..ranks as u16).map(Rank);
        let source = LoadSource {
            agent: AgentId::from("d-0"),
            supernode: Some(SupernodeId::from("s-0")),
            role: LoadRole::Decode,
        };
        Self {
            shape,
            maps: maps(shape, ranks, 1),
            counters: ids.clone().map(|rank| RankCounter::new(rank, shape)).collect(),
            ledger: LoadLedger::new(source, shape, ids),
            next_row: 0,
            expected: vec![0; shape.cells()],
        }
    }

    /// Where a choice goes: any slot that holds the expert, by row.
    fn place(&self, expert: u32, row: u64) -> (usize, usize) {
        let slots = self.maps[0].slots();
        let all = self.maps.len() * slots;
        let holders: Vec<usize> =
            (0..all).filter(|i| (i % self.shape.experts as usize) as u32 == expert).collect();
        let at = holders[row as usize % holders.len()];
        (at / slots, at % slots)
    }

    /// Arrivals at each rank of the next `rows` rows.
    fn route(&mut self, rows: u64) -> Vec<Vec<u32>> {
        let slots = self.maps[0].slots();
        let mut arrivals = vec![vec![0; self.shape.layers * slots]; self.maps.len()];
        for row in self.next_row..self.next_row + rows {
            for layer in 0..self.shape.layers {
                for expert in script(self.shape, row, layer) {
                    let (rank, slot) = self.place(expert, row);
                    arrivals[rank][layer * slots + slot] += 1;
                    self.expected[layer * self.shape.experts as usize + expert as usize] += 1;
                }
            }
        }
        self.next_row += rows;
        arrivals
    }

    /// A step in which rank `i` brings `rows[i]` rows; ranks in `absent` do not count it.
    fn step(&mut self, step: u64, rows: &[u32], absent: &[usize]) {
        let arrivals = self.route(rows.iter().map(|&n| u64::from(n)).sum());
        for (i, counter) in self.counters.iter_mut().enumerate().filter(|(i, _)| !absent.contains(i)) {
            let counted = CountedStep {
                step,
                rows: rows[i],
                arrivals: &arrivals[i],
                map: &self.maps[i],
                elapsed: Span(1_000 + i as u64),
                warm_up: false,
            };
            if let Some(window) = counter.record(&counted).expect("a step that fits") {
                self.ledger.offer(window);
            }
        }
    }

    fn total(&self) -> ExpertLoadReport {
        self.ledger.total(&self.counters.iter().collect::<Vec<_>>())
    }
}

fn layer_sums(report: &ExpertLoadReport) -> Vec<u64> {
    report.counts.counts.chunks(report.counts.experts as usize).map(|layer| layer.iter().sum()).collect()
}

/// SV-089.
#[test]
fn every_choice_is_counted_at_its_expert_whatever_rank_held_it() {
    let mut node = Supernode::new(SHAPE, 4);
    for step in 0..100 {
        node.step(step, &[3, 0, 7, 1], &[]);
    }
    let report = node.ledger.latest(Detail::Sums).unwrap();
    assert!(!report.spans_change);
    assert_eq!(report.counts.counts, node.expected);
    assert_eq!(report.rows, 1_100);
    assert_eq!(layer_sums(&report), [2_200; 3], "rows x top-k");
    assert_eq!((report.window, report.first_step, report.steps), (0, 0, 100));
    assert_eq!(report.by_rank.iter().map(|(_, n)| n).sum::<u64>(), 6_600);
    assert_eq!(report.busy_ns, [0, 1, 2, 3].map(|r| (Rank(r), 100 * (1_000 + u64::from(r)))));
}

/// SV-092.
#[test]
fn the_same_tokens_on_one_two_or_four_ranks_are_the_same_load() {
    let mut tables = Vec::new();
    for ranks in [1, 2, 4] {
        let mut node = Supernode::new(SHAPE, ranks);
        for step in 0..250 {
            let mut rows = vec![0; ranks];
            rows[step as usize % ranks] = 4;
            node.step(step, &rows, &[]);
        }
        let total = node.total();
        assert_eq!(layer_sums(&total), [2_000; 3]);
        tables.push((total.counts, total.rows, node.ledger.latest(Detail::Sums).unwrap().counts));
    }
    assert_eq!(tables[0], tables[1]);
    assert_eq!(tables[0], tables[2]);
}

/// SV-091.
#[test]
fn warm_up_is_not_counted_at_start_or_later() {
    let mut counter = RankCounter::new(Rank(0), SHAPE);
    let map = &maps(SHAPE, 1, 1)[0];
    let warm =
        |step| CountedStep { step, rows: 64, arrivals: &[9; 30], map, elapsed: Span(5), warm_up: true };
    assert!(counter.record(&warm(0)).unwrap().is_none());
    assert_eq!((counter.arrived(), counter.rows(), counter.steps(), counter.busy()), (0, 0, 0, Span::ZERO));
    assert!(counter.open().is_none() && counter.counts().iter().all(|&n| n == 0));
    counter.record(&CountedStep { warm_up: false, ..warm(0) }).unwrap();
    assert!(counter.record(&warm(1)).unwrap().is_none());
    assert_eq!((counter.arrived(), counter.rows(), counter.steps()), (270, 64, 1));
    assert_eq!(counter.open().map(|w| (w.rows(), w.arrived(), w.busy())), Some((64, 270, Span(5))));
}

#[test]
fn totals_hold_the_open_window_and_steps_are_told_one_by_one() {
    let mut node = Supernode::new(SHAPE, 2);
    for step in 0..130 {
        node.step(step, &[1, 2], &[]);
    }
    let total = node.total();
    assert_eq!(total.counts.counts, node.expected);
    assert_eq!((total.rows, total.steps, total.window), (390, 130, 1));
    assert_eq!(u64::from(SHAPE.top_k) * 3 * total.rows, total.counts.counts.iter().sum::<u64>());

    let closed = node.ledger.latest(Detail::Steps).unwrap();
    assert_eq!((closed.steps, closed.rows, closed.by_step.len()), (100, 300, 100));
    let mut sums = vec![0; SHAPE.cells()];
    for step in &closed.by_step {
        assert_eq!(step.counts.iter().sum::<u64>(), 18, "3 rows x 2 experts x 3 layers");
        sums.iter_mut().zip(&step.counts).for_each(|(sum, n)| *sum += n);
    }
    assert_eq!(sums, closed.counts.counts);
    assert!(node.ledger.latest(Detail::Sums).unwrap().by_step.is_empty());
}

#[test]
fn a_window_that_misses_a_rank_is_marked_and_the_next_whole_one_is_not() {
    let mut node = Supernode::new(SHAPE, 3);
    for step in 0..100 {
        node.step(step, &[1, 1, 1], &[]);
    }
    for step in 100..200 {
        node.step(step, &[1, 1, 1], &[1]);
    }
    assert_eq!(node.ledger.latest(Detail::Sums).unwrap().window, 0, "the second one still waits");
    for step in 200..300 {
        node.step(step, &[1, 1, 1], &[1]);
    }
    assert_eq!(node.ledger.latest(Detail::Sums).unwrap().window, 0);
    for step in 300..400 {
        node.step(step, &[1, 1, 1], &[1]);
    }
    let missing = node.ledger.latest(Detail::Sums).unwrap();
    assert!(missing.spans_change && missing.window == 1);
    assert_eq!(missing.by_rank.len(), 2);
    assert_eq!(missing.balance.balancedness, None, "two of three ranks say nothing about evenness");
    for step in 400..500 {
        node.step(step, &[1, 1, 1], &[]);
    }
    let whole = node.ledger.latest(Detail::Sums).unwrap();
    assert!(!whole.spans_change && whole.window == 4, "{whole:?}");
}

#[test]
fn totals_say_how_even_the_ranks_were_while_one_has_closed_its_window_and_another_not() {
    let mut node = Supernode::new(SHAPE, 2);
    for step in 0..99 {
        node.step(step, &[1, 1], &[]);
    }
    let before = node.total().balance;
    node.step(99, &[1, 1], &[1]);
    let after = node.total();
    assert_eq!(after.balance, before, "99 steps are known of both");
    assert!(before.balancedness.is_some_and(|b| b < 1.0));
    assert!(node.ledger.latest(Detail::Sums).is_none());
}

#[test]
fn a_rank_that_skipped_a_step_marks_the_window() {
    let mut node = Supernode::new(SHAPE, 2);
    for step in 0..100 {
        let absent: &[usize] = if step == 50 { &[1] } else { &[] };
        node.step(step, &[1, 1], absent);
    }
    let report = node.ledger.latest(Detail::Sums).unwrap();
    assert!(report.spans_change && report.steps == 100);
}

#[test]
fn a_new_placement_inside_a_window_marks_it_and_is_folded_with_its_own_map() {
    let mut node = Supernode::new(SHAPE, 1);
    let before = Arc::clone(&node.maps[0]);
    let reversed: Vec<u32> = (0..10).rev().collect();
    let after = Arc::new(SlotMap::new(Generation(2), 10, &vec![reversed; 3]).unwrap());
    let mut arrivals = vec![0; 30];
    arrivals[0] = 2;
    arrivals[10] = 2;
    arrivals[20] = 2;
    for step in 0..200 {
        let map = if step < 60 { &before } else { &after };
        let counted =
            CountedStep { step, rows: 1, arrivals: &arrivals, map, elapsed: Span(1), warm_up: false };
        if let Some(window) = node.counters[0].record(&counted).unwrap() {
            node.ledger.offer(window);
        }
        if step == 99 {
            let report = node.ledger.latest(Detail::Sums).unwrap();
            assert!(report.spans_change);
            assert_eq!((report.counts.counts[0], report.counts.counts[9]), (120, 80));
            assert_eq!(report.placement, Generation(2));
        }
    }
    assert!(!node.ledger.latest(Detail::Sums).unwrap().spans_change);
}

#[test]
fn a_change_of_ranks_marks_its_window() {
    let mut node = Supernode::new(SHAPE, 2);
    for step in 0..200 {
        if step == 40 {
            node.ledger.set_ranks(40, [Rank(0), Rank(1)]);
        }
        node.step(step, &[1, 1], &[]);
        if step == 99 {
            assert!(node.ledger.latest(Detail::Sums).unwrap().spans_change);
        }
    }
    assert!(!node.ledger.latest(Detail::Sums).unwrap().spans_change);
}

#[test]
fn arrivals_that_are_not_rows_times_top_k_mark_the_window() {
    let mut node = Supernode::new(SHAPE, 1);
    let map = Arc::clone(&node.maps[0]);
    for step in 0..100 {
        // One row was padding and is in the arrivals: 3 rows' worth, 2 rows said.
        let mut arrivals = vec![0; 30];
        (0..3).for_each(|layer| arrivals[10 * layer] = 6);
        let counted =
            CountedStep { step, rows: 2, arrivals: &arrivals, map: &map, elapsed: Span(1), warm_up: false };
        if let Some(window) = node.counters[0].record(&counted).unwrap() {
            node.ledger.offer(window);
        }
    }
    assert!(node.ledger.latest(Detail::Sums).unwrap().spans_change);
}

#[test]
fn a_window_that_comes_after_its_time_changes_nothing() {
    let mut node = Supernode::new(SHAPE, 1);
    node.step(0, &[1], &[]);
    let late = node.counters[0].open().unwrap().clone();
    for step in 1..100 {
        node.step(step, &[1], &[]);
    }
    let before = node.ledger.latest(Detail::Steps);
    node.ledger.offer(late);
    assert_eq!(node.ledger.latest(Detail::Steps), before);
}

#[test]
fn a_jump_over_windows_gives_each_of_them() {
    let mut node = Supernode::new(SHAPE, 1);
    for step in [5, 199, 250] {
        node.step(step, &[1], &[]);
        if step == 199 {
            assert_eq!(node.ledger.latest(Detail::Sums).unwrap().window, 0);
        }
    }
    assert_eq!(node.ledger.latest(Detail::Sums).unwrap().window, 1);
    assert_eq!(node.total().rows, 3);
}

#[test]
fn wrong_shapes_and_repeated_steps_are_refused_and_count_nothing() {
    let mut counter = RankCounter::new(Rank(0), SHAPE);
    let map = &maps(SHAPE, 1, 1)[0];
    let step = CountedStep { step: 7, rows: 1, arrivals: &[1; 30], map, elapsed: Span(1), warm_up: false };
    let short = CountedStep { arrivals: &[1; 29], ..step };
    assert_eq!(counter.record(&short).unwrap_err().to_string(), "arrivals: 29, expected 30");
    let other = Arc::new(SlotMap::new(Generation(1), 11, &vec![(0..10).collect(); 3]).unwrap());
    assert!(counter.record(&CountedStep { map: &other, ..step }).is_err());
    assert_eq!(counter.arrived(), 0);
    counter.record(&step).unwrap();
    assert_eq!(counter.record(&step).unwrap_err(), LoadError::Repeated { step: 7, last: 7 });
    assert_eq!(counter.arrived(), 30);
    let error = SlotMap::new(Generation(1), 4, &[vec![0, 1], vec![2, 4]]).unwrap_err();
    assert_eq!(error.to_string(), "slot map: layer 1 slot 1 holds expert 4, the model has 4");
    assert!(matches!(SlotMap::new(Generation(1), 4, &[vec![0], vec![]]), Err(LoadError::Uneven { .. })));
}

/// The worked example of DeepSeek's EPLB (two layers, 12 experts), under the placement that the per-step policy
/// gives for 8 ranks of two slots: balancedness as ratio of sums is 0.8812.
#[test]
fn the_public_example_has_its_published_balancedness() {
    const WEIGHT: [[u32; 12]; 2] = [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ];
    const SLOTS: [[u32; 16]; 2] = [
        [10, 2, 10, 6, 0, 7, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1],
        [1, 3, 2, 11, 5, 0, 5, 4, 6, 7, 6, 7, 8, 8, 9, 10],
    ];
    let shape = LoadShape { layers: 2, experts: 12, top_k: 1 };
    let mut counters = Vec::new();
    for rank in 0..8_usize {
        let layers: Vec<Vec<u32>> = SLOTS.iter().map(|s| s[2 * rank..2 * rank + 2].to_vec()).collect();
        // Replicas share their expert's load; weights are doubled so that halves stay whole.
        let share = |layer: usize, expert: u32| {
            let replicas = SLOTS[layer].iter().filter(|&&e| e == expert).count() as u32;
            2 * WEIGHT[layer][expert as usize] / replicas
        };
        let arrivals: Vec<u32> =
            layers.iter().enumerate().flat_map(|(l, s)| s.iter().map(move |&e| share(l, e))).collect();
        let map = Arc::new(SlotMap::new(Generation(1), 12, &layers).unwrap());
        let mut counter = RankCounter::new(Rank(rank as u16), shape);
        let step = CountedStep {
            step: 0,
            rows: 0,
            arrivals: &arrivals,
            map: &map,
            elapsed: Span(1),
            warm_up: false,
        };
        counter.record(&step).unwrap();
        counters.push(counter);
    }
    let source = LoadSource { agent: AgentId::from("d"), supernode: None, role: LoadRole::Decode };
    let ledger = LoadLedger::new(source, shape, (0..8).map(Rank));
    let report = ledger.total(&counters.iter().collect::<Vec<_>>());
    let doubled: Vec<u64> = WEIGHT.concat().iter().map(|&w| 2 * u64::from(w)).collect();
    assert_eq!(report.counts.counts, doubled);
    let c2 = report.balance.balancedness_c2.unwrap();
    assert!((c2 - 0.8812).abs() < 5e-5, "{c2}");
}

#[test]
fn both_kinds_of_balancedness_by_hand() {
    let mut sum = BalanceSum::new(3);
    assert_eq!((sum.finish().balancedness, sum.finish().peak_by_layer), (None, vec![1.0; 3]));
    sum.add(0, &[3, 1]);
    sum.add(0, &[0, 0]);
    sum.add(1, &[10, 10]);
    let balance = sum.finish();
    // Means 2 and 10, maxima 3 and 10.
    assert_eq!(balance.balancedness, Some((2.0 / 3.0 + 1.0) / 2.0));
    assert_eq!(balance.balancedness_c2, Some(24.0 / 26.0));
    assert_eq!(balance.peak_by_layer, [1.5, 1.0, 1.0]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn counts_add_up_for_any_ranks_rows_and_number_of_steps(
        ranks in 1_usize..6, experts in 4_u32..14, top_k in 1_u32..4,
        steps in prop::collection::vec(prop::collection::vec(0_u32..4, 6), 1..230),
    ) {
        let shape = LoadShape { layers: 2, experts, top_k };
        let mut node = Supernode::new(shape, ranks);
        let (mut rows, mut closed) = (0, None);
        for (step, by_rank) in steps.iter().enumerate() {
            node.step(step as u64, &by_rank[..ranks], &[]);
            rows += u64::from(by_rank[..ranks].iter().sum::<u32>());
            if step % 100 == 99 {
                closed = Some(step as u64 / 100);
            }
        }
        let total = node.total();
        prop_assert_eq!(&total.counts.counts, &node.expected);
        prop_assert_eq!(total.rows, rows);
        prop_assert_eq!(total.counts.counts.iter().sum::<u64>(), 2 * u64::from(top_k) * rows);
        prop_assert_eq!(total.by_rank.iter().map(|(_, n)| n).sum::<u64>(), 2 * u64::from(top_k) * rows);
        let latest = node.ledger.latest(Detail::Sums);
        prop_assert_eq!(latest.as_ref().map(|r| r.window), closed);
        if let Some(report) = latest {
            prop_assert!(!report.spans_change);
        }
        for balance in [total.balance.balancedness, total.balance.balancedness_c2].into_iter().flatten() {
            prop_assert!(balance > 0.0 && balance <= 1.0 + 1e-9);
        }
        prop_assert_eq!(total.balance.balancedness.is_some(), rows > 0);
    }
}
