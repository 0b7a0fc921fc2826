//! Bytes: of the weights by part and format, of the caches by token, of a sequence's constant state, and of
//! what one decoded token reads.
//!
//! Everything is counted from the same list of tensors that the checkpoint is checked with, and from the
//! formats that the caches are made of.

use std::collections::BTreeMap;

use deepinfer_kernels::{RowFormat, WeightFormat};
use deepinfer_serving::batch::BLOCK_TOKENS;

use crate::cache::{Geometry, Histories};
use crate::model::groups::GroupPlan;
use crate::numerics::Numerics;
use crate::shape::ModelShape;
use crate::tensors::{self, Part, TensorSpec};
use crate::weights::Checkpoint;

/// Weights of one part in one format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightBytes {
    /// Part of the model.
    pub part: Part,
    /// Stored format.
    pub format: WeightFormat,
    /// Number of tensors, scales not counted.
    pub tensors: usize,
    /// Number of values.
    pub parameters: u64,
    /// Bytes of values and scales.
    pub bytes: u64,
}

/// Sizes of a model. All in bytes unless named otherwise.
#[derive(Clone, Debug, PartialEq)]
pub struct Sizes {
    /// Weights by part (in the order of [`Part::ALL`]) and format.
    pub weights: Vec<WeightBytes>,
    /// All weights, scales included.
    pub weight_bytes: u64,
    /// Number of values of all weights.
    pub parameters: u64,
    /// Stored bytes, scales included, of all tensors that one decoded token reads: rows of tables, picked
    /// experts, everything else whole. Without KV, without drafts.
    pub active_bytes_per_token: u64,
    /// Number of values that one decoded token reads.
    pub active_parameters: u64,
    /// Main KV and index keys of a block of 128 tokens.
    pub kv_bytes_per_block: u64,
    /// Constant state of a sequence: window rings, open groups, n-gram history.
    pub state_bytes_per_slot: u64,
    /// The part of that state that a window checkpoint exports: `sliding_window` rows of every layer.
    pub window_bytes_per_slot: u64,
}

/// Memory for a number of sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needed {
    /// Weights (mapped from the checkpoint, can be dropped and read again by the system).
    pub weights: u64,
    /// Main KV and index keys, whole blocks.
    pub kv: u64,
    /// Constant state.
    pub state: u64,
}

impl Needed {
    /// All together.
    pub fn total(&self) -> u64 {
        self.weights + self.kv + self.state
    }
}

impl Sizes {
    /// Sizes of a model in the formats of the released layout.
    pub fn of(shape: &ModelShape, numerics: Numerics) -> Self {
        let specs = tensors::expected(shape);
        let stored = specs.iter().map(|spec| (spec, spec.kind.format(shape.quantized)));
        Self::count(shape, numerics, stored)
    }

    /// Sizes of a checkpoint in the formats that it has.
    pub fn of_checkpoint(checkpoint: &Checkpoint, numerics: Numerics) -> Self {
        let stored = checkpoint.specs().map(|spec| (spec, checkpoint.format(&spec.name)));
        Self::count(&checkpoint.shape, numerics, stored)
    }

    fn count<'a>(
        shape: &ModelShape,
        numerics: Numerics,
        stored: impl Iterator<Item = (&'a TensorSpec, WeightFormat)>,
    ) -> Self {
        let mut weights: BTreeMap<(Part, WeightFormat), WeightBytes> = BTreeMap::new();
        let (mut active_bytes, mut active_parameters) = (0.0, 0.0);
        for (spec, format) in stored {
            let part = spec.part;
            let empty = WeightBytes { part, format, tensors: 0, parameters: 0, bytes: 0 };
            let entry = weights.entry((part, format)).or_insert(empty);
            entry.tensors += 1;
            entry.parameters += spec.elements();
            entry.bytes += spec.bytes(format);
            active_bytes += spec.active_share() * spec.bytes(format) as f64;
            active_parameters += spec.active_share() * spec.elements() as f64;
        }
        let weights: Vec<WeightBytes> = weights.into_values().collect();
        let window_row = numerics.window_format().row_bytes(shape.head_dim) as u64;
        Self {
            weight_bytes: weights.iter().map(|w| w.bytes).sum(),
            parameters: weights.iter().map(|w| w.parameters).sum(),
            weights,
            active_bytes_per_token: active_bytes.round() as u64,
            active_parameters: active_parameters.round() as u64,
            kv_bytes_per_block: kv_bytes_per_block(shape, numerics),
            state_bytes_per_slot: state_bytes_per_slot(shape, window_row),
            window_bytes_per_slot: (shape.total_layers() * shape.sliding_window) as u64 * window_row,
        }
    }

    /// Main KV and index keys of one token; a fraction if a ratio does not divide the bytes of an entry.
    pub fn kv_bytes_per_token(&self) -> f64 {
        self.kv_bytes_per_block as f64 / BLOCK_TOKENS as f64
    }

    /// Memory for `sequences` sequences of `length` tokens each.
    pub fn needed(&self, sequences: usize, length: usize) -> Needed {
        let blocks = sequences as u64 * length.div_ceil(BLOCK_TOKENS) as u64;
        Needed {
            weights: self.weight_bytes,
            kv: blocks.saturating_mul(self.kv_bytes_per_block),
            state: (sequences as u64).saturating_mul(self.state_bytes_per_slot),
        }
    }
}

fn kv_bytes_per_block(shape: &ModelShape, numerics: Numerics) -> u64 {
    let main = numerics.main_format().row_bytes(shape.head_dim) as u64;
    let index = numerics.index_format().row_bytes(shape.index_head_dim) as u64;
    let entries = |&layer: &usize| (BLOCK_TOKENS / shape.ratio(layer)) as u64;
    shape.kv_source_layer_ids.iter().map(entries).sum::<u64>() * (main + index)
}

fn state_bytes_per_slot(shape: &ModelShape, window_row: u64) -> u64 {
    let geometry = Geometry::of(shape);
    let rings = (shape.total_layers() * geometry.ring) as u64 * window_row;
    let group_row = 2 * RowFormat::F32.row_bytes(shape.head_dim) as u64;
    let groups =
        shape.kv_source_layer_ids.iter().map(|&layer| GroupPlan::ring(shape.ratio(layer), geometry.slack));
    let history =
        shape.engram.as_ref().map_or(0, |e| Histories::bytes(1, e.max_ngram_size - 1, geometry.slack));
    rings + groups.sum::<usize>() as u64 * group_row + history
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn shape(path: &str) -> ModelShape {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
        crate::config::parse(&std::fs::read(path).unwrap()).unwrap().0
    }

    fn real() -> ModelShape {
        shape("examples/configs/v41-flash.json")
    }

    #[test]
    fn a_token_of_the_real_model_takes_890_bytes_of_compressed_kv() {
        let sizes = Sizes::of(&real(), Numerics::Quantized);
        assert_eq!(sizes.kv_bytes_per_token(), 890.0);
        assert_eq!(sizes.kv_bytes_per_block, 128 * 890);
        // A window checkpoint holds 43 layers of 128 rows of 528 bytes; a ring has six more rows.
        assert_eq!(sizes.window_bytes_per_slot, 43 * 128 * 528);
        assert!(sizes.state_bytes_per_slot >= 43 * 134 * 528);
        let plain = Sizes::of(&real(), Numerics::F32);
        assert_eq!(plain.kv_bytes_per_token(), (512.0 + 128.0) * 4.0 * 2.5);
    }

    #[test]
    fn the_real_model_has_the_published_sizes() {
        let sizes = Sizes::of(&real(), Numerics::Quantized);
        let of = |part: Part| sizes.weights.iter().filter(move |w| w.part == part);
        let parameters = |part: Part| of(part).map(|w| w.parameters).sum::<u64>();
        assert_eq!(parameters(Part::Experts), 40 * 384 * 3 * 5120 * 2304);
        assert_eq!(parameters(Part::EngramTables), (384_006_168 + 384_016_682) * 256);
        assert_eq!(of(Part::EngramTables).map(|w| w.bytes).sum::<u64>(), 768_022_850 * (256 + 8));
        // Weights without tables: 552 billion. Active: 16 billion. File size: about 509 billion bytes.
        let backbone = sizes.parameters - parameters(Part::EngramTables) - parameters(Part::Draft);
        assert!((551e9..553e9).contains(&(backbone as f64)), "{backbone}");
        assert!((15.5e9..16.5e9).contains(&(sizes.active_parameters as f64)), "{}", sizes.active_parameters);
        assert!((507e9..511e9).contains(&(sizes.weight_bytes as f64)), "{}", sizes.weight_bytes);
    }

    #[test]
    fn memory_grows_by_blocks_and_by_sequences() {
        let sizes = Sizes::of(&real(), Numerics::Quantized);
        let one = sizes.needed(1, 1);
        assert_eq!(one.kv, 128 * 890);
        assert_eq!(sizes.needed(3, 129).kv, 3 * 2 * one.kv);
        assert_eq!(sizes.needed(3, 129).state, 3 * one.state);
        assert_eq!(one.total(), one.weights + one.kv + one.state);
        assert_eq!(sizes.needed(0, 0).total(), sizes.weight_bytes);
    }

    #[test]
    fn the_active_bytes_of_a_small_model_add_up_by_hand() {
        let shape = shape("e2e/shapes/nodraft-quant/config.json");
        let sizes = Sizes::of(&shape, Numerics::Quantized);
        let mut by_hand = 0.0;
        for spec in tensors::expected(&shape) {
            let bytes = spec.bytes(spec.kind.format(true)) as f64;
            let name = spec.name.as_str();
            by_hand += match name {
                "embed.weight" => 32.0 * 2.0,
                n if n.starts_with("image_") || n.ends_with("bias_vl") => 0.0,
                // Three n-gram lengths, one head: three rows of 64 columns and two scales.
                n if n.ends_with("engram.embed.weight") => 3.0 * 66.0,
                n if n.contains(".experts.") => bytes * 7.0 / 33.0,
                _ => bytes,
            };
        }
        assert_eq!(sizes.active_bytes_per_token, by_hand.round() as u64);
    }
}
