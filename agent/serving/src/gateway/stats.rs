//! What a gateway counts. Counters only grow; gauges are exact at every moment, because one function moves a
//! request from state to state.

use std::collections::BTreeMap;
use std::sync::Arc;

use deepinfer_protocol::message::Refusal;

use super::request::{Class, Record, Stage};

/// A reading of [`Gateway::stats`](super::Gateway::stats).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GatewayStats {
    /// Requests that a worker or a rank has.
    pub running: usize,
    /// Requests that wait for a worker, resumed ones and those held back by a tenant's limit included.
    pub waiting: usize,
    /// Of these, the ones that no worker ever had: what the limits bound.
    pub fresh: usize,
    /// Their prompt tokens.
    pub fresh_tokens: u64,
    /// Requests by state.
    pub by_state: BTreeMap<&'static str, usize>,
    /// Requests that were taken in.
    pub admitted: u64,
    /// Requests refused or shed, by reason.
    pub refused: BTreeMap<Refusal, u64>,
    /// Requests refused because no pool serves.
    pub unavailable: u64,
    /// Requests that ended with a finish reason or were satisfied.
    pub finished: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Requests whose client left, or that the shutdown cut.
    pub cancelled: u64,
    /// Times that a request was started again with its tokens as context.
    pub resumed: u64,
    /// Times that a worker or rank turned away what a leader had sent there.
    pub bounced: u64,
    /// Times that a sequence gave way to others and was placed again.
    pub preempted: u64,
    /// Output tokens forwarded.
    pub tokens: u64,
    /// Prompt tokens of admitted requests.
    pub prompt_tokens: u64,
    /// Of these, tokens whose blocks were reused.
    pub cached_tokens: u64,
    /// Messages about requests that are not (or no more) ours, or of old attempts.
    pub ignored: u64,
    /// Requests that the gateway gave to a worker or rank without a leader.
    pub vacancy: u64,
}

/// One tenant's requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    /// Held back or waiting for a worker.
    pub waiting: usize,
    /// Waiting at a leader, or running.
    pub in_flight: usize,
}

/// Gauges, moved along with the records.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Gauges {
    pub by_state: BTreeMap<&'static str, usize>,
    pub running: usize,
    pub waiting: usize,
    pub fresh: usize,
    pub fresh_tokens: u64,
    pub tenants: BTreeMap<Arc<str>, Tally>,
}

impl Gauges {
    /// Counts a record in its stage.
    pub(super) fn add(&mut self, record: &Record) {
        *self.by_state.entry(record.stage.as_str()).or_default() += 1;
        let class = record.stage.class();
        let tally = self.tenants.entry(record.tenant.clone()).or_default();
        tally.in_flight += usize::from(class != Class::Held);
        tally.waiting += usize::from(class != Class::Running);
        self.running += usize::from(class == Class::Running);
        self.waiting += usize::from(class != Class::Running);
        if record.fresh {
            self.fresh += 1;
            self.fresh_tokens += record.prompt.len() as u64;
        }
    }

    /// Takes it out again, before its stage or freshness changes.
    pub(super) fn remove(&mut self, record: &Record) {
        let state = record.stage.as_str();
        if let Some(count) = self.by_state.get_mut(state) {
            *count -= 1;
            if *count == 0 {
                self.by_state.remove(state);
            }
        }
        let class = record.stage.class();
        if let Some(tally) = self.tenants.get_mut(&record.tenant) {
            tally.in_flight -= usize::from(class != Class::Held);
            tally.waiting -= usize::from(class != Class::Running);
            if *tally == Tally::default() {
                self.tenants.remove(&record.tenant);
            }
        }
        self.running -= usize::from(class == Class::Running);
        self.waiting -= usize::from(class != Class::Running);
        if record.fresh {
            self.fresh -= 1;
            self.fresh_tokens -= record.prompt.len() as u64;
        }
    }

    /// Moves a record to another stage.
    pub(super) fn enter(&mut self, record: &mut Record, stage: Stage) {
        self.remove(record);
        record.stage = stage;
        self.add(record);
    }
}
