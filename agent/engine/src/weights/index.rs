//! `model.safetensors.index.json`: which shard holds which tensor.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::{Component, Path};

use serde::Deserialize;
use serde_json::Value;

use super::header::RawHeader;

/// Shard file of every tensor, by stored name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Index {
    /// Stored tensor name to file name.
    pub files: BTreeMap<String, String>,
}

impl Index {
    /// File names, each once.
    pub fn shards(&self) -> Vec<&str> {
        let mut shards: Vec<&str> = self.files.values().map(String::as_str).collect();
        shards.sort_unstable();
        shards.dedup();
        shards
    }
}

#[derive(Deserialize)]
struct Raw {
    weight_map: RawHeader,
}

/// Reads an index.
///
/// # Errors
/// All of its problems: no `weight_map`, a tensor named twice, a file that is not a plain name.
pub fn parse(bytes: &[u8]) -> Result<Index, Vec<String>> {
    let raw: Raw =
        serde_json::from_slice(bytes).map_err(|e| vec![format!("is not JSON with a weight_map: {e}")])?;
    let (mut index, mut problems) = (Index::default(), Vec::new());
    for (name, file) in raw.weight_map.0 {
        let Value::String(file) = file else {
            problems.push(format!("tensor {name}: {file} is no file name"));
            continue;
        };
        if !is_plain(&file) {
            problems.push(format!("tensor {name}: {file:?} is not the name of a file in the same directory"));
        } else {
            match index.files.entry(name) {
                Entry::Occupied(there) => problems.push(format!("tensor {}: named twice", there.key())),
                Entry::Vacant(free) => {
                    free.insert(file);
                }
            }
        }
    }
    if index.files.is_empty() && problems.is_empty() {
        problems.push("names no tensor in weight_map".to_string());
    }
    if problems.is_empty() { Ok(index) } else { Err(problems) }
}

/// Whether a name stays inside its directory.
fn is_plain(file: &str) -> bool {
    let mut parts = Path::new(file).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(name)), None) if name == file)
}
