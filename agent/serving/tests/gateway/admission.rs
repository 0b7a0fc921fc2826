//! Who is taken in, who waits, who is refused with which answer: the gateway's bounds, with scripted agents.

use std::collections::BTreeMap;
use std::sync::Arc;

use deepinfer_protocol::agent_status::Role;
use deepinfer_protocol::message::{Message, Refusal};
use deepinfer_protocol::{Attempt, Epoch, RequestId, Span};
use deepinfer_serving::gateway::{EndedEarly, GatewayAction, GatewayEvent, GatewayOptions, TenantLimits};

use crate::scripted::{Scripted, request, view};

fn with(change: impl FnOnce(&mut GatewayOptions)) -> Scripted {
    let mut options = GatewayOptions::default();
    change(&mut options);
    Scripted::new(options)
}

/// SV-058: each of a thousand gets an answer; what is over the limit at once.
#[test]
fn of_a_thousand_at_once_the_queue_keeps_its_limit_and_the_rest_is_refused_with_a_time() {
    let mut test = with(|o| o.max_waiting = 96);
    let mut refused = 0;
    for id in 0..1_000 {
        for action in test.arrive(request(id, 10)) {
            if let GatewayAction::Ended { why: EndedEarly::Overloaded { reason, retry_after, .. }, .. } =
                action
            {
                assert_eq!(reason, Refusal::QueueFull);
                assert!(retry_after >= Span::secs(1));
                refused += 1;
            }
        }
    }
    assert_eq!((refused, test.gateway.holds()), (904, 96));
    assert_eq!(test.gateway.stats().refused, BTreeMap::from([(Refusal::QueueFull, 904)]));
}

/// SV-059.
#[test]
fn the_queue_is_bounded_in_prompt_tokens_too() {
    let mut test = with(|o| o.max_waiting_tokens = 1_000);
    assert_eq!(test.arrive(request(1, 600)).len(), 1, "it is sent to the leader");
    assert!(matches!(test.arrive(request(2, 401))[..], [GatewayAction::Ended { .. }]));
    assert_eq!(test.arrive(request(3, 400)).len(), 1);
    assert_eq!(test.gateway.stats().fresh_tokens, 1_000);
    test.tell(GatewayEvent::ClientGone(RequestId(1)));
    assert_eq!(test.gateway.stats().fresh_tokens, 400, "a request that leaves the queue leaves its room");
    assert_eq!(test.arrive(request(4, 600)).len(), 1);
}

#[test]
fn a_tenant_has_so_many_in_flight_and_so_many_waiting_and_others_do_not_notice() {
    let limits = TenantLimits { running: 2, queued: 3 };
    let mut test = with(|o| o.tenants = BTreeMap::from([("a".into(), limits)]));
    for id in 1..=3 {
        let enqueued = test.arrive(request(id, 10)).len();
        assert_eq!(enqueued, usize::from(id <= 2), "the third is held back");
    }
    let refused = test.arrive(request(4, 10));
    assert!(matches!(&refused[..], [GatewayAction::Ended { why: EndedEarly::Overloaded { .. }, .. }]));
    let mut other = request(5, 10);
    other.tenant = "b".into();
    assert_eq!(test.arrive(other).len(), 1);
    let out = test.tell(GatewayEvent::ClientGone(RequestId(1)));
    assert!(test.sent_enqueue(&out, 3), "the held one takes the place: {out:?}");
    assert_eq!(test.gateway.stats().by_state, BTreeMap::from([("prefill_queued", 3)]));
}

#[test]
fn limits_that_are_changed_while_running_apply_to_the_next_request() {
    let mut test = with(|_| {});
    test.arrive(request(1, 10));
    test.gateway.set_tenants(TenantLimits { running: 1, queued: 1 }, BTreeMap::new());
    assert!(matches!(test.arrive(request(2, 10))[..], [GatewayAction::Ended { .. }]));
    test.gateway.set_tenants(TenantLimits::NONE, BTreeMap::new());
    assert_eq!(test.arrive(request(2, 10)).len(), 1);
}

/// SV-116: full is 429, and only a missing pool is 503.
#[test]
fn without_a_pool_a_request_is_unavailable_and_with_a_full_one_overloaded() {
    let mut test = Scripted::bare(GatewayOptions::default());
    let why = |out: &[GatewayAction]| match out {
        [GatewayAction::Ended { why, .. }, ..] => why.clone(),
        _ => panic!("{out:?}"),
    };
    assert!(matches!(why(&test.arrive(request(1, 10))), EndedEarly::Unavailable { .. }));
    let mut fleet = view(1);
    fleet.members.retain(|m| m.name.as_str() != "d0" && m.name.as_str() != "d1");
    test.tell(GatewayEvent::Fleet(Arc::new(fleet)));
    let EndedEarly::Unavailable { detail, .. } = why(&test.arrive(request(2, 10))) else { panic!("no pool") };
    assert!(detail.contains("decode"), "{detail}");
    test.tell(GatewayEvent::Fleet(Arc::new(view(2))));
    test.connect();
    test.arrive(request(3, 10));
    let out = test.refuse("p0", 3, 0, Refusal::QueueFull);
    assert!(matches!(why(&out), EndedEarly::Overloaded { reason: Refusal::QueueFull, .. }));
    let stats = test.gateway.stats();
    assert_eq!((stats.unavailable, stats.refused[&Refusal::QueueFull], stats.failed), (2, 1, 0));
}

/// "A lost node costs time, not answers" (SV-116): the pool exists, it only has nobody for a moment.
#[test]
fn a_request_waits_for_a_pool_that_is_being_rebuilt() {
    let mut test = with(|_| {});
    let without_decode = |generation, rebuilding| {
        let mut fleet = view(generation);
        fleet.members.retain(|m| m.role == Role::Prefill);
        (fleet.decode_leader, fleet.rebuilding) = (None, rebuilding);
        GatewayEvent::Fleet(Arc::new(fleet))
    };
    test.tell(without_decode(2, vec![Role::Decode]));
    let out = test.arrive(request(1, 10));
    assert!(test.sent_enqueue(&out, 1), "the prompt is computed meanwhile: {out:?}");
    // Its successor is there and starts: it does not say yet whose KV it reads.
    let mut starting = view(3);
    for member in starting.members.iter_mut().filter(|m| m.role == Role::Decode) {
        (member.serving, member.kv_epoch) = (false, String::new());
    }
    for rebuilding in [vec![Role::Decode], Vec::new()] {
        starting.generation = starting.generation.next();
        starting.rebuilding = rebuilding;
        test.tell(GatewayEvent::Fleet(Arc::new(starting.clone())));
        let id = 10 + starting.generation.0 as u128;
        let out = test.arrive(request(id, 10));
        assert!(test.sent_enqueue(&out, id), "{out:?}");
    }
    // Nobody brings it back any more: whoever asks now is told so, and whoever waits goes on waiting.
    test.tell(without_decode(9, Vec::new()));
    let out = test.arrive(request(2, 10));
    assert!(
        matches!(&out[..], [GatewayAction::Ended { why: EndedEarly::Unavailable { .. }, .. }]),
        "{out:?}"
    );
    assert_eq!(test.gateway.stats().by_state, BTreeMap::from([("prefill_queued", 3)]));
}

/// SV-083.
#[test]
fn pools_that_cannot_read_each_others_kv_are_refused_by_name() {
    let mut test = Scripted::bare(GatewayOptions::default());
    let mut fleet = view(1);
    fleet
        .members
        .iter_mut()
        .filter(|m| m.name.as_str().starts_with('d'))
        .for_each(|m| m.kv_epoch = "v2".to_owned());
    test.tell(GatewayEvent::Fleet(Arc::new(fleet)));
    let out = test.arrive(request(1, 10));
    let [GatewayAction::Ended { why: EndedEarly::Unavailable { detail, .. }, .. }] = &out[..] else {
        panic!("{out:?}");
    };
    assert!(detail.contains("\"kv\"") && detail.contains("\"v2\""), "both are named: {detail}");
}

#[test]
fn a_closed_cluster_and_a_gateway_that_shuts_down_take_nothing_more() {
    let mut test = with(|_| {});
    let mut fleet = view(9);
    fleet.closed = true;
    test.tell(GatewayEvent::Fleet(Arc::new(fleet)));
    assert!(matches!(test.arrive(request(1, 10))[..], [GatewayAction::Ended { .. }]));
    let mut test = with(|_| {});
    test.arrive(request(1, 10));
    let deadline = test.now + Span::secs(5);
    test.tell(GatewayEvent::Shutdown { deadline });
    assert!(matches!(test.arrive(request(2, 10))[..], [GatewayAction::Ended { .. }]));
    assert_eq!(test.gateway.holds(), 1, "what is in goes on");
    let out = test.after(Span::secs(5));
    let cut = GatewayAction::Ended { request: RequestId(1), why: EndedEarly::Cancelled };
    assert!(out.contains(&cut), "until the deadline: {out:?}");
    assert_eq!(test.gateway.holds(), 0);
}

/// SV-053: known from the first refusal on, so the next one does not even ask.
#[test]
fn a_prompt_that_no_pool_can_hold_is_refused_and_longer_ones_are_refused_at_arrival() {
    let mut test = with(|_| {});
    test.arrive(request(1, 500));
    let out = test.refuse("p0", 1, 0, Refusal::TooLarge);
    assert!(
        matches!(out[..], [GatewayAction::Ended { why: EndedEarly::TooLarge { .. }, .. }, ..]),
        "{out:?}"
    );
    let out = test.arrive(request(2, 501));
    assert!(matches!(out[..], [GatewayAction::Ended { why: EndedEarly::TooLarge { .. }, .. }]), "{out:?}");
    let out = test.arrive(request(3, 499));
    assert!(test.sent_enqueue(&out, 3), "a shorter one may fit");
    test.tell(GatewayEvent::Fleet(Arc::new(view(9))));
    let out = test.arrive(request(4, 501));
    assert!(test.sent_enqueue(&out, 4), "a new fleet may have the memory");
}

#[test]
fn a_request_that_waits_longer_than_its_deadline_is_shed_and_the_leader_forgets_it() {
    let mut test = with(|_| {});
    let mut new = request(1, 10);
    new.first_token_deadline = Span::secs(3);
    test.arrive(new);
    assert!(test.after(Span::millis(2_999)).is_empty());
    let out = test.after(Span::millis(1));
    let ended = out.iter().any(|a| {
        matches!(
            a,
            GatewayAction::Ended { why: EndedEarly::Overloaded { reason: Refusal::Deadline, .. }, .. }
        )
    });
    assert!(ended, "{out:?}");
    assert!(test.sent_cancel(&out, "p0", 1, 0), "{out:?}");
}

/// SV-127: with every worker full nothing is sent to any, and the wait ends as 429.
#[test]
fn a_request_that_no_worker_has_room_for_reaches_none() {
    let mut test = with(|_| {});
    let mut new = request(1, 10);
    new.first_token_deadline = Span::secs(3);
    let mut out = test.arrive(new);
    for _ in 0..40 {
        out.extend(test.after(Span::millis(100)));
    }
    assert!(!out.iter().any(|a| matches!(a, GatewayAction::Send { message: Message::Prefill(_), .. })));
    assert!(out.iter().any(|a| matches!(a, GatewayAction::Ended { why: EndedEarly::Overloaded { .. }, .. })));
}

#[test]
fn an_id_that_is_in_use_changes_nothing() {
    let mut test = with(|_| {});
    test.arrive(request(1, 10));
    assert_eq!(test.arrive(request(1, 99)), []);
    assert_eq!((test.gateway.holds(), test.gateway.stats().ignored), (1, 1));
}

#[test]
fn entries_say_how_long_a_request_has_waited_and_is_still_willing_to() {
    let mut test = with(|_| {});
    let mut new = request(1, 10);
    new.first_token_deadline = Span::secs(10);
    test.arrive(new);
    test.after(Span::secs(4));
    let mut fleet = view(9);
    fleet.prefill_leader.as_mut().expect("there is one").epoch = Epoch(2);
    let out = test.tell(GatewayEvent::Fleet(Arc::new(fleet)));
    let [GatewayAction::Send { message: Message::Enqueue(entry), .. }] = &out[..] else { panic!("{out:?}") };
    assert_eq!((entry.waited, entry.deadline, entry.resumed), (Span::secs(4), Span::secs(6), false));
    assert_eq!((entry.tokens, entry.attempt), (10, Attempt(0)));
}
