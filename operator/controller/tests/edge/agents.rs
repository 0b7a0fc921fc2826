//! Agents behind real ports: who is asked how, what wakes a cluster, and what a call that fails says.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use deepinfer_operator::agents::{AgentAddress, AgentOptions, Agents, Cadence, CallError};
use deepinfer_operator::health::Health;
use deepinfer_operator::keys::ClusterRef;
use deepinfer_operator::metrics::Metrics;
use deepinfer_operator::serve::{self, Answer};
use deepinfer_planner::AgentCall;
use deepinfer_protocol::agent_status::{AgentPhase, AgentStatus, DrainRequest};
use deepinfer_transport::control_auth;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use serde_json::json;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::support::{SOON, cluster, keys, listener, now, until};

/// An agent's control port as the operator sees it.
struct Agent {
    address: SocketAddr,
    state: Arc<State>,
    stop: CancellationToken,
}

struct State {
    status: Mutex<AgentStatus>,
    asked: AtomicUsize,
    drained: Mutex<Option<DrainRequest>>,
    hosts: Mutex<Vec<(String, String)>>,
    hangs: CancellationToken,
}

fn status(name: &str) -> AgentStatus {
    serde_json::from_value(json!({
        "name": name, "role": "decode", "supernode": "sn", "index": 0, "ranks": 1, "phase": "serving", "reason": "",
        "accepting": true, "inflight": 4, "kvBlocksUsed": 0, "kvBlocksCached": 0, "kvBlocksTotal": 0,
        "parkedBytes": 0, "steps": 0, "abandonedThreads": 0, "replacedEngines": 0, "fleetGeneration": 0,
        "leads": null, "placement": 0, "engine": "", "kvEpoch": "e", "uptimeSeconds": 1,
    }))
    .unwrap()
}

impl Agent {
    async fn start(name: &str) -> Self {
        let (listener, address) = listener().await;
        let state = Arc::new(State {
            status: Mutex::new(status(name)),
            asked: AtomicUsize::new(0),
            drained: Mutex::default(),
            hosts: Mutex::default(),
            hangs: CancellationToken::new(),
        });
        let stop = CancellationToken::new();
        let answers = Arc::clone(&state);
        tokio::spawn(serve::serve(listener, 64, stop.clone(), move |request| {
            answer(Arc::clone(&answers), request)
        }));
        Self { address, state, stop }
    }

    fn at(&self, name: &str, cadence: Cadence) -> AgentAddress {
        AgentAddress {
            pod: name.into(),
            ip: self.address.ip(),
            control: self.address.port(),
            data: 29500,
            cadence,
        }
    }
}

async fn answer(state: Arc<State>, request: Request<Incoming>) -> Answer {
    let header = |name: &str| {
        request.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or("").to_owned()
    };
    let (method, path) = (request.method().as_str().to_owned(), request.uri().path().to_owned());
    let key = keys().cluster("uid-1");
    let authorization = header("authorization");
    if let Err(why) = control_auth::check(&key, now(), &method, &path, Some(&authorization)) {
        return reply(StatusCode::UNAUTHORIZED, why.to_owned());
    }
    if state.hangs.is_cancelled() {
        std::future::pending::<()>().await;
    }
    state.hosts.lock().unwrap().push((header("host"), header("x-deepinfer-pod")));
    match (method.as_str(), path.as_str()) {
        ("GET", "/v1/status") => {
            state.asked.fetch_add(1, Ordering::Relaxed);
            let status = state.status.lock().unwrap().clone();
            reply(StatusCode::OK, serde_json::to_string(&status).unwrap())
        }
        ("POST", "/v1/drain") => {
            let body = request.into_body().collect().await.unwrap().to_bytes();
            *state.drained.lock().unwrap() = Some(serde_json::from_slice(&body).unwrap());
            reply(StatusCode::ACCEPTED, "{}".to_owned())
        }
        ("POST", "/v1/undrain") => reply(StatusCode::CONFLICT, "the drain is complete".to_owned()),
        other => panic!("{other:?}"),
    }
}

fn reply(status: StatusCode, body: String) -> Answer {
    let mut answer = Answer::new(Full::new(Bytes::from(body)));
    *answer.status_mut() = status;
    answer
}

struct Rig {
    agents: Arc<Agents>,
    woken: mpsc::Receiver<ClusterRef>,
    metrics: Arc<Metrics>,
    _stop: tokio_util::sync::DropGuard,
}

fn rig(change: impl FnOnce(&mut AgentOptions)) -> Rig {
    let mut options = AgentOptions {
        leader_interval: Duration::from_millis(20),
        starting_interval: Duration::from_millis(20),
        first_interval: Duration::from_millis(100),
        timeout: Duration::from_millis(500),
        ..AgentOptions::default()
    };
    change(&mut options);
    let (wake, woken) = tokio::sync::mpsc::channel(4);
    let metrics = Metrics::new("1");
    let stop = CancellationToken::new();
    let agents = Agents::start(options, keys(), Arc::clone(&metrics), wake, stop.clone());
    Rig { agents, woken, metrics, _stop: stop.drop_guard() }
}

impl Rig {
    async fn woken(&mut self) -> ClusterRef {
        tokio::time::timeout(SOON, self.woken.recv()).await.expect("a wake").expect("the loop runs")
    }

    fn text(&self) -> String {
        self.metrics.text(&Health::new(SOON))
    }
}

#[tokio::test]
async fn an_agent_is_followed_and_what_matters_wakes_its_cluster() {
    let agent = Agent::start("a").await;
    let mut rig = rig(|_| {});
    rig.agents.follow(&cluster(), vec![agent.at("a", Cadence::Leader)]);
    assert_eq!(rig.woken().await, cluster());
    assert!(rig.agents.settled(&cluster()));
    let word = rig.agents.words(&cluster()).remove(&"a".into()).unwrap();
    assert_eq!(word.control, agent.address);
    assert_eq!(word.status.unwrap().inflight, 4);
    assert!((word.heard - i64::try_from(now()).unwrap()).abs() <= 1);

    // Counters are fresh in the words but wake nobody.
    agent.state.status.lock().unwrap().inflight = 9;
    let inflight = || rig.agents.words(&cluster())[&"a".into()].status.as_ref().map(|s| s.inflight);
    until("the word is fresh", || inflight() == Some(9)).await;
    assert!(rig.woken.try_recv().is_err());
    agent.state.status.lock().unwrap().phase = AgentPhase::Draining;
    rig.woken().await;

    rig.agents.follow(&cluster(), Vec::new());
    assert!(rig.agents.words(&cluster()).is_empty());
    let text = rig.text();
    assert!(!text.contains("agent_call_seconds_count{call=\"status\"} 0\n"), "{text}");
}

#[tokio::test]
async fn an_agent_that_is_gone_settles_without_a_word_and_is_counted() {
    let agent = Agent::start("a").await;
    agent.stop.cancel();
    let mut rig = rig(|_| {});
    until("its port is closed", || std::net::TcpStream::connect(agent.address).is_err()).await;
    rig.agents.follow(&cluster(), vec![agent.at("a", Cadence::First)]);
    rig.woken().await;
    assert!(rig.agents.settled(&cluster()));
    assert!(rig.agents.words(&cluster())[&"a".into()].status.is_none());
    until("it is counted", || rig.text().contains("deepinfer_operator_agent_unreachable 1")).await;
    let drain = AgentCall::Drain { deadline_seconds: 5, reason: "Replacing".into() };
    let error = rig.agents.call(&cluster(), &"a".into(), &drain).await.unwrap_err();
    assert!(matches!(error, CallError::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains(&agent.address.to_string()), "{error}");
    let error = rig.agents.call(&cluster(), &"b".into(), &drain).await.unwrap_err();
    assert_eq!(error, CallError::Unknown("b".into()));
}

#[tokio::test]
async fn another_pod_that_has_the_address_now_is_not_taken_for_the_agent() {
    let agent = Agent::start("successor").await;
    let mut rig = rig(|_| {});
    rig.agents.follow(&cluster(), vec![agent.at("a", Cadence::First)]);
    rig.woken().await;
    assert!(rig.agents.words(&cluster())[&"a".into()].status.is_none());
}

#[tokio::test]
async fn a_drain_arrives_with_its_deadline_and_a_refusal_says_why() {
    let agent = Agent::start("a").await;
    let mut rig = rig(|options| options.other_interval = Duration::from_secs(3600));
    rig.agents.follow(&cluster(), vec![agent.at("a", Cadence::Other)]);
    rig.woken().await;
    let asked = agent.state.asked.load(Ordering::Relaxed);
    let drain = AgentCall::Drain { deadline_seconds: 77, reason: "RollingOut".into() };
    rig.agents.call(&cluster(), &"a".into(), &drain).await.unwrap();
    let request = agent.state.drained.lock().unwrap().clone().unwrap();
    assert_eq!((request.deadline_seconds, request.reason.as_str()), (77, "RollingOut"));
    until("it is asked at once", || agent.state.asked.load(Ordering::Relaxed) > asked).await;
    let error = rig.agents.call(&cluster(), &"a".into(), &AgentCall::Undrain).await.unwrap_err();
    assert!(matches!(error, CallError::Refused { status: 409, .. }), "{error}");
    assert!(error.to_string().contains("the drain is complete"), "{error}");
}

#[tokio::test]
async fn a_rack_of_hanging_agents_does_not_hold_up_a_leader() {
    let (leader, dead) = (Agent::start("leader").await, Agent::start("dead").await);
    dead.state.hangs.cancel();
    let rig = rig(|options| (options.concurrency, options.timeout) = (2, Duration::from_secs(5)));
    let mut all: Vec<AgentAddress> =
        (0..50).map(|i| dead.at(&format!("dead-{i}"), Cadence::Starting)).collect();
    all.push(leader.at("leader", Cadence::Leader));
    rig.agents.follow(&cluster(), all);
    until("the leader is asked many times", || leader.state.asked.load(Ordering::Relaxed) >= 20).await;
    assert!(!rig.agents.settled(&cluster()), "the dead ones are still being asked");
}

#[tokio::test]
async fn through_a_proxy_the_agents_address_and_pod_are_in_the_headers() {
    let proxy = Agent::start("a").await;
    let mut rig = rig(|options| options.proxy = Some(proxy.address));
    let far = AgentAddress { ip: [10, 9, 8, 7].into(), control: 9810, ..proxy.at("a", Cadence::First) };
    rig.agents.follow(&cluster(), vec![far]);
    rig.woken().await;
    assert!(rig.agents.words(&cluster())[&"a".into()].status.is_some());
    let hosts = proxy.state.hosts.lock().unwrap().clone();
    assert_eq!(hosts[0], ("10.9.8.7:9810".to_owned(), "a".to_owned()));
}
