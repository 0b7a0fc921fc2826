//! Agents that cost nothing: the real frames over real sockets, canned tokens instead of engines.
//!
//! Each agent plays every part (leader, worker, rank); the view says which is which. Token `index` of a request is
//! a function of its prompt alone, so that a test knows every stream in advance, whatever fails on the way.
#![allow(dead_code, reason = "the tests and the bench use their parts")]
#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use deepinfer_protocol::agent_status::Role;
use deepinfer_protocol::fleet::{FleetMember, FleetView, Leader};
use deepinfer_protocol::generate::{FinishReason, Token, TokenEvent};
use deepinfer_protocol::message::{Assignment, DecodeWork, Message, Peer, PrefillWork, Refusal};
use deepinfer_protocol::{AgentId, Attempt, Epoch, Generation, Rank, RankId, RequestId, Span};
use deepinfer_transport::{ClusterKey, PeerEvent, Transport, TransportOptions};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

/// What the agents do; changed while they run.
#[derive(Debug, Default)]
pub struct Behaviour {
    /// Requests stay in the leader's queue.
    pub hold_queue: AtomicBool,
    /// Prefill starts and does not end.
    pub hold_prefill: AtomicBool,
    /// Workers turn everything away for lack of room.
    pub no_room: AtomicBool,
    /// Of the leaderships, minus one.
    pub later_epochs: AtomicU64,
    /// Microseconds between steps; 0: one after the other.
    pub step_micros: AtomicU64,
}

/// What an agent has and had.
#[derive(Debug, Default)]
pub struct Held {
    /// In the leader's queue.
    pub queued: BTreeSet<RequestId>,
    /// In prefill.
    pub prefilling: BTreeSet<RequestId>,
    /// Parked after prefill.
    pub parked: BTreeSet<RequestId>,
    /// In decode.
    pub running: BTreeMap<RequestId, Run>,
    /// Requests ever enqueued.
    pub seen: u64,
    /// Tokens sent.
    pub tokens: u64,
}

impl Held {
    fn count(&self) -> usize {
        self.queued.len() + self.prefilling.len() + self.parked.len() + self.running.len()
    }
}

/// A sequence in decode.
#[derive(Debug)]
pub struct Run {
    gateway: AgentId,
    attempt: Attempt,
    first: u32,
    next: u32,
    max_tokens: u32,
}

/// Token `index` of the answer to a prompt that begins with `first`: ordinary ids of the shipped tokenizer.
pub fn token(first: u32, index: u32) -> u32 {
    300 + (first * 31 + index * 7) % 2500
}

/// An agent.
pub struct FakeAgent {
    pub name: AgentId,
    pub member: FleetMember,
    pub held: Arc<Mutex<Held>>,
    task: JoinHandle<()>,
}

/// Agents, their view, their key.
pub struct FakeFleet {
    pub key: ClusterKey,
    pub behaviour: Arc<Behaviour>,
    pub agents: Vec<FakeAgent>,
    pub view: watch::Sender<Arc<FleetView>>,
}

impl FakeFleet {
    /// One prefill agent and `ranks` decode agents; the first of each leads.
    pub async fn start(ranks: usize) -> Self {
        let fleet = Self::hidden(ranks).await;
        fleet.show();
        fleet
    }

    /// As [`Self::start`], without a view for the gateway.
    pub async fn hidden(ranks: usize) -> Self {
        let key = ClusterKey::new(Generation(1), [9; 32]);
        let behaviour = Arc::new(Behaviour::default());
        behaviour.step_micros.store(1000, Relaxed);
        let mut agents = vec![agent("prefill-0", Role::Prefill, &key, &behaviour).await];
        for i in 0..ranks {
            agents.push(agent(&format!("decode-{i}"), Role::Decode, &key, &behaviour).await);
        }
        Self { key, behaviour, agents, view: watch::Sender::new(Arc::default()) }
    }

    /// Publishes the view.
    pub fn show(&self) {
        let leader = |at: usize| Some(Leader { agent: self.agents[at].name.clone(), epoch: Epoch(1) });
        self.view.send_modify(|view| {
            *view = Arc::new(FleetView {
                generation: view.generation.next(),
                cluster: "test".to_owned(),
                members: self.agents.iter().map(|agent| agent.member.clone()).collect(),
                prefill_leader: leader(0),
                decode_leader: if self.agents.len() > 1 { leader(1) } else { None },
                closed: false,
                rebuilding: Vec::new(),
            });
        });
    }

    /// Requests that any agent holds anything of.
    pub fn holds(&self) -> usize {
        self.agents.iter().map(|agent| agent.held.lock().unwrap().count()).sum()
    }

    /// Sequences in decode.
    pub fn running(&self) -> usize {
        self.agents.iter().map(|agent| agent.held.lock().unwrap().running.len()).sum()
    }

    /// Requests that agents have seen.
    pub fn seen(&self) -> u64 {
        self.agents.iter().map(|agent| agent.held.lock().unwrap().seen).sum()
    }

    /// Ends an agent as a crash does: its connections close.
    pub fn kill(&mut self, name: &str) {
        let at = self.agents.iter().position(|agent| agent.name.as_str() == name).unwrap();
        self.agents.remove(at).task.abort();
    }
}

impl Drop for FakeAgent {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn agent(name: &str, role: Role, key: &ClusterKey, behaviour: &Arc<Behaviour>) -> FakeAgent {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let data = listener.local_addr().unwrap();
    let options = TransportOptions::new(name.into(), Peer::Agent, key.clone());
    let (transport, events) = Transport::start(options, Some(listener));
    let held = Arc::new(Mutex::new(Held::default()));
    let player = Player {
        name: name.into(),
        transport,
        behaviour: Arc::clone(behaviour),
        held: Arc::clone(&held),
        assignments: 0,
        nothing: Arc::from([]),
    };
    let member = FleetMember {
        name: name.into(),
        role,
        supernode: None,
        index: 0,
        first_rank: 0,
        ranks: 1,
        data,
        control: data,
        serving: true,
        kv_epoch: "e".to_owned(),
    };
    FakeAgent { name: name.into(), member, held, task: tokio::spawn(player.run(events)) }
}

struct Player {
    name: AgentId,
    transport: Transport,
    behaviour: Arc<Behaviour>,
    held: Arc<Mutex<Held>>,
    assignments: u64,
    nothing: Arc<[u8]>,
}

impl Player {
    async fn run(mut self, mut events: mpsc::Receiver<PeerEvent>) {
        let mut next_step = tokio::time::Instant::now();
        loop {
            let pause = Duration::from_micros(self.behaviour.step_micros.load(Relaxed));
            if self.held.lock().unwrap().running.is_empty() {
                let Some(event) = events.recv().await else { return };
                self.hear(event);
                next_step = tokio::time::Instant::now() + pause;
            }
            while let Ok(event) = events.try_recv() {
                self.hear(event);
            }
            if pause.is_zero() {
                self.step();
                tokio::task::yield_now().await;
                continue;
            }
            tokio::select! {
                biased;
                event = events.recv() => match event {
                    Some(event) => self.hear(event),
                    None => return,
                },
                () = tokio::time::sleep_until(next_step) => {
                    self.step();
                    next_step += pause;
                }
            }
        }
    }

    fn say(&self, to: &AgentId, message: &Message) {
        self.transport.send(to, message, Arc::clone(&self.nothing));
    }

    fn assignment(&mut self) -> Assignment {
        self.assignments += 1;
        Assignment { epoch: Epoch(1 + self.behaviour.later_epochs.load(Relaxed)), number: self.assignments }
    }

    fn hear(&mut self, event: PeerEvent) {
        let (from, message) = match event {
            PeerEvent::Frame { from, message, .. } => (from, message),
            PeerEvent::Up { .. } => return,
            PeerEvent::Down { peer } => {
                let mut held = self.held.lock().unwrap();
                held.running.retain(|_, run| run.gateway != peer);
                return;
            }
        };
        match message {
            Message::Enqueue(entry) => {
                let mut held = self.held.lock().unwrap();
                held.seen += 1;
                if self.behaviour.hold_queue.load(Relaxed) {
                    held.queued.insert(entry.request);
                    return;
                }
                drop(held);
                let (request, attempt) = (entry.request, entry.attempt);
                let (assignment, worker) = (self.assignment(), self.name.clone());
                self.say(&from, &Message::PrefillAssigned { request, attempt, assignment, worker });
            }
            Message::Prefill(work) => self.prefill(&from, work),
            Message::Place(entry) => {
                let (request, attempt, assignment) = (entry.request, entry.attempt, self.assignment());
                let rank = RankId { agent: self.name.clone(), rank: Rank(0) };
                self.say(&from, &Message::Placed { request, attempt, assignment, rank });
            }
            Message::Decode(work) => self.decode(from, &work),
            Message::Cancel { request, .. } => {
                let mut held = self.held.lock().unwrap();
                held.queued.remove(&request);
                held.prefilling.remove(&request);
                held.parked.remove(&request);
                held.running.remove(&request);
            }
            Message::ReleaseKv { request, .. } => {
                self.held.lock().unwrap().parked.remove(&request);
            }
            _ => {}
        }
    }

    fn prefill(&mut self, from: &AgentId, work: PrefillWork) {
        let (request, attempt) = (work.request, work.attempt);
        if self.behaviour.no_room.load(Relaxed) {
            let retry_after = Span::millis(50);
            let refuse = Message::Refuse { request, attempt, reason: Refusal::NoRoom, retry_after };
            return self.say(from, &refuse);
        }
        self.say(from, &Message::PrefillProgress { request, attempt, cached_tokens: 0, last_chunk: true });
        if self.behaviour.hold_prefill.load(Relaxed) {
            self.held.lock().unwrap().prefilling.insert(request);
            return;
        }
        let index = work.tokens.len() as u32 - work.prompt_tokens;
        let last = index + 1 >= work.spec.max_tokens;
        let tokens = vec![Token { id: token(work.tokens[0], index), logprob: None }];
        let finish = last.then_some(FinishReason::Length);
        self.held.lock().unwrap().tokens += 1;
        self.say(from, &Message::Tokens(vec![TokenEvent { request, attempt, index, tokens, finish }]));
        if !last {
            self.held.lock().unwrap().parked.insert(request);
            let kv_epoch = "e".to_owned();
            self.say(from, &Message::PrefillDone { request, attempt, parked_bytes: 1, kv_epoch });
        }
    }

    fn decode(&mut self, gateway: AgentId, work: &DecodeWork) {
        let (request, attempt) = (work.request, work.attempt);
        let next = work.tokens.len() as u32 - work.prompt_tokens;
        let run = Run {
            gateway: gateway.clone(),
            attempt,
            first: work.tokens[0],
            next,
            max_tokens: work.spec.max_tokens,
        };
        self.held.lock().unwrap().running.insert(request, run);
        self.say(&gateway, &Message::DecodeRunning { request, attempt });
        // The holder's copy is not needed: these sequences have no KV. Another agent's leaves by its own rules.
        self.say(&work.holder, &Message::ReleaseKv { request, attempt });
    }

    fn step(&mut self) {
        let mut by_gateway: BTreeMap<AgentId, Vec<TokenEvent>> = BTreeMap::new();
        let mut held = self.held.lock().unwrap();
        let held = &mut *held;
        held.running.retain(|request, run| {
            let last = run.next + 1 >= run.max_tokens;
            let event = TokenEvent {
                request: *request,
                attempt: run.attempt,
                index: run.next,
                tokens: vec![Token { id: token(run.first, run.next), logprob: None }],
                finish: last.then_some(FinishReason::Length),
            };
            run.next += 1;
            held.tokens += 1;
            match by_gateway.get_mut(&run.gateway) {
                Some(events) => events.push(event),
                None => drop(by_gateway.insert(run.gateway.clone(), vec![event])),
            }
            !last
        });
        for (gateway, events) in by_gateway {
            self.transport.send(&gateway, &Message::Tokens(events), Arc::clone(&self.nothing));
        }
    }
}
