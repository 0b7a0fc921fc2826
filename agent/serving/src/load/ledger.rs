//! Reports of a supernode: the windows of its ranks put together by index 0.
//!
//! Invariant: a report that is not marked (`spans_change`) has every rank, every rank has the same steps, one
//! placement was in force, and in each step and layer the arrivals are exactly rows x top-k.

use std::collections::{BTreeMap, BTreeSet};

use deepinfer_protocol::load::{ExpertCounts, ExpertLoadReport, LoadRole};
use deepinfer_protocol::{AgentId, Generation, Rank, SupernodeId};

use super::{BalanceSum, LoadShape, RankCounter, RankWindow};

/// Windows that may wait for slow ranks. Ranks step together, so more than one is a rank that is gone.
const PENDING_WINDOWS: usize = 2;

/// How much of a closed window is told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Detail {
    /// Sums over its steps.
    #[default]
    Sums,
    /// Each step as well.
    Steps,
}

/// Who reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadSource {
    /// The agent.
    pub agent: AgentId,
    /// Its supernode; `None` for a prefill worker.
    pub supernode: Option<SupernodeId>,
    /// Whose tokens.
    pub role: LoadRole,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct LoadLedger {
    source: LoadSource,
    shape: LoadShape,
    ranks: BTreeSet<Rank>,
    pending: BTreeMap<u64, Group>,
    /// Windows below this one are closed.
    next: u64,
    last: Option<Group>,
    since_start: BalanceSum,
}

/// Windows of the same number, by rank.
#[derive(Clone, Debug, Default)]
struct Group {
    windows: BTreeMap<Rank, RankWindow>,
    /// Ranks came or went while it was open.
    changed: bool,
}

impl LoadLedger {
    /// A ledger of these ranks.
    pub fn new(source: LoadSource, shape: LoadShape, ranks: impl IntoIterator<Item = Rank>) -> Self {
        Self {
            source,
            shape,
            ranks: ranks.into_iter().collect(),
            pending: BTreeMap::new(),
            next: 0,
            last: None,
            since_start: BalanceSum::new(shape.layers),
        }
    }

    /// Takes a closed window of a rank. Windows close when all ranks have given theirs, or when a rank is so late
    /// that it must be gone. A window that comes after that is dropped; totals do not miss it.
    pub fn offer(&mut self, window: RankWindow) {
        let number = window.window();
        if number < self.next {
            return;
        }
        self.pending.entry(number).or_default().windows.insert(window.rank(), window);
        let complete = self.is_complete(number);
        while let Some((&oldest, _)) = self.pending.first_key_value() {
            let overdue = self.pending.len() > PENDING_WINDOWS || (complete && oldest < number);
            if !overdue && !self.is_complete(oldest) {
                break;
            }
            let group = self.pending.remove(&oldest).expect("it was the first");
            self.close(oldest, group);
        }
    }

    /// The ranks are others from `step` on: the window of that step is marked.
    pub fn set_ranks(&mut self, step: u64, ranks: impl IntoIterator<Item = Rank>) {
        self.ranks = ranks.into_iter().collect();
        let window = super::window_of(step);
        if window >= self.next {
            self.pending.entry(window).or_default().changed = true;
        }
    }

    /// The last closed window; `None` before the first.
    pub fn latest(&self, detail: Detail) -> Option<ExpertLoadReport> {
        let group = self.last.as_ref()?;
        let windows: Vec<&RankWindow> = group.windows.values().collect();
        let mut report = self.empty();
        report.window = windows.first()?.window();
        report.spans_change = group.changed || !self.is_exact(&windows);
        let steps = union_of_steps(&windows);
        report.first_step = steps.first().copied().unwrap_or(0);
        report.steps = u32::try_from(steps.len()).unwrap_or(u32::MAX);
        report.placement = windows.iter().filter_map(|w| w.steps.last()).map(|s| s.map.placement()).max()?;
        for window in &windows {
            window.fold(&mut report.counts.counts);
            report.rows += window.rows();
            report.by_rank.push((window.rank(), window.arrived()));
            report.busy_ns.push((window.rank(), window.busy().0));
        }
        let mut balance = BalanceSum::new(self.shape.layers);
        self.add_balance(&windows, &mut balance);
        report.balance = balance.finish();
        if detail == Detail::Steps {
            report.by_step = steps.iter().map(|&step| self.step_counts(&windows, step)).collect();
        }
        Some(report)
    }

    /// Everything since the start, the open window included, from the counters of the ranks.
    pub fn total(&self, counters: &[&RankCounter]) -> ExpertLoadReport {
        let mut report = self.empty();
        let mut groups: BTreeMap<u64, Vec<&RankWindow>> =
            self.pending.iter().map(|(&n, group)| (n, group.windows.values().collect())).collect();
        for counter in counters {
            for (sum, count) in report.counts.counts.iter_mut().zip(counter.counts()) {
                *sum += count;
            }
            report.rows += counter.rows();
            report.steps = report.steps.max(u32::try_from(counter.steps()).unwrap_or(u32::MAX));
            report.placement = report.placement.max(counter.placement());
            report.by_rank.push((counter.rank(), counter.arrived()));
            report.busy_ns.push((counter.rank(), counter.busy().0));
            if let Some(open) = counter.open() {
                groups.entry(open.window()).or_default().push(open);
            }
        }
        report.window = groups.keys().next_back().copied().unwrap_or(self.next).max(self.next);
        let mut balance = self.since_start.clone();
        for windows in groups.values() {
            self.add_balance(windows, &mut balance);
        }
        report.balance = balance.finish();
        report
    }

    fn is_complete(&self, window: u64) -> bool {
        self.pending.get(&window).is_some_and(|group| self.has_all(group.windows.keys()))
    }

    fn has_all<'a>(&self, ranks: impl Iterator<Item = &'a Rank>) -> bool {
        ranks.eq(self.ranks.iter())
    }

    fn close(&mut self, number: u64, group: Group) {
        self.next = number + 1;
        let windows: Vec<&RankWindow> = group.windows.values().collect();
        let mut balance = std::mem::take(&mut self.since_start);
        self.add_balance(&windows, &mut balance);
        self.since_start = balance;
        // A window that only a change of ranks opened has nothing to tell.
        if !group.windows.is_empty() {
            self.last = Some(group);
        }
    }

    fn empty(&self) -> ExpertLoadReport {
        ExpertLoadReport {
            agent: self.source.agent.clone(),
            supernode: self.source.supernode.clone(),
            role: self.source.role,
            window: 0,
            first_step: 0,
            steps: 0,
            rows: 0,
            top_k: self.shape.top_k,
            placement: Generation::default(),
            spans_change: false,
            counts: self.zeros(),
            by_step: Vec::new(),
            by_rank: Vec::new(),
            busy_ns: Vec::new(),
            balance: BalanceSum::new(self.shape.layers).finish(),
            missing: Vec::new(),
        }
    }

    fn zeros(&self) -> ExpertCounts {
        ExpertCounts {
            layers: u32::try_from(self.shape.layers).unwrap_or(u32::MAX),
            experts: self.shape.experts,
            counts: vec![0; self.shape.cells()],
        }
    }

    /// Adds the steps that every rank has; with a rank missing, loads of the others say nothing about evenness.
    fn add_balance(&self, windows: &[&RankWindow], balance: &mut BalanceSum) {
        if windows.len() != self.ranks.len() || windows.is_empty() {
            return;
        }
        let mut loads = vec![0; windows.len()];
        for step in &windows[0].steps {
            let records: Vec<_> = windows
                .iter()
                .filter_map(|w| {
                    w.steps.binary_search_by_key(&step.step, |s| s.step).ok().map(|i| &w.steps[i])
                })
                .collect();
            if records.len() != windows.len() {
                continue;
            }
            for layer in 0..self.shape.layers {
                loads.iter_mut().zip(&records).for_each(|(load, record)| *load = record.load(layer));
                balance.add(layer, &loads);
            }
        }
    }

    fn step_counts(&self, windows: &[&RankWindow], step: u64) -> ExpertCounts {
        let mut counts = self.zeros();
        for window in windows {
            for record in window.steps.iter().filter(|s| s.step == step) {
                record
                    .map
                    .fold(&record.arrivals, &mut counts.counts)
                    .expect("shapes were checked when the step was counted");
            }
        }
        counts
    }

    /// The module's invariant.
    fn is_exact(&self, windows: &[&RankWindow]) -> bool {
        let Some(first) = windows.first() else {
            return false;
        };
        let ranks: Vec<Rank> = windows.iter().map(|w| w.rank()).collect();
        let same_steps =
            windows.iter().all(|w| w.steps.iter().map(|s| s.step).eq(first.steps.iter().map(|s| s.step)));
        if !self.has_all(ranks.iter()) || !same_steps {
            return false;
        }
        let mut placements = windows.iter().flat_map(|w| &w.steps).map(|s| s.map.placement());
        let placement = placements.next();
        if placements.any(|p| Some(p) != placement) {
            return false;
        }
        (0..first.steps.len()).all(|i| {
            let rows: u64 = windows.iter().map(|w| u64::from(w.steps[i].rows)).sum();
            (0..self.shape.layers).all(|layer| {
                let arrived: u64 = windows.iter().map(|w| w.steps[i].load(layer)).sum();
                arrived == rows * u64::from(self.shape.top_k)
            })
        })
    }
}

fn union_of_steps(windows: &[&RankWindow]) -> Vec<u64> {
    let steps: BTreeSet<u64> = windows.iter().flat_map(|w| &w.steps).map(|s| s.step).collect();
    steps.into_iter().collect()
}
