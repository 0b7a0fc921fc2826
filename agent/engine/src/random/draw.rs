//! The random numbers of a checkpoint: what a tensor's values look like, and the values themselves.
//!
//! A value depends on the seed, the tensor's name and its place in it, and on nothing else: shards, strips
//! and threads can be cut anywhere. Spreads follow the fixtures' draw: streams stay of order one to ten
//! through all layers, scores differ enough that routing, selection and clamps all do something.

use crate::shape::ModelShape;
use crate::tensors::{TensorKind, TensorSpec};

/// Distribution of a tensor's values.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Draw {
    /// Bell-shaped around a mean.
    Bell {
        /// Centre.
        mean: f32,
        /// Standard deviation.
        spread: f32,
    },
    /// Bell-shaped around given centres, one for each value.
    Around {
        /// Centres.
        centres: Vec<f32>,
        /// Standard deviation.
        spread: f32,
    },
}

/// How the values of a tensor are drawn.
pub(super) fn draw_of(spec: &TensorSpec, shape: &ModelShape) -> Draw {
    let (layer, name) = split_layer(&spec.name, shape);
    let bell = |mean, spread| Draw::Bell { mean, spread };
    if let Some(name) = name.strip_suffix("_base")
        && name.starts_with("hc_")
    {
        return Draw::Around { centres: mix_centres(layer, shape.hc_mult), spread: 0.3 };
    }
    match name {
        "hc_attn_scale" | "hc_ffn_scale" => bell(0.7, 0.1),
        "attn.attn_sink" | "engram.embed.weight" | "markov_head.embed.weight" | "embed.weight" => {
            bell(0.0, 1.0)
        }
        "image_start" | "image_end" | "image_newline" => bell(0.0, 1.0),
        "ffn.gate.bias" => bell(0.0, 0.1),
        "ffn.gate.bias_vl" => bell(0.0, 0.3),
        "engram.q_weight" | "engram.k_weight" => bell(1.0, 0.3),
        _ if spec.shape.len() == 1 => bell(1.0, 0.1),
        // A matrix that is fed channels of order one gives outputs of order `gain`.
        _ => bell(0.0, gain(name, spec.kind) * (spec.cols() as f32).powf(-0.5)),
    }
}

fn gain(name: &str, kind: TensorKind) -> f32 {
    match name {
        "attn.wo_b.weight" | "attn.compressor.wgate.weight" => 2.0,
        "attn.wq_b.weight" | "attn.wo_a.weight" | "ffn.gate.weight" | "head.weight" => 1.5,
        _ if kind == TensorKind::Expert || name.starts_with("ffn.shared_experts.") => 1.5,
        _ => 1.0,
    }
}

/// Number of the layer a tensor belongs to (0 outside of layers), and its name inside it.
fn split_layer<'a>(name: &'a str, shape: &ModelShape) -> (usize, &'a str) {
    let first_draft = shape.num_hidden_layers;
    for (prefix, first) in [("layers.", 0), ("mtp.", first_draft)] {
        if let Some((number, rest)) = name.strip_prefix(prefix).and_then(|rest| rest.split_once('.'))
            && let Ok(number) = number.parse::<usize>()
        {
            return (first + number, rest);
        }
    }
    (0, name)
}

/// Centres of a mix: each layer reads mostly one copy, and copies mostly stay what they are.
fn mix_centres(layer: usize, copies: usize) -> Vec<f32> {
    let mut centres = vec![-1.0; copies];
    centres[layer % copies] = 1.5;
    centres.extend(vec![0.0; copies]);
    centres.extend((0..copies * copies).map(|i| if i / copies == i % copies { 2.0 } else { -2.0 }));
    centres
}

/// Random values by place.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stream {
    key: u64,
}

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// Scatters the bits of a counter (the finaliser of splitmix64).
fn scatter(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

impl Stream {
    /// The stream of a tensor.
    pub(super) fn new(seed: u64, tensor: &str) -> Self {
        let key = tensor.bytes().fold(scatter(seed ^ GOLDEN), |key, byte| scatter(key ^ u64::from(byte)));
        Self { key }
    }

    /// Mean 0, deviation 1, inside +-3.47: the sum of four uniform numbers out of one scattered counter.
    fn bell(self, place: u64) -> f32 {
        let bits = scatter(self.key.wrapping_add(place.wrapping_mul(GOLDEN)));
        let sum = (bits & 0xFFFF) + (bits >> 16 & 0xFFFF) + (bits >> 32 & 0xFFFF) + (bits >> 48);
        // The sum has mean 2 * 65535 and deviation (65536^2 - 1)^(1/2) / 3^(1/2).
        (sum as f32 - 131_070.0) * (1.732_050_8 / 65_536.0)
    }

    /// The values of a tensor from place `first` on.
    pub(super) fn fill(self, draw: &Draw, first: u64, out: &mut [f32]) {
        match draw {
            Draw::Bell { mean, spread } => {
                for (place, value) in (first..).zip(out) {
                    *value = mean + spread * self.bell(place);
                }
            }
            Draw::Around { centres, spread } => {
                for (place, value) in (first..).zip(out) {
                    *value = centres[place as usize] + spread * self.bell(place);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_have_the_wanted_mean_and_deviation_and_depend_on_seed_and_name() {
        let draw = Draw::Bell { mean: 0.5, spread: 2.0 };
        let values = |seed, name: &str| {
            let mut out = vec![0.0; 100_000];
            Stream::new(seed, name).fill(&draw, 0, &mut out);
            out
        };
        let a = values(1, "layers.0.attn.wkv.weight");
        let mean = a.iter().sum::<f32>() / a.len() as f32;
        let variance = a.iter().map(|v| (v - mean) * (v - mean)).sum::<f32>() / a.len() as f32;
        assert!((mean - 0.5).abs() < 0.05, "{mean}");
        assert!((variance.sqrt() - 2.0).abs() < 0.05, "{variance}");
        for other in [values(2, "layers.0.attn.wkv.weight"), values(1, "layers.1.attn.wkv.weight")] {
            let dot: f32 = a.iter().zip(&other).map(|(x, y)| (x - 0.5) * (y - 0.5)).sum();
            assert!((dot / a.len() as f32).abs() < 0.1, "independent");
        }
    }

    #[test]
    fn strips_of_a_tensor_are_cut_anywhere() {
        let draw = Draw::Bell { mean: 0.0, spread: 1.0 };
        let stream = Stream::new(7, "head.weight");
        let (mut whole, mut parts) = (vec![0.0; 100], vec![0.0; 100]);
        stream.fill(&draw, 0, &mut whole);
        let (head, tail) = parts.split_at_mut(37);
        stream.fill(&draw, 37, tail);
        stream.fill(&draw, 0, head);
        assert_eq!(whole, parts);
    }
}
