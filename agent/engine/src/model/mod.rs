//! The model, one file per part in the order of the forward pass; [`forward`] is the whole of it.
//!
//! What a step computes is said in `forward.rs`; which rows, keys and entries it computes with is said before
//! it starts, by [`plan`] and the files it uses.

pub(crate) mod groups;
pub(crate) mod plan;
pub(crate) mod rope;
mod rows;
pub(crate) mod weights;
mod windows;
pub(crate) mod workspace;

mod attention;
mod compressor;
pub(crate) mod draft;
mod embed;
mod engram;
pub(crate) mod forward;
mod head;
mod hyper_connection;
mod indexer;
mod moe;
pub(crate) mod spread;

use deepinfer_kernels::HcParams;

use crate::cache::Geometry;
use crate::numerics::Numerics;
use crate::shape::ModelShape;
use plan::Zone;

/// What the parts read of the configuration, derived once.
#[derive(Clone, Debug)]
pub(crate) struct Constants {
    pub shape: ModelShape,
    pub numerics: Numerics,
    pub hc: HcParams,
    /// Factor on `q . k`.
    pub attention_scale: f32,
    /// Factor on index head weights.
    pub index_scale: f32,
    /// Layer where consumer truncation begins, if it is on.
    pub boundary: Option<usize>,
    /// Position of each KV source's ratio in lists by ratio.
    pub ratio_ordinals: Vec<usize>,
}

impl Constants {
    /// Constants of a shape. `boundary`: see [`Constants::boundary`].
    pub fn new(shape: &ModelShape, geometry: &Geometry, numerics: Numerics, boundary: Option<usize>) -> Self {
        let sources = shape.kv_source_layer_ids.iter();
        let root = |n: usize| (n as f64).powf(-0.5);
        Self {
            numerics,
            hc: HcParams {
                copies: shape.hc_mult,
                iters: shape.hc_sinkhorn_iters,
                eps: shape.hc_eps,
                norm_eps: shape.rms_norm_eps,
            },
            attention_scale: root(shape.head_dim) as f32,
            index_scale: if shape.kv_source_layer_ids.is_empty() {
                0.0
            } else {
                (root(shape.index_head_dim) * root(shape.index_n_heads)) as f32
            },
            boundary,
            ratio_ordinals: sources.map(|&l| geometry.ratio_ordinal(shape.ratio(l))).collect(),
            shape: shape.clone(),
        }
    }

    /// The KV source that a layer reads, as (ordinal, ratio); `None` for a window-only layer.
    pub fn source(&self, layer: usize) -> Option<(usize, usize)> {
        let source = self.shape.kv_source(layer)?;
        let ordinal = self.shape.kv_source_layer_ids.iter().position(|&l| l == source)?;
        Some((ordinal, self.shape.ratio(source)))
    }

    /// Zone of a backbone layer.
    pub fn zone(&self, layer: usize) -> Zone {
        match self.boundary {
            Some(boundary) if layer == boundary => Zone::Boundary,
            Some(boundary) if layer > boundary => Zone::Consumer,
            _ => Zone::Producer,
        }
    }
}
