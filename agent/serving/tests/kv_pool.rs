//! The block pool: conservation under any operations, sharing by content, and who is evicted.

use deepinfer_serving::batch::BlockId;
use deepinfer_serving::kv::{BlockKey, BlockPool, PoolCounts, blocks_for, chain};
use proptest::prelude::*;

fn keys(n: usize) -> Vec<BlockKey> {
    chain(&BlockKey([7; 32]), &vec![5; 128 * n])
}

/// Takes the blocks of `keys` and seals them in order.
fn sealed(pool: &mut BlockPool, keys: &[BlockKey]) -> Vec<BlockId> {
    let filling = pool.allocate(keys.len()).expect("room");
    let parents = std::iter::once(None).chain(keys.iter().copied().map(Some));
    filling
        .into_iter()
        .zip(keys)
        .zip(parents)
        .map(|((id, key), parent)| pool.seal(id, *key, parent))
        .collect()
}

fn counts(pool: &BlockPool) -> (usize, usize, usize) {
    let PoolCounts { used, cached, free, .. } = pool.counts();
    (used, cached, free)
}

#[test]
fn blocks_go_from_free_to_filling_to_held_to_cached_and_back() {
    let mut pool = BlockPool::new(4);
    let keys = keys(2);
    let blocks = sealed(&mut pool, &keys);
    assert_eq!(blocks, [BlockId(0), BlockId(1)]);
    assert_eq!(counts(&pool), (2, 0, 2));
    pool.release_all(&blocks);
    assert_eq!(counts(&pool), (0, 2, 2));
    assert_eq!(pool.hold(&keys[1]), Some(BlockId(1)));
    assert_eq!(counts(&pool), (1, 1, 2));
    assert_eq!(pool.available(), 3);
    pool.release(BlockId(1));
    let all = pool.allocate(4).unwrap();
    assert_eq!(counts(&pool), (4, 0, 0));
    assert_eq!((pool.find(&keys[0]), pool.find(&keys[1])), (None, None));
    assert_eq!(pool.counts().evicted, 2);
    pool.release_all(&all);
    assert_eq!(counts(&pool), (0, 0, 4));
    pool.check().unwrap();
}

#[test]
fn a_refused_allocation_changes_nothing() {
    let mut pool = BlockPool::new(3);
    let blocks = sealed(&mut pool, &keys(2));
    pool.release_all(&blocks);
    let held = pool.hold(&keys(1)[0]).unwrap();
    let error = pool.allocate(3).unwrap_err();
    assert_eq!(error.to_string(), "3 blocks are needed, 2 of 3 are free or can be evicted");
    assert_eq!(counts(&pool), (1, 1, 1));
    assert!(pool.find(&keys(2)[1]).is_some(), "nothing was evicted for it");
    pool.release(held);
}

#[test]
fn the_second_sequence_with_the_same_content_gets_the_first_ones_block() {
    let mut pool = BlockPool::new(4);
    let keys = keys(2);
    let first = sealed(&mut pool, &keys);
    let second = sealed(&mut pool, &keys);
    assert_eq!(first, second);
    assert_eq!(counts(&pool), (2, 0, 2));
    pool.release_all(&first);
    assert_eq!(counts(&pool), (2, 0, 2), "the other one still holds them");
    pool.release_all(&second);
    assert_eq!(counts(&pool), (0, 2, 2));
}

#[test]
fn the_least_recently_used_goes_first_and_a_leaf_before_what_it_continues() {
    let mut pool = BlockPool::new(6);
    let old = keys(3);
    let young = chain(&BlockKey([8; 32]), &[1; 384]);
    let (a, b) = (sealed(&mut pool, &old), sealed(&mut pool, &young));
    pool.release_all(&a);
    pool.release_all(&b);
    let gone = |pool: &BlockPool| -> Vec<bool> {
        old.iter().chain(&young).map(|key| pool.find(key).is_none()).collect()
    };
    pool.allocate(1).unwrap();
    assert_eq!(gone(&pool), [false, false, true, false, false, false]);
    // A use makes the old chain young again, as far as it was used.
    let used = pool.hold(&old[0]).unwrap();
    pool.release(used);
    pool.allocate(1).unwrap();
    assert_eq!(gone(&pool), [false, true, true, false, false, false], "a leaf that was not used since");
    pool.allocate(1).unwrap();
    assert_eq!(gone(&pool), [false, true, true, false, false, true]);
    pool.allocate(3).unwrap();
    assert_eq!(gone(&pool), [true; 6]);
    pool.check().unwrap();
}

#[test]
fn a_block_whose_continuation_is_held_goes_last() {
    let mut pool = BlockPool::new(3);
    let keys = keys(2);
    let blocks = sealed(&mut pool, &keys);
    let other = sealed(&mut pool, &[BlockKey([9; 32])]);
    pool.release(blocks[0]);
    pool.release_all(&other);
    pool.allocate(1).unwrap();
    assert!(pool.find(&keys[0]).is_some() && pool.find(&BlockKey([9; 32])).is_none());
    pool.allocate(1).unwrap();
    assert!(pool.find(&keys[0]).is_none(), "no other is left");
    assert!(pool.allocate(1).is_err());
    // The content can come back under its own continuation.
    pool.release(blocks[1]);
    pool.check().unwrap();
}

#[test]
fn a_lost_engine_leaves_an_empty_pool_and_a_forgotten_cache_leaves_what_is_held() {
    let mut pool = BlockPool::new(5);
    let keys = keys(3);
    let blocks = sealed(&mut pool, &keys);
    pool.release(blocks[2]);
    pool.forget_cached();
    assert_eq!(counts(&pool), (2, 0, 3));
    assert!(pool.find(&keys[1]).is_some() && pool.find(&keys[2]).is_none());
    pool.check().unwrap();
    pool.reset();
    assert_eq!(counts(&pool), (0, 0, 5));
    assert!(pool.find(&keys[1]).is_none());
    pool.check().unwrap();
}

#[test]
#[should_panic(expected = "released while nobody holds it")]
fn a_block_that_nobody_holds_cannot_be_released() {
    let mut pool = BlockPool::new(1);
    let blocks = sealed(&mut pool, &keys(1));
    pool.release_all(&blocks);
    pool.release_all(&blocks);
}

#[test]
#[should_panic(expected = "sealed while it is not being filled")]
fn shared_bytes_cannot_be_sealed_again() {
    let mut pool = BlockPool::new(1);
    let blocks = sealed(&mut pool, &keys(1));
    let _ = pool.seal(blocks[0], BlockKey([1; 32]), None);
}

#[test]
fn a_sequence_needs_whole_blocks() {
    assert_eq!([0, 1, 128, 129].map(blocks_for), [0, 1, 1, 2]);
}

/// Something that happens to a pool of sequences. Numbers choose among what is there.
#[derive(Clone, Debug)]
enum Op {
    /// A sequence of this branch begins: adopts what is known and takes blocks for the rest.
    Begin {
        branch: u8,
        blocks: usize,
    },
    /// A sequence fills its next block.
    Fill(usize),
    /// A sequence ends at any time.
    End(usize),
    Forget,
    Reset,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0_u8..6, 1_usize..8).prop_map(|(branch, blocks)| Op::Begin { branch, blocks }),
        8 => any::<usize>().prop_map(Op::Fill),
        3 => any::<usize>().prop_map(Op::End),
        1 => Just(Op::Forget),
        1 => Just(Op::Reset),
    ]
}

#[derive(Clone, Debug)]
struct Sequence {
    keys: Vec<BlockKey>,
    blocks: Vec<BlockId>,
    /// Blocks whose content is complete.
    filled: usize,
}

/// Branches share their first blocks: branch b leaves the trunk after b blocks.
fn branch_keys(branch: u8, blocks: usize) -> Vec<BlockKey> {
    let mut tokens = vec![0; 128 * blocks];
    tokens.iter_mut().skip(128 * usize::from(branch)).for_each(|t| *t = 1 + u32::from(branch));
    chain(&BlockKey([0; 32]), &tokens)
}

fn apply(pool: &mut BlockPool, sequences: &mut Vec<Sequence>, op: &Op) {
    match *op {
        Op::Begin { branch, blocks } => {
            let keys = branch_keys(branch, blocks);
            let mut held: Vec<BlockId> = keys.iter().map_while(|key| pool.hold(key)).collect();
            let filled = held.len();
            match pool.allocate(blocks - filled) {
                Ok(more) => {
                    held.extend(more);
                    sequences.push(Sequence { keys, blocks: held, filled });
                }
                Err(_) => pool.release_all(&held),
            }
        }
        Op::Fill(which) if !sequences.is_empty() => {
            let at = which % sequences.len();
            let s = &mut sequences[at];
            if s.filled < s.blocks.len() {
                let parent = s.filled.checked_sub(1).map(|i| s.keys[i]);
                s.blocks[s.filled] = pool.seal(s.blocks[s.filled], s.keys[s.filled], parent);
                s.filled += 1;
            }
        }
        Op::End(which) if !sequences.is_empty() => {
            let s = sequences.swap_remove(which % sequences.len());
            pool.release_all(&s.blocks);
        }
        Op::Forget => pool.forget_cached(),
        Op::Reset => {
            pool.reset();
            sequences.clear();
        }
        Op::Fill(_) | Op::End(_) => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn blocks_are_conserved_and_never_given_twice(
        total in 1_usize..24, ops in prop::collection::vec(op(), 1..120),
    ) {
        let mut pool = BlockPool::new(total);
        let mut sequences: Vec<Sequence> = Vec::new();
        for op in &ops {
            apply(&mut pool, &mut sequences, op);
            pool.check().map_err(TestCaseError::fail)?;
            let now = pool.counts();
            prop_assert_eq!(now.used + now.cached + now.free, total);
            // Held exactly by the sequences; shared only where the content is the same.
            let mut owners: Vec<(BlockId, Option<BlockKey>)> = Vec::new();
            for s in &sequences {
                for (i, &block) in s.blocks.iter().enumerate() {
                    owners.push((block, (i < s.filled).then(|| s.keys[i])));
                    prop_assert_eq!(pool.is_sealed(block), i < s.filled);
                }
            }
            owners.sort();
            for pair in owners.windows(2) {
                prop_assert!(pair[0].0 != pair[1].0 || (pair[0].1 == pair[1].1 && pair[0].1.is_some()));
            }
            owners.dedup_by_key(|o| o.0);
            prop_assert_eq!(owners.len(), now.used);
            prop_assert_eq!(pool.available(), total - now.used);
        }
        for s in sequences {
            pool.release_all(&s.blocks);
        }
        prop_assert_eq!(pool.counts().used, 0);
        prop_assert_eq!(pool.allocate(total).map(|b| b.len()), Ok(total));
    }
}
