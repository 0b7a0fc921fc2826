//! Filling a step from a queue: budget, granularity, cuts, room, and who may pass whom.

use deepinfer_protocol::Span;
use deepinfer_serving::batch::{
    Aged, Chunk, Cost, Pack, PackItem, PackLimits, Room, Running, StepLoad, aged_srpt, choose_victim, pack,
};
use proptest::prelude::*;

/// A microsecond a row and ten a sequence.
struct Linear;

impl Cost for Linear {
    fn work(&self, _: &PackItem, tokens: usize) -> u128 {
        tokens as u128
    }

    fn time(&self, load: StepLoad) -> Span {
        Span::micros(load.work as u64 + 10 * load.sequences as u64)
    }
}

fn item(start: usize, end: usize) -> PackItem {
    PackItem { start, end, ..PackItem::default() }
}

/// Needs room for all its blocks and a slot.
fn newcomer(end: usize) -> PackItem {
    PackItem { end, need_blocks: end.div_ceil(128), need_slot: true, ..PackItem::default() }
}

fn limits(budget_micros: u64) -> PackLimits {
    PackLimits { budget: Span::micros(budget_micros), ..PackLimits::cpu() }
}

const PLENTY: Room = Room { blocks: 1 << 20, slots: 1 << 10 };

fn chunks(pack: &Pack) -> Vec<(usize, usize)> {
    pack.chunks.iter().map(|c| (c.item, c.tokens)).collect()
}

#[test]
fn whole_prompts_are_taken_until_the_budget_cuts_one() {
    let queue = [item(0, 300), item(0, 77), item(0, 5_000), item(0, 10)];
    let pack = pack(&queue, &limits(1_030), PLENTY, &Linear);
    // 300 + 77 rows and three sequences leave 623 microseconds: four blocks of the third prompt.
    assert_eq!(chunks(&pack), [(0, 300), (1, 77), (2, 512)]);
    assert_eq!(pack.predicted, Span::micros(300 + 77 + 512 + 30));
    assert_eq!(pack.load, StepLoad { work: 889, rows: 889, sequences: 3 });
}

#[test]
fn a_chunk_below_the_minimum_is_not_begun_but_alone_it_runs_over_the_budget() {
    let few = PackLimits { min_chunk: 1024, ..limits(1_000) };
    assert_eq!(chunks(&pack(&[item(0, 300), item(0, 5_000)], &few, PLENTY, &Linear)), [(0, 300)]);
    // Exactly the minimum is begun: 300 rows, 1,024 rows and two sequences.
    let exact = PackLimits { budget: Span::micros(1_344), ..few };
    let both = pack(&[item(0, 300), item(0, 5_000)], &exact, PLENTY, &Linear);
    assert_eq!(chunks(&both), [(0, 300), (1, 1024)]);
    let alone = pack(&[item(0, 5_000), item(0, 10)], &few, PLENTY, &Linear);
    assert_eq!(chunks(&alone), [(0, 1024)], "progress comes before the budget");
    assert_eq!(chunks(&pack(&[item(0, 700)], &limits(1), PLENTY, &Linear)), [(0, 128)]);
    assert_eq!(chunks(&pack(&[item(0, 99)], &limits(1), PLENTY, &Linear)), [(0, 99)]);
}

#[test]
fn a_chunk_that_begins_inside_a_grain_ends_at_its_border() {
    let pack = pack(&[item(200, 5_000)], &limits(700), PLENTY, &Linear);
    assert_eq!(chunks(&pack), [(0, 768 - 200)], "690 rows would fit");
}

#[test]
fn no_chunk_passes_a_cut_and_the_next_prompt_shares_the_step() {
    let mut first = item(0, 600);
    first.cuts = vec![700, 512, 0];
    assert_eq!(
        chunks(&pack(&[first.clone(), item(0, 50)], &limits(10_000), PLENTY, &Linear)),
        [(0, 512), (1, 50)]
    );
    first.start = 512;
    assert_eq!(chunks(&pack(&[first], &limits(10_000), PLENTY, &Linear)), [(0, 88)]);
}

#[test]
fn limits_on_rows_and_sequences_hold() {
    let rows = PackLimits { tokens: 400, ..limits(1 << 40) };
    assert_eq!(chunks(&pack(&[item(0, 300), item(0, 300), item(0, 1)], &rows, PLENTY, &Linear)), [(0, 300)]);
    assert_eq!(chunks(&pack(&[item(0, 900)], &rows, PLENTY, &Linear)), [(0, 384)]);
    let sequences = PackLimits { sequences: 2, ..limits(1 << 40) };
    assert_eq!(
        chunks(&pack(&[item(0, 3), item(0, 4), item(0, 5)], &sequences, PLENTY, &Linear)),
        [(0, 3), (1, 4)]
    );
}

#[test]
fn an_engine_with_steps_smaller_than_a_block_still_gets_on() {
    let tiny = PackLimits { tokens: 48, ..limits(1 << 40) };
    assert_eq!(chunks(&pack(&[item(0, 130)], &tiny, PLENTY, &Linear)), [(0, 48)]);
    assert_eq!(chunks(&pack(&[item(96, 130)], &tiny, PLENTY, &Linear)), [(0, 34)]);
}

#[test]
fn a_head_without_room_is_passed_sixteen_times_and_then_no_newcomer_passes() {
    let room = Room { blocks: 4, slots: 3 };
    let mut head = newcomer(128 * 5);
    let small = newcomer(100);
    let running = item(128, 256);
    let queue = [head.clone(), small.clone(), running.clone()];
    let passed = pack(&queue, &limits(1 << 40), room, &Linear);
    assert_eq!(chunks(&passed), [(1, 100), (2, 128)]);
    assert_eq!((passed.passed.clone(), passed.blocked), (vec![0], Some(0)));

    head.passes = 16;
    let queue = [head.clone(), small.clone(), running.clone()];
    let closed = pack(&queue, &limits(1 << 40), room, &Linear);
    assert_eq!(chunks(&closed), [(2, 128)], "who holds blocks goes on, or they would never become free");
    assert_eq!((closed.passed.clone(), closed.blocked), (vec![], Some(0)));

    head.passes = 0;
    head.blocked_for = Span::millis(500);
    assert_eq!(chunks(&pack(&[head, small, running], &limits(1 << 40), room, &Linear)), [(2, 128)]);
}

#[test]
fn newcomers_of_one_step_share_what_is_free() {
    let room = Room { blocks: 5, slots: 2 };
    let queue = [newcomer(300), newcomer(300), newcomer(200), newcomer(10)];
    let shared = pack(&queue, &limits(1 << 40), room, &Linear);
    assert_eq!(chunks(&shared), [(0, 300), (2, 200)], "3 blocks and 2; then no slot is left");
    assert_eq!(shared.passed, [1]);
    let queue = [newcomer(700), newcomer(300), newcomer(200)];
    let twice = pack(&queue, &limits(1 << 40), room, &Linear);
    assert_eq!(twice.passed, [0], "passed in one step counts once");
}

#[test]
fn the_prompt_that_is_nearly_done_goes_first_until_others_have_waited_longer() {
    let at = |remaining, waited| Aged { remaining: Span::millis(remaining), waited: Span::millis(waited) };
    assert_eq!(aged_srpt(&[at(900, 0), at(100, 0), at(100, 0)]), [1, 2, 0]);
    assert_eq!(aged_srpt(&[at(900, 850), at(100, 0)]), [0, 1]);
    assert!(Aged { remaining: Span::ZERO, waited: Span::MAX }.key() < 0);
}

fn running(admitted: u64, growth: u32, preemptions: u32) -> Running {
    Running { admitted, growth, preemptions }
}

#[test]
fn the_victim_grows_most_among_the_newest_quarter() {
    let all: Vec<Running> = (0..8).map(|i| running(i, 1_000 - 10 * i as u32, 0)).collect();
    assert_eq!(choose_victim(&all), Some(6), "two are the newest quarter, the sixth grows more");
    assert_eq!(choose_victim(&all[..1]), Some(0));
    assert_eq!(choose_victim(&[]), None);
    let equal: Vec<Running> = (0..8).map(|i| running(i, 7, 0)).collect();
    assert_eq!(choose_victim(&equal), Some(7));
}

#[test]
fn nobody_gives_way_more_than_three_times() {
    assert_eq!(choose_victim(&[running(0, 10, 2), running(1, 99, 3)]), Some(0));
    assert_eq!(choose_victim(&[running(0, 10, 3), running(1, 99, 4)]), None);
}

prop_compose! {
    fn any_item()(
        start in 0_usize..4, inside in 0_usize..128, more in 1_usize..3_000,
        cuts in prop::collection::vec(0_usize..3_000, 0..3),
        blocks in 0_usize..10, passes in 0_u32..20, blocked in 0_u64..600,
    ) -> PackItem {
        let start = start * 128 + inside * usize::from(more % 3 == 0);
        PackItem {
            start, end: start + more, window_start: 0, cuts, need_blocks: blocks * (more % 2), need_slot: more % 2 == 1,
            passes, blocked_for: Span::millis(blocked),
        }
    }
}

/// What [`PackItem`] promises about one chunk.
fn check_chunk(item: &PackItem, chunk: Chunk, limits: &PackLimits) -> Result<(), TestCaseError> {
    let end = item.start + chunk.tokens;
    prop_assert!(chunk.tokens > 0 && end <= item.end);
    prop_assert!(!item.cuts.iter().any(|&cut| item.start < cut && cut < end), "{item:?} {chunk:?}");
    let natural = end == item.end || item.cuts.contains(&end);
    let grain_fits = item.start / 128 * 128 + 128 - item.start <= limits.tokens;
    prop_assert!(natural || end.is_multiple_of(128) || !grain_fits, "{item:?} {chunk:?}");
    Ok(())
}

proptest! {
    #[test]
    fn packs_keep_every_limit_and_always_get_on(
        queue in prop::collection::vec(any_item(), 0..12),
        budget in 1_u64..6_000, tokens in 1_usize..4_000, sequences in 1_usize..8, min_chunk in 1_usize..1_500,
        blocks in 0_usize..30, slots in 0_usize..6,
    ) {
        let limits = PackLimits { budget: Span::micros(budget), tokens, sequences, granularity: 128, min_chunk };
        let room = Room { blocks, slots };
        let pack = pack(&queue, &limits, room, &Linear);
        let rows: usize = pack.chunks.iter().map(|c| c.tokens).sum();
        prop_assert_eq!(pack.load.rows, rows);
        prop_assert!(rows <= tokens && pack.chunks.len() <= sequences);
        prop_assert!(pack.chunks.is_sorted_by_key(|c| c.item));
        prop_assert!(pack.chunks.windows(2).all(|w| w[0].item < w[1].item), "an item twice");
        for &chunk in &pack.chunks {
            check_chunk(&queue[chunk.item], chunk, &limits)?;
        }
        let taken = || pack.chunks.iter().map(|c| &queue[c.item]);
        prop_assert!(taken().map(|i| i.need_blocks).sum::<usize>() <= blocks);
        prop_assert!(taken().filter(|i| i.need_slot).count() <= slots);
        // Within the budget, or one chunk that could not be smaller.
        let minimal = match pack.chunks[..] {
            [only] => only.tokens < min_chunk + 128,
            _ => false,
        };
        prop_assert!(pack.predicted <= limits.budget || minimal || pack.chunks.is_empty());
        // Somebody with room runs if there is anybody.
        let held = queue.iter().any(|i| i.need_blocks == 0 && !i.need_slot);
        prop_assert!(!held || !pack.chunks.is_empty(), "nothing runs");
    }
}
