//! Files of numbers that need no model: `spec_decode.json` and `engram_real.json`. Everything in them is exact.

use std::collections::BTreeMap;
use std::path::Path;

use deepinfer_serving::batch::{drafts_to_verify, rows_per_sequence, survivals};
use serde::Deserialize;

use super::checks::Checks;
use super::{VerifyError, manifest};
use crate::engram::{DEAD, Hasher, TokenMap};
use crate::shape::{EngramShape, ModelShape};

/// Compares one file. The shape only fills the fields that the file does not set.
type Compare = fn(&Path, &ModelShape, &mut Checks) -> Result<(), VerifyError>;

/// The files beside the manifest that belong to the suite: name, kind, comparison.
pub(super) const FILES: [(&str, &str, Compare); 2] =
    [("spec_decode.json", "spec_decode", spec_decode), ("engram_real.json", "engram_real", engram_real)];

#[derive(Deserialize)]
struct Verification {
    confidence: Vec<Vec<f64>>,
    step_ms: StepTime,
    drafts_to_verify: usize,
    rows_per_sequence: Vec<usize>,
}

#[derive(Deserialize)]
struct StepTime {
    base: f64,
    per_row: f64,
}

/// How many drafts a batch verifies on a given step-time line, and which sequences they belong to.
fn spec_decode(path: &Path, _: &ModelShape, checks: &mut Checks) -> Result<(), VerifyError> {
    let cases: Vec<Verification> = manifest::json(path)?;
    for (i, case) in cases.iter().enumerate() {
        let sequences = case.confidence.len();
        let step_ms = |rows: usize| case.step_ms.base + case.step_ms.per_row * rows as f64;
        let drafts = drafts_to_verify(&survivals(&case.confidence), sequences, step_ms);
        checks.equal(&format!("case {i}: drafts_to_verify"), &[case.drafts_to_verify], &[drafts]);
        let rows = rows_per_sequence(&case.confidence, sequences + drafts);
        checks.equal(&format!("case {i}: rows_per_sequence"), &case.rows_per_sequence, &rows);
    }
    Ok(())
}

#[derive(Deserialize)]
struct EngramConstants {
    config: EngramConfig,
    /// `[layer][n - 2][head]`
    primes: Vec<Vec<Vec<u64>>>,
    /// `[layer][lag]`
    multipliers: Vec<Vec<u64>>,
    /// `[layer][n-gram and head]`
    offsets: Vec<Vec<u64>>,
    example: EngramExample,
}

#[derive(Deserialize)]
struct EngramConfig {
    engram_layer_ids: Vec<usize>,
    engram_max_ngram_size: usize,
    engram_vocab_size: usize,
    engram_n_heads: usize,
    engram_compressed_vocab_size: usize,
    engram_pad_token_id: u32,
    engram_num_embeddings: Vec<usize>,
}

/// Compressed ids of a text, -1 at image positions, and the table rows of every position.
#[derive(Deserialize)]
struct EngramExample {
    compressed_ids: Vec<i64>,
    rows: BTreeMap<usize, Vec<Vec<u32>>>,
}

/// Channels of a table row of the real model; hashing does not depend on them.
const REAL_HEAD_DIM: usize = 256;

/// Primes, multipliers, offsets and table rows of the real configuration.
fn engram_real(path: &Path, shape: &ModelShape, checks: &mut Checks) -> Result<(), VerifyError> {
    let file: EngramConstants = manifest::json(path)?;
    let config = &file.config;
    let compressed = config.engram_compressed_vocab_size;
    let engram = EngramShape {
        layer_ids: config.engram_layer_ids.clone(),
        num_embeddings: config.engram_num_embeddings.clone(),
        max_ngram_size: config.engram_max_ngram_size,
        vocab_size: config.engram_vocab_size,
        n_heads: config.engram_n_heads,
        head_dim: REAL_HEAD_DIM,
        pad_token_id: config.engram_pad_token_id,
        compressed_vocab_size: compressed,
    };
    match crate::engram::table_rows(&engram) {
        Ok(rows) => checks.equal("engram_num_embeddings", &engram.num_embeddings, &rows),
        Err(why) => checks.refuse(format!("engram_vocab_size {why}")),
    }
    let layers = engram.layer_ids.clone();
    let shape = ModelShape { engram: Some(engram), ..shape.clone() };
    let hasher = match Hasher::new(&shape, TokenMap::identity(compressed)) {
        Ok(hasher) => hasher,
        Err(why) => {
            checks.refuse(why.to_string());
            return Ok(());
        }
    };
    for (ordinal, layer) in layers.iter().enumerate() {
        compare_constants(&file, &hasher, ordinal, checks);
        let Some(want) = file.example.rows.get(layer) else {
            checks.refuse(format!("no example rows of layer {layer}"));
            continue;
        };
        let got = example_rows(&file.example.compressed_ids, &hasher, ordinal);
        checks.equal(&format!("rows of layer {layer}"), want, &got);
    }
    Ok(())
}

fn compare_constants(file: &EngramConstants, hasher: &Hasher, ordinal: usize, checks: &mut Checks) {
    let got = hasher.constants(ordinal);
    let flat: Vec<u64> = file.primes.get(ordinal).into_iter().flatten().flatten().copied().collect();
    checks.equal(&format!("primes[{ordinal}]"), &flat, &got.primes);
    for (name, want, got) in
        [("multipliers", &file.multipliers, &got.multipliers), ("offsets", &file.offsets, &got.offsets)]
    {
        let want = want.get(ordinal).map_or(&[][..], Vec::as_slice);
        checks.equal(&format!("{name}[{ordinal}]"), want, got);
    }
}

/// Table rows of every position of the example text.
fn example_rows(ids: &[i64], hasher: &Hasher, ordinal: usize) -> Vec<Vec<u32>> {
    let ids: Vec<u32> = ids.iter().map(|id| u32::try_from(*id).unwrap_or(DEAD)).collect();
    (0..ids.len())
        .map(|position| {
            let history: Vec<u32> =
                (ids[..=position].iter().rev().copied().take(hasher.history_len())).collect();
            let mut rows = vec![0; hasher.columns()];
            hasher.rows(ordinal, &history, &mut rows);
            rows
        })
        .collect()
}
