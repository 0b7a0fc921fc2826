//! N-gram hashing: the compressed ids of the last tokens to table rows (model.md 8, rules 2 to 5).

use super::rng::Pcg64;
use super::token_map::{TokenMap, TokenMapError};
use crate::shape::ModelShape;

/// Stands for an image position in a history. It, and everything before it, counts as the pad id.
pub const DEAD: u32 = u32::MAX;

/// Hash constants of one layer.
#[derive(Clone, Debug)]
pub(crate) struct LayerHash {
    /// One odd multiplier per token of the longest n-gram, newest first.
    pub multipliers: Vec<u64>,
    /// Table sizes, length-major, then head.
    pub primes: Vec<u64>,
    /// First row of each of these tables.
    pub offsets: Vec<u64>,
}

/// Token ids to table rows.
#[derive(Clone, Debug)]
pub struct Hasher {
    layers: Vec<LayerHash>,
    map: TokenMap,
    pad: u32,
    lengths: usize,
    heads: usize,
}

impl Hasher {
    /// Derives the constants of a shape.
    ///
    /// # Errors
    /// If the map does not belong to the shape: another number of compressed ids, or no id for the pad token.
    ///
    /// # Panics
    /// If the shape has no Engram layers.
    pub fn new(shape: &ModelShape, map: TokenMap) -> Result<Self, TokenMapError> {
        let engram = shape.engram.as_ref().expect("called for shapes with Engram layers only");
        if map.compressed_len() != engram.compressed_vocab_size {
            return Err(TokenMapError::CompressedSize {
                found: map.compressed_len(),
                expected: engram.compressed_vocab_size,
            });
        }
        let pad = map.get(engram.pad_token_id).ok_or(TokenMapError::NoPadToken(engram.pad_token_id))?;
        // Half of the largest multiplier whose product with any id still fits in 63 bits.
        let bound = (i64::MAX as u64 / engram.compressed_vocab_size as u64 / 2).max(1);
        let layers = engram.layer_ids.iter().zip(super::primes(engram)).map(|(&layer, primes)| {
            let mut rng = Pcg64::new(10_007 * layer as u64);
            let multipliers = (0..engram.max_ngram_size).map(|_| 2 * rng.below(bound) + 1).collect();
            let offsets = primes.iter().scan(0, |next, &prime| {
                let first = *next;
                *next += prime;
                Some(first)
            });
            LayerHash { multipliers, offsets: offsets.collect(), primes }
        });
        Ok(Self {
            layers: layers.collect(),
            map,
            pad,
            lengths: engram.max_ngram_size - 1,
            heads: engram.n_heads,
        })
    }

    /// Hash constants of the `ordinal`-th Engram layer.
    pub(crate) fn constants(&self, ordinal: usize) -> &LayerHash {
        &self.layers[ordinal]
    }

    /// Compressed id of a raw token; ids beyond the map count as the pad token.
    pub fn compress(&self, token: u32) -> u32 {
        self.map.get(token).unwrap_or(self.pad)
    }

    /// Compressed id that stands for "nothing before".
    pub fn pad_id(&self) -> u32 {
        self.pad
    }

    /// Tokens that a row depends on, the current one included.
    pub fn history_len(&self) -> usize {
        self.lengths + 1
    }

    /// Table rows per token and layer.
    pub fn columns(&self) -> usize {
        self.lengths * self.heads
    }

    /// Table rows of one token in the `ordinal`-th Engram layer.
    ///
    /// `history` are compressed ids, newest (the token itself) first; a shorter one, or [`DEAD`], means that
    /// nothing is known from there on. Allocates nothing.
    ///
    /// # Panics
    /// If `out` is not [`Hasher::columns`] long.
    pub fn rows(&self, ordinal: usize, history: &[u32], out: &mut [u32]) {
        assert_eq!(out.len(), self.columns(), "table rows of one token");
        let layer = &self.layers[ordinal];
        let known = history.iter().position(|&id| id == DEAD).unwrap_or(history.len());
        let mut hash = 0;
        for (lag, &multiplier) in layer.multipliers.iter().enumerate() {
            let id = if lag < known { history[lag] } else { self.pad };
            hash ^= u64::from(id) * multiplier;
            if lag == 0 {
                continue;
            }
            let tables = (lag - 1) * self.heads..lag * self.heads;
            let sizes = layer.primes[tables.clone()].iter().zip(&layer.offsets[tables.clone()]);
            for (row, (prime, offset)) in out[tables].iter_mut().zip(sizes) {
                // The sum of the primes fits in 32 bits: checked with the configuration.
                *row = (hash % prime + offset) as u32;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::EngramShape;
    use serde_json::Value;
    use std::path::{Path, PathBuf};

    fn golden() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../e2e/golden")
    }

    fn json(path: &Path) -> Value {
        serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
    }

    fn numbers(value: &Value) -> Vec<u64> {
        value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap()).collect()
    }

    /// Nested lists to one.
    fn flat(value: &Value) -> Vec<u64> {
        match value {
            Value::Array(items) => items.iter().flat_map(flat).collect(),
            number => vec![number.as_u64().unwrap()],
        }
    }

    fn shape_of(checkpoint: &str) -> ModelShape {
        let config = std::fs::read(golden().join(checkpoint).join("config.json")).unwrap();
        crate::config::parse(&config).unwrap().0
    }

    #[test]
    fn constants_and_rows_of_the_real_configuration() {
        let file = json(&golden().join("vectors/engram_real.json"));
        let config = &file["config"];
        let number = |key: &str| config[key].as_u64().unwrap() as usize;
        let list = |key: &str| numbers(&config[key]).into_iter().map(|n| n as usize).collect::<Vec<_>>();
        let compressed = number("engram_compressed_vocab_size");
        let mut shape = shape_of("tiny-bf16");
        shape.engram = Some(EngramShape {
            layer_ids: list("engram_layer_ids"),
            num_embeddings: list("engram_num_embeddings"),
            max_ngram_size: number("engram_max_ngram_size"),
            vocab_size: number("engram_vocab_size"),
            n_heads: number("engram_n_heads"),
            head_dim: 256,
            pad_token_id: number("engram_pad_token_id") as u32,
            compressed_vocab_size: compressed,
        });
        let engram = shape.engram.as_ref().unwrap();
        assert_eq!(super::super::table_rows(engram).unwrap(), engram.num_embeddings);

        let hasher = Hasher::new(&shape, TokenMap::identity(compressed)).unwrap();
        for (ordinal, layer) in hasher.layers.iter().enumerate() {
            assert_eq!(layer.multipliers, numbers(&file["multipliers"][ordinal]));
            assert_eq!(layer.primes, flat(&file["primes"][ordinal]));
            assert_eq!(layer.offsets, flat(&file["offsets"][ordinal]));
        }
        let ids = file["example"]["compressed_ids"].as_array().unwrap();
        let ids = ids.iter().map(|id| id.as_u64().map_or(DEAD, |id| id as u32)).collect::<Vec<_>>();
        assert!(ids.contains(&DEAD), "the example has an image position");
        for (ordinal, layer) in engram.layer_ids.iter().enumerate() {
            let rows = file["example"]["rows"][layer.to_string()].as_array().unwrap();
            assert_eq!(rows.len(), ids.len());
            for (position, want) in rows.iter().enumerate() {
                let history = ids[..=position].iter().rev().copied().take(hasher.history_len());
                let mut out = vec![0; hasher.columns()];
                hasher.rows(ordinal, &history.collect::<Vec<_>>(), &mut out);
                let out = out.into_iter().map(u64::from).collect::<Vec<_>>();
                assert_eq!(out, numbers(want), "layer {layer}, position {position}");
            }
        }
    }

    #[test]
    fn constants_of_the_golden_checkpoints() {
        for checkpoint in ["tiny-bf16", "tiny-quant"] {
            let map = TokenMap::from_tokenizer_file(&golden().join(checkpoint).join("tokenizer.json"), 512)
                .unwrap();
            let hasher = Hasher::new(&shape_of(checkpoint), map).unwrap();
            let file = json(&golden().join(checkpoint).join("engram_hash.json"));
            assert_eq!(u64::from(hasher.pad_id()), file["pad_id"].as_u64().unwrap());
            for (ordinal, layer) in hasher.layers.iter().enumerate() {
                assert_eq!(layer.multipliers, numbers(&file["multipliers"][ordinal]));
                assert_eq!(layer.primes, flat(&file["primes"][ordinal]));
                assert_eq!(layer.offsets, flat(&file["offsets"][ordinal]));
            }
        }
    }

    #[test]
    fn a_dead_position_hides_itself_and_everything_before() {
        let map = TokenMap::from_tokenizer_file(&golden().join("tiny-quant/tokenizer.json"), 512).unwrap();
        let hasher = Hasher::new(&shape_of("tiny-quant"), map).unwrap();
        let rows = |history: &[u32]| {
            let mut out = vec![0; hasher.columns()];
            hasher.rows(1, history, &mut out);
            out
        };
        let pad = hasher.pad_id();
        assert_eq!(rows(&[7, 9, DEAD, 11]), rows(&[7, 9]));
        assert_eq!(rows(&[7, 9, DEAD, 11]), rows(&[7, 9, pad, pad]));
        assert_ne!(rows(&[7, 9, DEAD, 11]), rows(&[7, 9, pad, 11]));
        assert_eq!(rows(&[DEAD, 9, 8, 11]), rows(&[pad; 4]));
    }
}
