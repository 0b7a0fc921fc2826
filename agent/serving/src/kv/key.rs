//! Names of blocks by content: a chain of hashes over everything that decides a block's bytes (KV-2).
//!
//! Invariant: two sequences get the same key for block `i` only if they agree in the domain (weights, formats,
//! tokenizer, replay mode, numeric class), the adapter, the tenant's salt, and all tokens and inputs up to the end
//! of block `i`. Every field goes into the hash with its length or has a fixed one, under a context of its own.

use std::fmt;

use crate::batch::BLOCK_TOKENS;

/// Version of what is hashed and in which order. A change here makes every old key unreachable.
pub const KEY_FORMAT: u32 = 1;

const ROOT_CONTEXT: &str = "deepinfer.io kv block key 2026-11 root";
const BLOCK_CONTEXT: &str = "deepinfer.io kv block key 2026-11 block";

/// Name of a block's content and of everything before it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockKey(pub [u8; 32]);

impl fmt::Display for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockKey({self})")
    }
}

/// How window state is rebuilt and whether consumer rows are dropped: blocks of one mode are not another's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ReplayMode {
    /// Exact replay, no consumer truncation: the same bits as without a cache.
    #[default]
    Exact,
    /// Replay of one window, an approximation.
    Bounded,
}

/// What an engine's blocks depend on besides a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyDomain {
    /// Of the checkpoint's files.
    pub weights_digest: [u8; 32],
    /// Entry formats, block size and layer map, as text.
    pub kv_format: String,
    /// Of `tokenizer.json`: ids of two tokenizers do not mean the same.
    pub tokenizer_digest: [u8; 32],
    /// How state is rebuilt after a hit.
    pub replay: ReplayMode,
    /// Kernels and layouts that give the same bits, as text: `f32`, `quantized`.
    pub numeric_class: String,
}

impl KeyDomain {
    /// The key before the first block, for one adapter (empty: none) and one tenant.
    pub fn root(&self, adapter: &str, salt: &[u8; 32]) -> BlockKey {
        let mut hasher = blake3::Hasher::new_derive_key(ROOT_CONTEXT);
        hasher.update(&KEY_FORMAT.to_le_bytes());
        field(&mut hasher, &self.weights_digest);
        field(&mut hasher, self.kv_format.as_bytes());
        field(&mut hasher, &self.tokenizer_digest);
        field(
            &mut hasher,
            match self.replay {
                ReplayMode::Exact => b"exact",
                ReplayMode::Bounded => b"bounded",
            },
        );
        field(&mut hasher, self.numeric_class.as_bytes());
        field(&mut hasher, adapter.as_bytes());
        field(&mut hasher, salt);
        BlockKey(*hasher.finalize().as_bytes())
    }
}

fn field(hasher: &mut blake3::Hasher, bytes: &[u8]) {
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

/// An input of a block that is no text: an image at a position of the sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ExtraInput {
    /// Position in the sequence.
    pub position: u32,
    /// Of its content.
    pub digest: [u8; 32],
}

/// Key of the block after `parent`. `extra` is sorted by position.
///
/// # Panics
/// If `tokens` is not one full block: only full blocks have keys.
pub fn block_key(parent: &BlockKey, tokens: &[u32], extra: &[ExtraInput]) -> BlockKey {
    assert_eq!(tokens.len(), BLOCK_TOKENS, "only full blocks have keys");
    debug_assert!(extra.is_sorted(), "extra inputs are sorted by position");
    let mut bytes = [0; 4 * BLOCK_TOKENS];
    for (to, token) in bytes.chunks_exact_mut(4).zip(tokens) {
        to.copy_from_slice(&token.to_le_bytes());
    }
    let mut hasher = blake3::Hasher::new_derive_key(BLOCK_CONTEXT);
    hasher.update(&parent.0);
    hasher.update(&bytes);
    hasher.update(&(extra.len() as u64).to_le_bytes());
    for input in extra {
        hasher.update(&input.position.to_le_bytes());
        hasher.update(&input.digest);
    }
    BlockKey(*hasher.finalize().as_bytes())
}

/// Keys of all full blocks of a text sequence, in order.
pub fn chain(root: &BlockKey, tokens: &[u32]) -> Vec<BlockKey> {
    let mut parent = *root;
    tokens
        .chunks_exact(BLOCK_TOKENS)
        .map(|block| {
            parent = block_key(&parent, block, &[]);
            parent
        })
        .collect()
}
