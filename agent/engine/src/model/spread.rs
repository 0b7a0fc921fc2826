//! Experts of a rank among several: the step's rows go where their experts are, and this rank's experts serve
//! what comes.
//!
//! Each (row, expert) pair is computed as a row of its own, and a row's results are added in ascending expert
//! id from zero: the additions that one rank with all experts makes (`Backend::experts`).

use std::sync::Arc;

use deepinfer_kernels::{Backend, ExpertParams};

use super::forward::Pass;
use super::weights::LayerWeights;
use crate::exchange::{ExchangeError, ExpertExchange, Pick, RankSetup, SlotMap};
use crate::memory::Allocator;
use crate::shape::ModelShape;

/// Fewest arrivals computed at a time: below that the weights would be read for too little.
const MIN_CHUNK: usize = 64;

/// A rank's part in the exchange, with its buffers.
pub(crate) struct Spread<B: Backend> {
    exchange: Box<dyn ExpertExchange>,
    map: Arc<SlotMap>,
    buffers: SpreadBuffers<B>,
    /// Rows on the host, `[max(rows, chunk), H]`: what is sent, then what is served, then the sums.
    rows: Vec<f32>,
    ids: Vec<u32>,
    weights: Vec<f32>,
    picks: Vec<Pick>,
}

/// Arrivals that are computed together.
pub(crate) struct SpreadBuffers<B: Backend> {
    chunk: usize,
    x: B::Buf<f32>,
    y: B::Buf<f32>,
    ids: B::Buf<u32>,
    weights: B::Buf<f32>,
}

impl<B: Backend> SpreadBuffers<B> {
    /// Buffers for steps of `rows` rows. Arrivals are sorted by slot, so cutting them into chunks reads few
    /// weights twice: they need not all fit.
    pub fn new(memory: &mut Allocator<'_, B>, shape: &ModelShape, rows: usize) -> Self {
        let (chunk, hidden) = (rows.max(MIN_CHUNK), shape.hidden_size);
        // The copies on the host, of this rank and in an exchange within the process.
        let picks = (rows * shape.num_experts_per_tok) as u64;
        memory.count(4 * hidden as u64 * (chunk as u64 + rows as u64 + picks));
        Self {
            chunk,
            x: memory.buffer(chunk, hidden),
            y: memory.buffer(chunk, hidden),
            ids: memory.buffer(chunk, 1),
            weights: memory.buffer(chunk, 1),
        }
    }
}

impl<B: Backend> Spread<B> {
    /// A rank's part, not begun.
    pub fn new(setup: RankSetup, buffers: SpreadBuffers<B>) -> Self {
        let RankSetup { map, exchange } = setup;
        let (rows, ids, weights, picks) = Default::default();
        Self { exchange, map, buffers, rows, ids, weights, picks }
    }

    /// The `count` floats at the beginning of the host rows.
    fn host(&mut self, count: usize) -> &mut [f32] {
        if self.rows.len() < count {
            self.rows.resize(count, 0.0);
        }
        &mut self.rows[..count]
    }

    /// Where each row's picks go, ascending by expert within a row.
    fn plan_picks(&mut self, layer: usize, top_k: usize) {
        let (rank, ranks) = (self.exchange.rank() as u32, self.exchange.ranks() as u32);
        self.picks.clear();
        let routed = self.ids.chunks_exact_mut(top_k).zip(self.weights.chunks_exact_mut(top_k));
        for (row, (ids, weights)) in routed.enumerate() {
            sort_together(ids, weights);
            let row = row as u32;
            // An index that no other row of the step has, on any rank.
            let token = row.wrapping_mul(ranks).wrapping_add(rank);
            for (&expert, &weight) in ids.iter().zip(&*weights) {
                let (rank, slot) = self.map.choose(layer, expert, token);
                self.picks.push(Pick { row, rank, slot, weight });
            }
        }
    }

    /// Runs this rank's experts over everything that arrived.
    fn serve(
        &mut self,
        backend: &B,
        layer: &LayerWeights<B>,
        params: ExpertParams,
        width: usize,
        counts: &mut [u32],
    ) -> Result<(), ExchangeError> {
        let all = self.exchange.arrivals().len();
        for first in (0..all).step_by(self.buffers.chunk) {
            let count = self.buffers.chunk.min(all - first);
            self.ids.clear();
            self.weights.clear();
            for arrival in &self.exchange.arrivals()[first..first + count] {
                self.ids.push(arrival.slot);
                self.weights.push(arrival.weight);
            }
            self.host(count * width);
            let rows = &mut self.rows[..count * width];
            self.exchange.load(first, rows)?;
            let SpreadBuffers { x, y, ids, weights, .. } = &mut self.buffers;
            backend.write(x, 0, rows);
            backend.write(ids, 0, &self.ids);
            backend.write(weights, 0, &self.weights);
            backend.experts(x, count, ids, weights, &layer.moe.experts, params, y, counts);
            backend.read(y, 0, rows);
            self.exchange.store(first, rows)?;
        }
        self.exchange.finish()
    }
}

impl<B: Backend> Pass<'_, B> {
    /// `y = sum_e weight_e expert_e(x) + shared(x)` with the experts of all ranks, and this rank's experts for
    /// the rows of all ranks. The step may have no rows. Nothing happens without an exchange.
    pub fn spread_experts(
        &mut self,
        layer: &LayerWeights<B>,
        params: ExpertParams,
        counts: &mut [u32],
    ) -> Result<(), ExchangeError> {
        let (rows, hidden, top_k) = (self.rows, self.constants.shape.hidden_size, layer.moe.top_k);
        let backend = self.backend;
        let Some(spread) = self.spread.as_deref_mut() else {
            return Ok(());
        };
        spread.ids.resize(rows * top_k, 0);
        spread.weights.resize(rows * top_k, 0.0);
        spread.host(rows * hidden);
        if rows > 0 {
            backend.read(&self.ws.route_ids, 0, &mut spread.ids);
            backend.read(&self.ws.route_weights, 0, &mut spread.weights);
            backend.read(&self.ws.x.plain, 0, &mut spread.rows[..rows * hidden]);
        }
        spread.plan_picks(layer.number, top_k);
        spread.exchange.dispatch(layer.number, hidden, &spread.rows[..rows * hidden], &spread.picks)?;
        spread.serve(backend, layer, ExpertParams { top_k: 1, ..params }, hidden, counts)?;
        if rows > 0 {
            // While the other ranks still compute.
            self.shared_expert(layer);
        }
        let Some(spread) = self.spread.as_deref_mut() else {
            return Ok(());
        };
        spread.host(rows * hidden).fill(0.0);
        spread.exchange.collect(&mut spread.rows[..rows * hidden])?;
        if rows > 0 {
            backend.write(&mut self.ws.y, 0, &spread.rows[..rows * hidden]);
            backend.add(&mut self.ws.y, &self.ws.shared_out, rows * hidden);
        }
        Ok(())
    }
}

/// Sorts a row's picks by expert. There are a handful of them.
fn sort_together(ids: &mut [u32], weights: &mut [f32]) {
    for end in 1..ids.len() {
        let mut at = end;
        while at > 0 && ids[at - 1] > ids[at] {
            ids.swap(at - 1, at);
            weights.swap(at - 1, at);
            at -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_follow_their_experts_into_ascending_order() {
        let (mut ids, mut weights) = ([9, 2, 7, 0], [0.9, 0.2, 0.7, 0.0]);
        sort_together(&mut ids, &mut weights);
        assert_eq!((ids, weights), ([0, 2, 7, 9], [0.0, 0.2, 0.7, 0.9]));
    }
}
