//! Entry points for fuzzing what a checkpoint directory feeds us. Each takes any bytes and panics only on a
//! bug; the result says whether the bytes were accepted, so that a corpus can be replayed as a test.

use crate::config;
use crate::tensors;
use crate::weights::{header, index};

/// The head of a safetensors file, with the rest of the file behind it.
pub fn safetensors_header(bytes: &[u8]) -> bool {
    let Ok(header) = header::parse(bytes) else {
        return false;
    };
    let mut next = 0;
    for entry in &header.entries {
        assert!(entry.offset >= next, "{}: overlaps", entry.name);
        next = entry.offset + entry.len;
        let bits = entry.shape.iter().product::<usize>() * entry.dtype.bitsize();
        assert_eq!(bits, entry.len * 8, "{}: length", entry.name);
    }
    assert!(header.entries.is_empty() || next == bytes.len(), "bytes beyond the last tensor");
    true
}

/// An index of shards.
pub fn safetensors_index(bytes: &[u8]) -> bool {
    let Ok(index) = index::parse(bytes) else {
        return false;
    };
    for file in index.shards() {
        assert!(!file.is_empty() && !file.contains('/') && file != "..", "{file:?} leaves the directory");
    }
    true
}

/// A configuration.
pub fn config_json(bytes: &[u8]) -> bool {
    let Ok((shape, _)) = config::parse(bytes) else {
        return false;
    };
    for layer in 0..shape.total_layers() {
        let compressed = shape.ratio(layer) > 0;
        assert_eq!(shape.kv_source(layer).is_some(), compressed, "KV source of layer {layer}");
        assert_eq!(shape.index_source(layer).is_some(), compressed, "index source of layer {layer}");
        assert!(shape.top_k(layer) <= shape.experts(layer), "experts of layer {layer}");
    }
    let _ = (shape.check_quantized(), shape.check_truncation());
    // A large but allowed model has millions of tensors: the list is made for small ones only.
    if shape.total_layers() * shape.n_routed_experts <= 1 << 12 {
        for spec in tensors::expected(&shape) {
            let format = spec.kind.format(shape.quantized);
            assert!(spec.bytes(format) > 0 && spec.rows() > 0, "{}", spec.name);
        }
    }
    true
}
