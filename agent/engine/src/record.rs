//! Intermediate values of a step, by name, and replaced layer inputs: for tests and for `verify`.
//!
//! Without a probe the engine does nothing of this. Names: `layers.N.` and one of `stream_in`, `pre_in`,
//! `engram.rows`, `engram.gate`, `attn_in`, `attn_core`, `attn_out`, `compressed_kv`, `index_k`,
//! `index_scores`, `selected`, `candidates`, `ffn_in`, `route_ids`, `route_weights`, `ffn_out`, `stream_out`;
//! and `draft_features`, `final_pre`.
//!
//! Rows are those that ran through the layer, in the order of the batch. `index_scores` (before candidates
//! restrict them), `selected` and `candidates` have one column per complete entry of the first sequence: a
//! probed batch has one sequence. `compressed_kv` and `index_k` are the new entries, read back from the
//! caches.

use std::collections::BTreeMap;

use deepinfer_kernels::Backend;

/// Values of one name.
#[derive(Clone, Debug, PartialEq)]
pub enum Recorded {
    /// Activations.
    Floats {
        /// Sizes of the dimensions.
        shape: Vec<usize>,
        /// Row-major values.
        values: Vec<f32>,
    },
    /// Ids, and masks of 0 and 1.
    Whole {
        /// Sizes of the dimensions.
        shape: Vec<usize>,
        /// Row-major values.
        values: Vec<u32>,
    },
}

/// What a probed step recorded, and what it is told to compute with.
#[derive(Clone, Debug, Default)]
pub struct Probe {
    forced: BTreeMap<usize, Forced>,
    records: BTreeMap<String, Recorded>,
}

/// Input of a layer.
#[derive(Clone, Debug)]
pub(crate) struct Forced {
    pub stream: Vec<f32>,
    pub pre: Vec<f32>,
}

impl Probe {
    /// Replaces the input of a backbone layer: the stream `[rows, m * H]` before Engram, and the mix handed
    /// over by the layer before, `[rows, m]`.
    pub fn force(&mut self, layer: usize, stream: Vec<f32>, pre: Vec<f32>) {
        self.forced.insert(layer, Forced { stream, pre });
    }

    /// What was recorded under a name.
    pub fn get(&self, name: &str) -> Option<&Recorded> {
        self.records.get(name)
    }

    /// All records by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Recorded)> {
        self.records.iter().map(|(name, recorded)| (name.as_str(), recorded))
    }

    pub(crate) fn forced(&self, layer: usize) -> Option<&Forced> {
        self.forced.get(&layer)
    }

    pub(crate) fn whole(&mut self, name: String, shape: &[usize], values: Vec<u32>) {
        let shape = shape.to_vec();
        self.records.insert(name, Recorded::Whole { shape, values });
    }

    /// Records the first values of a buffer.
    pub(crate) fn floats<B: Backend>(
        &mut self,
        backend: &B,
        name: String,
        shape: &[usize],
        buffer: &B::Buf<f32>,
    ) {
        let mut values = vec![0.0; shape.iter().product()];
        backend.read(buffer, 0, &mut values);
        let shape = shape.to_vec();
        self.records.insert(name, Recorded::Floats { shape, values });
    }
}
