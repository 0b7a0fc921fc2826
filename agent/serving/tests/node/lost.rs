//! Engines, gateways and messages that are lost, late or wrong.

use std::sync::Arc;

use deepinfer_protocol::message::{Failure, Message, PieceKind, Refusal};
use deepinfer_protocol::{AgentId, Attempt, RequestId, Span};
use deepinfer_serving::node::{EngineEvent, NodeEvent, Ticket};

use crate::clients::Phase;
use crate::engine::Dice;
use crate::rig::Rig;
use crate::setup::{gateway, prompt, rank_name, rank_options, spec, worker_name, worker_options};

fn rig(seed: u64) -> Rig {
    Rig::new(seed, worker_options(4, 32), vec![rank_options(0, 4, 32)])
}

#[test]
fn an_engine_that_dies_fails_what_was_in_it_and_forgets_its_cache() {
    let mut rig = rig(1);
    rig.submit(1, prompt(0, 1, 0, 600), spec(1, 1));
    rig.pump();
    assert!(rig.worker().blocks.cached > 0 && rig.worker().checkpoints.entries > 0);
    rig.auto = false;
    let id = rig.submit(2, prompt(0, 2, 0, 600), spec(1, 9));
    rig.deliver(&gateway(), &worker_name());
    rig.poll(&worker_name());
    rig.crash_engine(&worker_name());
    rig.pump();
    let failed = Message::Failed { request: id, attempt: Attempt(0), reason: Failure::EngineLost };
    assert_eq!(rig.heard_of(id), [&progress(id), &failed]);
    let status = rig.worker();
    assert_eq!((status.inflight, status.blocks.free, status.checkpoints.entries), (0, 32, 0));
    assert!(status.engine && status.free_slots == 4);
}

fn progress(request: RequestId) -> Message {
    Message::PrefillProgress { request, attempt: Attempt(0), cached_tokens: 0, last_chunk: false }
}

#[test]
fn parked_sequences_survive_the_engine_that_made_them() {
    let mut rig = rig(1);
    rig.auto = false;
    let id = rig.submit(1, prompt(0, 1, 0, 600), spec(1, 9));
    rig.pump();
    rig.crash_engine(&worker_name());
    rig.pump();
    assert_eq!(rig.worker().parked, 1);
    rig.auto = true;
    rig.requests.get_mut(&id).expect("it").holder = Some(worker_name());
    rig.place(id);
    rig.run();
    rig.assert_outputs();
    assert_eq!(rig.requests[&id].attempt, 0);
}

#[test]
fn without_an_engine_no_work_is_taken_and_no_step_given() {
    let mut rig = rig(1);
    rig.auto = false;
    rig.tell(&worker_name(), NodeEvent::Engine(EngineEvent::Lost(Failure::EngineHung)));
    let id = rig.submit(1, prompt(0, 1, 0, 100), spec(1, 9));
    rig.pump();
    assert!(matches!(rig.heard_of(id)[..], [Message::Refuse { reason: Refusal::NoRoom, .. }]));
    rig.tell(&worker_name(), NodeEvent::Engine(EngineEvent::Ready));
    rig.place(id);
    rig.pump();
    assert_eq!(rig.worker().parked, 1);
}

#[test]
fn what_is_still_on_its_way_to_a_rank_survives_the_loss_of_its_engine() {
    let mut rig = rig(1);
    let id = rig.submit(1, prompt(0, 1, 0, 600), spec(1, 9));
    while rig.rank(0).loading == 0 {
        rig.poll(&worker_name());
        rig.run_engine(&worker_name());
        rig.deliver_if_any(&worker_name(), &gateway());
        rig.deliver_if_any(&gateway(), &worker_name());
        rig.deliver_if_any(&gateway(), &rank_name(0));
    }
    rig.tell(&rank_name(0), NodeEvent::Engine(EngineEvent::Lost(Failure::EngineLost)));
    rig.pump();
    assert_eq!(rig.rank(0).loading, 1, "all pieces came, there is no engine");
    rig.tell(&rank_name(0), NodeEvent::Engine(EngineEvent::Ready));
    rig.run();
    rig.assert_outputs();
    assert!(rig.requests[&id].failures.is_empty());
}

#[test]
fn things_of_a_lost_gateway_are_kept_for_the_lease_and_then_freed() {
    let mut rig = rig(1);
    rig.auto = false;
    rig.submit(1, prompt(0, 1, 0, 300), spec(1, 9));
    rig.pump();
    rig.submit(2, prompt(0, 2, 0, 300), spec(1, 9));
    rig.deliver(&gateway(), &worker_name());
    rig.tell(&worker_name(), NodeEvent::PeerLost(gateway()));
    rig.wait(Span::secs(29));
    assert_eq!(rig.worker().inflight, 2);
    rig.wait(Span::secs(1));
    let status = rig.worker();
    assert_eq!((status.inflight, status.blocks.used, status.parked_bytes), (0, 0, 0));
    assert_eq!(status.counts.failed.get(&Failure::LeaseExpired), Some(&2));
}

#[test]
fn a_gateway_that_comes_back_in_time_loses_nothing() {
    let (mut rig, id) = running(1, 200);
    for name in [worker_name(), rank_name(0)] {
        rig.tell(&name, NodeEvent::PeerLost(gateway()));
    }
    rig.wait(Span::secs(20));
    for name in [worker_name(), rank_name(0)] {
        rig.tell(&name, NodeEvent::PeerUp { peer: gateway(), process: Some(0) });
    }
    rig.wait(Span::secs(20));
    rig.run();
    rig.assert_outputs();
    assert_eq!(rig.requests[&id].attempt, 0);
}

#[test]
fn a_gateway_process_that_was_replaced_under_its_name_leaves_nothing_behind() {
    let mut rig = rig(1);
    rig.auto = false;
    rig.submit(1, prompt(0, 1, 0, 300), spec(1, 9));
    rig.submit((9 << 64) + 1, prompt(0, 2, 0, 300), spec(1, 9));
    rig.pump();
    assert_eq!(rig.worker().parked, 2);
    // It is connected and idle: no lease runs, and no work says who it is.
    rig.tell(&worker_name(), NodeEvent::PeerLost(gateway()));
    rig.tell(&worker_name(), NodeEvent::PeerUp { peer: gateway(), process: Some(9) });
    assert_eq!(rig.worker().parked, 1, "only the new process's");
    let (mut rig, _) = running(1, 200);
    rig.tell(&rank_name(0), NodeEvent::PeerUp { peer: gateway(), process: Some(0) });
    assert_eq!(rig.rank(0).running, 1, "the same process");
    rig.tell(&rank_name(0), NodeEvent::PeerUp { peer: gateway(), process: Some(9) });
    assert_eq!((rig.rank(0).inflight, rig.rank(0).blocks.used), (0, 0));
}

/// A rig whose only request runs on the rank.
fn running(seed: u64, max_tokens: u32) -> (Rig, RequestId) {
    let mut rig = rig(seed);
    let id = rig.submit(1, prompt(0, 1, 0, 300), spec(1, max_tokens));
    while rig.rank(0).running == 0 {
        rig.round();
    }
    (rig, id)
}

#[test]
fn what_a_gateway_forgot_in_host_memory_is_freed_in_the_end() {
    let mut rig = rig(1);
    rig.auto = false;
    rig.submit(1, prompt(0, 1, 0, 300), spec(1, 9));
    rig.pump();
    rig.wait(Span::secs(1_799));
    assert_eq!(rig.worker().parked, 1);
    rig.wait(Span::secs(2));
    assert_eq!((rig.worker().parked, rig.worker().parked_bytes), (0, 0));
}

/// Messages and engine events about things that do not exist.
fn strangers(dice: &mut Dice) -> Vec<NodeEvent> {
    let request = RequestId(dice.roll(40) as u128);
    let attempt = Attempt(dice.roll(3) as u32);
    let kind = if dice.one_in(2) { PieceKind::State } else { PieceKind::Block(dice.roll(9) as u32) };
    let (pieces, tokens, crc) = (dice.roll(9) as u32, dice.roll(900) as u32, dice.roll(9) as u32);
    let messages = [
        Message::KvPiece { request, attempt, kind, pieces, tokens, crc },
        Message::KvGone { request, attempt },
        Message::ReleaseKv { request, attempt },
        Message::FetchKv { request, attempt, only: dice.one_in(2).then_some(kind) },
        Message::PrefillDone { request, attempt, parked_bytes: 9, kv_epoch: String::new() },
        Message::DecodeRunning { request, attempt },
        Message::Preempted { request, attempt, tokens, parked_bytes: 1 },
        Message::Failed { request, attempt, reason: Failure::KvLost },
        Message::Tokens(Vec::new()),
        Message::Heartbeat,
    ];
    let from = AgentId::from(["p-0", "d-0", "g-0", "x-0"][dice.roll(4)]);
    let message = messages[dice.roll(messages.len())].clone();
    let ticket = Ticket(1_000_000 + dice.roll(9) as u64);
    let engine = [
        EngineEvent::Exported { ticket, pieces: Vec::new() },
        EngineEvent::Imported { ticket, fits: dice.one_in(2) },
        EngineEvent::Checkpointed { ticket, state: None },
        EngineEvent::Restored { ticket, fits: dice.one_in(2) },
    ];
    let engine = NodeEvent::Engine(engine[dice.roll(4)].clone());
    vec![NodeEvent::Message { from, message, payload: Arc::from([1, 2, 3]) }, engine]
}

#[test]
fn sv_079_messages_about_unknown_requests_are_ignored_and_counted_and_others_go_on() {
    for seed in 0..10 {
        let mut rig = rig(seed);
        let mut dice = Dice(seed << 8);
        for i in 0..6_u32 {
            rig.submit(1_000 + u128::from(i), prompt(i, i, 0, 200), spec(u64::from(i), 30));
        }
        while !rig.all_ended() {
            rig.round();
            let name = if dice.one_in(2) { worker_name() } else { rank_name(0) };
            strangers(&mut dice).into_iter().for_each(|event| rig.tell(&name, event));
        }
        rig.run();
        rig.assert_outputs();
        assert!(rig.requests.values().all(|r| r.phase == Phase::Done && r.failures.is_empty()));
        assert!(rig.worker().counts.ignored > 0 && rig.rank(0).counts.ignored > 0);
    }
}

#[test]
fn a_fetch_of_something_that_is_not_here_is_answered_as_gone() {
    let mut rig = rig(1);
    let (request, attempt) = (RequestId(5), Attempt(0));
    for holder in [worker_name(), rank_name(0)] {
        let message = Message::FetchKv { request, attempt, only: None };
        rig.tell(&holder, NodeEvent::Message { from: gateway(), message, payload: Arc::from([]) });
        let gone = Message::KvGone { request, attempt };
        assert_eq!(rig.wires[&(holder, gateway())].back().map(|(m, _)| m), Some(&gone));
    }
}
