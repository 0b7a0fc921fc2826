//! A prefill worker alone: chunks, first tokens, refusals, fences, drains, reports.

use std::sync::Arc;

use deepinfer_protocol::fleet::Leader;
use deepinfer_protocol::generate::FinishReason;
use deepinfer_protocol::message::{Failure, Message, PrefillReport, Refusal};
use deepinfer_protocol::{AgentId, Attempt, Epoch, RequestId, Span};
use deepinfer_serving::batch::TimeModel;
use deepinfer_serving::node::{NodeEvent, WorkerOptions};

use crate::clients::Phase;
use crate::engine::reference;
use crate::rig::Rig;
use crate::setup::{gateway, prompt, spec, worker_name, worker_options};

fn alone(options: WorkerOptions) -> Rig {
    let mut rig = Rig::new(1, options, Vec::new());
    rig.auto = false;
    rig
}

#[test]
fn a_prompt_runs_in_chunks_that_end_at_block_borders_and_at_its_checkpoint() {
    let mut options = worker_options(2, 16);
    options.limits.tokens = 384;
    let mut rig = alone(options);
    rig.submit(1, prompt(0, 1, 0, 1_000), spec(1, 5));
    rig.pump();
    let chunks = &rig.engine(&worker_name()).chunks;
    let expected = [(0, 384), (384, 384), (768, 128), (896, 104)];
    assert_eq!(chunks.concat(), expected.map(|(start, rows)| (start, rows, false)));
}

#[test]
fn the_first_token_goes_ahead_of_the_parked_sequence_with_its_index() {
    let mut rig = alone(worker_options(2, 16));
    let id = rig.submit(1, prompt(0, 1, 0, 300), spec(1, 5));
    rig.pump();
    let (tokens, _) = reference(&rig.requests[&id].prompt, &spec(1, 5), rig.limit);
    assert_eq!(rig.requests[&id].output, tokens[..1]);
    let order: Vec<bool> = rig
        .heard
        .iter()
        .filter(|(_, m)| matches!(m, Message::Tokens(_) | Message::PrefillDone { .. }))
        .map(|(_, m)| matches!(m, Message::Tokens(_)))
        .collect();
    assert_eq!(order, [true, false]);
    let status = rig.worker();
    assert_eq!((status.parked, status.blocks.used, status.free_slots), (1, 0, 2), "only host memory is held");
    assert!(status.parked_bytes > 0);
}

#[test]
fn the_gateway_hears_when_the_chunk_that_ends_the_prompt_starts() {
    let mut rig = alone(worker_options(2, 16));
    let id = rig.submit(1, prompt(0, 1, 0, 1_000), spec(1, 5));
    rig.pump();
    let last: Vec<bool> = rig
        .heard_of(id)
        .iter()
        .filter_map(|m| match m {
            Message::PrefillProgress { last_chunk, .. } => Some(*last_chunk),
            _ => None,
        })
        .collect();
    assert_eq!(last, [false, true]);
}

#[test]
fn a_first_token_that_ends_the_sequence_parks_nothing() {
    for (wanted, finish) in [(1, FinishReason::Length), (5, FinishReason::Stop)] {
        let mut rig = alone(worker_options(2, 16));
        let prompt = prompt(0, 1, 0, 200);
        let mut spec = spec(1, wanted);
        spec.stop_tokens = if wanted == 1 { Vec::new() } else { vec![reference(&prompt, &spec, 4_096).0[0]] };
        let id = rig.submit(1, prompt, spec);
        rig.pump();
        assert_eq!(rig.requests[&id].finish, Some(finish));
        assert_eq!((rig.worker().inflight, rig.worker().parked_bytes), (0, 0));
    }
}

#[test]
fn a_stop_token_is_not_drawn_before_min_tokens() {
    let mut rig = alone(worker_options(2, 16));
    let prompt = prompt(0, 1, 0, 200);
    let mut spec = spec(1, 5);
    let first = reference(&prompt, &spec, 4_096).0[0];
    (spec.stop_tokens, spec.min_tokens) = (vec![first], 1);
    let id = rig.submit(1, prompt, spec);
    rig.pump();
    let request = &rig.requests[&id];
    assert_ne!(request.output, [first]);
    assert_eq!(request.finish, None);
}

#[test]
fn a_prompt_one_token_short_of_the_context_gets_one_token() {
    let mut options = worker_options(2, 16);
    options.context_limit = 600;
    let mut rig = alone(options);
    let fits = rig.submit(1, prompt(0, 1, 0, 599), spec(1, 50));
    let none = rig.submit(2, prompt(0, 2, 0, 600), spec(1, 50));
    rig.pump();
    assert_eq!(rig.requests[&fits].output.len(), 1);
    assert_eq!(rig.requests[&fits].finish, Some(FinishReason::Length));
    let refused = |m: &&&Message| matches!(m, Message::Refuse { reason: Refusal::TooLarge, .. });
    assert_eq!(rig.heard_of(none).iter().filter(refused).count(), 1);
}

#[test]
fn what_never_fits_is_too_large_and_what_does_not_fit_now_has_no_room() {
    let mut rig = alone(worker_options(2, 8));
    let reasons = |rig: &Rig, id| match rig.heard_of(id)[..] {
        [Message::Refuse { reason, .. }] => Some(*reason),
        _ => None,
    };
    let large = rig.submit(1, prompt(0, 1, 0, 8 * 128 + 1), spec(1, 5));
    rig.submit(2, prompt(0, 2, 0, 500), spec(1, 5));
    let wide = rig.submit(3, prompt(0, 3, 0, 600), spec(1, 5));
    rig.submit(4, prompt(0, 4, 0, 500), spec(1, 5));
    let slotless = rig.submit(5, prompt(0, 5, 0, 10), spec(1, 5));
    for _ in 0..5 {
        rig.deliver(&gateway(), &worker_name());
    }
    rig.pump();
    assert_eq!(reasons(&rig, large), Some(Refusal::TooLarge));
    assert_eq!(reasons(&rig, wide), Some(Refusal::NoRoom));
    assert_eq!(reasons(&rig, slotless), Some(Refusal::NoRoom));
    assert_eq!(rig.worker().parked, 2, "a refusal changes nothing for the others");
}

#[test]
fn no_prompt_is_taken_while_the_parked_ones_fill_their_memory() {
    let mut options = worker_options(2, 8);
    options.parked_bytes = 100;
    let mut rig = alone(options);
    rig.submit(1, prompt(0, 1, 0, 10), spec(1, 5));
    rig.pump();
    let second = rig.submit(2, prompt(0, 2, 0, 10), spec(1, 5));
    rig.pump();
    assert!(matches!(rig.heard_of(second)[..], [Message::Refuse { reason: Refusal::NoRoom, .. }]));
    let (request, attempt) = (RequestId(1), Attempt(0));
    rig.post(&AgentId::from("d-9"), &worker_name(), Message::ReleaseKv { request, attempt }, Arc::from([]));
    rig.pump();
    rig.place(second);
    rig.pump();
    assert_eq!(rig.worker().parked, 1, "the same attempt is taken under another decision");
}

#[test]
fn a_repeated_prefill_is_answered_from_memory() {
    let mut rig = alone(worker_options(2, 8));
    rig.faults.duplicates = 1;
    let id = rig.submit(1, prompt(0, 1, 0, 200), spec(1, 5));
    rig.deliver(&gateway(), &worker_name());
    rig.pump();
    let rows = rig.engine(&worker_name()).rows;
    assert_eq!((rows, rig.worker().counts.accepted), (200, 1));
    let again = rig.wires.values().flatten().count();
    assert_eq!(again, 0);
    // And once it is parked: both the token and the end of the prefill are said again.
    rig.heard.clear();
    let prefill = rig.requests[&id].clone();
    assert_eq!(prefill.phase, Phase::Prefilling);
    rig.faults.duplicates = 0;
    rig.place(id);
    rig.pump();
    assert!(matches!(rig.heard[0].1, Message::Tokens(_)));
    assert!(matches!(rig.heard[1].1, Message::PrefillDone { .. }));
    assert_eq!(rig.engine(&worker_name()).rows, rows);
}

#[test]
fn a_newer_attempt_replaces_an_older_one_and_the_older_is_fenced_off() {
    let mut rig = alone(worker_options(2, 8));
    let id = rig.submit(1, prompt(0, 1, 0, 300), spec(1, 5));
    rig.deliver(&gateway(), &worker_name());
    rig.poll(&worker_name());
    rig.requests.get_mut(&id).expect("it").attempt = 1;
    rig.place(id);
    rig.pump();
    assert_eq!(rig.worker().parked, 1);
    assert_eq!(rig.requests[&id].output.len(), 1);
    rig.requests.get_mut(&id).expect("it").attempt = 0;
    rig.place(id);
    rig.pump();
    assert_eq!((rig.worker().parked, rig.worker().counts.ignored), (1, 1));
}

#[test]
fn a_cancelled_prompt_is_gone_at_once_wherever_it_is() {
    // Cancelled after so many things have happened to it.
    for happened in 0..12 {
        let mut rig = alone(worker_options(2, 8));
        let id = rig.submit(1, prompt(0, 1, 0, 700), spec(1, 5));
        rig.deliver(&gateway(), &worker_name());
        for _ in 0..happened {
            rig.poll(&worker_name());
            rig.run_engine(&worker_name());
        }
        rig.poll(&worker_name());
        let cancel = Message::Cancel { request: id, attempt: Attempt(0) };
        rig.tell(
            &worker_name(),
            NodeEvent::Message { from: gateway(), message: cancel, payload: Arc::from([]) },
        );
        let status = rig.worker();
        assert_eq!((status.inflight, status.blocks.used, status.free_slots), (0, 0, 2), "after {happened}");
        rig.heard.clear();
        rig.wires.clear();
        rig.pump();
        assert!(rig.heard.is_empty(), "results of a cancelled request are dropped");
        assert_eq!(rig.worker().inflight, 0);
    }
}

#[test]
fn a_drain_finishes_what_it_has_and_takes_nothing_new() {
    let mut rig = alone(worker_options(4, 16));
    let first = rig.submit(1, prompt(0, 1, 0, 300), spec(1, 5));
    rig.deliver(&gateway(), &worker_name());
    let deadline = rig.now + Span::secs(10);
    rig.tell(&worker_name(), NodeEvent::Drain { deadline });
    let second = rig.submit(2, prompt(0, 2, 0, 300), spec(1, 5));
    rig.pump();
    assert_eq!(rig.requests[&first].output.len(), 1);
    assert!(matches!(rig.heard_of(second)[..], [Message::Refuse { reason: Refusal::Draining, .. }]));
    assert!(rig.worker().draining && rig.worker().parked == 1);
    rig.tell(&worker_name(), NodeEvent::Undrain);
    rig.place(second);
    rig.pump();
    assert_eq!(rig.worker().parked, 2);
}

#[test]
fn at_the_deadline_of_a_drain_everything_is_cut_with_word_to_the_gateway() {
    let mut rig = alone(worker_options(4, 16));
    let parked = rig.submit(1, prompt(0, 1, 0, 300), spec(1, 5));
    rig.pump();
    let running = rig.submit(2, prompt(0, 2, 0, 300), spec(1, 5));
    rig.deliver(&gateway(), &worker_name());
    rig.poll(&worker_name());
    let deadline = rig.now + Span::secs(1);
    rig.tell(&worker_name(), NodeEvent::Drain { deadline });
    rig.wait(Span::millis(999));
    assert_eq!(rig.worker().inflight, 2);
    rig.wait(Span::millis(1));
    rig.pump();
    for id in [parked, running] {
        let last = rig.heard_of(id).pop().cloned();
        let expected = Message::Failed { request: id, attempt: Attempt(0), reason: Failure::DrainDeadline };
        assert_eq!(last, Some(expected));
    }
    let status = rig.worker();
    assert_eq!((status.inflight, status.blocks.used, status.cut), (0, 0, 2));
}

#[test]
fn reports_name_the_decisions_that_were_heard_taken_or_refused() {
    let mut rig = alone(worker_options(1, 8));
    let leader = Leader { agent: AgentId::from("p-1"), epoch: Epoch(1) };
    rig.submit(1, prompt(0, 1, 0, 300), spec(1, 5));
    rig.submit(2, prompt(0, 2, 0, 300), spec(1, 5));
    rig.deliver(&gateway(), &worker_name());
    rig.deliver(&gateway(), &worker_name());
    rig.tell(&worker_name(), NodeEvent::Leader(Some(leader.clone())));
    let reports = |rig: &Rig| -> Vec<PrefillReport> {
        let wire = rig.wires.get(&(worker_name(), leader.agent.clone())).into_iter().flatten();
        wire.filter_map(|(m, _)| if let Message::PrefillReport(r) = m { Some(r.clone()) } else { None })
            .collect()
    };
    let first = reports(&rig).pop().expect("a report at once");
    assert_eq!(first.seen.iter().map(|a| a.number).collect::<Vec<_>>(), [1, 2]);
    assert_eq!((first.requests, first.tokens, first.free_blocks, first.free_slots), (1, 300, 5, 0));
    assert!(first.backlog > Span::ZERO);
    rig.poll(&worker_name());
    rig.run_engine(&worker_name());
    rig.poll(&worker_name());
    rig.run_engine(&worker_name());
    rig.run_engine(&worker_name());
    rig.wait(Span::millis(20));
    let second = reports(&rig).pop().expect("a change is reported");
    assert_eq!((second.requests, second.tokens, second.free_slots, second.seen.len()), (0, 0, 1, 0));
    assert!(second.parked_bytes > 0 && second.tokens_per_second > 0);
}

#[test]
fn a_long_prompt_does_not_keep_short_ones_waiting_for_all_its_chunks() {
    let mut options = worker_options(4, 64);
    // About one chunk of 128 rows fits the budget.
    options.time = TimeModel::new(20_000_000, &[]);
    options.context_limit = 8_192;
    let mut rig = alone(options);
    rig.submit(1, prompt(0, 1, 0, 4_000), spec(1, 5));
    rig.deliver(&gateway(), &worker_name());
    rig.poll(&worker_name());
    rig.run_engine(&worker_name());
    let short = rig.submit(2, prompt(0, 2, 0, 100), spec(1, 5));
    rig.pump();
    let done = |m: &&Message| matches!(m, Message::PrefillDone { .. });
    let order: Vec<RequestId> =
        rig.heard.iter().map(|(_, m)| m).filter(done).filter_map(|m| m.subject()).map(|s| s.0).collect();
    assert_eq!(order, [short, RequestId(1)]);
}
