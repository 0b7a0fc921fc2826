//! What a prompt reuses: every branch of the decision, and the checkpoint store's own budget.

use std::sync::Arc;

use deepinfer_serving::batch::BlockId;
use deepinfer_serving::kv::{
    BlockKey, BlockPool, CheckpointStore, PrefixPlan, Start, chain, checkpoint_position, plan_prefix,
};
use proptest::prelude::*;

fn keys(blocks: usize) -> Vec<BlockKey> {
    chain(&BlockKey([7; 32]), &vec![3; 128 * blocks])
}

/// A pool of `total` blocks in which `keys` are cached, and a roomy store with checkpoints at these blocks' ends.
fn world(total: usize, keys: &[BlockKey], checkpoints: &[usize]) -> (BlockPool, CheckpointStore) {
    let mut pool = BlockPool::new(total);
    let filling = pool.allocate(keys.len()).expect("room");
    let mut parent = None;
    for (id, &key) in filling.into_iter().zip(keys) {
        let id = pool.seal(id, key, parent);
        pool.release(id);
        parent = Some(key);
    }
    let mut store = CheckpointStore::new(1 << 20);
    for &block in checkpoints {
        assert!(store.insert(keys[block - 1], state(block as u8)));
    }
    (pool, store)
}

fn state(tag: u8) -> Arc<[u8]> {
    Arc::from([tag; 100])
}

fn plan(cached: usize, checkpoints: &[usize], tokens: usize, replay: usize) -> PrefixPlan {
    let all = keys(tokens / 128 + cached);
    let (mut pool, mut store) = world(64, &all[..cached], checkpoints);
    let plan = plan_prefix(&mut pool, &mut store, &all[..tokens / 128], tokens, replay);
    assert_eq!(pool.counts().used, plan.adopt.len(), "adopted blocks are held");
    pool.check().expect("blocks add up");
    store.check().expect("bytes add up");
    plan
}

fn at_checkpoint(block: usize) -> Start {
    Start::Checkpoint { position: 128 * block, key: keys(block)[block - 1], state: state(block as u8) }
}

#[test]
fn a_checkpoint_at_the_end_of_the_hit_is_loaded() {
    let plan = plan(4, &[2, 4], 600, 384);
    assert_eq!(plan.start, at_checkpoint(4));
    assert_eq!((plan.resume_from, plan.cached_tokens(), plan.adopt.len()), (512, 512, 4));
}

#[test]
fn a_checkpoint_close_before_it_is_loaded_and_the_rest_computed_again() {
    let plan = plan(6, &[2], 1_000, 128);
    assert_eq!(plan.start, at_checkpoint(2));
    assert_eq!((plan.resume_from, plan.cached_tokens()), (256, 256), "only what is before it is adopted");
}

#[test]
fn a_checkpoint_far_before_it_is_worth_less_than_a_short_replay() {
    let short = plan(7, &[2], 1_000, 128);
    assert_eq!((short.start, short.resume_from), (Start::Replay { from: 6 * 128 }, 7 * 128));
    let long = plan(7, &[2], 1_000, 5 * 128);
    assert_eq!((long.start, long.resume_from), (at_checkpoint(2), 256), "an exact replay costs as much");
}

#[test]
fn without_a_checkpoint_the_tokens_before_the_end_are_replayed() {
    let plan = plan(5, &[], 1_000, 384);
    assert_eq!(plan.start, Start::Replay { from: 256 });
    assert_eq!((plan.resume_from, plan.cached_tokens()), (640, 640), "cached, replayed or not");
}

#[test]
fn a_hit_not_longer_than_its_replay_is_ignored_unless_there_is_a_checkpoint() {
    assert_eq!(plan(3, &[], 1_000, 384), PrefixPlan::fresh());
    assert_eq!(plan(3, &[1], 1_000, 384).start, at_checkpoint(1));
    assert_eq!(plan(0, &[], 1_000, 384), PrefixPlan::fresh());
}

#[test]
fn at_least_one_row_runs_even_if_every_block_is_known() {
    let whole = plan(4, &[3, 4], 512, 128);
    assert_eq!((whole.start, whole.resume_from), (at_checkpoint(3), 384), "one block back");
    let more = plan(4, &[4], 513, 128);
    assert_eq!((more.start, more.resume_from), (at_checkpoint(4), 512));
    assert_eq!(plan(1, &[1], 128, 128), PrefixPlan::fresh());
    assert_eq!(plan(1, &[1], 100, 128), PrefixPlan::fresh());
}

#[test]
fn the_same_prompt_sent_again_starts_at_the_checkpoint_it_left() {
    for tokens in [129, 256, 257, 600, 1_024] {
        let position = checkpoint_position(tokens).unwrap();
        assert!(position < tokens && position + 128 >= tokens && position.is_multiple_of(128), "{tokens}");
        let plan = plan(tokens / 128, &[position / 128], tokens, 1 << 20);
        assert_eq!((plan.resume_from, plan.cached_tokens()), (position, position), "{tokens}");
    }
    assert_eq!([0, 1, 127, 128].map(checkpoint_position), [None; 4]);
}

#[test]
fn a_hit_ends_before_the_first_block_that_is_gone() {
    let all = keys(4);
    let (mut pool, mut store) = world(8, &all, &[4]);
    let held: Vec<BlockId> = [0, 1, 3].map(|i| pool.hold(&all[i]).unwrap()).to_vec();
    pool.forget_cached();
    let plan = plan_prefix(&mut pool, &mut store, &all, 600, 128);
    assert_eq!((plan.start, plan.resume_from), (Start::Replay { from: 128 }, 256));
    assert_eq!(plan.adopt, held[..2]);
}

#[test]
fn a_full_window_budget_shows_as_misses_while_blocks_hit() {
    let all = keys(4);
    let (mut pool, mut store) = world(8, &all, &[4]);
    plan_prefix(&mut pool, &mut store, &all, 600, 128);
    store.remove(&all[3]);
    plan_prefix(&mut pool, &mut store, &all, 600, 128);
    plan_prefix(&mut pool, &mut store, &keys(9)[8..], 600, 128);
    assert_eq!((store.counts().hits, store.counts().misses), (1, 1));
}

#[test]
fn the_store_keeps_its_own_budget_and_pushes_out_the_least_recently_used() {
    let keys = keys(5);
    let mut store = CheckpointStore::new(250);
    assert!(store.insert(keys[0], state(0)) && store.insert(keys[1], state(1)));
    assert!(store.get(&keys[0]).is_some());
    assert!(store.insert(keys[2], state(2)));
    assert!(store.contains(&keys[0]) && !store.contains(&keys[1]) && store.contains(&keys[2]));
    assert!(!store.insert(keys[3], Arc::from([0; 251])), "larger than all");
    assert!(store.contains(&keys[0]), "nothing went for it");
    assert!(store.insert(keys[4], Arc::from([0; 250])));
    assert_eq!((store.counts().entries, store.counts().bytes, store.counts().evicted), (1, 250, 3));
    assert!(!CheckpointStore::new(0).insert(keys[0], state(0)));
    store.clear();
    assert_eq!((store.counts().entries, store.counts().bytes), (0, 0));
    store.check().unwrap();
}

proptest! {
    #[test]
    fn a_plan_is_always_one_that_an_engine_can_run(
        cached in 0_usize..20, at in prop::collection::btree_set(1_usize..20, 0..4),
        tokens in 1_usize..2_600, replay_blocks in 1_usize..12,
    ) {
        let all = keys(20);
        let at: Vec<usize> = at.into_iter().filter(|&a| a <= cached).collect();
        let (mut pool, mut store) = world(32, &all[..cached], &at);
        let replay = 128 * replay_blocks;
        let plan = plan_prefix(&mut pool, &mut store, &all[..tokens / 128], tokens, replay);
        prop_assert_eq!(plan.adopt.len() * 128, plan.resume_from);
        prop_assert!(plan.resume_from < tokens);
        prop_assert!(plan.adopt.len() <= cached);
        let blocks: Vec<_> = all[..plan.adopt.len()].iter().map(|key| pool.find(key)).collect();
        prop_assert_eq!(blocks, plan.adopt.iter().copied().map(Some).collect::<Vec<_>>());
        let recomputed = match plan.start {
            Start::Fresh => {
                prop_assert_eq!(plan.resume_from, 0);
                0
            }
            Start::Checkpoint { position, key, .. } => {
                prop_assert_eq!(position, plan.resume_from);
                prop_assert!(at.contains(&(position / 128)));
                prop_assert_eq!(key, all[position / 128 - 1]);
                0
            }
            Start::Replay { from } => {
                prop_assert_eq!(from + replay, plan.resume_from);
                prop_assert!(from > 0);
                replay
            }
        };
        // Reuse never costs more rows than prefilling from the start.
        prop_assert!(tokens - plan.resume_from + recomputed <= tokens);
        pool.release_all(&plan.adopt);
        prop_assert_eq!(pool.counts().used, 0);
        prop_assert_eq!(pool.counts().cached, cached);
    }

    #[test]
    fn the_checkpoint_store_never_exceeds_its_budget(
        budget in 0_u64..500, ops in prop::collection::vec((0_usize..12, 0_usize..200, 0_u8..3), 1..60),
    ) {
        let keys = keys(12);
        let mut store = CheckpointStore::new(budget);
        for (key, size, op) in ops {
            match op {
                0 => { store.get(&keys[key]); }
                1 => store.remove(&keys[key]),
                _ => {
                    let known = store.contains(&keys[key]);
                    let kept = store.insert(keys[key], vec![0; size].into());
                    prop_assert_eq!(kept, known || size as u64 <= budget);
                    prop_assert_eq!(store.contains(&keys[key]), kept);
                }
            }
            store.check().map_err(TestCaseError::fail)?;
        }
    }
}
