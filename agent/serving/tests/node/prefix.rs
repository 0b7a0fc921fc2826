//! Reuse of prefixes: what is not computed again, and that it changes no token.

use std::sync::Arc;

use deepinfer_protocol::message::{Message, Refusal};
use deepinfer_protocol::{Attempt, RequestId};
use deepinfer_serving::node::WorkerOptions;

use crate::clients::Phase;
use crate::engine::REPLAY;
use crate::rig::Rig;
use crate::setup::{gateway, prompt, rank_options, spec, worker_name, worker_options};

/// Sends prompts one after the other; gives the rows run and the tokens reported as cached for each.
fn one_after_the_other(options: WorkerOptions, prompts: Vec<Vec<u32>>) -> (Rig, Vec<(u64, u32)>) {
    let mut rig = Rig::new(3, options, vec![rank_options(0, 8, 64)]);
    let mut seen = Vec::new();
    for (i, prompt) in (0..).zip(prompts) {
        let before = rig.engine(&worker_name()).rows;
        let id = rig.submit(i, prompt, spec(i as u64, 9));
        rig.run();
        let cached = rig.requests[&id].cached.expect("it ran");
        seen.push((rig.engine(&worker_name()).rows - before, cached));
    }
    rig.assert_outputs();
    (rig, seen)
}

fn without_checkpoints() -> WorkerOptions {
    WorkerOptions { checkpoint_bytes: 0, ..worker_options(4, 32) }
}

#[test]
fn sv_068_a_repeated_prompt_reports_the_blocks_that_prefill_reused() {
    let twice = vec![prompt(0, 1, 0, 1_300), prompt(0, 1, 0, 1_300)];
    let (rig, seen) = one_after_the_other(worker_options(4, 32), twice);
    assert_eq!(seen, [(1_300, 0), (20, 1_280)], "the second starts at the first one's checkpoint");
    assert_eq!(rig.worker().counts.cached_tokens, 1_280);
    assert_eq!(rig.worker().counts.replayed_rows, 0);
}

#[test]
fn a_prompt_of_whole_blocks_steps_back_one_so_that_a_row_runs() {
    let twice = vec![prompt(0, 1, 0, 640), prompt(0, 1, 0, 640)];
    let (_, seen) = one_after_the_other(worker_options(4, 32), twice);
    assert_eq!(seen, [(640, 0), (128, 512)]);
}

#[test]
fn without_checkpoints_the_state_is_rebuilt_by_an_exact_replay() {
    let twice = vec![prompt(0, 1, 0, 1_300), prompt(0, 1, 0, 1_300)];
    let (rig, seen) = one_after_the_other(without_checkpoints(), twice);
    assert_eq!(seen, [(1_300, 0), (20 + u64::from(REPLAY), 1_280)]);
    assert_eq!(rig.worker().counts.replayed_rows, u64::from(REPLAY));
}

#[test]
fn a_hit_no_longer_than_a_replay_is_ignored_without_a_checkpoint() {
    let twice = vec![prompt(0, 1, 0, 300), prompt(0, 1, 0, 300)];
    let (_, seen) = one_after_the_other(without_checkpoints(), twice);
    assert_eq!(seen, [(300, 0), (300, 0)]);
}

#[test]
fn a_conversation_goes_on_from_the_checkpoint_of_its_last_turn() {
    let whole = prompt(0, 1, 0, 1_500);
    let turns = [700, 1_100, 1_500].map(|n| whole[..n].to_vec());
    let (_, seen) = one_after_the_other(worker_options(4, 32), turns.to_vec());
    assert_eq!(seen, [(700, 0), (1_100 - 640, 640), (1_500 - 1_024, 1_024)]);
}

#[test]
fn a_shared_beginning_is_found_among_requests_that_arrived_together() {
    let mut rig = Rig::new(3, worker_options(4, 40), vec![rank_options(0, 8, 64)]);
    for i in 0..4 {
        rig.submit(u128::from(i), prompt(0, i, 1_000, 1_100), spec(1, 4));
    }
    rig.pump();
    assert!(rig.all_ended());
    rig.assert_outputs();
    // The pack of the first steps may hold two of them, but not all four compute the beginning.
    assert!(rig.worker().counts.cached_tokens >= 2 * 896, "{:?}", rig.worker().counts);
    assert_eq!(rig.worker().inflight, 0);
}

#[test]
fn requests_that_must_not_share_neither_leave_nor_take_blocks() {
    let mut rig = Rig::new(3, worker_options(4, 32), vec![rank_options(0, 8, 64)]);
    for (i, (salt, reuse)) in
        [(1, false), (1, true), (2, true), (1, false), (1, true)].into_iter().enumerate()
    {
        let id = rig.submit(i as u128, prompt(0, 1, 0, 900), spec(1, 3));
        rig.wires.clear();
        let request = rig.requests.get_mut(&id).expect("it was just sent");
        (request.salt, request.reuse) = (salt, reuse);
        rig.place(id);
        rig.run();
    }
    let cached: Vec<u32> = rig.requests.values().filter_map(|r| r.cached).collect();
    assert_eq!(cached, [0, 0, 0, 0, 896], "only the second of the same tenant, both willing, hits");
}

#[test]
fn sv_065_cancelled_and_retried_requests_with_a_shared_prefix_spoil_no_other() {
    for round in 0..100 {
        let mut rig = Rig::new(round, worker_options(6, 20), vec![rank_options(0, 12, 40)]);
        rig.faults.cancels = 40;
        for i in 0..32_u32 {
            let shared = if i < 16 { 128 } else { 0 };
            rig.submit(u128::from(i), prompt(0, i, shared, 140 + i as usize), spec(u64::from(i), 6));
        }
        for _ in 0..400 {
            rig.round();
        }
        rig.faults.cancels = 0;
        let cancelled: Vec<u128> =
            rig.requests.iter().filter(|(_, r)| r.phase == Phase::Cancelled).map(|(id, _)| id.0).collect();
        assert!(!cancelled.is_empty());
        for id in cancelled {
            let prompt = rig.requests[&RequestId(id)].prompt.clone();
            rig.submit(100 + id, prompt, spec(id as u64, 6));
        }
        rig.run();
        rig.assert_outputs();
    }
}

#[test]
fn sv_067_cached_tokens_never_exceed_the_prompt_when_work_is_done_again() {
    for seed in 0..3 {
        let mut rig = Rig::new(seed, worker_options(4, 40), vec![rank_options(0, 6, 9)]);
        rig.faults.crashes = 500;
        for i in 0..8 {
            rig.submit(u128::from(i), prompt(0, i % 2, 0, 150), spec(1, 300));
        }
        rig.run();
        let status = rig.worker();
        let resumed: usize = rig.requests.values().map(|r| r.failures.len()).sum();
        assert!(resumed > 0 && rig.rank(0).counts.preempted > 0, "work was done again");
        // The rig's gateway asserts it for each request, too.
        assert!(status.counts.cached_tokens <= status.counts.prompt_tokens);
        assert!(rig.requests.values().all(|r| r.cached.is_none_or(|c| c as usize <= r.prompt.len())));
    }
}

#[test]
fn a_checkpoint_that_cannot_be_read_is_a_miss_and_no_error() {
    let mut rig = Rig::new(3, worker_options(4, 32), vec![rank_options(0, 8, 64)]);
    rig.submit(1, prompt(0, 1, 0, 1_300), spec(1, 9));
    rig.run();
    rig.nodes.get_mut(&worker_name()).expect("it").engine.refuse_restores = true;
    let id = rig.submit(2, prompt(0, 1, 0, 1_300), spec(1, 9));
    rig.run();
    rig.assert_outputs();
    assert!(rig.requests[&id].failures.is_empty());
    assert_eq!(rig.worker().counts.replayed_rows, u64::from(REPLAY), "the replay takes its place");
}

#[test]
fn sv_071_thousands_of_look_ups_that_are_never_used_pin_nothing() {
    let mut rig = Rig::new(1, worker_options(4, 10), vec![rank_options(0, 4, 40)]);
    rig.submit(0, prompt(0, 1, 0, 520), spec(1, 1));
    rig.run();
    assert_eq!(rig.worker().blocks.cached, 4);
    // Another prompt takes the free blocks, so that a request which hits the four cached ones has no room left.
    rig.auto = false;
    rig.submit(1, prompt(0, 2, 0, 700), spec(1, 9));
    rig.deliver(&gateway(), &worker_name());
    for i in 0..10_000 {
        rig.submit(10 + i, [prompt(0, 1, 0, 512), prompt(0, 3, 0, 200)].concat(), spec(1, 9));
        rig.deliver(&gateway(), &worker_name());
    }
    let status = rig.worker();
    assert_eq!(status.counts.refused.get(&Refusal::NoRoom), Some(&10_000));
    assert_eq!((status.blocks.used, status.blocks.cached), (6, 4), "only the running prompt holds blocks");
    rig.requests.clear();
    rig.wires.clear();
    let cancel = Message::Cancel { request: RequestId(1), attempt: Attempt(0) };
    rig.post(&gateway(), &worker_name(), cancel, Arc::from([]));
    rig.deliver(&gateway(), &worker_name());
    rig.submit(1 << 21, prompt(0, 5, 0, 1_270), spec(1, 9));
    rig.deliver(&gateway(), &worker_name());
    assert_eq!(rig.worker().blocks.evicted, 4, "eviction takes all of them");
}
