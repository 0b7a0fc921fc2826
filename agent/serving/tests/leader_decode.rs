//! The decode leader: which rank takes which sequence, who waits, who is refused and why.

use std::collections::BTreeMap;
use std::sync::Arc;

use deepinfer_protocol::agent_status::Role;
use deepinfer_protocol::fleet::{FleetMember, FleetView};
use deepinfer_protocol::message::{Assignment, DecodeReport, Message, PlaceEntry, Refusal};
use deepinfer_protocol::{
    AgentId, Attempt, Epoch, Generation, Rank, RankId, RequestId, Span, SupernodeId, Time,
};
use deepinfer_serving::leader::choose::WhyNot;
use deepinfer_serving::leader::{DecodeLeader, DecodeLeaderOptions, LeaderAction, LeaderEvent};

fn entry(request: u128, tokens: u32) -> PlaceEntry {
    PlaceEntry {
        request: RequestId(request),
        attempt: Attempt(0),
        tokens,
        max_tokens: 100,
        preempted: false,
        kv_epoch: "kv".to_owned(),
        exclude: Vec::new(),
    }
}

fn report(rank: u16) -> DecodeReport {
    DecodeReport {
        epoch: Epoch(1),
        rank: Rank(rank),
        requests: 0,
        tokens: 0,
        free_blocks: 1_000,
        total_blocks: 1_000,
        free_slots: 76,
        max_requests: 64,
        step: Span::millis(20),
        draining: false,
        kv_epoch: "kv".to_owned(),
        seen: Vec::new(),
    }
}

struct Test {
    leader: DecodeLeader,
    now: Time,
}

impl Test {
    fn new() -> Self {
        let mut test = Self { leader: DecodeLeader::new(DecodeLeaderOptions::default()), now: Time(0) };
        test.tell(LeaderEvent::Lead(Epoch(1)));
        test.now = Time(0) + Span::secs(10);
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

    fn rank(&mut self, agent: &str, rank: u16, change: impl FnOnce(&mut DecodeReport)) -> Vec<Message> {
        let mut report = report(rank);
        change(&mut report);
        self.hear(agent, Message::DecodeReport(report))
    }

    fn place(&mut self, entry: PlaceEntry) -> Vec<Message> {
        self.hear("g", Message::Place(entry))
    }
}

fn placed(messages: &[Message]) -> Vec<(u128, RankId)> {
    let placed = messages.iter().filter_map(|m| match m {
        Message::Placed { request, rank, .. } => Some((request.0, rank.clone())),
        _ => None,
    });
    placed.collect()
}

fn refused(messages: &[Message]) -> Vec<(u128, Refusal)> {
    let refused = messages.iter().filter_map(|m| match m {
        Message::Refuse { request, reason, .. } => Some((request.0, *reason)),
        _ => None,
    });
    refused.collect()
}

#[test]
fn between_two_reports_a_burst_is_spread_as_if_every_rank_had_reported() {
    let mut test = Test::new();
    (0..8).for_each(|rank| drop(test.rank("d", rank, |_| {})));
    let mut counts: BTreeMap<RankId, usize> = BTreeMap::new();
    for request in 0..80 {
        for (_, rank) in placed(&test.place(entry(request, 500))) {
            *counts.entry(rank).or_default() += 1;
        }
    }
    assert_eq!(counts.into_values().collect::<Vec<_>>(), [10; 8], "own assignments count at once");
}

/// SV-100: one queue for all ranks, so none waits on a rank; requests of mixed length spread evenly.
#[test]
fn five_hundred_requests_of_mixed_length_leave_no_rank_behind() {
    let mut test = Test::new();
    (0..8).for_each(|rank| drop(test.rank("d", rank, |r| (r.free_blocks, r.total_blocks) = (9_000, 9_000))));
    let mut counts: BTreeMap<RankId, (u64, u64)> = BTreeMap::new();
    for request in 0..512u32 {
        let length = 200 + (request * 7_919) % 4_000;
        for (_, rank) in placed(&test.place(entry(u128::from(request), length))) {
            let (n, k) = counts.entry(rank).or_default();
            (*n, *k) = (*n + 1, *k + u64::from(length));
        }
    }
    assert_eq!(test.leader.queued(), 0, "no request waits while a rank has slots and blocks");
    assert_eq!(counts.values().map(|c| c.0).sum::<u64>(), 512);
    let (most, tokens) = (counts.values().map(|c| c.0).max(), counts.values().map(|c| c.1).max());
    let all: u64 = counts.values().map(|c| c.1).sum();
    assert_eq!(most, Some(64), "every rank runs as many as it may: {counts:?}");
    assert!(tokens.expect("eight ranks") * 8 * 10 <= all * 12, "tokens are even within 20 %: {counts:?}");
    assert_eq!(test.place(entry(9_999, 100)), [], "the next one waits");
}

#[test]
fn preempted_sequences_are_placed_first_and_the_head_is_never_passed() {
    let mut test = Test::new();
    test.place(entry(1, 100));
    test.place(PlaceEntry { preempted: true, ..entry(2, 900 * 128) });
    let said = test.rank("d", 0, |r| (r.requests, r.free_blocks) = (1, 800));
    assert_eq!(said, [], "the head finds no room, and what waits behind it does not pass");
    assert_eq!(
        test.leader.explain(test.now),
        [(RankId { agent: "d".into(), rank: Rank(0) }, WhyNot::NoBlocks)],
        "and it is said why"
    );
    let said = test.rank("d", 0, |_| {});
    assert_eq!(placed(&said).iter().map(|p| p.0).collect::<Vec<_>>(), [2, 1]);
}

#[test]
fn a_rank_without_slots_or_with_all_requests_that_it_may_run_gets_nothing() {
    let mut test = Test::new();
    test.rank("d", 0, |r| r.free_slots = 0);
    test.rank("d", 1, |r| r.requests = 64);
    test.rank("d", 2, |r| r.draining = true);
    assert_eq!(test.place(entry(1, 100)), []);
    let why: Vec<WhyNot> = test.leader.explain(test.now).into_iter().map(|e| e.1).collect();
    assert_eq!(why, [WhyNot::NoSlot, WhyNot::MostRequests, WhyNot::Draining]);
    assert_eq!(placed(&test.rank("d", 0, |_| {})).len(), 1);
}

/// SV-083: the wait ends with a name instead of a time-out.
#[test]
fn kv_that_no_rank_can_read_is_refused_by_name_and_stops_nobody() {
    let mut test = Test::new();
    test.rank("d", 0, |r| r.kv_epoch = "other".to_owned());
    assert_eq!(refused(&test.place(entry(1, 100))), [(1, Refusal::KvEpoch)]);
    let mut fresh = Test::new();
    fresh.now = Time(0) + Span::millis(100);
    fresh.rank("d", 0, |r| r.kv_epoch = "other".to_owned());
    assert_eq!(fresh.place(entry(1, 100)), [], "a new leader waits for all ranks to report");
    let other = PlaceEntry { kv_epoch: "other".to_owned(), ..entry(2, 100) };
    assert_eq!(placed(&fresh.place(other)).len(), 1, "others are placed meanwhile");
}

#[test]
fn what_fits_no_rank_is_refused_as_too_large() {
    let mut test = Test::new();
    test.rank("d", 0, |r| (r.total_blocks, r.free_blocks) = (8, 8));
    assert_eq!(
        refused(&test.place(entry(1, 8 * 128))),
        [(1, Refusal::TooLarge)],
        "the next token has no place"
    );
    assert_eq!(placed(&test.place(entry(2, 8 * 128 - 1))).len(), 1);
}

#[test]
fn the_lighter_supernode_is_chosen_over_the_lighter_rank() {
    let member = |name: &str, supernode: &str, first_rank| FleetMember {
        name: name.into(),
        role: Role::Decode,
        supernode: Some(SupernodeId::from(supernode)),
        index: 0,
        first_rank,
        ranks: 1,
        data: ([127, 0, 0, 1], 1).into(),
        control: ([127, 0, 0, 1], 2).into(),
        serving: true,
        kv_epoch: "kv".to_owned(),
    };
    let members =
        vec![member("a0", "a", 0), member("a1", "a", 1), member("b0", "b", 0), member("b1", "b", 1)];
    let mut test = Test::new();
    let view = FleetView { generation: Generation(1), members, ..FleetView::default() };
    test.tell(LeaderEvent::Fleet(Arc::new(view)));
    test.rank("a0", 0, |r| (r.requests, r.tokens) = (9, 50_000));
    test.rank("a1", 1, |r| (r.requests, r.tokens) = (0, 0));
    test.rank("b0", 0, |r| (r.requests, r.tokens) = (5, 20_000));
    test.rank("b1", 1, |r| (r.requests, r.tokens) = (5, 20_001));
    let said = test.place(entry(1, 100));
    assert_eq!(placed(&said), [(1, RankId { agent: "b0".into(), rank: Rank(0) })]);
}

#[test]
fn a_repeated_request_is_answered_from_memory_until_it_is_said_to_be_unused() {
    let mut test = Test::new();
    test.rank("d", 0, |_| {});
    let first = test.place(entry(1, 100));
    assert_eq!(test.place(entry(1, 100)), first);
    let (request, attempt) = (RequestId(1), Attempt(0));
    let unused = Message::Refuse { request, attempt, reason: Refusal::NoRoom, retry_after: Span::ZERO };
    test.hear("g", unused);
    assert_eq!(test.leader.unseen(), 0);
    let second = test.place(entry(1, 100));
    assert_eq!(placed(&second).len(), 1);
    assert_ne!(second, first, "another decision");
    test.rank("d", 0, |r| r.seen = vec![Assignment { epoch: Epoch(1), number: 2 }]);
    assert_eq!(test.leader.unseen(), 0);
}

#[test]
fn a_gateway_that_is_gone_leaves_nothing_and_a_lost_agent_takes_no_more() {
    let mut test = Test::new();
    test.place(entry(1, 100));
    test.hear("other", Message::Place(entry(2, 100)));
    test.tell(LeaderEvent::PeerLost("g".into()));
    assert_eq!(test.leader.queued(), 1);
    test.rank("d", 0, |_| {});
    assert_eq!((test.leader.queued(), test.leader.unseen()), (0, 1));
    test.tell(LeaderEvent::PeerLost("other".into()));
    assert_eq!(test.leader.unseen(), 0);
    test.tell(LeaderEvent::PeerLost("d".into()));
    assert_eq!(test.place(entry(3, 100)), []);
}

#[test]
fn an_agent_where_it_failed_is_used_only_when_there_is_no_other() {
    let mut test = Test::new();
    test.rank("a", 0, |_| {});
    test.rank("b", 0, |r| (r.requests, r.tokens) = (10, 10_000));
    let exclude: Vec<AgentId> = vec!["a".into()];
    let said = test.place(PlaceEntry { exclude: exclude.clone(), ..entry(1, 100) });
    assert_eq!(placed(&said)[0].1.agent, "b".into());
    test.tell(LeaderEvent::PeerLost("b".into()));
    let said = test.place(PlaceEntry { exclude, ..entry(2, 100) });
    assert_eq!(placed(&said)[0].1.agent, "a".into());
}

#[test]
fn who_does_not_lead_says_so() {
    let mut test = Test::new();
    test.rank("d", 0, |_| {});
    test.tell(LeaderEvent::Resign);
    assert_eq!(refused(&test.place(entry(1, 100))), [(1, Refusal::NotLeader)]);
    test.tell(LeaderEvent::Lead(Epoch(2)));
    assert_eq!(test.place(entry(1, 100)), [], "nothing of the old leadership is known");
}
