//! Gateways, agents and the fleet in one loop with one clock: what happens next is what is due first, and every
//! choice comes from one seed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use deepinfer_protocol::agent_status::Role;
use deepinfer_protocol::fleet::{FleetMember, FleetView, Leader};
use deepinfer_protocol::message::Message;
use deepinfer_protocol::{AgentId, Epoch, Generation, RequestId, Span, Time};
use deepinfer_serving::gateway::{Gateway, GatewayAction, GatewayEvent, GatewayOptions, NewRequest};
use deepinfer_serving::leader::LeaderAction;
use deepinfer_serving::node::{EngineEvent, NodeAction, NodeEvent};

use crate::agent::{Agent, Sizes, Wants};
use crate::client::{Clients, Ending};
use crate::dice::Dice;
use crate::net::{Letter, Net};

/// Something that is due.
pub enum Due {
    Letter(Letter),
    /// The oldest answer of an engine; stale if the engine was replaced since.
    Engine {
        process: usize,
        machine: usize,
        engine: u64,
    },
    Ready {
        process: usize,
        machine: usize,
        engine: u64,
    },
    Lost {
        process: usize,
        peer: usize,
    },
    Connect {
        a: usize,
        b: usize,
    },
    Fleet {
        process: usize,
        fleet: Arc<FleetView>,
        life: u64,
    },
    Tick,
    Arrive {
        gateway: usize,
        new: Box<NewRequest>,
        leaves_after: Option<(usize, bool)>,
    },
    Leave {
        gateway: usize,
        request: RequestId,
        satisfied: bool,
    },
    Restart {
        process: usize,
    },
    NameLeader {
        role: Role,
        after: usize,
    },
    Drained {
        process: usize,
    },
    Undrain {
        process: usize,
    },
}

/// A process.
pub enum Process {
    Gateway(Box<Gateway>),
    Agent(Box<Agent>),
    Dead,
}

/// The whole system.
pub struct World {
    pub now: Time,
    pub dice: Dice,
    pub net: Net,
    pub processes: Vec<Process>,
    pub names: Vec<AgentId>,
    pub roles: Vec<Option<Role>>,
    pub clients: Clients,
    pub fleet: Arc<FleetView>,
    pub sizes: Sizes,
    pub options: GatewayOptions,
    due: BTreeMap<(Time, u64), Due>,
    order: u64,
    pub engines: BTreeMap<(usize, usize), u64>,
    engine_last: BTreeMap<(usize, usize), Time>,
    lives: Vec<u64>,
    pub heard_up: BTreeSet<(usize, usize)>,
}

const TICK: Span = Span::millis(20);

impl World {
    pub fn new(seed: u64, gateways: usize, workers: usize, supernodes: usize, sizes: Sizes) -> Self {
        let mut world = Self {
            now: Time::default(),
            dice: Dice::new(seed),
            net: Net::new(Span::millis(3)),
            processes: Vec::new(),
            names: Vec::new(),
            roles: Vec::new(),
            clients: Clients::default(),
            fleet: Arc::default(),
            sizes,
            options: GatewayOptions::default(),
            due: BTreeMap::new(),
            order: 0,
            engines: BTreeMap::new(),
            engine_last: BTreeMap::new(),
            lives: Vec::new(),
            heard_up: BTreeSet::new(),
        };
        let groups = [
            ("g", gateways, None),
            ("p", workers, Some(Role::Prefill)),
            ("d", supernodes, Some(Role::Decode)),
        ];
        for (letter, count, role) in groups {
            for i in 0..count {
                world.names.push(AgentId::new(format!("{letter}{i}")));
                world.roles.push(role);
                world.processes.push(Process::Dead);
                world.lives.push(0);
            }
        }
        let lead = |name: &str| Some(Leader { agent: name.into(), epoch: Epoch(1) });
        world.fleet = Arc::new(world.view(Generation(1), lead("p0"), lead("d0")));
        for process in 0..world.names.len() {
            world.start(process);
        }
        world.push(Time::default(), Due::Tick);
        world
    }

    fn view(&self, generation: Generation, prefill: Option<Leader>, decode: Option<Leader>) -> FleetView {
        let member = |(name, role): (&AgentId, &Option<Role>)| {
            role.map(|role| FleetMember {
                name: name.clone(),
                role,
                supernode: None,
                index: 0,
                first_rank: 0,
                ranks: if role == Role::Decode { self.sizes.ranks } else { 1 },
                data: ([127, 0, 0, 1], 1).into(),
                control: ([127, 0, 0, 1], 2).into(),
                serving: true,
                kv_epoch: "kv".to_owned(),
            })
        };
        FleetView {
            generation,
            cluster: "test".to_owned(),
            members: self.names.iter().zip(&self.roles).filter_map(member).collect(),
            prefill_leader: prefill,
            decode_leader: decode,
            closed: false,
            rebuilding: Vec::new(),
        }
    }

    /// Changes the fleet; every process hears of it at another time.
    pub fn change_fleet(&mut self, change: impl FnOnce(&mut FleetView)) {
        let mut fleet = (*self.fleet).clone();
        fleet.generation = fleet.generation.next();
        change(&mut fleet);
        self.fleet = Arc::new(fleet);
        for process in 0..self.names.len() {
            self.tell_fleet(process);
        }
    }

    fn tell_fleet(&mut self, process: usize) {
        let at = self.now + Span::millis(self.dice.below(300) as u64);
        let (fleet, life) = (self.fleet.clone(), self.lives[process]);
        self.push(at, Due::Fleet { process, fleet, life });
    }

    pub fn push(&mut self, at: Time, due: Due) {
        self.order += 1;
        self.due.insert((at.max(self.now), self.order), due);
    }

    /// Makes the process anew and connects it.
    fn start(&mut self, process: usize) {
        self.lives[process] += 1;
        let name = self.names[process].clone();
        self.processes[process] = match self.roles[process] {
            None => {
                let options = GatewayOptions { seed: process as u64, ..self.options.clone() };
                Process::Gateway(Box::new(Gateway::new(options)))
            }
            Some(role) => Process::Agent(Box::new(Agent::new(name, role, self.sizes))),
        };
        for machine in 0..self.sizes.ranks as usize {
            *self.engines.entry((process, machine)).or_default() += 1;
        }
        self.tell_fleet(process);
        for peer in (0..self.names.len()).filter(|p| *p != process) {
            let at = self.now + Span::millis(self.dice.below(200) as u64);
            self.push(at, Due::Connect { a: process, b: peer });
        }
    }

    /// Runs until nothing is left that happens by itself, or until `end`.
    pub fn run_until(&mut self, end: Time, mut idle: impl FnMut(&mut Self) -> bool) {
        while let Some(entry) = self.due.first_entry() {
            if entry.key().0 > end {
                return;
            }
            let ((now, _), due) = entry.remove_entry();
            self.now = now;
            let tick = matches!(due, Due::Tick);
            self.happen(due);
            if tick && idle(self) {
                return;
            }
        }
    }

    fn happen(&mut self, due: Due) {
        match due {
            Due::Letter(letter) => self.letter(letter),
            Due::Engine { process, machine, engine } => self.engine_speaks(process, machine, engine),
            Due::Ready { process, machine, engine } => {
                if self.engines.get(&(process, machine)) == Some(&engine) {
                    self.node(process, machine, NodeEvent::Engine(EngineEvent::Ready));
                }
            }
            Due::Lost { process, peer } => self.notice_lost(process, peer),
            Due::Connect { a, b } => self.connect(a, b),
            Due::Fleet { process, fleet, life } if self.lives[process] == life => self.follow(process, fleet),
            Due::Fleet { .. } => {}
            Due::Tick => {
                self.push(self.now + TICK, Due::Tick);
                (0..self.names.len()).for_each(|p| self.tick(p));
            }
            Due::Arrive { gateway, new, leaves_after } => {
                self.clients.ask(&new, leaves_after);
                if matches!(self.processes[gateway], Process::Dead) {
                    let asked = self.clients.asked.get_mut(&new.id).expect("it was just asked");
                    asked.ending = Some(Ending::Lost);
                }
                self.gateway(gateway, GatewayEvent::Arrived(*new));
            }
            Due::Leave { gateway, request, satisfied } => self.leave(gateway, request, satisfied),
            Due::Restart { process } => self.start(process),
            Due::NameLeader { role, after } => self.name_leader(role, after),
            Due::Drained { process } => {
                self.crash(process, Span::millis(500));
                self.serving_again(process);
            }
            Due::Undrain { process } => {
                self.nodes(process, &NodeEvent::Undrain);
                self.serving_again(process);
            }
        }
    }

    fn serving_again(&mut self, process: usize) {
        let name = self.names[process].clone();
        self.change_fleet(|f| f.members.iter_mut().filter(|m| m.name == name).for_each(|m| m.serving = true));
    }

    fn letter(&mut self, letter: Letter) {
        if !self.net.arrives(&letter) {
            return;
        }
        let Letter { from, to, message, payload, .. } = letter;
        let from = self.names[from].clone();
        match &mut self.processes[to] {
            Process::Gateway(_) => self.gateway(to, GatewayEvent::Message { from, message }),
            Process::Agent(agent) => {
                let mut out = Vec::new();
                let wants = agent.deliver(self.now, from, message, payload, &mut out);
                self.carry_out(to, out, wants);
            }
            Process::Dead => {}
        }
    }

    /// Of a gateway, what the ids of its requests begin with: those of its first life, whose requests are asked.
    fn process_number(&self, process: usize) -> u64 {
        process as u64 + 1 + 1_000 * (self.lives[process] - 1)
    }

    fn connect(&mut self, a: usize, b: usize) {
        let dead = |p: usize| matches!(self.processes[p], Process::Dead);
        if dead(a) || dead(b) || self.net.is_up(a, b) {
            return;
        }
        // A new connection makes the end of the old one known.
        self.notice_lost(a, b);
        self.notice_lost(b, a);
        self.net.connect(a, b);
        for (process, peer) in [(a, b), (b, a)] {
            self.heard_up.insert((process, peer));
            let name = self.names[peer].clone();
            match &self.processes[process] {
                Process::Gateway(_) => self.gateway(process, GatewayEvent::PeerUp(name)),
                _ => {
                    let process_of_peer = Some(self.process_number(peer));
                    self.nodes(process, &NodeEvent::PeerUp { peer: name, process: process_of_peer });
                }
            }
        }
    }

    fn notice_lost(&mut self, process: usize, peer: usize) {
        if self.net.is_up(process, peer) || !self.heard_up.remove(&(process, peer)) {
            return;
        }
        let name = self.names[peer].clone();
        match &mut self.processes[process] {
            Process::Gateway(_) => self.gateway(process, GatewayEvent::PeerLost(name)),
            Process::Agent(agent) => {
                let mut out = Vec::new();
                let wants = agent.peer_lost(self.now, &name, &mut out);
                self.carry_out(process, out, wants);
            }
            Process::Dead => {}
        }
    }

    fn follow(&mut self, process: usize, fleet: Arc<FleetView>) {
        match &mut self.processes[process] {
            Process::Gateway(_) => self.gateway(process, GatewayEvent::Fleet(fleet)),
            Process::Agent(agent) => {
                let mut out = Vec::new();
                let wants = agent.follow(self.now, &fleet, &mut out);
                self.carry_out(process, out, wants);
            }
            Process::Dead => {}
        }
    }

    fn tick(&mut self, process: usize) {
        match &mut self.processes[process] {
            Process::Gateway(_) => self.gateway(process, GatewayEvent::Tick),
            Process::Agent(agent) => {
                let mut out = Vec::new();
                let wants = agent.tick(self.now, &mut out);
                self.carry_out(process, out, wants);
            }
            Process::Dead => {}
        }
    }

    fn leave(&mut self, gateway: usize, request: RequestId, satisfied: bool) {
        let open = self.clients.asked.get(&request).is_some_and(|a| a.ending.is_none());
        if !open || matches!(self.processes[gateway], Process::Dead) {
            return;
        }
        if satisfied {
            self.gateway(gateway, GatewayEvent::Satisfied(request));
            let asked = self.clients.asked.get_mut(&request).expect("it was asked");
            asked.ending = Some(Ending::Satisfied);
        } else {
            self.gateway(gateway, GatewayEvent::ClientGone(request));
        }
    }

    fn gateway(&mut self, process: usize, event: GatewayEvent) {
        let Process::Gateway(gateway) = &mut self.processes[process] else { return };
        let mut out = Vec::new();
        gateway.on_event(self.now, event, &mut out);
        if let Err(broken) = gateway.check() {
            panic!("{}: {broken}", self.names[process]);
        }
        let stats = gateway.stats();
        assert!(stats.fresh <= self.options.max_waiting, "the queue is over its limit");
        assert!(stats.fresh_tokens <= self.options.max_waiting_tokens, "the queue is over its limit");
        for action in out {
            self.clients.hear(&action);
            match action {
                GatewayAction::Send { to, message } => self.send(process, &to, message, Arc::from([])),
                GatewayAction::Tokens { request, .. } => {
                    if let Some(satisfied) = self.clients.leaver(request) {
                        let at = self.now + Span::millis(self.dice.below(30) as u64);
                        self.push(at, Due::Leave { gateway: process, request, satisfied });
                    }
                }
                _ => {}
            }
        }
    }

    pub fn nodes(&mut self, process: usize, event: &NodeEvent) {
        let Process::Agent(agent) = &mut self.processes[process] else { return };
        let mut wants = Wants::new();
        agent.tell_all(self.now, event, &mut wants);
        self.carry_out(process, Vec::new(), wants);
    }

    fn node(&mut self, process: usize, machine: usize, event: NodeEvent) {
        let Process::Agent(agent) = &mut self.processes[process] else { return };
        let mut wants = Wants::new();
        agent.tell(self.now, machine, event, &mut wants);
        self.carry_out(process, Vec::new(), wants);
    }

    fn engine_speaks(&mut self, process: usize, machine: usize, engine: u64) {
        if self.engines.get(&(process, machine)) != Some(&engine) {
            return;
        }
        let Process::Agent(agent) = &mut self.processes[process] else { return };
        let Some(answer) = agent.engines[machine].answers.pop_front() else { return };
        if matches!(answer, EngineEvent::StepDone(_)) {
            agent.engines[machine].stepping = false;
        }
        self.node(process, machine, NodeEvent::Engine(answer));
    }

    /// Carries out what an agent wants, then asks idle engines for their next step.
    fn carry_out(&mut self, process: usize, said: Vec<LeaderAction>, wants: Wants) {
        for LeaderAction { to, message } in said {
            self.send(process, &to, message, Arc::from([]));
        }
        self.do_all(process, wants);
        let machines = match &self.processes[process] {
            Process::Agent(agent) => agent.machines.len(),
            _ => 0,
        };
        for machine in 0..machines {
            self.poll(process, machine);
        }
    }

    fn do_all(&mut self, process: usize, wants: Wants) {
        for (machine, action) in wants {
            match action {
                NodeAction::Send { to, message, payload } => self.send(process, &to, message, payload),
                NodeAction::Engine(command) => {
                    let Process::Agent(agent) = &mut self.processes[process] else { return };
                    let before = agent.engines[machine].answers.len();
                    agent.engines[machine].command(command);
                    if agent.engines[machine].answers.len() > before {
                        let took = Span::millis(self.dice.below(3) as u64);
                        self.answer_after(process, machine, took);
                    }
                }
            }
        }
    }

    fn poll(&mut self, process: usize, machine: usize) {
        let Process::Agent(agent) = &mut self.processes[process] else { return };
        if agent.engines[machine].stepping {
            return;
        }
        let mut out = Vec::new();
        let Some(work) = agent.machines[machine].poll_step(self.now, &mut out) else {
            return self.do_all(process, out.into_iter().map(|a| (machine, a)).collect());
        };
        self.do_all(process, out.into_iter().map(|a| (machine, a)).collect());
        let rows = work.batch.rows() as u64;
        let elapsed =
            Span::millis(3).plus(Span::micros(100 * rows)).plus(Span::micros(self.dice.below(2_000) as u64));
        let Process::Agent(agent) = &mut self.processes[process] else { return };
        agent.engines[machine].step(&work, elapsed);
        self.answer_after(process, machine, elapsed);
    }

    fn answer_after(&mut self, process: usize, machine: usize, took: Span) {
        let last = self.engine_last.entry((process, machine)).or_default();
        *last = (*last).max(self.now + took);
        let (at, engine) = (*last, self.engines[&(process, machine)]);
        self.push(at, Due::Engine { process, machine, engine });
    }

    fn send(&mut self, from: usize, to: &AgentId, message: Message, payload: Arc<[u8]>) {
        let Some(to) = self.names.iter().position(|n| n == to) else { return };
        for (at, letter) in self.net.send(self.now, &mut self.dice, (from, to), message, payload) {
            self.push(at, Due::Letter(letter));
        }
    }
}
