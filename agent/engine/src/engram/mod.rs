//! Engram: which table rows a token reads (model.md section 8). Exact integer work.
//!
//! Everything is computed from tokenizer.json and config.json; files next to the weights that hold the same
//! numbers are never opened.

mod hash;
mod primes;
mod rng;
mod token_map;

pub use hash::{DEAD, Hasher};
pub use token_map::{TokenMap, TokenMapError};

use crate::shape::EngramShape;

/// Rows per token over all tables above which a configuration is surely a mistake (the real model has 48).
const MAX_COLUMNS: usize = 4096;

/// Hash primes by layer, each `[columns]`: length-major, then head.
fn primes(engram: &EngramShape) -> Vec<Vec<u64>> {
    let columns = engram.columns();
    let all = primes::primes_from(engram.vocab_size as u64, columns * engram.layer_ids.len());
    all.chunks(columns).map(<[u64]>::to_vec).collect()
}

/// Rows that the table of each Engram layer must have: the sum of its hash primes. `num_embeddings` is not
/// read.
///
/// # Errors
/// If rows could not be numbered with 32 bits, or there are absurdly many columns.
pub fn table_rows(engram: &EngramShape) -> Result<Vec<usize>, String> {
    let lengths = engram.max_ngram_size - 1;
    let columns = lengths.saturating_mul(engram.n_heads).saturating_mul(engram.layer_ids.len());
    if columns > MAX_COLUMNS {
        return Err(format!(
            "and the other engram sizes make {columns} table columns (lengths x heads x layers), at most \
             {MAX_COLUMNS} are supported"
        ));
    }
    let sums = primes(engram).iter().map(|layer| layer.iter().sum()).collect::<Vec<u64>>();
    match sums.iter().find(|&&sum| sum > u64::from(u32::MAX)) {
        Some(sum) => Err(format!("makes a table of {sum} rows, at most {} are supported", u32::MAX)),
        None => Ok(sums.into_iter().map(|sum| sum as usize).collect()),
    }
}
