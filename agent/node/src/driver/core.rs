//! State and events of an agent, without sockets and clocks of its own.
//!
//! Invariant: what a machine wants done is done in the order in which it said it, before any later event; so
//! blocks and slots that it gives away are free when the next step uses them.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::sync::Arc;

use deepinfer_protocol::agent_status::{AgentPhase, Role};
use deepinfer_protocol::fleet::FleetView;
use deepinfer_protocol::message::{Message, Refusal};
use deepinfer_protocol::{AgentId, Span, SupernodeId, Time};
use deepinfer_serving::leader::{LeaderAction, LeaderEvent};
use deepinfer_serving::node::{EngineEvent, NodeAction, NodeEvent, StepResult};
use deepinfer_transport::fleet_client::FleetProbe;
use deepinfer_transport::{PeerEvent, Transport};
use tokio::sync::watch;

use super::book::Book;
use super::leading::Leading;
use super::machines::{Machines, Target};
use crate::clock::Clock;
use crate::engine::group::{GroupEvent, RankGroup};
use crate::engine::thread::{Beat, Opened, Output};
use crate::metrics::Metrics;
use crate::plan::MachinePlan;

/// What is left after the engines failed for good gets this long: parked sequences may still be fetched.
const LAST_DRAIN: Span = Span::secs(30);
/// Invariants of idle machines are looked at this often: it reads every block.
const CHECK_EVERY: Span = Span::secs(1);
/// When work that came to the wrong agent is worth another try: a view of the fleet later.
const RETRY_AFTER: Span = Span::millis(500);

/// What a core is made of.
pub struct CoreSetup {
    /// Name in the fleet.
    pub name: AgentId,
    /// What its engines do.
    pub role: Role,
    /// Of decode.
    pub supernode: Option<SupernodeId>,
    /// Of the pod in the supernode.
    pub index: u16,
    /// Ranks.
    pub ranks: u16,
    /// Time budget of a worker's step.
    pub chunk: Span,
    /// Pods of the supernode.
    pub nodes: u16,
    /// Whether the other agents of the supernode must have answered before this one is ready.
    pub fabric: bool,
    /// How the following of the fleet goes, for metrics.
    pub probe: Option<FleetProbe>,
    /// Connections.
    pub transport: Transport,
    /// The clock.
    pub clock: Clock,
    /// Told once the engines do not come back.
    pub failed: watch::Sender<Option<String>>,
    /// Told once machines are there.
    pub serving: watch::Sender<bool>,
}

/// See the module.
pub struct Core {
    pub(super) setup: CoreSetup,
    pub(super) phase: AgentPhase,
    pub(super) reason: String,
    /// One word for `reason`, for programs.
    pub(super) code: &'static str,
    pub(super) failing_since: Option<Time>,
    /// The engines, or the driver, do not come back: only a new process helps.
    pub(super) dead: bool,
    /// A drain that was asked for before there were machines.
    pub(super) early_drain: Option<Time>,
    /// The supernode's other agents have answered once.
    pub(super) fabric_passed: bool,
    closed: bool,
    plan: Option<MachinePlan>,
    pub(super) group: Option<RankGroup>,
    pub(super) machines: Option<Machines>,
    pub(super) leading: Leading,
    pub(super) book: Option<Book>,
    pub(super) fleet: Arc<FleetView>,
    pub(super) engine: String,
    pub(super) kv_epoch: String,
    /// Of the checkpoint, hex.
    pub(super) model_digest: String,
    /// Messages to this agent itself.
    local: VecDeque<(AgentId, Message, Arc<[u8]>)>,
    group_events: VecDeque<GroupEvent>,
    /// What is sent once the engines have their next step: nobody waits for a socket meanwhile.
    outbox: Vec<(AgentId, Message, Arc<[u8]>)>,
    /// Steps to be counted, as (rank, step, rows, arrivals and time), once the engines have their next step.
    uncounted: Vec<(usize, u64, usize, StepResult)>,
    /// When invariants were looked at last.
    checked: Time,
    /// Number of the step that runs or comes next, and the rows of each machine that has a part in it.
    pub(super) step: u64,
    rows: Vec<Option<usize>>,
    nothing: Arc<[u8]>,
    pub(super) metrics: Metrics,
}

impl Core {
    /// An agent whose engines are not there yet.
    pub fn new(setup: CoreSetup) -> Self {
        Self {
            phase: AgentPhase::Starting,
            reason: "the checkpoint is being opened".to_owned(),
            code: "",
            failing_since: None,
            dead: false,
            early_drain: None,
            fabric_passed: false,
            closed: false,
            plan: None,
            group: None,
            machines: None,
            leading: Leading::new(setup.role, setup.chunk),
            book: None,
            fleet: Arc::default(),
            engine: String::new(),
            kv_epoch: String::new(),
            model_digest: String::new(),
            local: VecDeque::new(),
            group_events: VecDeque::new(),
            outbox: Vec::new(),
            uncounted: Vec::new(),
            checked: Time(0),
            step: 0,
            rows: Vec::new(),
            nothing: Arc::from([]),
            metrics: Metrics::new(&setup.name),
            setup,
        }
    }

    /// The engines are being opened; machines are made when they are there.
    pub fn open(&mut self, mut group: RankGroup, plan: MachinePlan) {
        if self.closed {
            group.close();
            return;
        }
        self.group = Some(group);
        self.model_digest = hex(&plan.weights_digest);
        self.plan = Some(plan);
        self.code = "";
        self.phase = AgentPhase::Warming;
        self.reason = "engines open and run a first step".to_owned();
    }

    /// It did not get so far. `code`: one word, if it may yet heal without a restart.
    pub fn give_up(&mut self, reason: String, code: &'static str) {
        self.phase = AgentPhase::Failed;
        self.reason = reason;
        self.code = code;
    }

    /// Engines or driver do not come back: probes say that the process is to end.
    pub fn die(&mut self, reason: String) {
        self.dead = true;
        self.give_up(reason, "");
    }

    /// Lets the engine threads end.
    pub fn close(&mut self) -> Vec<Arc<Beat>> {
        self.closed = true;
        self.phase = AgentPhase::Drained;
        self.reason = "stopped".to_owned();
        if self.machines.take().is_none() && self.setup.failed.borrow().is_none() {
            self.setup.failed.send_replace(Some(self.reason.clone()));
        }
        self.group.take().map(|mut group| group.close()).unwrap_or_default()
    }

    pub(super) fn now(&self) -> Time {
        self.setup.clock.now()
    }

    // ---- events

    /// The data port speaks.
    pub fn on_peer(&mut self, event: PeerEvent) {
        match event {
            PeerEvent::Frame { from, message, payload } => self.on_message(from, message, payload),
            PeerEvent::Up { peer, process, .. } => {
                self.tell_all(&NodeEvent::PeerUp { peer, process });
                self.test_fabric();
            }
            PeerEvent::Down { peer } => {
                self.tell_leader(LeaderEvent::PeerLost(peer.clone()));
                self.tell_all(&NodeEvent::PeerLost(peer));
            }
        }
        self.settle();
    }

    /// An engine speaks.
    pub fn on_output(&mut self, output: Output) {
        let mut events = Vec::new();
        if let Some(group) = &mut self.group {
            group.on_output(output, &mut events);
        }
        self.group_events.extend(events);
        self.settle();
    }

    /// The fleet changed. Older views are refused.
    pub fn on_fleet(&mut self, view: Arc<FleetView>) {
        if view.generation < self.fleet.generation {
            return;
        }
        let others = view.members.iter().filter(|m| m.name != self.setup.name);
        let peers: Vec<_> = others.map(|m| (m.name.clone(), m.data)).collect();
        self.setup.transport.set_peers(&peers);
        self.fleet = view;
        self.test_fabric();
        let mut out = Vec::new();
        self.leading.follow(self.setup.clock.now(), &self.setup.name, &self.fleet, &mut out);
        self.perform_leader(out);
        self.tell_all(&NodeEvent::Leader(self.leading.leader_of(&self.fleet).cloned()));
        self.settle();
    }

    /// Time passes.
    pub fn on_tick(&mut self) {
        let now = self.now();
        let mut events = Vec::new();
        if let Some(group) = &mut self.group {
            group.on_tick(now, &mut events);
        }
        self.group_events.extend(events);
        self.tell_all(&NodeEvent::Tick);
        self.tell_leader(LeaderEvent::Tick);
        self.settle();
        if now.since(self.checked) >= CHECK_EVERY && self.group.as_ref().is_some_and(RankGroup::idle) {
            self.checked = now;
            self.check();
        }
        if let Some(since) = self.failing_since
            && (self.totals().drain.held == 0 || now.since(since) >= LAST_DRAIN)
        {
            self.setup.failed.send_replace(Some(self.reason.clone()));
        }
    }

    /// Looks for blocks and slots that do not add up: a bug, to be seen and not to be died of (SV-061).
    fn check(&self) {
        if let Some(problem) = self.machines.as_ref().and_then(|machines| machines.check().err()) {
            tracing::error!(%problem, "an invariant of this agent's machines does not hold");
            self.metrics.count_broken_invariant();
        }
    }

    /// Gives the engines their next step, if they are idle and there is one; then sends and counts what the events
    /// before left to do.
    pub fn advance(&mut self) {
        self.give_step();
        self.flush();
    }

    fn give_step(&mut self) {
        let now = self.now();
        if !self.group.as_ref().is_some_and(RankGroup::idle) {
            return;
        }
        let Some(machines) = &mut self.machines else { return };
        let mut works = Vec::with_capacity(machines.len());
        let mut actions = Vec::new();
        for index in 0..machines.len() {
            let mut out = Vec::new();
            works.push(machines.poll_step(index, now, &mut out));
            actions.push(out);
        }
        for (index, out) in actions.into_iter().enumerate() {
            self.perform(index, out);
        }
        if let Some(group) = self.group.as_mut().filter(|group| group.idle())
            && works.iter().any(Option::is_some)
        {
            self.rows.clear();
            self.rows.extend(works.iter().map(|work| work.as_ref().map(|work| work.batch.rows())));
            // A rank without work takes part: the others need its experts.
            let steps = works.into_iter().map(Option::unwrap_or_default).collect();
            let mut events = Vec::new();
            group.step(steps, &mut events);
            self.group_events.extend(events);
        }
        self.settle();
    }

    /// Carries out what events have left to do.
    pub(super) fn settle(&mut self) {
        loop {
            if let Some(event) = self.group_events.pop_front() {
                self.on_group(event);
            } else if let Some((from, message, payload)) = self.local.pop_front() {
                self.on_message(from, message, payload);
            } else {
                return;
            }
        }
    }

    fn on_group(&mut self, event: GroupEvent) {
        match event {
            GroupEvent::Ready(opened) => self.on_ready(&opened),
            GroupEvent::Rank(rank, EngineEvent::StepDone(mut result)) => {
                let own = self.rows.get(rank).copied().flatten();
                let counted =
                    StepResult { arrivals: std::mem::take(&mut result.arrivals), ..StepResult::default() };
                let counted = StepResult {
                    elapsed: result.elapsed,
                    slots_per_layer: result.slots_per_layer,
                    ..counted
                };
                self.uncounted.push((rank, self.step, own.unwrap_or(0), counted));
                if own.is_some() {
                    self.tell(rank, NodeEvent::Engine(EngineEvent::StepDone(result)));
                }
            }
            GroupEvent::Rank(rank, event) => self.tell(rank, NodeEvent::Engine(event)),
            GroupEvent::Stepped { rows, elapsed } => {
                self.step += 1;
                self.metrics.observe_step(rows, elapsed);
            }
            GroupEvent::Failed(reason) => {
                let now = self.now();
                let started = self.machines.is_some();
                self.die(reason);
                if started {
                    self.failing_since = Some(now);
                    self.tell_all(&NodeEvent::Drain { deadline: now + LAST_DRAIN });
                } else {
                    self.setup.failed.send_replace(Some(self.reason.clone()));
                }
            }
        }
    }

    fn on_ready(&mut self, opened: &[Opened]) {
        if self.machines.is_some() {
            // Whatever step was lost with the old engines, the next one has a number of its own.
            self.step += 1;
            tracing::info!("engines were replaced");
            self.tell_all(&NodeEvent::Engine(EngineEvent::Ready));
            return;
        }
        let Some(plan) = self.plan.take() else { return };
        match plan.build(opened) {
            Ok((machines, book)) => {
                self.machines = Some(machines);
                self.book = Some(book);
                self.phase = AgentPhase::Serving;
                self.reason.clear();
                self.test_fabric();
                if let Some(first) = opened.first() {
                    self.engine.clone_from(&first.description);
                    self.kv_epoch.clone_from(&first.kv_epoch);
                }
                self.tell_all(&NodeEvent::Leader(self.leading.leader_of(&self.fleet).cloned()));
                if let Some(deadline) = self.early_drain.take() {
                    self.tell_all(&NodeEvent::Drain { deadline });
                }
                self.setup.serving.send_replace(true);
            }
            Err(reason) => {
                self.die(reason);
                self.setup.failed.send_replace(Some(self.reason.clone()));
            }
        }
    }

    fn on_message(&mut self, from: AgentId, message: Message, payload: Arc<[u8]>) {
        match (&message, self.setup.role) {
            (Message::Enqueue(_) | Message::PrefillReport(_), Role::Prefill)
            | (Message::Place(_) | Message::DecodeReport(_), Role::Decode)
            // A gateway's word to the leader that a decision was not used.
            | (Message::Refuse { .. }, _) => {
                return self.tell_leader(LeaderEvent::Message { from, message });
            }
            (Message::Cancel { .. }, _) => {
                self.tell_leader(LeaderEvent::Message { from: from.clone(), message: message.clone() });
            }
            _ => {}
        }
        let target = self.machines.as_ref().map_or(Target::None, |machines| machines.target(&message));
        match target {
            Target::One(index) => self.tell(index, NodeEvent::Message { from, message, payload }),
            Target::All => self.tell_all(&NodeEvent::Message { from, message, payload }),
            Target::None => self.turn_away(&from, &message),
        }
    }

    /// Answers what is not for this agent, so that nobody waits for it.
    fn turn_away(&mut self, from: &AgentId, message: &Message) {
        let Some((request, attempt)) = message.subject() else { return };
        let answer = match message {
            Message::Enqueue(_) | Message::Place(_) | Message::Prefill(_) | Message::Decode(_) => {
                let reason = Refusal::WrongTarget;
                Message::Refuse { request, attempt, reason, retry_after: RETRY_AFTER }
            }
            Message::FetchKv { .. } => Message::KvGone { request, attempt },
            _ => return,
        };
        self.send(from.clone(), answer, self.nothing.clone());
    }

    // ---- actions

    fn tell(&mut self, index: usize, event: NodeEvent) {
        let now = self.now();
        let mut out = Vec::new();
        if let Some(machines) = &mut self.machines {
            machines.on_event(index, now, event, &mut out);
        }
        self.perform(index, out);
    }

    pub(super) fn tell_all(&mut self, event: &NodeEvent) {
        for index in 0..self.machines.as_ref().map_or(0, Machines::len) {
            self.tell(index, event.clone());
        }
    }

    fn tell_leader(&mut self, event: LeaderEvent) {
        let mut out = Vec::new();
        self.leading.on_event(self.setup.clock.now(), event, &mut out);
        self.perform_leader(out);
    }

    fn perform(&mut self, index: usize, actions: Vec<NodeAction>) {
        for action in actions {
            match action {
                NodeAction::Send { to, message, payload } => self.send(to, message, payload),
                NodeAction::Engine(command) => {
                    let mut events = Vec::new();
                    if let Some(group) = &mut self.group {
                        group.command(index, command, &mut events);
                    }
                    self.group_events.extend(events);
                }
            }
        }
    }

    fn perform_leader(&mut self, actions: Vec<LeaderAction>) {
        for LeaderAction { to, message } in actions {
            self.send(to, message, self.nothing.clone());
        }
    }

    /// To nobody's connection: dropped; leases, time-outs and retries cover it.
    fn send(&mut self, to: AgentId, message: Message, payload: Arc<[u8]>) {
        if to == self.setup.name {
            self.local.push_back((to, message, payload));
        } else {
            self.outbox.push((to, message, payload));
        }
    }

    /// Sends and counts what was put off.
    pub(super) fn flush(&mut self) {
        for (to, message, payload) in self.outbox.drain(..) {
            if !self.setup.transport.send(&to, &message, payload) {
                tracing::debug!(peer = %to, "a message was not sent: no connection");
            }
        }
        let Some(book) = &mut self.book else { return self.uncounted.clear() };
        for (rank, step, rows, result) in self.uncounted.drain(..) {
            book.record(rank, step, rows, &result);
        }
    }
}

/// As digests are written.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}
