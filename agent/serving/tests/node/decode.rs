//! Decode ranks: loading, stepping, giving way, and what is said about it.

use std::sync::Arc;

use deepinfer_protocol::fleet::Leader;
use deepinfer_protocol::generate::FinishReason;
use deepinfer_protocol::message::{DecodeReport, Failure, Message, Refusal};
use deepinfer_protocol::{AgentId, Attempt, Epoch, Rank, RequestId, Span};
use deepinfer_serving::batch::MAX_PREEMPTIONS;
use deepinfer_serving::node::NodeEvent;

use crate::clients::Phase;
use crate::rig::Rig;
use crate::setup::{gateway, prompt, rank_name, rank_options, spec, worker_name, worker_options};

#[test]
fn sv_055_preempted_streams_equal_streams_without_memory_pressure() {
    let mut preempted = 0;
    for seed in 0..6 {
        let mut rig =
            Rig::new(seed, worker_options(6, 40), vec![rank_options(0, 8, 10), rank_options(1, 8, 12)]);
        for i in 0..20_u32 {
            let mut spec = spec(0, 300);
            spec.temperature = 0.0;
            rig.submit(u128::from(i), prompt(i, i, 0, 30 + i as usize * 5), spec);
        }
        rig.run();
        rig.assert_outputs();
        preempted += rig.rank(0).counts.preempted + rig.rank(1).counts.preempted;
    }
    assert!(preempted > 50, "{preempted} preemptions are no pressure");
}

#[test]
fn sv_056_a_request_gives_way_a_bounded_number_of_times_and_nothing_is_computed_again() {
    let mut most = 0;
    for seed in 0..4 {
        let mut rig = Rig::new(seed, worker_options(4, 60), vec![rank_options(0, 8, 12)]);
        rig.submit(0, prompt(9, 0, 0, 400), spec(5, 700));
        for i in 1..12_u32 {
            rig.submit(u128::from(i), prompt(i, i, 0, 60), spec(u64::from(i), 300));
        }
        rig.run();
        rig.assert_outputs();
        most = most.max(rig.requests.values().map(|r| r.preemptions).max().unwrap_or(0));
        let output: usize = rig.requests.values().map(|r| r.output.len() - 1).sum();
        assert_eq!(rig.rank(0).counts.rows, output as u64, "each row runs once");
    }
    assert!((1..=MAX_PREEMPTIONS).contains(&most), "{most} preemptions of one request");
}

#[test]
fn a_sequence_alone_grows_to_the_whole_pool_and_ends_there() {
    let mut rig = Rig::new(1, worker_options(2, 8), vec![rank_options(0, 2, 3)]);
    let mut long = spec(1, 4_000);
    long.stop_tokens.clear();
    let id = rig.submit(1, prompt(0, 1, 0, 200), long);
    rig.run();
    let request = &rig.requests[&id];
    assert_eq!(request.prompt.len() + request.output.len(), 3 * 128);
    assert_eq!(request.finish, Some(FinishReason::Length));
    assert_eq!(rig.rank(0).counts.preempted, 0);
}

#[test]
fn a_sequence_that_the_engine_cannot_read_is_lost_here_but_its_holder_keeps_it() {
    let (mut rig, id) = loading(1, 400);
    rig.auto = false;
    rig.nodes.get_mut(&rank_name(0)).expect("it").engine.refuse_imports = true;
    rig.pump();
    let failed = Message::Failed { request: id, attempt: Attempt(0), reason: Failure::KvLost };
    assert_eq!(rig.heard_of(id).last(), Some(&&failed));
    let status = rig.rank(0);
    assert_eq!((status.inflight, status.blocks.used, status.free_slots), (0, 0, 4));
    assert_eq!(rig.worker().parked, 1, "until its gateway cancels it");
}

#[test]
fn who_still_loads_is_turned_away_when_a_protected_sequence_needs_its_blocks() {
    let mut rig = Rig::new(1, worker_options(4, 64), vec![rank_options(0, 4, 6)]);
    let mut endless = spec(1, 500);
    endless.stop_tokens.clear();
    let old = rig.submit(1, prompt(0, 1, 0, 250), endless.clone());
    rig.requests.get_mut(&old).expect("it").preemptions = MAX_PREEMPTIONS;
    while rig.rank(0).running == 0 {
        rig.round();
    }
    rig.deliver(&rank_name(0), &worker_name());
    assert_eq!(rig.worker().parked, 0, "it was released");
    let new = rig.submit(2, prompt(0, 2, 0, 300), endless);
    while rig.rank(0).loading == 0 {
        rig.round();
        // The pieces of the newcomer do not come.
        rig.wires.remove(&(rank_name(0), worker_name()));
    }
    rig.auto = false;
    while rig.rank(0).loading == 1 {
        rig.wires.remove(&(rank_name(0), worker_name()));
        rig.poll(&rank_name(0));
        rig.run_engine(&rank_name(0));
    }
    rig.pump();
    let refused = |m: &&&Message| matches!(m, Message::Refuse { reason: Refusal::NoRoom, .. });
    assert_eq!(rig.heard_of(new).iter().filter(refused).count(), 1);
    assert_eq!((rig.worker().parked, rig.rank(0).counts.preempted), (1, 0), "the holder has its copy");
    rig.auto = true;
    rig.requests.get_mut(&new).expect("it").phase = Phase::Again;
    rig.run();
    rig.assert_outputs();
    assert!(rig.requests.values().all(|r| r.failures.is_empty()));
}

#[test]
fn who_gave_way_comes_back_only_when_its_growth_is_free() {
    let taken = |preemptions| {
        let mut rig = Rig::new(1, worker_options(4, 64), vec![rank_options(0, 4, 6)]);
        let first = rig.submit(1, prompt(0, 1, 0, 250), spec(1, 400));
        while rig.rank(0).running == 0 && rig.requests[&first].phase != Phase::Done {
            rig.round();
        }
        let second = rig.submit(2, prompt(0, 2, 0, 300), spec(2, 400));
        rig.requests.get_mut(&second).expect("it").preemptions = preemptions;
        while rig.requests[&second].holder.is_none() {
            rig.deliver_if_any(&gateway(), &worker_name());
            rig.poll(&worker_name());
            rig.run_engine(&worker_name());
            rig.deliver_if_any(&worker_name(), &gateway());
        }
        rig.deliver(&gateway(), &rank_name(0));
        rig.rank(0).loading == 1
    };
    // Three blocks and four with their reserves, of six: overcommitted by less than 30 %.
    assert!(taken(0));
    assert!(!taken(1));
}

#[test]
fn what_is_longer_than_the_pool_is_too_large_at_once() {
    let mut rig = Rig::new(1, worker_options(2, 16), vec![rank_options(0, 2, 3)]);
    let id = rig.submit(1, prompt(0, 1, 0, 3 * 128), spec(1, 10));
    for _ in 0..20 {
        rig.pump();
    }
    assert!(rig.requests[&id].phase != Phase::Done);
    assert!(rig.refusals.iter().all(|r| *r == Refusal::TooLarge) && !rig.refusals.is_empty());
}

/// A rig with one request parked at the worker and placed at rank 0, whose pieces have not been delivered.
fn loading(seed: u64, length: usize) -> (Rig, RequestId) {
    let mut rig = Rig::new(seed, worker_options(4, 64), vec![rank_options(0, 4, 64)]);
    let id = rig.submit(1, prompt(0, 1, 0, length), spec(1, 20));
    while rig.rank(0).loading == 0 {
        rig.poll(&worker_name());
        rig.run_engine(&worker_name());
        rig.deliver_if_any(&worker_name(), &gateway());
        rig.deliver_if_any(&gateway(), &worker_name());
        rig.deliver_if_any(&gateway(), &rank_name(0));
    }
    (rig, id)
}

#[test]
fn blocks_and_slot_are_held_while_pieces_are_under_way_and_given_back_when_it_is_cancelled() {
    let (mut rig, id) = loading(1, 400);
    let status = rig.rank(0);
    assert_eq!((status.loading, status.blocks.used, status.free_slots), (1, 4, 3));
    rig.auto = false;
    let cancel = Message::Cancel { request: id, attempt: Attempt(0) };
    rig.tell(&rank_name(0), NodeEvent::Message { from: gateway(), message: cancel, payload: Arc::from([]) });
    let status = rig.rank(0);
    assert_eq!((status.inflight, status.blocks.used, status.free_slots), (0, 0, 4));
    rig.pump();
    assert_eq!(rig.rank(0).inflight, 0, "late pieces are ignored");
    assert!(rig.rank(0).counts.ignored > 0);
}

#[test]
fn sv_074_a_load_whose_holder_died_holds_nothing_after_the_cancel_a_hundred_times() {
    let mut rig = Rig::new(1, worker_options(4, 64), vec![rank_options(0, 4, 64)]);
    for round in 0..100 {
        let id = rig.submit(round, prompt(0, round as u32, 0, 300), spec(1, 20));
        while rig.rank(0).loading == 0 {
            rig.poll(&worker_name());
            rig.run_engine(&worker_name());
            rig.deliver_if_any(&worker_name(), &gateway());
            rig.deliver_if_any(&gateway(), &worker_name());
            rig.deliver_if_any(&gateway(), &rank_name(0));
        }
        // The worker dies before it answers; the client leaves.
        rig.wires.clear();
        if round % 2 == 0 {
            rig.tell(&rank_name(0), NodeEvent::PeerLost(worker_name()));
        }
        rig.cancel(id);
        rig.pump();
        let status = rig.rank(0);
        assert_eq!((status.inflight, status.blocks.used, status.free_slots), (0, 0, 4), "round {round}");
    }
    assert_eq!(rig.worker().inflight, 0);
}

#[test]
fn a_silent_holder_is_asked_again_once_and_then_given_up() {
    let (mut rig, id) = loading(1, 400);
    rig.auto = false;
    rig.wires.clear();
    rig.wait(Span::secs(5));
    let asked = rig.wires[&(rank_name(0), worker_name())].len();
    assert_eq!(asked, 5, "every piece is asked for again");
    rig.wires.clear();
    rig.wait(Span::secs(5));
    let status = rig.rank(0);
    assert_eq!((status.inflight, status.blocks.used), (0, 0));
    rig.pump();
    let failed = Message::Failed { request: id, attempt: Attempt(0), reason: Failure::KvLost };
    assert!(rig.heard_of(id).contains(&&failed));
}

#[test]
fn a_holder_that_comes_back_is_asked_again_and_one_that_does_not_is_given_up() {
    let (mut rig, id) = loading(1, 400);
    rig.wires.clear();
    rig.tell(&rank_name(0), NodeEvent::PeerLost(worker_name()));
    rig.wait(Span::secs(1));
    rig.tell(&rank_name(0), NodeEvent::PeerUp { peer: worker_name(), process: None });
    rig.run();
    rig.assert_outputs();
    assert!(rig.requests[&id].failures.is_empty());
    let (mut rig, id) = loading(1, 400);
    rig.wires.clear();
    rig.tell(&rank_name(0), NodeEvent::PeerLost(worker_name()));
    rig.wait(Span::secs(2));
    assert_eq!(rig.rank(0).inflight, 0);
    rig.run();
    assert_eq!(rig.requests[&id].failures, [Failure::KvLost]);
}

#[test]
fn sv_076_a_parked_sequence_that_is_gone_fails_the_load_and_the_retry_is_right() {
    let (mut rig, id) = loading(1, 400);
    let release = Message::ReleaseKv { request: id, attempt: Attempt(0) };
    rig.tell(
        &worker_name(),
        NodeEvent::Message { from: gateway(), message: release, payload: Arc::from([]) },
    );
    rig.run();
    rig.assert_outputs();
    assert_eq!(rig.requests[&id].failures, [Failure::KvLost]);
    assert_eq!(rig.requests[&id].attempt, 1);
}

#[test]
fn sv_076_eviction_after_the_prefill_does_not_touch_what_waits_for_its_rank() {
    let (mut rig, id) = loading(1, 400);
    // Other prompts take every block of the worker before a piece is sent.
    let held = rig.wires.remove(&(rank_name(0), worker_name())).expect("fetches");
    for i in 10..16 {
        rig.submit(i, prompt(i as u32, i as u32, 0, 2_000), spec(1, 1));
        for _ in 0..40 {
            rig.poll(&worker_name());
            rig.run_engine(&worker_name());
            rig.deliver_if_any(&worker_name(), &gateway());
            rig.deliver_if_any(&gateway(), &worker_name());
        }
    }
    assert!(rig.worker().blocks.evicted > 3);
    rig.wires.insert((rank_name(0), worker_name()), held);
    rig.run();
    rig.assert_outputs();
    assert_eq!(rig.requests[&id].attempt, 0);
}

#[test]
fn sv_077_late_pieces_of_a_cancelled_request_do_not_reach_the_next_owner_of_its_blocks() {
    let (mut rig, id) = loading(1, 400);
    rig.deliver_if_any(&rank_name(0), &worker_name());
    let late = rig.wires.remove(&(worker_name(), rank_name(0))).expect("pieces under way");
    assert_eq!(late.len(), 5);
    rig.cancel(id);
    rig.deliver(&gateway(), &rank_name(0));
    assert_eq!(rig.rank(0).inflight, 0);
    // The next request gets the same blocks; the late pieces come while it loads and while it runs.
    rig.submit(2, prompt(0, 2, 0, 420), spec(2, 20));
    let mut late = late.into_iter();
    while !rig.quiet() {
        rig.round();
        if rig.rank(0).inflight > 0
            && let Some((message, payload)) = late.next()
        {
            rig.tell(&rank_name(0), NodeEvent::Message { from: worker_name(), message, payload });
        }
    }
    assert_eq!(late.count(), 0, "all of them came");
    rig.assert_outputs();
    assert!(rig.rank(0).counts.ignored >= 5);
}

#[test]
fn sv_080_every_flipped_byte_is_found_before_the_first_step() {
    let mut damaged = 0;
    for seed in 0..25 {
        let mut rig =
            Rig::new(seed, worker_options(4, 40), vec![rank_options(0, 8, 64), rank_options(1, 8, 64)]);
        rig.faults.damage = 6;
        for i in 0..40_u32 {
            rig.submit(u128::from(i), prompt(i, i, 0, 60 + i as usize * 9), spec(u64::from(i), 4));
        }
        rig.run();
        rig.assert_outputs();
        damaged += rig.rank(0).counts.damaged_pieces + rig.rank(1).counts.damaged_pieces;
        let failures = rig.requests.values().flat_map(|r| &r.failures);
        assert!(failures.into_iter().all(|f| *f == Failure::KvLost));
    }
    assert!(damaged > 300, "{damaged} pieces were damaged");
}

#[test]
fn tokens_of_one_step_are_one_message_per_gateway() {
    let mut rig = Rig::new(1, worker_options(8, 40), vec![rank_options(0, 8, 64)]);
    for i in 0..6_u32 {
        rig.submit(u128::from(i), prompt(i, i, 0, 50), spec(u64::from(i), 30));
    }
    while rig.rank(0).running < 6 {
        rig.round();
    }
    while rig.engine(&rank_name(0)).stepping() || !rig.nodes[&rank_name(0)].events.is_empty() {
        rig.run_engine(&rank_name(0));
    }
    rig.wires.clear();
    rig.poll(&rank_name(0));
    rig.run_engine(&rank_name(0));
    let sent = &rig.wires[&(rank_name(0), gateway())];
    assert_eq!(sent.len(), 1);
    assert!(matches!(&sent[0].0, Message::Tokens(events) if events.len() == 6));
}

#[test]
fn a_rank_without_work_has_no_step_and_takes_the_result_of_an_empty_one() {
    let mut rig = Rig::new(1, worker_options(2, 8), vec![rank_options(0, 2, 8)]);
    rig.poll(&rank_name(0));
    assert!(!rig.engine(&rank_name(0)).stepping());
    let empty = deepinfer_serving::node::StepResult { elapsed: Span::millis(3), ..Default::default() };
    rig.tell(&rank_name(0), NodeEvent::Engine(deepinfer_serving::node::EngineEvent::StepDone(empty)));
    assert_eq!(rig.rank(0).counts.steps, 0);
}

#[test]
fn work_for_another_rank_is_turned_away() {
    let (mut rig, id) = loading(1, 100);
    rig.auto = false;
    rig.requests.get_mut(&id).expect("it").attempt = 1;
    rig.place(id);
    let (mut message, payload) =
        rig.wires.get_mut(&(gateway(), rank_name(0))).and_then(|q| q.pop_back()).expect("a decode");
    if let Message::Decode(work) = &mut message {
        work.rank = Rank(7);
    }
    rig.tell(&rank_name(0), NodeEvent::Message { from: gateway(), message, payload });
    rig.pump();
    let refused = |m: &&Message| matches!(m, Message::Refuse { reason: Refusal::WrongTarget, .. });
    assert_eq!(rig.heard_of(id).into_iter().filter(refused).count(), 1);
}

#[test]
fn a_rank_reports_its_load_with_reserved_growth() {
    let (mut rig, _) = loading(1, 100);
    let leader = Leader { agent: AgentId::from("d-7"), epoch: Epoch(1) };
    rig.tell(&rank_name(0), NodeEvent::Leader(Some(leader.clone())));
    let report: Option<DecodeReport> =
        rig.wires[&(rank_name(0), leader.agent)].iter().find_map(|(m, _)| match m {
            Message::DecodeReport(report) => Some(report.clone()),
            _ => None,
        });
    let report = report.expect("a report at once");
    assert_eq!((report.requests, report.free_blocks, report.total_blocks, report.free_slots), (1, 63, 64, 3));
    assert_eq!(report.tokens, 101 + 19, "19 output tokens are left of 20");
    assert_eq!(report.seen.len(), 1);
}
