//! Which experts this agent's tokens chose: counters of its ranks, and their windows put together.

use std::sync::Arc;

use deepinfer_engine::ModelShape;
use deepinfer_protocol::agent_status::Role;
use deepinfer_protocol::load::{ExpertLoadReport, LoadRole};
use deepinfer_protocol::{AgentId, Generation, Rank, SupernodeId};
use deepinfer_serving::load::{
    CountedStep, Detail, LoadError, LoadLedger, LoadShape, LoadSource, RankCounter, SlotMap,
};
use deepinfer_serving::node::StepResult;

/// How much of the load is told (`GET /v1/experts/load?detail=...`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadDetail {
    /// Sums of the last closed window.
    #[default]
    Sums,
    /// Its steps as well.
    Steps,
    /// Everything since the start, the open window included.
    Total,
}

impl LoadDetail {
    /// As the control port has it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sums => "sums",
            Self::Steps => "steps",
            Self::Total => "total",
        }
    }
}

/// See the module.
pub struct Book {
    counters: Vec<RankCounter>,
    maps: Vec<Arc<SlotMap>>,
    ledger: LoadLedger,
}

impl Book {
    /// A book of ranks from `first_rank` on, with these experts by layer and slot, all counts 0.
    ///
    /// # Errors
    /// If a map does not fit the model: a bug.
    pub fn new(
        agent: AgentId,
        role: Role,
        supernode: Option<SupernodeId>,
        first_rank: u16,
        shape: &ModelShape,
        slot_experts: &[Vec<Vec<u32>>],
    ) -> Result<Self, LoadError> {
        let experts = shape.n_routed_experts as u32;
        let load =
            LoadShape { layers: shape.num_hidden_layers, experts, top_k: shape.num_experts_per_tok as u32 };
        let ranks = (0..slot_experts.len()).map(|rank| Rank(first_rank + rank as u16));
        let role = match role {
            Role::Prefill => LoadRole::Prefill,
            Role::Decode => LoadRole::Decode,
        };
        let maps = slot_experts
            .iter()
            .map(|layers| SlotMap::new(Generation(0), experts, layers).map(Arc::new))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            counters: ranks.clone().map(|rank| RankCounter::new(rank, load)).collect(),
            maps,
            ledger: LoadLedger::new(LoadSource { agent, supernode, role }, load, ranks),
        })
    }

    /// A rank ran its part of step `step`, with `rows` rows of its own.
    pub fn record(&mut self, rank: usize, step: u64, rows: usize, result: &StepResult) {
        let counted = CountedStep {
            step,
            rows: rows as u32,
            arrivals: &result.arrivals,
            map: &self.maps[rank],
            elapsed: result.elapsed,
            warm_up: false,
        };
        match self.counters[rank].record(&counted) {
            Ok(Some(window)) => self.ledger.offer(window),
            Ok(None) => {}
            Err(error) => tracing::error!(rank, step, %error, "expert counts of a step were lost"),
        }
    }

    /// A report; `None` before the first window has closed.
    pub fn report(&self, detail: LoadDetail) -> Option<ExpertLoadReport> {
        match detail {
            LoadDetail::Sums => self.ledger.latest(Detail::Sums),
            LoadDetail::Steps => self.ledger.latest(Detail::Steps),
            LoadDetail::Total => Some(self.ledger.total(&self.counters.iter().collect::<Vec<_>>())),
        }
    }
}
