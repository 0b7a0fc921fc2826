//! Names of a checkpoint's content, cheap to compute: without reading all weights.

use super::{Checkpoint, CheckpointError, read};
use crate::tensors::Part;

/// Bytes of a tensor that are looked at.
const SAMPLE: usize = 256;

impl Checkpoint {
    /// Digest of config.json, of every tensor's name, file, format, shape and place, of the files' sizes, and
    /// of the first bytes of every tensor but the routed experts. Another training run of the same layout has
    /// other norms, so another digest; a changed byte deep inside a weight is not noticed.
    pub fn digest(&self) -> [u8; 32] {
        let mut hash = blake3::Hasher::new_derive_key("deepinfer.io checkpoint 1");
        hash.update(&self.config_digest);
        for shard in &self.shards {
            text(&mut hash, &shard.file);
            number(&mut hash, shard.bytes.len());
        }
        let mut names: Vec<&String> = self.stored.keys().collect();
        names.sort_unstable();
        for name in names {
            let stored = &self.stored[name];
            text(&mut hash, name);
            text(&mut hash, &format!("{:?}", stored.dtype));
            number(&mut hash, stored.shape.len());
            stored.shape.iter().for_each(|&size| number(&mut hash, size));
            [stored.shard, stored.offset, stored.len].iter().for_each(|&n| number(&mut hash, n));
        }
        // Experts are most of the tensors, each in pages of its own that nothing else has touched yet.
        for spec in self.specs().filter(|spec| spec.part != Part::Experts) {
            let bytes = self.view(&spec.name);
            hash.update(&bytes[..bytes.len().min(SAMPLE)]);
        }
        hash.finalize().into()
    }

    /// Digest of tokenizer.json; `None` without one.
    ///
    /// # Errors
    /// [`CheckpointError::Io`] if it cannot be read.
    pub fn tokenizer_digest(&self) -> Result<Option<[u8; 32]>, CheckpointError> {
        match self.tokenizer_path() {
            Some(path) => Ok(Some(blake3::hash(&read(&path)?).into())),
            None => Ok(None),
        }
    }
}

fn text(hash: &mut blake3::Hasher, text: &str) {
    number(hash, text.len());
    hash.update(text.as_bytes());
}

fn number(hash: &mut blake3::Hasher, number: usize) {
    hash.update(&(number as u64).to_le_bytes());
}
