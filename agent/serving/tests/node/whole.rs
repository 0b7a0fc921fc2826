//! Many requests through a worker and ranks, with everything that can go wrong.

use proptest::prelude::*;

use crate::rig::{Faults, Rig};
use crate::setup::{prompt, rank_options, spec, worker_options};

fn crowd(rig: &mut Rig, requests: u32) {
    for i in 0..requests {
        let shared = [0, 300, 700][i as usize % 3];
        let length = shared + 1 + (i as usize * 53) % 420;
        let wanted = 1 + (i * 37) % 160;
        rig.submit(u128::from(i), prompt(i % 2, i, shared, length), spec(u64::from(i), wanted));
    }
}

#[test]
fn a_crowd_gets_the_tokens_of_solo_runs() {
    for seed in 0..6 {
        let mut rig =
            Rig::new(seed, worker_options(4, 40), vec![rank_options(0, 8, 60), rank_options(1, 8, 60)]);
        crowd(&mut rig, 24);
        rig.run();
        rig.assert_outputs();
        assert!(rig.requests.values().all(|r| r.finish.is_some() && r.failures.is_empty()));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 0, ..ProptestConfig::default() })]

    #[test]
    fn whatever_the_sizes_and_the_faults_tokens_are_right_and_nothing_is_left(
        seed in any::<u64>(),
        (slots, blocks) in (1_u32..6, 10_u32..40),
        ranks in proptest::collection::vec((1_u32..8, 9_u32..30), 1..4),
        (duplicates, reorder, damage) in (0_usize..30, 0_usize..30, 0_usize..80),
        (crashes, cancels, absences) in (600_usize..4_000, 300_usize..4_000, 200_usize..900),
        checkpoints in prop::bool::ANY,
        rows in 64_usize..600,
    ) {
        let mut options = worker_options(slots, blocks);
        options.limits.tokens = rows;
        if !checkpoints {
            options.checkpoint_bytes = 0;
        }
        let ranks = (0..).zip(ranks).map(|(n, (slots, blocks))| rank_options(n, slots, blocks)).collect();
        let mut rig = Rig::new(seed, options, ranks);
        rig.faults = Faults { duplicates, reorder, damage, crashes, cancels, absences };
        crowd(&mut rig, 14);
        rig.run();
        rig.assert_outputs();
    }
}

#[test]
fn faults_of_every_kind_change_no_token_and_leak_nothing() {
    for seed in 0..12 {
        let mut rig =
            Rig::new(seed, worker_options(4, 24), vec![rank_options(0, 6, 16), rank_options(1, 6, 14)]);
        rig.faults =
            Faults { duplicates: 20, reorder: 20, damage: 60, crashes: 900, cancels: 900, absences: 400 };
        crowd(&mut rig, 24);
        rig.run();
        rig.assert_outputs();
    }
}

#[test]
fn sv_061_after_thousands_of_mixed_requests_free_and_cached_blocks_are_the_pool() {
    let mut rig = Rig::new(9, worker_options(8, 24), vec![rank_options(0, 8, 10), rank_options(1, 8, 12)]);
    let (mut cancelled, mut failed) = (0, 0);
    for batch in 0..150_u32 {
        rig.requests.clear();
        rig.heard.clear();
        rig.faults = Faults { cancels: 200, crashes: 3_000, damage: 200, ..Faults::default() };
        for i in 0..16 {
            let id = batch * 16 + i;
            let shared = [0, 128, 256][id as usize % 3];
            let length = shared + 2 + id as usize % 40;
            rig.submit(u128::from(id), prompt(id % 23, id, shared, length), spec(u64::from(id), 1 + id % 9));
        }
        // Asserts that nothing is held and that free and cached blocks are all there are.
        rig.run();
        cancelled += rig.requests.values().filter(|r| r.finish.is_none()).count();
        failed += rig.requests.values().filter(|r| !r.failures.is_empty()).count();
    }
    let worker = rig.worker();
    assert!(cancelled > 100 && failed > 10 && worker.blocks.evicted > 100, "{cancelled} {failed} {worker:?}");
    assert!(worker.counts.cached_tokens > 0);
}
