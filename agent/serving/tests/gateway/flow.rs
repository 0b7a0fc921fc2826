//! A request's way through the gateway, with scripted agents: what is said to whom, what happens when someone fails,
//! and that the client hears each token once.

use std::sync::Arc;

use deepinfer_protocol::message::{Failure, Message, Refusal};
use deepinfer_protocol::{AgentId, Attempt, Epoch, Rank, RankId, RequestId, Span};
use deepinfer_serving::gateway::{EndedEarly, GatewayAction, GatewayEvent, GatewayOptions};

use crate::scripted::{Scripted, forwarded, request, sent, view};

fn scripted() -> Scripted {
    Scripted::new(GatewayOptions::default())
}

fn failed(out: &[GatewayAction]) -> Option<&str> {
    out.iter().find_map(|a| match a {
        GatewayAction::Ended { why: EndedEarly::Failed { detail }, .. } => Some(detail.as_str()),
        _ => None,
    })
}

#[test]
fn a_request_goes_from_the_leader_to_a_worker_to_a_rank_and_its_tokens_to_the_client() {
    let mut test = scripted();
    let out = test.arrive(request(1, 10));
    assert!(matches!(sent(&out)[..], [("p0", Message::Enqueue(_))]), "{out:?}");
    let out = test.assign(1, 0, "p1");
    let [("p1", Message::Prefill(work))] = sent(&out)[..] else { panic!("{out:?}") };
    assert_eq!((work.tokens.len(), work.prompt_tokens), (10, 10));
    let out = test.progress("p1", 1, 0, true);
    assert!(out.contains(&GatewayAction::Started { request: RequestId(1), cached_tokens: 0 }));
    let place = sent(&out).into_iter().find(|(_, m)| matches!(m, Message::Place(_)));
    let Some(("d0", Message::Place(entry))) = place else { panic!("a rank is looked for early: {out:?}") };
    assert_eq!((entry.tokens, entry.max_tokens), (11, 9), "the token to come is counted");
    assert_eq!(forwarded(&test.tokens("p1", 1, 0, 0, &[50])), [50]);
    test.placed(1, 0, "d1", 1);
    let out = test.done("p1", 1, 0);
    let [("d1", Message::Decode(work))] = sent(&out)[..] else { panic!("{out:?}") };
    assert_eq!((work.tokens.last(), work.holder.as_str(), work.rank), (Some(&50), "p1", Rank(1)));
    test.running("d1", 1, 0);
    assert_eq!(forwarded(&test.tokens("d1", 1, 0, 1, &[51])), [51]);
    let out = test.last("d1", 1, 0, 2, 1);
    assert!(matches!(out[0], GatewayAction::Tokens { finish: Some(_), .. }), "{out:?}");
    let stats = test.gateway.stats();
    assert_eq!((stats.finished, stats.tokens, test.gateway.holds()), (1, 3, 0));
}

#[test]
fn a_request_that_ends_with_its_first_token_takes_its_question_to_the_decode_leader_back() {
    let mut test = scripted();
    test.arrive(request(1, 10));
    test.assign(1, 0, "p1");
    test.progress("p1", 1, 0, true);
    let out = test.last("p1", 1, 0, 0, 1);
    assert!(test.sent_cancel(&out, "d0", 1, 0), "{out:?}");
    assert!(!test.sent_cancel(&out, "p1", 1, 0), "it freed everything itself");
}

#[test]
fn a_lost_rank_means_the_same_request_again_with_what_was_sent_as_context() {
    let mut test = scripted();
    test.run(1);
    test.tokens("d1", 1, 0, 1, &[51, 52]);
    test.lose("d1");
    assert_eq!(test.state(), "backoff");
    let out = test.after(Span::millis(80));
    let [("p0", Message::Enqueue(entry))] = sent(&out)[..] else { panic!("{out:?}") };
    assert_eq!((entry.attempt, entry.tokens, entry.max_tokens), (Attempt(1), 13, 7));
    assert!(entry.resumed);
    assert_eq!(entry.exclude, [AgentId::from("d1")]);
    let out = test.assign(1, 1, "p1");
    let [("p1", Message::Prefill(work))] = sent(&out)[..] else { panic!("{out:?}") };
    assert_eq!((&work.tokens[10..], work.prompt_tokens), (&[50, 51, 52][..], 10));
    assert_eq!(forwarded(&test.tokens("p1", 1, 1, 3, &[53])), [53], "the index goes on");
}

#[test]
fn what_an_old_attempt_still_says_is_not_forwarded_and_it_is_told_to_stop() {
    let mut test = scripted();
    test.run(1);
    test.lose("d1");
    let out = test.tell(GatewayEvent::PeerUp("d1".into()));
    assert!(test.sent_cancel(&out, "d1", 1, 0), "it could not hear the cancel before: {out:?}");
    let out = test.tokens("d1", 1, 0, 1, &[51]);
    assert_eq!(forwarded(&out), [0u32; 0]);
    assert!(test.sent_cancel(&out, "d1", 1, 0), "{out:?}");
    assert!(test.gateway.stats().ignored > 0);
}

#[test]
fn words_about_requests_that_never_were_are_counted_and_answered_and_nothing_else() {
    let mut test = scripted();
    let (request, attempt) = (RequestId(77), Attempt(0));
    test.progress("p1", 77, 0, true);
    test.done("p1", 77, 0);
    test.running("d1", 77, 0);
    test.fail("d1", 77, 0, Failure::KvLost);
    test.refuse("d1", 77, 0, Refusal::NoRoom);
    let out = test.placed(77, 0, "d1", 0);
    let unused = Message::Refuse { request, attempt, reason: Refusal::NoRoom, retry_after: Span::ZERO };
    assert_eq!(sent(&out), [("d0", &unused)], "the leader need not count it any longer");
    assert_eq!(test.gateway.stats().ignored, 6);
}

/// PD-10.
#[test]
fn a_request_that_was_running_at_two_crashes_is_not_tried_a_third_time() {
    let mut test = scripted();
    test.run(1);
    test.lose("d1");
    test.tell(GatewayEvent::PeerUp("d1".into()));
    test.after(Span::millis(80));
    test.prefill(1, 1, 1, 51, "p1");
    test.decode(1, 1, "d1");
    let out = test.fail("d1", 1, 1, Failure::EngineLost);
    let detail = failed(&out).expect("it ends");
    assert!(detail.contains(&RequestId(1).to_string()) && detail.contains("2 crashes"), "{detail}");
    assert_eq!((test.gateway.holds(), test.gateway.stats().failed), (0, 1));
}

#[test]
fn an_agent_that_was_only_out_of_reach_did_not_crash() {
    let mut test = scripted();
    test.run(1);
    for attempt in 0..5 {
        test.lose("d1");
        test.tell(GatewayEvent::PeerUp("d1".into()));
        test.tokens("d1", 1, attempt, attempt + 1, &[99]);
        test.after(Span::millis(80));
        test.prefill(1, attempt + 1, attempt + 1, 60 + attempt, "p1");
        test.decode(1, attempt + 1, "d1");
        assert_eq!(test.state(), "decode_running", "after {attempt} more losses");
    }
    test.lose("d1");
    test.after(Span::millis(80));
    test.prefill(1, 6, 6, 70, "p1");
    test.decode(1, 6, "d0");
    assert!(failed(&test.lose("d0")).is_some(), "two that stay silent are two crashes");
}

#[test]
fn three_failed_attempts_are_the_end_and_waits_between_them_grow() {
    let mut test = scripted();
    test.arrive(request(1, 10));
    for attempt in 0..3 {
        test.prefill(1, attempt, attempt, 50 + attempt, "p1");
        test.placed(1, attempt, "d1", 0);
        let out = test.fail("d1", 1, attempt, Failure::KvLost);
        if attempt == 2 {
            assert!(failed(&out).expect("it ends").contains("3 attempts"));
            break;
        }
        let least = Span::millis(25 << attempt);
        test.now = test.now + least - Span::millis(1);
        assert_eq!(test.tell(GatewayEvent::Tick), [], "not before {least:?}");
        let out = test.after(Span::millis(51 << attempt));
        assert!(test.sent_enqueue(&out, 1), "{out:?}");
    }
}

#[test]
fn failures_in_queue_states_cost_no_attempt() {
    let mut test = scripted();
    test.arrive(request(1, 10));
    for attempt in 0..10 {
        let index = attempt;
        test.prefill(1, attempt, index, 50 + attempt, "p1");
        assert_eq!(test.state(), "decode_queued");
        test.lose("p1");
        test.tell(GatewayEvent::PeerUp("p1".into()));
        test.after(Span::millis(80));
        assert_eq!(test.state(), "prefill_queued", "after {attempt} lost holders");
    }
}

/// SV-127: the refusal of a worker that filled up meanwhile costs the client nothing.
#[test]
fn a_worker_that_refuses_is_avoided_and_the_leader_told() {
    let mut test = scripted();
    test.arrive(request(1, 10));
    test.assign(1, 0, "p1");
    let out = test.refuse("p1", 1, 0, Refusal::NoRoom);
    assert!(matches!(sent(&out)[..], [("p0", Message::Refuse { .. })]), "{out:?}");
    let out = test.after(Span::millis(20));
    let [("p0", Message::Enqueue(entry))] = sent(&out)[..] else { panic!("{out:?}") };
    assert_eq!((entry.attempt, &entry.exclude[..]), (Attempt(1), &[AgentId::from("p1")][..]));
    assert!(!entry.resumed, "nothing of it has run");
    assert_eq!((test.gateway.stats().bounced, test.gateway.stats().resumed), (1, 0));
}

/// SV-082: refusals are tried again and counted; the client sees one answer.
#[test]
fn two_refusals_and_then_an_answer_are_one_answer_and_two_counted_retries() {
    let mut test = scripted();
    test.arrive(request(1, 10));
    for attempt in 0..2 {
        test.assign(1, attempt, "p1");
        let out = test.refuse("p1", 1, attempt, Refusal::NoRoom);
        assert!(out.iter().all(|a| matches!(a, GatewayAction::Send { .. })), "the client hears nothing");
        test.after(Span::millis(100));
    }
    test.assign(1, 2, "p1");
    assert_eq!(forwarded(&test.last("p1", 1, 2, 0, 1)), [1]);
    let stats = test.gateway.stats();
    assert_eq!((stats.bounced, stats.finished, stats.failed), (2, 1, 0));
}

#[test]
fn a_rank_that_refuses_costs_no_prefill() {
    let mut test = scripted();
    test.arrive(request(1, 10));
    test.prefill(1, 0, 0, 50, "p1");
    test.placed(1, 0, "d1", 0);
    let out = test.refuse("d1", 1, 0, Refusal::NoRoom);
    assert!(matches!(sent(&out)[..], [("d0", Message::Refuse { .. })]), "{out:?}");
    assert_eq!(test.state(), "decode_queued");
    let out = test.after(Span::millis(20));
    let [("d0", Message::Place(entry))] = sent(&out)[..] else { panic!("{out:?}") };
    assert_eq!((entry.attempt, &entry.exclude[..]), (Attempt(0), &[AgentId::from("d1")][..]));
    let out = test.placed(1, 0, "d0", 1);
    let [("d0", Message::Decode(work))] = sent(&out)[..] else { panic!("{out:?}") };
    assert_eq!(work.holder, "p1".into());
}

#[test]
fn a_preempted_sequence_is_placed_again_from_who_has_it() {
    let mut test = scripted();
    test.run(1);
    test.tokens("d1", 1, 0, 1, &[51]);
    let (request, attempt) = (RequestId(1), Attempt(0));
    let out = test.hear("d1", Message::Preempted { request, attempt, tokens: 12, parked_bytes: 9 });
    let [("d0", Message::Refuse { .. }), ("d0", Message::Place(entry))] = sent(&out)[..] else {
        panic!("the leader forgets its old answer first: {out:?}");
    };
    assert!(entry.preempted);
    let out = test.placed(1, 0, "d0", 0);
    let [("d0", Message::Decode(work))] = sent(&out)[..] else { panic!("{out:?}") };
    assert_eq!((work.holder.as_str(), work.preemptions, work.tokens.len()), ("d1", 1, 12));
    test.running("d0", 1, 0);
    assert_eq!(forwarded(&test.tokens("d0", 1, 0, 2, &[52])), [52]);
}

#[test]
fn a_rank_lost_while_it_loads_costs_no_prefill_if_another_agent_can_take_over() {
    let mut test = scripted();
    test.arrive(request(1, 10));
    test.prefill(1, 0, 0, 50, "p1");
    test.placed(1, 0, "d1", 0);
    test.lose("d1");
    assert_eq!(test.state(), "decode_queued");
    test.after(Span::millis(20));
    let out = test.placed(1, 0, "d0", 0);
    assert!(matches!(sent(&out)[..], [("d0", Message::Decode(_))]), "{out:?}");
    let out = test.tell(GatewayEvent::PeerUp("d1".into()));
    assert!(test.sent_cancel(&out, "d1", 1, 0), "it may have begun: {out:?}");
}

#[test]
fn a_cancel_reaches_whoever_may_hold_something_in_every_state() {
    type Step = fn(&mut Scripted);
    let way: [(&str, Step, &[&str]); 7] = [
        ("prefill_queued", |t| drop(t.arrive(request(1, 10))), &["p0"]),
        ("prefill_loading", |t| drop(t.assign(1, 0, "p1")), &["p1"]),
        ("prefill_running", |t| drop(t.progress("p1", 1, 0, true)), &["p1", "d0"]),
        ("prefill_running", |t| drop(t.tokens("p1", 1, 0, 0, &[50])), &["p1", "d0"]),
        ("decode_queued", |t| drop(t.done("p1", 1, 0)), &["p1", "d0"]),
        ("decode_loading", |t| drop(t.placed(1, 0, "d1", 0)), &["p1", "d1"]),
        ("decode_running", |t| drop(t.running("d1", 1, 0)), &["p1", "d1"]),
    ];
    for stop in 0..way.len() {
        for event in [GatewayEvent::ClientGone(RequestId(1)), GatewayEvent::Satisfied(RequestId(1))] {
            let mut test = scripted();
            way[..=stop].iter().for_each(|(_, step, _)| step(&mut test));
            let (state, _, holders) = way[stop];
            assert_eq!(test.state(), state);
            let gone = matches!(event, GatewayEvent::ClientGone(_));
            let out = test.tell(event.clone());
            for holder in holders {
                assert!(test.sent_cancel(&out, holder, 1, 0), "{state}: {holder} is not told: {out:?}");
            }
            let said = out.iter().filter(|a| !matches!(a, GatewayAction::Send { .. })).count();
            assert_eq!(said, usize::from(gone), "the edge that is satisfied hears nothing");
            assert_eq!((test.gateway.holds(), test.tell(event)), (0, Vec::new()), "once only");
            let stats = test.gateway.stats();
            assert_eq!((stats.cancelled, stats.finished), (u64::from(gone), u64::from(!gone)));
        }
    }
}

#[test]
fn a_new_leader_is_asked_again_and_the_old_ones_answers_are_fenced_off() {
    let mut test = scripted();
    test.arrive(request(1, 10));
    let mut fleet = view(2);
    fleet.prefill_leader.as_mut().expect("there is one").agent = "p1".into();
    fleet.prefill_leader.as_mut().expect("there is one").epoch = Epoch(2);
    let out = test.tell(GatewayEvent::Fleet(Arc::new(fleet)));
    assert!(matches!(sent(&out)[..], [("p1", Message::Enqueue(_))]), "{out:?}");
    let out = test.assign(1, 0, "p1");
    assert!(
        matches!(sent(&out)[..], [("p0", Message::Refuse { .. })]),
        "an old decision is not used: {out:?}"
    );
    assert_eq!(test.state(), "prefill_queued");
    assert_eq!(test.tell(GatewayEvent::Fleet(Arc::new(view(2)))), [], "an older view is ignored");
}

#[test]
fn a_leader_that_comes_back_is_asked_again() {
    let mut test = scripted();
    test.arrive(request(1, 10));
    test.lose("p0");
    let out = test.tell(GatewayEvent::PeerUp("p0".into()));
    assert!(matches!(sent(&out)[..], [("p0", Message::Enqueue(_))]), "{out:?}");
}

#[test]
fn while_there_is_no_leader_the_gateway_chooses_by_itself_and_keeps_within_a_bound() {
    let mut test = scripted();
    test.lose("p0");
    for id in 1..=20 {
        test.arrive(request(id, 10));
    }
    assert_eq!(sent(&test.after(Span::millis(400))), [], "the operator may name another one soon");
    let out = test.after(Span::millis(200));
    let to: Vec<&str> = sent(&out).into_iter().map(|(to, _)| to).collect();
    assert_eq!(to, ["p1"; 4], "to who can be reached, at most four at once");
    assert_eq!(test.gateway.stats().vacancy, 4);
    assert_eq!(sent(&test.after(Span::secs(50))).len(), 0, "no time limit, and no more than four");
}

#[test]
fn without_a_decode_leader_sequences_are_spread_over_ranks_that_can_read_them() {
    let mut test = scripted();
    let mut fleet = view(2);
    fleet.decode_leader = None;
    fleet
        .members
        .iter_mut()
        .filter(|m| m.name.as_str() == "d0")
        .for_each(|m| m.kv_epoch = "other".to_owned());
    test.tell(GatewayEvent::Fleet(Arc::new(fleet)));
    for id in 1..=8 {
        test.arrive(request(id, 10));
        test.prefill(id, 0, 0, 50, "p1");
    }
    let out = test.after(Span::secs(1));
    let ranks: Vec<RankId> = sent(&out)
        .into_iter()
        .filter_map(|(to, m)| match m {
            Message::Decode(work) => Some(RankId { agent: to.into(), rank: work.rank }),
            _ => None,
        })
        .collect();
    let on = |rank| ranks.iter().filter(|r| **r == RankId { agent: "d1".into(), rank: Rank(rank) }).count();
    assert_eq!((on(0), on(1)), (4, 4), "{ranks:?}");
}

#[test]
fn tokens_come_once_and_in_order_and_a_missing_one_is_not_waited_for_for_ever() {
    let mut test = scripted();
    test.run(1);
    assert_eq!(forwarded(&test.tokens("d1", 1, 0, 2, &[52])), [0u32; 0]);
    assert_eq!(forwarded(&test.tokens("d1", 1, 0, 0, &[50])), [0u32; 0]);
    assert_eq!(forwarded(&test.tokens("d1", 1, 0, 1, &[51])), [51, 52]);
    test.tokens("d1", 1, 0, 4, &[54]);
    test.after(Span::secs(4));
    assert_eq!(test.state(), "decode_running");
    let out = test.after(Span::secs(1));
    assert!(test.sent_cancel(&out, "d1", 1, 0), "{out:?}");
    assert_eq!(test.state(), "backoff");
}

#[test]
fn a_token_that_differs_from_what_was_sent_ends_the_request_as_our_fault() {
    let mut test = scripted();
    test.run(1);
    let out = test.tokens("d1", 1, 0, 0, &[99]);
    assert!(failed(&out).expect("it ends").contains("differed"));
    assert!(test.sent_cancel(&out, "d1", 1, 0));
}

#[test]
fn whoever_says_nothing_for_too_long_is_given_up() {
    let mut test = scripted();
    test.arrive(request(1, 10));
    test.assign(1, 0, "p1");
    test.after(Span::secs(59));
    assert_eq!(test.state(), "prefill_loading");
    let out = test.after(Span::secs(1));
    assert!(test.sent_cancel(&out, "p1", 1, 0), "{out:?}");
    assert_eq!(test.state(), "backoff");
    let mut test = scripted();
    test.run(1);
    test.after(Span::secs(119));
    test.tokens("d1", 1, 0, 1, &[51]);
    test.after(Span::secs(119));
    assert_eq!(test.state(), "decode_running", "a token is a word");
    test.after(Span::secs(1));
    assert_eq!(test.state(), "backoff");
}

#[test]
fn a_drain_that_cuts_a_request_is_no_failure_of_it() {
    let mut test = scripted();
    test.arrive(request(1, 10));
    for attempt in 0..6 {
        test.prefill(1, attempt, attempt, 50 + attempt, "p1");
        test.decode(1, attempt, "d1");
        test.fail("d1", 1, attempt, Failure::DrainDeadline);
        test.after(Span::millis(80));
        assert_eq!(test.state(), "prefill_queued");
    }
    assert_eq!((test.gateway.stats().resumed, test.gateway.stats().failed), (6, 0));
}

/// SV-121.
#[test]
fn a_dead_worker_gets_no_request_even_if_a_leader_still_names_it() {
    let mut test = scripted();
    test.lose("p1");
    test.arrive(request(1, 10));
    let out = test.assign(1, 0, "p1");
    assert!(!sent(&out).iter().any(|(to, _)| *to == "p1"), "{out:?}");
    let out = test.after(Span::millis(20));
    let [("p0", Message::Enqueue(entry))] = sent(&out)[..] else { panic!("{out:?}") };
    assert_eq!(entry.exclude, [AgentId::from("p1")]);
}

/// SV-106.
#[test]
fn when_a_hundred_running_requests_leave_together_every_gauge_is_back_at_zero() {
    let mut test = scripted();
    for id in 1..=100 {
        test.arrive(request(id, 10));
        test.prefill(id, 0, 0, 50, "p1");
        test.decode(id, 0, "d1");
    }
    assert_eq!(test.gateway.stats().running, 100);
    for id in 1..=100 {
        test.tell(GatewayEvent::ClientGone(RequestId(id)));
    }
    let stats = test.gateway.stats();
    assert_eq!((stats.running, stats.waiting, stats.fresh_tokens, stats.cancelled), (0, 0, 0, 100));
    assert!(stats.by_state.is_empty());
}

#[test]
fn too_large_for_decode_is_said_before_the_first_token_and_fails_after_it() {
    let mut test = scripted();
    test.arrive(request(1, 10));
    test.assign(1, 0, "p1");
    test.progress("p1", 1, 0, true);
    let out = test.refuse("d0", 1, 0, Refusal::TooLarge);
    assert!(out.iter().any(|a| matches!(a, GatewayAction::Ended { why: EndedEarly::TooLarge { .. }, .. })));
    assert!(test.sent_cancel(&out, "p1", 1, 0), "the worker stops: {out:?}");
    let mut test = scripted();
    test.arrive(request(1, 10));
    test.prefill(1, 0, 0, 50, "p1");
    assert!(failed(&test.refuse("d0", 1, 0, Refusal::TooLarge)).is_some());
}

#[test]
fn kv_that_no_rank_can_read_ends_a_request_with_the_name_of_the_reason() {
    let mut test = scripted();
    test.arrive(request(1, 10));
    let mut detail = None;
    for attempt in 0..3 {
        test.assign(1, attempt, "p1");
        test.progress("p1", 1, attempt, true);
        detail = failed(&test.refuse("d0", 1, attempt, Refusal::KvEpoch)).map(str::to_owned);
        test.after(Span::secs(1));
    }
    assert!(detail.expect("it ends").contains("kv_epoch"));
}
