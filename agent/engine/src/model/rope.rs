//! Rotary position embedding: frequencies, and tables of cosines and sines.
//!
//! The angle is the float32 product of position and frequency: at a million tokens the model was trained with
//! that rounding, and an exact angle would be another one.

use crate::shape::{ModelShape, RopeScaling};

/// Inverse frequencies of the two kinds of layers, `[qk_rope_head_dim / 2]` each.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Frequencies {
    /// Window-only and draft layers.
    pub plain: Vec<f32>,
    /// Everything in layers with compressed KV: their windows, queries and compressed entries.
    pub compressed: Vec<f32>,
}

impl Frequencies {
    /// The frequencies of a model.
    pub fn of(shape: &ModelShape) -> Self {
        let dim = shape.qk_rope_head_dim;
        Self {
            plain: frequencies(dim, shape.rope_theta, None),
            compressed: frequencies(dim, shape.compress_rope_theta, shape.rope_scaling.as_ref()),
        }
    }
}

/// `theta^(-2i / dim)` for i = 0 .. dim / 2, stretched by YaRN where asked.
pub fn frequencies(dim: usize, theta: f64, scaling: Option<&RopeScaling>) -> Vec<f32> {
    // Every source builds this table in float32, step by step; a last bit counts at a million tokens.
    let base = |i: usize| 1.0 / theta.powf(f64::from((2 * i) as f32 / dim as f32)) as f32;
    let plain = (0..dim / 2).map(base);
    let Some(yarn) = scaling else {
        return plain.collect();
    };
    let (low, high) = ramp_ends(dim, theta, yarn);
    let width = ((high - low) as f32).max(1e-3);
    let factor = yarn.factor as f32;
    plain
        .enumerate()
        .map(|(i, f)| {
            let ramp = ((i as f32 - low as f32) / width).clamp(0.0, 1.0);
            f / factor * ramp + f * (1.0 - ramp)
        })
        .collect()
}

/// Channel pairs between which YaRN goes from keeping to dividing a frequency.
fn ramp_ends(dim: usize, theta: f64, yarn: &RopeScaling) -> (f64, f64) {
    let original = yarn.original_max_position_embeddings as f64;
    let pair = |rotations: f64| {
        dim as f64 * (original / (rotations * 2.0 * std::f64::consts::PI)).ln() / (2.0 * theta.ln())
    };
    let low = pair(yarn.beta_fast).floor().max(0.0);
    let high = pair(yarn.beta_slow).ceil().min(dim as f64 - 1.0);
    (low, high)
}

/// Appends the table row of `position`: all cosines, then all sines.
pub fn push_cos_sin(frequencies: &[f32], position: usize, table: &mut Vec<f32>) {
    let angle = |f: f32| f64::from(position as f32 * f);
    table.extend(frequencies.iter().map(|&f| angle(f).cos() as f32));
    table.extend(frequencies.iter().map(|&f| angle(f).sin() as f32));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_real_ramp_goes_from_pair_15_to_25() {
        let yarn = RopeScaling {
            factor: 16.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_max_position_embeddings: 65536,
        };
        assert_eq!(ramp_ends(64, 160_000.0, &yarn), (15.0, 25.0));
        let plain = frequencies(64, 160_000.0, None);
        let stretched = frequencies(64, 160_000.0, Some(&yarn));
        assert_eq!(plain[..16], stretched[..16]);
        for i in 25..32 {
            assert_eq!(stretched[i], plain[i] / 16.0);
        }
    }

    #[test]
    fn a_table_row_holds_cosines_then_sines() {
        let mut table = Vec::new();
        push_cos_sin(&[1.0, 0.5], 2, &mut table);
        let want = [2f64.cos(), 1f64.cos(), 2f64.sin(), 1f64.sin()].map(|v| v as f32);
        assert_eq!(table, want);
    }
}
