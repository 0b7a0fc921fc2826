//! Decisions of the table, with times from the tests.

use deepinfer_protocol::agent_status::{AgentPhase, Role};
use deepinfer_protocol::{Generation, SupernodeId};

use super::*;

fn cluster(name: &str) -> ClusterRef {
    ClusterRef { namespace: "ns".into(), name: name.into(), uid: format!("uid-{name}") }
}

fn address(pod: &str, cadence: Cadence) -> AgentAddress {
    AgentAddress { pod: pod.into(), ip: [10, 0, 0, 1].into(), control: 9810, data: 29500, cadence }
}

fn status(pod: &str) -> AgentStatus {
    AgentStatus {
        name: pod.into(),
        role: Role::Decode,
        supernode: Some(SupernodeId::from("sn")),
        index: 0,
        ranks: 1,
        phase: AgentPhase::Serving,
        reason: String::new(),
        accepting: true,
        inflight: 3,
        kv_blocks_used: 0,
        kv_blocks_cached: 0,
        kv_blocks_total: 0,
        parked_bytes: 0,
        steps: 0,
        abandoned_threads: 0,
        replaced_engines: 0,
        fleet_generation: Generation(0),
        leads: None,
        placement: Generation(0),
        engine: String::new(),
        kv_epoch: String::new(),
        reason_code: String::new(),
        model_digest: String::new(),
        fabric: String::new(),
        device_health: String::new(),
        uptime_seconds: 0,
    }
}

fn key() -> ClusterKey {
    ClusterKey::new(Generation(1), [1; 32])
}

struct Rig {
    table: Table,
    start: Instant,
    at: Duration,
}

impl Rig {
    fn new() -> Self {
        Self { table: Table::new(&AgentOptions::default()), start: Instant::now(), at: Duration::ZERO }
    }

    fn now(&self) -> Instant {
        self.start + self.at
    }

    fn follow(&mut self, name: &str, agents: &[AgentAddress]) -> bool {
        let (now, unix) = (self.now(), self.unix());
        self.table.follow(&cluster(name), agents.to_vec(), key, now, unix)
    }

    /// All questions of a lane that are due.
    fn due(&mut self, lane: Lane) -> Vec<Question> {
        let now = self.now();
        std::iter::from_fn(|| self.table.next(lane, now).ok()).collect()
    }

    /// Wall clock: begins at second 1,000.
    fn unix(&self) -> i64 {
        1_000 + i64::try_from(self.at.as_secs()).unwrap()
    }

    fn answer(&mut self, question: &Question, status: Option<AgentStatus>) -> bool {
        let (now, unix) = (self.now(), self.unix());
        self.table.answered(question, status, now, unix)
    }
}

#[test]
fn a_cluster_is_settled_when_each_agent_was_asked_whether_it_answered_or_not() {
    let mut rig = Rig::new();
    assert!(rig.table.settled(&cluster("c")), "nobody to ask");
    assert!(rig.follow("c", &[address("a", Cadence::First), address("b", Cadence::First)]));
    assert!(!rig.table.settled(&cluster("c")));
    rig.at = FIRST_SPREAD;
    let questions = rig.due(Lane::Others);
    assert_eq!(questions.len(), 2);
    assert!(rig.answer(&questions[0], Some(status(questions[0].target.agent.as_str()))));
    assert!(!rig.table.settled(&cluster("c")));
    assert!(rig.answer(&questions[1], None), "the last of the round wakes the cluster");
    assert!(rig.table.settled(&cluster("c")));
    assert_eq!(rig.table.counts(), (2, 1));
    let all = ["a", "b", "later"].map(|pod| address(pod, Cadence::First));
    assert!(rig.follow("c", &all));
    assert!(rig.table.settled(&cluster("c")), "who comes later holds up nothing");
}

/// A cluster of thousands that load their weights costs no more questions than the budget, and nobody else waits for it.
#[test]
fn agents_that_start_share_a_budget_in_which_each_has_its_turn() {
    let mut rig = Rig::new();
    let options = AgentOptions { starting_rate: 10, ..AgentOptions::default() };
    rig.table = Table::new(&options);
    let mut all: Vec<AgentAddress> =
        (0..50).map(|n| address(&format!("starting-{n:02}"), Cadence::Starting)).collect();
    all.push(address("first", Cadence::First));
    rig.follow("c", &all);
    rig.at = FIRST_SPREAD;
    let round = rig.due(Lane::Others);
    assert_eq!(round.len(), 51, "the first questions are outside the budget");
    assert!(rig.due(Lane::Starting).is_empty());
    for question in round {
        rig.answer(&question, Some(status(question.target.agent.as_str())));
    }
    let mut asked: BTreeMap<String, u32> = BTreeMap::new();
    let mut most = 0;
    for millis in (0..60_000).step_by(50) {
        rig.at = FIRST_SPREAD + Duration::from_millis(millis);
        for lane in Lane::ALL {
            let questions = rig.due(lane);
            most = most.max(if lane == Lane::Starting { questions.len() } else { 0 });
            for question in questions {
                *asked.entry(question.target.agent.as_str().to_owned()).or_default() += 1;
                rig.answer(&question, Some(status(question.target.agent.as_str())));
            }
        }
    }
    assert!((12..=14).contains(&asked.remove("first").unwrap()), "{asked:?}");
    let total: u32 = asked.values().sum();
    assert!((580..=610).contains(&total), "ten a second for a minute, and ten at once: {total}");
    assert!(most <= 10, "{most} at once");
    assert!(asked.len() == 50 && asked.values().all(|times| (11..=13).contains(times)), "{asked:?}");
}

#[test]
fn each_cadence_has_its_pause_and_leaders_their_lane() {
    let mut rig = Rig::new();
    let all = [
        address("leader", Cadence::Leader),
        address("first", Cadence::First),
        address("starting", Cadence::Starting),
        address("draining", Cadence::Draining),
        address("other", Cadence::Other),
    ];
    rig.follow("c", &all);
    let mut asked: BTreeMap<String, u32> = BTreeMap::new();
    for millis in (0..60_000).step_by(50) {
        rig.at = Duration::from_millis(millis);
        for lane in Lane::ALL {
            for question in rig.due(lane) {
                let name = question.target.agent.as_str().to_owned();
                assert_eq!(lane == Lane::Leaders, name == "leader");
                let begun = asked.contains_key(&name);
                assert_eq!(lane == Lane::Starting, name == "starting" && begun, "{name}: {asked:?}");
                rig.answer(&question, Some(status(&name)));
                *asked.entry(name).or_default() += 1;
            }
        }
    }
    assert!((58..=68).contains(&asked["leader"]), "{asked:?}");
    assert!((12..=14).contains(&asked["first"]), "{asked:?}");
    assert!((58..=68).contains(&asked["starting"]), "{asked:?}");
    assert!((58..=68).contains(&asked["draining"]), "{asked:?}");
    assert!((1..=2).contains(&asked["other"]), "{asked:?}");
}

#[test]
fn counters_do_not_wake_a_cluster_but_readiness_reasons_and_the_last_request_do() {
    let mut rig = Rig::new();
    rig.follow("c", &[address("a", Cadence::Leader)]);
    let ask = |rig: &mut Rig, change: fn(&mut AgentStatus)| {
        let question = rig.due(Lane::Leaders).pop().expect("due");
        let mut word = status("a");
        change(&mut word);
        let woken = rig.answer(&question, Some(word));
        rig.at += Duration::from_secs(1);
        woken
    };
    assert!(ask(&mut rig, |_| {}), "the first word");
    assert!(!ask(&mut rig, |_| {}));
    assert!(!ask(&mut rig, |s| (s.steps, s.inflight, s.kv_blocks_used) = (9, 7, 5)));
    assert!(ask(&mut rig, |s| s.inflight = 0));
    assert!(!ask(&mut rig, |s| s.inflight = 0));
    assert!(ask(&mut rig, |s| (s.inflight, s.accepting) = (0, false)));
    assert!(ask(&mut rig, |s| s.phase = AgentPhase::Draining));
    assert!(ask(&mut rig, |s| s.fabric = "peer 3 does not answer".into()));
}

#[test]
fn silence_wakes_at_each_limit_once_and_the_word_is_kept_for_thirty_seconds() {
    let mut rig = Rig::new();
    rig.follow("c", &[address("a", Cadence::Leader)]);
    let question = rig.due(Lane::Leaders).pop().expect("due");
    rig.answer(&question, Some(status("a")));
    let mut woken = Vec::new();
    for second in 1..=40 {
        rig.at = Duration::from_secs(second);
        for question in rig.due(Lane::Leaders) {
            if rig.answer(&question, None) {
                woken.push(second);
            }
        }
        let word = &rig.table.words(&cluster("c"))[&AgentId::from("a")];
        assert_eq!(word.heard, 1_000);
        assert_eq!(word.status.is_some(), second <= 30, "at {second}");
    }
    assert_eq!(woken, [3, 11, 31]);
    rig.at = Duration::from_secs(41);
    let question = rig.due(Lane::Leaders).pop().expect("due");
    assert!(rig.answer(&question, Some(status("a"))), "its return wakes too");
}

#[test]
fn an_answer_to_a_pod_that_was_replaced_under_its_name_does_not_count() {
    let mut rig = Rig::new();
    rig.follow("c", &[address("a", Cadence::Leader)]);
    let old = rig.due(Lane::Leaders).pop().expect("due");
    let moved = AgentAddress { ip: [10, 0, 0, 9].into(), ..address("a", Cadence::Leader) };
    assert!(rig.follow("c", &[moved]));
    assert!(!rig.answer(&old, Some(status("a"))));
    assert!(rig.table.words(&cluster("c"))[&AgentId::from("a")].status.is_none());
    let new = rig.due(Lane::Leaders).pop().expect("the new one is due");
    assert_eq!(new.target.control.ip().to_string(), "10.0.0.9");
}

#[test]
fn a_new_leader_is_asked_at_the_leaders_pace_and_nobody_twice() {
    let mut rig = Rig::new();
    rig.follow("c", &[address("a", Cadence::Other)]);
    rig.at = FIRST_SPREAD;
    let question = rig.due(Lane::Others).pop().expect("due");
    rig.answer(&question, Some(status("a")));
    assert!(rig.follow("c", &[address("a", Cadence::Leader)]));
    assert!(!rig.follow("c", &[address("a", Cadence::Leader)]), "the same again is nothing");
    rig.at += Duration::from_secs(1);
    assert_eq!(rig.due(Lane::Leaders).len(), 1);
    rig.at += Duration::from_secs(100);
    assert!(rig.due(Lane::Others).is_empty(), "its old place is void");
    assert!(!rig.follow("c", &[]));
    assert!(rig.table.words(&cluster("c")).is_empty());
}

#[test]
fn the_silence_of_an_agent_that_never_answered_begins_when_it_is_followed() {
    let mut rig = Rig::new();
    rig.at = Duration::from_secs(100);
    rig.follow("c", &[address("a", Cadence::Leader)]);
    let mut woken = Vec::new();
    for second in 100..=140 {
        rig.at = Duration::from_secs(second);
        for question in rig.due(Lane::Leaders) {
            if rig.answer(&question, None) {
                woken.push(second);
            }
        }
        let word = &rig.table.words(&cluster("c"))[&AgentId::from("a")];
        assert_eq!((word.heard, word.status.is_none()), (1_100, true), "not lost since 1970");
    }
    assert_eq!(woken, [100, 103, 111, 131], "settled, then each silence");
}

#[test]
fn an_agent_that_is_asked_seldom_and_answers_is_never_silent() {
    let mut rig = Rig::new();
    rig.follow("c", &[address("a", Cadence::Other)]);
    let silence = |rig: &Rig| rig.table.words(&cluster("c"))[&AgentId::from("a")].silent_since;
    assert_eq!(silence(&rig), Some(1_000), "it has never answered");
    let mut last = 0;
    for second in 1..=200 {
        rig.at = Duration::from_secs(second);
        for question in rig.due(Lane::Others) {
            rig.answer(&question, Some(status("a")));
            last = second;
        }
        assert_eq!(silence(&rig), None, "at {second}, last asked at {last}");
    }
    assert!(last > 100, "it is asked again and again");
    // Then it falls silent: from the first question without an answer, and it is asked often from then on.
    let mut woken = Vec::new();
    for second in 201..=320 {
        rig.at = Duration::from_secs(second);
        for question in rig.due(Lane::Others) {
            if rig.answer(&question, None) {
                woken.push(second);
            }
        }
    }
    let first = woken[0] - 3;
    assert_eq!(woken, [first + 3, first + 11, first + 31]);
    assert!(silence(&rig).is_some_and(|since| (since - 1_000).abs_diff(i64::try_from(first).unwrap()) <= 1));
}
