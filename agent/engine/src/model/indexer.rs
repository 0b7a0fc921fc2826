//! Indexer (model.md section 6.4): which compressed entries each row attends to, in two levels where
//! candidate blocks are configured.

use deepinfer_kernels::{Backend, CandidateUse, Candidates, IndexQuery, Selection};

use super::forward::{Keys, Pass};
use super::weights::LayerWeights;
use crate::record::Probe;

impl<B: Backend> Pass<'_, B> {
    /// Scores the visible entries of the layer's KV source and keeps the best; the selection serves the
    /// layers up to the next index source. The query latent must be current.
    pub fn select_entries(&mut self, layer: &LayerWeights<B>, keys: Keys<'_>) {
        self.index_queries(layer);
        let shape = &self.constants.shape;
        let (source, ratio) = self.constants.source(layer.number).expect("index sources read a KV source");
        let ws = &mut *self.ws;
        let query = IndexQuery {
            rows: self.rows,
            heads: shape.index_n_heads,
            width: shape.index_head_dim,
            query: &ws.index_query,
            weights: &ws.index_weights,
            keys: &self.caches.sources[source].index,
            visible: &keys.rows.visible[self.constants.ratio_ordinals[source]],
            tables: keys.tables(ratio),
        };
        let produces = shape.candidate.is_some_and(|c| c.source_layer == layer.number);
        let candidates = match &mut ws.candidates {
            Some(candidates) if produces => CandidateUse::Produce(candidates),
            Some(candidates) if shape.is_restricted(layer.number) => CandidateUse::Restrict(candidates),
            _ => CandidateUse::Ignore,
        };
        self.backend.index_select(&query, candidates, &mut ws.selection);
        if let Some(probe) = self.probe.as_deref_mut() {
            let name = |what: &str| format!("layers.{}.{what}", layer.number);
            let entries = query.visible.last().map_or(0, |&v| v as usize);
            record_scores(self.backend, probe, name("index_scores"), &query, entries);
            record_selection(self.backend, probe, name("selected"), &ws.selection, self.rows, entries);
            if let Some(candidates) = ws.candidates.as_ref().filter(|_| produces) {
                record_candidates(self.backend, probe, name("candidates"), candidates, self.rows, entries);
            }
        }
    }

    /// `index_query = rope(wq_b latent)` of every index head, `index_weights = weights_proj x * scale`.
    fn index_queries(&mut self, layer: &LayerWeights<B>) {
        let weights = layer.indexer.as_ref().expect("called for index sources");
        let shape = &self.constants.shape;
        let (rows, heads, width) = (self.rows, shape.index_n_heads, shape.index_head_dim);
        let rounds = self.rounds(&weights.wq_b);
        let ws = &mut *self.ws;
        let backend = self.backend;
        backend.matmul(&weights.wq_b, ws.latent.form(rounds), rows, &mut ws.index_query);
        let rope = &ws.compressed_rope;
        backend.rope(&mut ws.index_query, rows, heads, width, shape.qk_rope_head_dim, rope, false);
        backend.matmul(&weights.weights_proj, &ws.x.plain, rows, &mut ws.index_weights);
        backend.scale(&mut ws.index_weights, self.constants.index_scale, rows * heads);
    }
}

/// Records `[rows, entries]` scores, -inf where an entry is not visible.
fn record_scores<B: Backend>(
    backend: &B,
    probe: &mut Probe,
    name: String,
    query: &IndexQuery<'_, B>,
    entries: usize,
) {
    let mut scores = backend.alloc(query.rows * entries);
    if entries > 0 {
        backend.index_scores(query, entries, &mut scores);
    }
    probe.floats(backend, name, &[query.rows, entries], &scores);
}

/// Records a selection as a mask `[rows, entries]`.
fn record_selection<B: Backend>(
    backend: &B,
    probe: &mut Probe,
    name: String,
    selection: &Selection<B::Buf<u32>>,
    rows: usize,
    entries: usize,
) {
    let lists = read_lists(backend, &selection.indices, &selection.counts, rows, selection.top_k);
    let mut mask = vec![0; rows * entries];
    for (row, list) in lists.iter().enumerate() {
        for &entry in list {
            mask[row * entries + entry as usize] = 1;
        }
    }
    probe.whole(name, &[rows, entries], mask);
}

/// Records candidate blocks as a mask over entries, `[rows, entries]`.
fn record_candidates<B: Backend>(
    backend: &B,
    probe: &mut Probe,
    name: String,
    candidates: &Candidates<B::Buf<u32>>,
    rows: usize,
    entries: usize,
) {
    let lists = read_lists(backend, &candidates.indices, &candidates.counts, rows, candidates.max_blocks);
    let mut mask = vec![0; rows * entries];
    for (row, list) in lists.iter().enumerate() {
        for &block in list {
            let first = block as usize * candidates.block_size;
            let end = entries.min(first + candidates.block_size);
            mask[row * entries + first..row * entries + end].fill(1);
        }
    }
    probe.whole(name, &[rows, entries], mask);
}

/// The valid parts of lists with a common stride.
fn read_lists<B: Backend>(
    backend: &B,
    indices: &B::Buf<u32>,
    counts: &B::Buf<u32>,
    rows: usize,
    stride: usize,
) -> Vec<Vec<u32>> {
    let mut all = vec![0; rows * stride];
    let mut lengths = vec![0; rows];
    backend.read(indices, 0, &mut all);
    backend.read(counts, 0, &mut lengths);
    let list = |(row, &length): (usize, &u32)| all[row * stride..row * stride + length as usize].to_vec();
    lengths.iter().enumerate().map(list).collect()
}
