//! The worker of a prefill agent or the ranks of a decode agent, behind one face.

use deepinfer_protocol::message::Message;
use deepinfer_protocol::{Rank, RequestId, Time};
use deepinfer_serving::kv::PoolCounts;
use deepinfer_serving::node::{
    DecodeRank, DrainTotals, NodeAction, NodeEvent, NodeStatus, PrefillWorker, StepWork,
};

/// See the module.
pub enum Machines {
    /// One worker.
    Prefill(Box<PrefillWorker>),
    /// Ranks, in order.
    Decode(Vec<DecodeRank>),
}

/// Which machines a message is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// This one.
    One(usize),
    /// All.
    All,
    /// None here.
    None,
}

impl Machines {
    /// How many there are; each has an engine.
    pub fn len(&self) -> usize {
        match self {
            Self::Prefill(_) => 1,
            Self::Decode(ranks) => ranks.len(),
        }
    }

    /// Tells one machine something.
    pub fn on_event(&mut self, index: usize, now: Time, event: NodeEvent, out: &mut Vec<NodeAction>) {
        match self {
            Self::Prefill(worker) => worker.on_event(now, event, out),
            Self::Decode(ranks) => ranks[index].on_event(now, event, out),
        }
    }

    /// The next step of one machine.
    pub fn poll_step(&mut self, index: usize, now: Time, out: &mut Vec<NodeAction>) -> Option<StepWork> {
        match self {
            Self::Prefill(worker) => worker.poll_step(now, out),
            Self::Decode(ranks) => ranks[index].poll_step(now, out),
        }
    }

    /// Where a message goes.
    pub fn target(&self, message: &Message) -> Target {
        match (self, message) {
            (_, Message::Cancel { .. }) => Target::All,
            (Self::Prefill(_), Message::Prefill(_)) => Target::One(0),
            (Self::Decode(ranks), Message::Decode(work)) => rank_of(ranks, work.rank),
            (Self::Prefill(_), Message::FetchKv { .. } | Message::ReleaseKv { .. }) => Target::One(0),
            (Self::Decode(ranks), Message::FetchKv { request, .. } | Message::ReleaseKv { request, .. }) => {
                Target::One(holder(ranks, *request))
            }
            (Self::Decode(ranks), Message::KvPiece { request, .. } | Message::KvGone { request, .. }) => {
                ranks.iter().position(|rank| rank.knows(*request)).map_or(Target::None, Target::One)
            }
            _ => Target::None,
        }
    }

    /// Whether blocks and slots of every machine add up.
    ///
    /// # Errors
    /// The first that does not.
    pub fn check(&self) -> Result<(), String> {
        match self {
            Self::Prefill(worker) => worker.check(),
            Self::Decode(ranks) => ranks.iter().try_for_each(DecodeRank::check),
        }
    }

    /// Numbers of the ranks, in order; none for a worker.
    pub fn ranks(&self) -> Vec<Rank> {
        match self {
            Self::Prefill(_) => Vec::new(),
            Self::Decode(ranks) => ranks.iter().map(DecodeRank::rank).collect(),
        }
    }

    /// Where each machine stands.
    pub fn statuses(&self) -> Vec<NodeStatus> {
        match self {
            Self::Prefill(worker) => vec![worker.status()],
            Self::Decode(ranks) => ranks.iter().map(DecodeRank::status).collect(),
        }
    }
}

fn rank_of(ranks: &[DecodeRank], rank: Rank) -> Target {
    ranks.iter().position(|own| own.rank() == rank).map_or(Target::None, Target::One)
}

/// The rank that has a sequence parked; the first one if none has, which says so.
fn holder(ranks: &[DecodeRank], request: RequestId) -> usize {
    ranks.iter().position(|rank| rank.parks(request)).unwrap_or(0)
}

/// Sums over an agent's machines.
#[derive(Clone, Debug, Default)]
pub struct Totals {
    /// All counts summed; flags of any.
    pub node: NodeStatus,
    /// The drain.
    pub drain: DrainTotals,
}

impl Totals {
    /// Of these.
    pub fn of(statuses: &[NodeStatus]) -> Self {
        let mut totals = Self::default();
        for status in statuses {
            totals.add(status);
        }
        totals
    }

    fn add(&mut self, status: &NodeStatus) {
        self.drain.add(status.draining, status.inflight, status.cut, status.parked_bytes);
        let node = &mut self.node;
        node.inflight += status.inflight;
        node.loading += status.loading;
        node.running += status.running;
        node.leaving += status.leaving;
        node.parked += status.parked;
        node.parked_bytes += status.parked_bytes;
        node.free_slots += status.free_slots;
        node.total_slots += status.total_slots;
        node.backlog = node.backlog.plus(status.backlog);
        node.draining |= status.draining;
        node.cut += status.cut;
        node.checkpoints = status.checkpoints;
        add_blocks(&mut node.blocks, &status.blocks);
        let (sum, counts) = (&mut node.counts, &status.counts);
        sum.accepted += counts.accepted;
        sum.finished += counts.finished;
        sum.handed_over += counts.handed_over;
        sum.preempted += counts.preempted;
        sum.ignored += counts.ignored;
        sum.steps += counts.steps;
        sum.rows += counts.rows;
        sum.replayed_rows += counts.replayed_rows;
        sum.prompt_tokens += counts.prompt_tokens;
        sum.cached_tokens += counts.cached_tokens;
        sum.generated_tokens += counts.generated_tokens;
        sum.damaged_pieces += counts.damaged_pieces;
        sum.lost_engines += counts.lost_engines;
        counts.refused.iter().for_each(|(&why, &n)| *sum.refused.entry(why).or_default() += n);
        counts.failed.iter().for_each(|(&why, &n)| *sum.failed.entry(why).or_default() += n);
    }
}

fn add_blocks(sum: &mut PoolCounts, blocks: &PoolCounts) {
    sum.used += blocks.used;
    sum.cached += blocks.cached;
    sum.free += blocks.free;
    sum.total += blocks.total;
    sum.evicted += blocks.evicted;
}
