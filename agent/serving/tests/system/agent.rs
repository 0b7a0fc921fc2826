//! One agent's process: its machines, its engines, the leaders it may be, and the routing between them, as a driver
//! does it.

use std::sync::Arc;

use deepinfer_protocol::agent_status::Role;
use deepinfer_protocol::fleet::FleetView;
use deepinfer_protocol::message::Message;
use deepinfer_protocol::{AgentId, Rank, RequestId, Span, Time};
use deepinfer_serving::batch::{
    ChunkRows, StepLoad, TimeModel, Truncation, WorkLayer, WorkModel, WorkShape, prefill_work,
};
use deepinfer_serving::leader::{
    DecodeLeader, DecodeLeaderOptions, LeaderAction, LeaderEvent, PrefillLeader, PrefillLeaderOptions,
};
use deepinfer_serving::node::{
    DecodeRank, NodeAction, NodeEvent, NodeStatus, PrefillWorker, RankOptions, StepWork, WorkerOptions,
};

use crate::client::CONTEXT_LIMIT;
use crate::engine::ScriptedEngine;

/// Small enough that memory runs out often.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub worker_slots: u32,
    pub worker_blocks: u32,
    pub rank_slots: u32,
    pub rank_blocks: u32,
    pub ranks: u16,
    /// Output tokens that leader and ranks expect.
    pub reserve: u32,
}

/// A worker or a rank.
pub enum Machine {
    Worker(Box<PrefillWorker>),
    Rank(Box<DecodeRank>),
}

/// What one machine wants done, and which.
pub type Wants = Vec<(usize, NodeAction)>;

/// The process.
pub struct Agent {
    pub name: AgentId,
    pub machines: Vec<Machine>,
    pub engines: Vec<ScriptedEngine>,
    pub prefill: PrefillLeader,
    pub decode: DecodeLeader,
    fleet: Arc<FleetView>,
}

impl Machine {
    pub fn on_event(&mut self, now: Time, event: NodeEvent, out: &mut Vec<NodeAction>) {
        match self {
            Self::Worker(worker) => worker.on_event(now, event, out),
            Self::Rank(rank) => rank.on_event(now, event, out),
        }
    }

    pub fn poll_step(&mut self, now: Time, out: &mut Vec<NodeAction>) -> Option<StepWork> {
        match self {
            Self::Worker(worker) => worker.poll_step(now, out),
            Self::Rank(rank) => rank.poll_step(now, out),
        }
    }

    pub fn status(&self) -> NodeStatus {
        match self {
            Self::Worker(worker) => worker.status(),
            Self::Rank(rank) => rank.status(),
        }
    }

    pub fn check(&self) -> Result<(), String> {
        match self {
            Self::Worker(worker) => worker.check(),
            Self::Rank(rank) => rank.check(),
        }
    }

    fn parks(&self, request: RequestId) -> bool {
        matches!(self, Self::Rank(rank) if rank.parks(request))
    }

    fn knows(&self, request: RequestId) -> bool {
        matches!(self, Self::Rank(rank) if rank.knows(request))
    }
}

impl Agent {
    pub fn new(name: AgentId, role: Role, sizes: Sizes) -> Self {
        let machines: Vec<Machine> = match role {
            Role::Prefill => vec![Machine::Worker(Box::new(worker(name.clone(), sizes)))],
            Role::Decode => (0..sizes.ranks)
                .map(|rank| {
                    let mut options =
                        RankOptions::new(name.clone(), Rank(rank), sizes.rank_slots, sizes.rank_blocks);
                    options.context_limit = CONTEXT_LIMIT;
                    options.reserve = sizes.reserve;
                    options.kv_epoch = "kv".to_owned();
                    Machine::Rank(Box::new(DecodeRank::new(options)))
                })
                .collect(),
        };
        let decode = DecodeLeaderOptions { reserve: sizes.reserve, ..DecodeLeaderOptions::default() };
        Self {
            engines: machines.iter().map(|_| ScriptedEngine::default()).collect(),
            machines,
            prefill: PrefillLeader::new(PrefillLeaderOptions::default()),
            decode: DecodeLeader::new(decode),
            fleet: Arc::default(),
            name,
        }
    }

    /// Follows a newer view: leads or resigns, and reports to whom it names.
    pub fn follow(&mut self, now: Time, fleet: &Arc<FleetView>, out: &mut Vec<LeaderAction>) -> Wants {
        if fleet.generation <= self.fleet.generation {
            return Wants::new();
        }
        self.fleet = fleet.clone();
        let own = |leader: &Option<deepinfer_protocol::fleet::Leader>| {
            leader
                .as_ref()
                .filter(|l| l.agent == self.name)
                .map_or(LeaderEvent::Resign, |l| LeaderEvent::Lead(l.epoch))
        };
        let (prefill, decode) = (own(&fleet.prefill_leader), own(&fleet.decode_leader));
        self.prefill.on_event(now, LeaderEvent::Fleet(fleet.clone()), out);
        self.prefill.on_event(now, prefill, out);
        self.decode.on_event(now, LeaderEvent::Fleet(fleet.clone()), out);
        self.decode.on_event(now, decode, out);
        let mut wants = Wants::new();
        for at in 0..self.machines.len() {
            let leader = match self.machines[at] {
                Machine::Worker(_) => fleet.prefill_leader.clone(),
                Machine::Rank(_) => fleet.decode_leader.clone(),
            };
            self.tell(now, at, NodeEvent::Leader(leader), &mut wants);
        }
        wants
    }

    /// Tells one machine something.
    pub fn tell(&mut self, now: Time, at: usize, event: NodeEvent, wants: &mut Wants) {
        let mut out = Vec::new();
        self.machines[at].on_event(now, event, &mut out);
        if let Err(broken) = self.machines[at].check() {
            panic!("{} machine {at}: {broken}", self.name);
        }
        wants.extend(out.into_iter().map(|action| (at, action)));
    }

    /// Tells all machines something.
    pub fn tell_all(&mut self, now: Time, event: &NodeEvent, wants: &mut Wants) {
        for at in 0..self.machines.len() {
            self.tell(now, at, event.clone(), wants);
        }
    }

    /// A message from another process, or from itself.
    pub fn deliver(
        &mut self,
        now: Time,
        from: AgentId,
        message: Message,
        payload: Arc<[u8]>,
        out: &mut Vec<LeaderAction>,
    ) -> Wants {
        let mut wants = Wants::new();
        let to_leader =
            |message: &Message| LeaderEvent::Message { from: from.clone(), message: message.clone() };
        match &message {
            Message::Enqueue(_) | Message::PrefillReport(_) => {
                self.prefill.on_event(now, to_leader(&message), out)
            }
            Message::Place(_) | Message::DecodeReport(_) => {
                self.decode.on_event(now, to_leader(&message), out)
            }
            Message::Refuse { .. } | Message::Cancel { .. } => {
                self.prefill.on_event(now, to_leader(&message), out);
                self.decode.on_event(now, to_leader(&message), out);
            }
            _ => {}
        }
        let event = NodeEvent::Message { from, message: message.clone(), payload };
        match &message {
            Message::Cancel { .. } => self.tell_all(now, &event, &mut wants),
            Message::Prefill(_) => self.tell(now, 0, event, &mut wants),
            Message::Decode(work) => {
                let at = (work.rank.0 as usize).min(self.machines.len() - 1);
                self.tell(now, at, event, &mut wants);
            }
            Message::FetchKv { request, .. } | Message::ReleaseKv { request, .. } => {
                let at = self.machines.iter().position(|m| m.parks(*request)).unwrap_or(0);
                self.tell(now, at, event, &mut wants);
            }
            Message::KvPiece { request, .. } | Message::KvGone { request, .. } => {
                let at = self.machines.iter().position(|m| m.knows(*request)).unwrap_or(0);
                self.tell(now, at, event, &mut wants);
            }
            _ => {}
        }
        wants
    }

    /// A peer is gone.
    pub fn peer_lost(&mut self, now: Time, peer: &AgentId, out: &mut Vec<LeaderAction>) -> Wants {
        self.prefill.on_event(now, LeaderEvent::PeerLost(peer.clone()), out);
        self.decode.on_event(now, LeaderEvent::PeerLost(peer.clone()), out);
        let mut wants = Wants::new();
        self.tell_all(now, &NodeEvent::PeerLost(peer.clone()), &mut wants);
        wants
    }

    /// Time passes.
    pub fn tick(&mut self, now: Time, out: &mut Vec<LeaderAction>) -> Wants {
        self.prefill.on_event(now, LeaderEvent::Tick, out);
        self.decode.on_event(now, LeaderEvent::Tick, out);
        let mut wants = Wants::new();
        self.tell_all(now, &NodeEvent::Tick, &mut wants);
        wants
    }

    /// What is still held here, in words; empty if nothing is.
    pub fn leftovers(&self) -> Vec<String> {
        let mut left = Vec::new();
        for (at, machine) in self.machines.iter().enumerate() {
            let s = machine.status();
            if s.inflight > 0 || s.blocks.used > 0 || s.parked_bytes > 0 {
                left.push(format!("{} machine {at}: {s:?}", self.name));
            }
        }
        for (what, n) in [
            ("prefill queue", self.prefill.queued()),
            ("prefill assignments", self.prefill.unseen()),
            ("decode queue", self.decode.queued()),
            ("decode assignments", self.decode.unseen()),
        ] {
            if n > 0 {
                left.push(format!("{}: {n} in {what}", self.name));
            }
        }
        left
    }
}

fn worker(name: AgentId, sizes: Sizes) -> PrefillWorker {
    let shape = WorkShape::new(&small_model()).expect("the sizes are in bounds");
    let work = prefill_work(&shape, ChunkRows::last(128, 128), Truncation::Off).total;
    let load = StepLoad { work, rows: 128, sequences: 1 };
    let time = TimeModel::new(u64::try_from(work).unwrap_or(u64::MAX) * 40, &[(load, Span::millis(25))]);
    let mut options = WorkerOptions::new(name, sizes.worker_slots, sizes.worker_blocks, shape, time);
    options.context_limit = CONTEXT_LIMIT;
    options.kv_epoch = "kv".to_owned();
    options.parked_bytes = 40_000;
    options.replay_tokens = 128;
    PrefillWorker::new(options)
}

/// The scripted engine costs what the test says; the model only has to be a possible one.
fn small_model() -> WorkModel {
    WorkModel {
        hidden_size: 64,
        num_attention_heads: 1,
        head_dim: 32,
        q_lora_rank: 16,
        o_groups: 1,
        o_lora_rank: 16,
        sliding_window: 128,
        index_n_heads: 1,
        index_head_dim: 16,
        index_topk: 16,
        candidate_blocks: 0,
        candidate_block_size: 0,
        n_routed_experts: 2,
        experts_per_row: 1,
        moe_intermediate_size: 16,
        hc_mult: 1,
        vocab_size: 64,
        layers: vec![WorkLayer { ratio: 1, kv_source: true, ..WorkLayer::default() }],
    }
}
