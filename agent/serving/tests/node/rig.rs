//! A worker, some ranks, and a gateway made of a few lines, over queues. What happens next is drawn from dice:
//! which message arrives, which engine runs, whose step is polled. Between two peers messages keep their order
//! unless [`Faults`] say otherwise.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use deepinfer_protocol::message::{Failure, Message, Refusal};
use deepinfer_protocol::{AgentId, RequestId, Span, Time};
use deepinfer_serving::node::{
    DecodeRank, EngineEvent, NodeAction, NodeEvent, NodeStatus, PrefillWorker, RankOptions, WorkerOptions,
};

use crate::clients::{Phase, Request};
use crate::engine::{Dice, Engine};
use crate::setup::{gateway, rank_name, worker_name};

/// One in so many; 0 is never.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// Messages to nodes that come a second time, later.
    pub duplicates: usize,
    /// Messages to nodes that overtake the one before.
    pub reorder: usize,
    /// KV pieces with a flipped bit.
    pub damage: usize,
    /// Rounds in which an engine dies.
    pub crashes: usize,
    /// Rounds in which a client leaves.
    pub cancels: usize,
    /// Rounds in which the gateway is lost and found again.
    pub absences: usize,
}

/// A worker or a rank.
pub enum Machine {
    Worker(Box<PrefillWorker>),
    Rank(Box<DecodeRank>),
}

/// A machine and its engine.
pub struct Node {
    pub machine: Machine,
    pub engine: Engine,
    pub events: VecDeque<EngineEvent>,
}

impl Node {
    pub fn status(&self) -> NodeStatus {
        match &self.machine {
            Machine::Worker(worker) => worker.status(),
            Machine::Rank(rank) => rank.status(),
        }
    }

    pub fn check(&self) -> Result<(), String> {
        match &self.machine {
            Machine::Worker(worker) => worker.check(),
            Machine::Rank(rank) => rank.check(),
        }
    }
}

/// Messages with their payloads, oldest first.
pub type Wire = VecDeque<(Message, Arc<[u8]>)>;

/// See the module.
pub struct Rig {
    seed: u64,
    pub now: Time,
    pub dice: Dice,
    pub faults: Faults,
    pub nodes: BTreeMap<AgentId, Node>,
    pub wires: BTreeMap<(AgentId, AgentId), Wire>,
    pub requests: BTreeMap<RequestId, Request>,
    pub refusals: Vec<Refusal>,
    /// What the gateway was told, oldest first.
    pub heard: Vec<(AgentId, Message)>,
    /// The gateway goes on by itself: places, retries, resumes.
    pub auto: bool,
    pub limit: u32,
    pub next_assignment: u64,
    away: bool,
}

/// What is needed to see a failure again.
impl Drop for Rig {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the seed is {}", self.seed);
        }
    }
}

impl Rig {
    pub fn new(seed: u64, worker: WorkerOptions, ranks: Vec<RankOptions>) -> Self {
        let mut limit = worker.context_limit;
        let mut nodes = BTreeMap::new();
        let engine = Engine::new(worker.slots, worker.blocks);
        let machine = Machine::Worker(Box::new(PrefillWorker::new(worker)));
        nodes.insert(worker_name(), Node { machine, engine, events: VecDeque::new() });
        for options in ranks {
            limit = limit.min(options.blocks * 128);
            let (name, engine) = (options.name.clone(), Engine::new(options.slots, options.blocks));
            let machine = Machine::Rank(Box::new(DecodeRank::new(options)));
            nodes.insert(name, Node { machine, engine, events: VecDeque::new() });
        }
        Self {
            seed,
            now: Time(0),
            dice: Dice(seed),
            faults: Faults::default(),
            nodes,
            wires: BTreeMap::new(),
            requests: BTreeMap::new(),
            refusals: Vec::new(),
            heard: Vec::new(),
            auto: true,
            limit,
            next_assignment: 0,
            away: false,
        }
    }

    pub fn status(&self, name: &AgentId) -> NodeStatus {
        self.nodes[name].status()
    }

    pub fn post(&mut self, from: &AgentId, to: &AgentId, message: Message, payload: Arc<[u8]>) {
        let queue = self.wires.entry((from.clone(), to.clone())).or_default();
        let to_node = *to != gateway();
        let mut payload = payload;
        if self.faults.damage > 0 && !payload.is_empty() && self.dice.one_in(self.faults.damage) {
            let at = self.dice.roll(payload.len());
            let mut bytes = payload.to_vec();
            bytes[at] ^= 1 << self.dice.roll(8);
            payload = bytes.into();
        }
        if to_node && self.faults.duplicates > 0 && self.dice.one_in(self.faults.duplicates) {
            queue.push_back((message.clone(), payload.clone()));
        }
        queue.push_back((message, payload));
        let n = queue.len();
        if to_node && n > 1 && self.faults.reorder > 0 && self.dice.one_in(self.faults.reorder) {
            let other = self.dice.roll(n - 1);
            queue.swap(n - 1, other);
        }
    }

    /// Tells a node something and carries out what it wants.
    pub fn tell(&mut self, name: &AgentId, event: NodeEvent) {
        let mut out = Vec::new();
        let now = self.now;
        let node = self.nodes.get_mut(name).expect("a node of the rig");
        match &mut node.machine {
            Machine::Worker(worker) => worker.on_event(now, event, &mut out),
            Machine::Rank(rank) => rank.on_event(now, event, &mut out),
        }
        node.check().expect("invariants hold after every event");
        self.carry_out(name, out);
    }

    pub fn poll(&mut self, name: &AgentId) {
        let mut out = Vec::new();
        let now = self.now;
        let node = self.nodes.get_mut(name).expect("a node of the rig");
        if node.engine.stepping() || node.events.iter().any(|e| matches!(e, EngineEvent::StepDone(_))) {
            return;
        }
        let work = match &mut node.machine {
            Machine::Worker(worker) => worker.poll_step(now, &mut out),
            Machine::Rank(rank) => rank.poll_step(now, &mut out),
        };
        self.carry_out(name, out);
        if let Some(work) = work {
            self.nodes.get_mut(name).expect("a node of the rig").engine.start_step(work);
        }
    }

    fn carry_out(&mut self, name: &AgentId, actions: Vec<NodeAction>) {
        for action in actions {
            match action {
                NodeAction::Send { to, message, payload } => self.post(name, &to, message, payload),
                NodeAction::Engine(command) => {
                    self.nodes.get_mut(name).expect("a node of the rig").engine.command(command);
                }
            }
        }
    }

    pub fn crash_engine(&mut self, name: &AgentId) {
        let node = self.nodes.get_mut(name).expect("a node of the rig");
        node.engine.crash();
        node.events.clear();
        node.events.push_back(EngineEvent::Lost(Failure::EngineLost));
        node.events.push_back(EngineEvent::Ready);
    }

    /// Lets one of the things happen that can.
    pub fn round(&mut self) {
        self.now = self.now + Span::micros(100 + 100 * self.dice.roll(10) as u64);
        self.inject();
        match self.dice.roll(8) {
            0..=3 => self.deliver_any(),
            4 | 5 => self.run_any_engine(),
            6 => {
                for name in self.nodes.keys().cloned().collect::<Vec<_>>() {
                    self.poll(&name);
                }
            }
            _ => self.tick(),
        }
    }

    pub fn tick(&mut self) {
        self.now = self.now + Span::millis(2);
        for name in self.nodes.keys().cloned().collect::<Vec<_>>() {
            self.tell(&name, NodeEvent::Tick);
        }
        let again: Vec<RequestId> =
            self.requests.iter().filter(|(_, r)| r.phase == Phase::Again).map(|(id, _)| *id).collect();
        again.into_iter().for_each(|id| self.place(id));
    }

    fn inject(&mut self) {
        let Faults { crashes, cancels, absences, .. } = self.faults;
        if crashes > 0 && self.dice.one_in(crashes) {
            let n = self.dice.roll(self.nodes.len());
            let name = self.nodes.keys().nth(n).expect("a node").clone();
            self.crash_engine(&name);
        }
        if cancels > 0 && self.dice.one_in(cancels) {
            let live = |r: &Request| !matches!(r.phase, Phase::Done | Phase::Cancelled);
            let ids: Vec<RequestId> =
                self.requests.iter().filter(|(_, r)| live(r)).map(|(id, _)| *id).collect();
            if let Some(id) = ids.get(self.dice.roll(ids.len())) {
                self.cancel(*id);
            }
        }
        if absences > 0 && self.dice.one_in(absences) {
            self.away = !self.away;
            for name in self.nodes.keys().cloned().collect::<Vec<_>>() {
                let back = NodeEvent::PeerUp { peer: gateway(), process: Some(0) };
                self.tell(&name, if self.away { NodeEvent::PeerLost(gateway()) } else { back });
            }
        }
    }

    pub fn deliver_any(&mut self) {
        let full: Vec<(AgentId, AgentId)> =
            self.wires.iter().filter(|(_, q)| !q.is_empty()).map(|(pair, _)| pair.clone()).collect();
        if let Some((from, to)) = full.get(self.dice.roll(full.len())) {
            self.deliver(from, to);
        }
    }

    pub fn deliver_if_any(&mut self, from: &AgentId, to: &AgentId) {
        if self.wires.contains_key(&(from.clone(), to.clone())) {
            self.deliver(from, to);
        }
    }

    pub fn deliver(&mut self, from: &AgentId, to: &AgentId) {
        let queue = self.wires.get_mut(&(from.clone(), to.clone())).expect("a wire that was used");
        let Some((message, payload)) = queue.pop_front() else { return };
        if *to == gateway() {
            self.on_gateway_message(from, message);
        } else if self.nodes.contains_key(to) {
            self.tell(to, NodeEvent::Message { from: from.clone(), message, payload });
        }
    }

    /// Delivers, runs and polls, in a fixed order, until nothing is left to do without time passing.
    pub fn pump(&mut self) {
        loop {
            let mut busy = false;
            let full = self.wires.iter().filter(|(_, q)| !q.is_empty());
            for (from, to) in full.map(|(pair, _)| pair.clone()).collect::<Vec<_>>() {
                busy = true;
                self.deliver(&from, &to);
            }
            for name in self.nodes.keys().cloned().collect::<Vec<_>>() {
                busy |= self.run_engine(&name);
                self.poll(&name);
                busy |= self.nodes[&name].engine.busy();
            }
            if !busy {
                return;
            }
        }
    }

    /// Runs what an engine was given and tells its machine.
    pub fn run_engine(&mut self, name: &AgentId) -> bool {
        let node = self.nodes.get_mut(name).expect("a node of the rig");
        while node.engine.busy() {
            let event = node.engine.run_one();
            node.events.extend(event);
        }
        let events: Vec<EngineEvent> = node.events.drain(..).collect();
        for event in &events {
            if *event == EngineEvent::Ready {
                self.nodes.get_mut(name).expect("a node of the rig").engine.revive();
            }
            self.tell(name, NodeEvent::Engine(event.clone()));
        }
        !events.is_empty()
    }

    /// Lets time pass, with ticks.
    pub fn wait(&mut self, span: Span) {
        self.now = self.now + span;
        for name in self.nodes.keys().cloned().collect::<Vec<_>>() {
            self.tell(&name, NodeEvent::Tick);
        }
    }

    pub fn worker(&self) -> NodeStatus {
        self.status(&worker_name())
    }

    pub fn rank(&self, n: usize) -> NodeStatus {
        self.status(&rank_name(n))
    }

    pub fn engine(&self, name: &AgentId) -> &Engine {
        &self.nodes[name].engine
    }

    fn run_any_engine(&mut self) {
        let n = self.dice.roll(self.nodes.len());
        let (name, node) = self.nodes.iter_mut().nth(n).expect("a node");
        let name = name.clone();
        if node.engine.busy() && self.dice.roll(2) == 0 {
            let event = node.engine.run_one();
            node.events.extend(event);
        } else if let Some(event) = node.events.pop_front() {
            if event == EngineEvent::Ready {
                node.engine.revive();
            }
            self.tell(&name, NodeEvent::Engine(event));
        }
    }

    pub fn quiet(&self) -> bool {
        self.all_ended()
            && self.wires.values().all(VecDeque::is_empty)
            && self.nodes.values().all(|n| !n.engine.busy() && n.events.is_empty())
    }

    /// Runs until every request has ended and nothing is under way.
    ///
    /// # Panics
    /// If that does not happen.
    pub fn run(&mut self) {
        for _ in 0..400_000 {
            if self.all_ended() {
                self.faults = Faults::default();
            }
            if self.quiet() {
                return self.settle();
            }
            self.round();
        }
        panic!("no end: {:#?}", self.requests.values().map(|r| (r.phase, r.attempt)).collect::<Vec<_>>());
    }

    /// What is left when all is quiet: nothing.
    fn settle(&mut self) {
        for (name, node) in &self.nodes {
            node.check().expect("invariants hold");
            let status = node.status();
            assert_eq!(status.inflight, 0, "{name} holds {status:?}");
            assert_eq!(status.parked_bytes, 0, "{name}");
            assert_eq!(status.blocks.used, 0, "{name}");
            assert_eq!(status.blocks.free + status.blocks.cached, status.blocks.total, "{name}");
        }
    }
}
