//! The prefill leader: who gets which prompt, who waits, who is refused and why.

use std::collections::BTreeMap;
use std::sync::Arc;

use deepinfer_protocol::agent_status::Role;
use deepinfer_protocol::fleet::{FleetMember, FleetView};
use deepinfer_protocol::message::{Assignment, Message, PrefillEntry, PrefillReport, Refusal};
use deepinfer_protocol::{AgentId, Attempt, Epoch, Generation, RequestId, Span, Time};
use deepinfer_serving::leader::{LeaderAction, LeaderEvent, PrefillLeader, PrefillLeaderOptions};

const RATE: u32 = 100_000;

fn entry(request: u128, tokens: u32) -> PrefillEntry {
    PrefillEntry {
        request: RequestId(request),
        attempt: Attempt(0),
        tokens,
        max_tokens: 1,
        waited: Span::ZERO,
        deadline: Span::secs(600),
        resumed: false,
        exclude: Vec::new(),
    }
}

fn report(epoch: u64) -> PrefillReport {
    PrefillReport {
        epoch: Epoch(epoch),
        backlog: Span::ZERO,
        tokens: 0,
        requests: 0,
        free_blocks: 1_000,
        total_blocks: 1_000,
        free_slots: 64,
        parked_bytes: 0,
        parked_limit: 1,
        tokens_per_second: RATE,
        draining: false,
        kv_epoch: "kv".to_owned(),
        seen: Vec::new(),
    }
}

fn at(millis: u64) -> Time {
    Time(0) + Span::millis(millis)
}

/// A leader and what it said.
struct Test {
    leader: PrefillLeader,
    now: Time,
}

impl Test {
    /// Leads since long ago, so that it may refuse for good.
    fn new() -> Self {
        let mut test = Self { leader: PrefillLeader::new(PrefillLeaderOptions::default()), now: at(0) };
        test.tell(LeaderEvent::Lead(Epoch(1)));
        test.now = at(10_000);
        test
    }

    fn tell(&mut self, event: LeaderEvent) -> Vec<Message> {
        let mut out = Vec::new();
        self.leader.on_event(self.now, event, &mut out);
        out.into_iter().map(|LeaderAction { message, .. }| message).collect()
    }

    fn hear(&mut self, from: &str, message: Message) -> Vec<Message> {
        self.tell(LeaderEvent::Message { from: from.into(), message })
    }

    fn worker(&mut self, name: &str, change: impl FnOnce(&mut PrefillReport)) -> Vec<Message> {
        let mut report = report(1);
        change(&mut report);
        self.hear(name, Message::PrefillReport(report))
    }

    fn enqueue(&mut self, entry: PrefillEntry) -> Vec<Message> {
        self.hear("g", Message::Enqueue(entry))
    }
}

/// The worker that each assigned request went to.
fn assigned(messages: &[Message]) -> Vec<(u128, String)> {
    let assigned = messages.iter().filter_map(|m| match m {
        Message::PrefillAssigned { request, worker, .. } => Some((request.0, worker.to_string())),
        _ => None,
    });
    assigned.collect()
}

fn refused(messages: &[Message]) -> Vec<(u128, Refusal)> {
    let refused = messages.iter().filter_map(|m| match m {
        Message::Refuse { request, reason, .. } => Some((request.0, *reason)),
        _ => None,
    });
    refused.collect()
}

#[test]
fn between_two_reports_a_burst_is_spread_as_if_every_worker_had_reported() {
    let mut test = Test::new();
    for name in ["a", "b", "c", "d"] {
        test.worker(name, |_| {});
    }
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for request in 0..40 {
        for (_, worker) in assigned(&test.enqueue(entry(request, 100))) {
            *counts.entry(worker).or_default() += 1;
        }
    }
    assert_eq!(counts.into_values().collect::<Vec<_>>(), [10, 10, 10, 10], "own assignments count at once");
}

/// SV-118: load counts from the assignment on, not from the first answer.
#[test]
fn a_burst_of_long_prompts_is_spread_over_all_workers() {
    let names = ["a", "b", "c", "d"];
    let mut test = Test::new();
    let start = test.now;
    // (backlog, seen) of each worker; a prompt reaches its worker 5 ms after the decision.
    let mut backlog = [Span::ZERO; 4];
    let mut tokens = [0u64; 4];
    let mut under_way: Vec<(Time, usize, Assignment)> = Vec::new();
    for name in names {
        test.worker(name, |_| {});
    }
    for step in 0..40_000u64 {
        test.now = start + Span::millis(step);
        let mut said = Vec::new();
        if step % 20 == 0 {
            for (w, name) in names.iter().enumerate() {
                let arrived: Vec<Assignment> = under_way
                    .extract_if(.., |(at, to, _)| *to == w && *at <= test.now)
                    .map(|u| u.2)
                    .collect();
                backlog[w] = backlog[w].plus(prompt_time().times(arrived.len() as u64));
                said.extend(test.worker(name, |r| (r.backlog, r.seen) = (backlog[w], arrived)));
            }
        }
        if step < 50 {
            for i in 0..2 {
                said.extend(test.enqueue(entry(u128::from(step * 2 + i), 8_192)));
            }
        }
        for message in said {
            if let Message::PrefillAssigned { worker, assignment, .. } = message {
                let w = names.iter().position(|n| *n == worker.as_str()).expect("a known worker");
                tokens[w] += 8_192;
                under_way.push((test.now + Span::millis(5), w, assignment));
            }
        }
        for left in &mut backlog {
            left.0 = left.0.saturating_sub(Span::millis(1).0);
        }
        if test.leader.queued() == 0 && step > 50 {
            break;
        }
    }
    let all: u64 = tokens.iter().sum();
    assert_eq!(all, 100 * 8_192);
    let busiest = *tokens.iter().max().expect("four workers");
    assert!(busiest * 4 * 10 <= all * 12, "the busiest got {busiest} of {all} tokens: {tokens:?}");
}

fn prompt_time() -> Span {
    Span(8_192 * 1_000_000_000 / u64::from(RATE))
}

/// SV-119: an empty cache is no reason to choose the worker with the long queue.
#[test]
fn a_prompt_goes_to_the_idle_worker_and_not_to_the_one_with_the_empty_cache() {
    let mut test = Test::new();
    test.worker("empty-but-busy", |r| r.backlog = Span::millis(150));
    // Cached blocks that nobody references count as free: they can be evicted.
    test.worker("idle-but-full", |r| r.free_blocks = 900);
    let said = test.enqueue(entry(1, 1_000));
    assert_eq!(assigned(&said), [(1, "idle-but-full".to_owned())]);
}

/// SV-053.
#[test]
fn what_never_fits_is_refused_at_once_and_the_next_is_served() {
    let mut test = Test::new();
    test.worker("a", |r| (r.free_blocks, r.total_blocks) = (64, 64));
    let said = test.enqueue(entry(1, 70 * 128));
    assert_eq!(refused(&said), [(1, Refusal::TooLarge)]);
    assert_eq!(assigned(&test.enqueue(entry(2, 100))).len(), 1);
}

#[test]
fn a_new_leader_refuses_nothing_as_too_large_before_all_workers_had_time_to_report() {
    let mut test = Test::new();
    test.tell(LeaderEvent::Lead(Epoch(2)));
    let small = PrefillReport { total_blocks: 64, free_blocks: 64, ..report(2) };
    test.hear("a", Message::PrefillReport(small.clone()));
    assert_eq!(test.enqueue(entry(1, 70 * 128)), []);
    test.hear("b", Message::PrefillReport(PrefillReport { ..report(2) }));
    assert_eq!(test.leader.queued(), 0, "the larger worker took it");
    test.enqueue(entry(2, 2_000 * 128));
    test.now = test.now + Span::secs(2);
    assert_eq!(refused(&test.hear("a", Message::PrefillReport(small))), [(2, Refusal::TooLarge)]);
}

#[test]
fn a_prompt_without_blocks_is_passed_sixteen_times_and_then_blocks_the_queue() {
    let mut test = Test::new();
    test.worker("a", |r| (r.free_blocks, r.total_blocks) = (40, 100));
    assert_eq!(test.enqueue(entry(1, 60 * 128)), []);
    // By now it is the first of the queue: shorter ones that come later do not outrank it by their length.
    test.now = test.now + Span::millis(100);
    let served = (2..40).filter(|r| !assigned(&test.enqueue(entry(*r, 100))).is_empty()).count();
    assert_eq!(served, 16);
    assert_eq!(test.leader.queued(), 1 + 38 - 16);
    let said = test.worker("a", |r| (r.free_blocks, r.total_blocks) = (100, 100));
    assert_eq!(assigned(&said)[0].0, 1, "it goes first when its blocks are there");
}

#[test]
fn a_prompt_without_blocks_is_passed_for_half_a_second_at_most() {
    let mut test = Test::new();
    test.worker("a", |r| (r.free_blocks, r.total_blocks) = (40, 100));
    test.enqueue(entry(1, 60 * 128));
    test.now = test.now + Span::millis(499);
    assert_eq!(assigned(&test.enqueue(entry(2, 100))).len(), 1);
    test.now = test.now + Span::millis(1);
    assert_eq!(assigned(&test.enqueue(entry(3, 100))).len(), 0);
}

#[test]
fn closed_workers_get_nothing_and_a_worker_whose_parked_memory_is_full_waits_for_decode() {
    let mut test = Test::new();
    test.worker("draining", |r| r.draining = true);
    test.worker("parked", |r| (r.parked_bytes, r.parked_limit) = (10, 10));
    test.worker("slots", |r| r.free_slots = 0);
    assert_eq!(test.enqueue(entry(1, 100)), []);
    let said = test.worker("parked", |r| (r.parked_bytes, r.parked_limit) = (9, 10));
    assert_eq!(assigned(&said), [(1, "parked".to_owned())]);
}

#[test]
fn a_silent_worker_gets_nothing_until_it_reports_again() {
    let mut test = Test::new();
    test.worker("a", |_| {});
    test.now = test.now + Span::millis(1_001);
    assert_eq!(test.enqueue(entry(1, 100)), []);
    assert_eq!(assigned(&test.worker("a", |_| {})).len(), 1);
}

#[test]
fn workers_that_the_fleet_does_not_let_serve_get_nothing() {
    let member = |name: &str, serving| FleetMember {
        name: name.into(),
        role: Role::Prefill,
        supernode: None,
        index: 0,
        first_rank: 0,
        ranks: 1,
        data: ([127, 0, 0, 1], 1).into(),
        control: ([127, 0, 0, 1], 2).into(),
        serving,
        kv_epoch: "kv".to_owned(),
    };
    let mut test = Test::new();
    let members = vec![member("a", false), member("b", true)];
    let view = FleetView { generation: Generation(3), members, ..FleetView::default() };
    test.tell(LeaderEvent::Fleet(Arc::new(view)));
    for name in ["a", "b", "gone"] {
        test.worker(name, |_| {});
    }
    for request in 0..4 {
        assert_eq!(assigned(&test.enqueue(entry(request, 100)))[0].1, "b");
    }
}

#[test]
fn what_would_miss_its_deadline_is_refused_at_arrival_and_says_when_to_come_back() {
    let mut test = Test::new();
    test.worker("a", |r| (r.backlog, r.requests) = (Span::secs(30), 4));
    let late = PrefillEntry { deadline: Span::secs(20), ..entry(1, 100) };
    let said = test.enqueue(late.clone());
    let [Message::Refuse { reason: Refusal::Deadline, retry_after, .. }] = said[..] else {
        panic!("{said:?}");
    };
    assert!(retry_after >= Span::secs(25) && retry_after <= Span::secs(35), "{retry_after:?}");
    assert_eq!(test.enqueue(PrefillEntry { resumed: true, ..late }), [], "what was admitted before waits");
}

#[test]
fn what_has_waited_for_its_deadline_is_refused() {
    let mut test = Test::new();
    test.enqueue(PrefillEntry { deadline: Span::secs(5), ..entry(1, 100) });
    test.now = test.now + Span::millis(4_999);
    assert_eq!(test.tell(LeaderEvent::Tick), []);
    test.now = test.now + Span::millis(1);
    assert_eq!(refused(&test.tell(LeaderEvent::Tick)), [(1, Refusal::Deadline)]);
}

#[test]
fn the_queue_is_bounded_and_the_rest_is_refused_with_a_time() {
    let mut test = Test::new();
    for request in 0..16_384 {
        assert_eq!(test.enqueue(entry(request, 100)), []);
    }
    assert_eq!(refused(&test.enqueue(entry(99_999, 100))), [(99_999, Refusal::QueueFull)]);
    assert_eq!(test.leader.queued(), 16_384);
}

#[test]
fn a_repeated_request_is_answered_from_memory_and_a_newer_attempt_replaces_it() {
    let mut test = Test::new();
    test.worker("a", |_| {});
    let first = test.enqueue(entry(1, 100));
    assert_eq!(test.enqueue(entry(1, 100)), first, "the same decision again");
    let newer = PrefillEntry { attempt: Attempt(1), ..entry(1, 100) };
    let second = test.enqueue(newer);
    assert_eq!(assigned(&second).len(), 1);
    assert_ne!(second, first);
    assert_eq!(test.enqueue(entry(1, 100)), [], "the old attempt is fenced off");
    assert_eq!(test.leader.unseen(), 1);
}

#[test]
fn an_assignment_is_forgotten_when_it_is_seen_unused_or_five_seconds_old() {
    let mut test = Test::new();
    test.worker("a", |_| {});
    for request in 1..=4 {
        test.enqueue(entry(request, 100));
    }
    assert_eq!(test.leader.unseen(), 4);
    test.worker("a", |r| r.seen = vec![Assignment { epoch: Epoch(1), number: 1 }]);
    assert_eq!(test.leader.unseen(), 3);
    let (request, attempt) = (RequestId(2), Attempt(0));
    let unused = Message::Refuse { request, attempt, reason: Refusal::NoRoom, retry_after: Span::ZERO };
    test.hear("g", unused);
    assert_eq!(test.leader.unseen(), 2);
    test.hear("g", Message::Cancel { request: RequestId(3), attempt });
    assert_eq!(test.leader.unseen(), 1);
    test.now = test.now + Span::secs(5);
    test.tell(LeaderEvent::Tick);
    assert_eq!(test.leader.unseen(), 0);
}

#[test]
fn a_lost_gateway_takes_its_requests_with_it_and_a_lost_worker_its_reports() {
    let mut test = Test::new();
    test.enqueue(entry(1, 100));
    test.hear("other", Message::Enqueue(entry(2, 100)));
    test.tell(LeaderEvent::PeerLost("g".into()));
    assert_eq!(test.leader.queued(), 1);
    test.worker("a", |r| r.backlog = Span::secs(9));
    test.tell(LeaderEvent::PeerLost("a".into()));
    test.worker("b", |_| {});
    assert_eq!(test.leader.queued(), 0);
}

#[test]
fn who_does_not_lead_says_so_and_reports_of_another_leadership_count_for_nothing() {
    let mut test = Test::new();
    test.tell(LeaderEvent::Resign);
    assert_eq!(refused(&test.enqueue(entry(1, 100))), [(1, Refusal::NotLeader)]);
    test.tell(LeaderEvent::Lead(Epoch(5)));
    test.hear("a", Message::PrefillReport(report(4)));
    assert_eq!(test.enqueue(entry(2, 100)), []);
    assert_eq!(assigned(&test.hear("a", Message::PrefillReport(report(5)))).len(), 1);
}

#[test]
fn assignments_carry_the_epoch_and_a_number_that_grows() {
    let mut test = Test::new();
    test.worker("a", |_| {});
    let numbers: Vec<Assignment> = (0..5)
        .flat_map(|r| test.enqueue(entry(r, 10)))
        .filter_map(|m| match m {
            Message::PrefillAssigned { assignment, .. } => Some(assignment),
            _ => None,
        })
        .collect();
    assert_eq!(numbers.len(), 5);
    assert!(numbers.is_sorted_by(|a, b| a < b) && numbers.iter().all(|a| a.epoch == Epoch(1)), "{numbers:?}");
}

#[test]
fn a_worker_where_it_failed_is_used_only_when_there_is_no_other() {
    let mut test = Test::new();
    test.worker("a", |_| {});
    test.worker("b", |r| r.backlog = Span::millis(100));
    let exclude: Vec<AgentId> = vec!["a".into()];
    let said = test.enqueue(PrefillEntry { exclude: exclude.clone(), ..entry(1, 100) });
    assert_eq!(assigned(&said)[0].1, "b");
    test.tell(LeaderEvent::PeerLost("b".into()));
    let said = test.enqueue(PrefillEntry { exclude, ..entry(2, 100) });
    assert_eq!(assigned(&said)[0].1, "a");
}

#[test]
fn a_short_prompt_does_not_wait_in_the_queue_for_a_long_one_to_end() {
    let mut test = Test::new();
    test.worker("a", |r| (r.free_blocks, r.total_blocks) = (9_000, 9_000));
    assert_eq!(assigned(&test.enqueue(entry(1, 200_000))).len(), 1, "two seconds of work");
    assert_eq!(assigned(&test.enqueue(entry(2, 100_000))).len(), 0, "another long one waits");
    assert_eq!(assigned(&test.enqueue(entry(3, 500))).len(), 1);
    let said = test.worker("a", |r| (r.backlog, r.requests) = (Span::secs(1), 4));
    assert_eq!(assigned(&said).len(), 0);
    assert_eq!(assigned(&test.enqueue(entry(4, 500))).len(), 0, "a few go before it, not all");
}

#[test]
fn a_chunk_of_a_few_rows_does_not_make_a_worker_look_slow() {
    let mut test = Test::new();
    test.worker("a", |_| {});
    test.worker("a", |r| r.tokens_per_second = 100);
    let late = PrefillEntry { deadline: Span::secs(1), ..entry(1, 50_000) };
    assert_eq!(assigned(&test.enqueue(late)).len(), 1, "half a second by its better chunk");
}
