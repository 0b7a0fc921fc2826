//! The compressed Engram vocabulary: tokens whose normalized text agrees share one id (model.md 8, rule 1).

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use tokenizers::normalizers::replace::ReplacePattern;
use tokenizers::normalizers::{Lowercase, NFD, NFKC, Replace, Strip, StripAccents};
use tokenizers::{NormalizedString, Normalizer, Tokenizer};

/// Why there is no compressed vocabulary for a model.
#[derive(Debug, thiserror::Error)]
pub enum TokenMapError {
    /// The file could not be read.
    #[error("{}: {source}; Engram layers need the tokenizer of the model", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The bytes are no tokenizer.
    #[error("tokenizer.json cannot be read: {0}")]
    Tokenizer(String),
    /// There are tokens without an embedding.
    #[error(
        "tokenizer.json has token id {largest}, but text_config.vocab_size is {vocab_size}: \
         it is another model's"
    )]
    TooLarge {
        /// Largest token id.
        largest: u32,
        /// Rows of the embedding.
        vocab_size: usize,
    },
    /// The tokenizer belongs to another model.
    #[error(
        "tokenizer.json gives {found} compressed Engram ids, but text_config.engram_compressed_vocab_size is \
         {expected}: it is another model's"
    )]
    CompressedSize {
        /// Ids that the tokenizer gives.
        found: usize,
        /// Ids that the configuration names.
        expected: usize,
    },
    /// The pad token has no entry.
    #[error("text_config.engram_pad_token_id is {0}, but tokenizer.json has no such token")]
    NoPadToken(u32),
}

/// Raw token id to compressed id. Compressed ids count up in order of first appearance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenMap {
    ids: Vec<u32>,
    compressed: usize,
}

impl TokenMap {
    /// As [`TokenMap::from_tokenizer`], from a file.
    ///
    /// # Errors
    /// As there, and if the file cannot be read.
    pub fn from_tokenizer_file(path: &Path, vocab_size: usize) -> Result<Self, TokenMapError> {
        let bytes =
            std::fs::read(path).map_err(|source| TokenMapError::Io { path: path.to_path_buf(), source })?;
        Self::from_tokenizer(&bytes, vocab_size)
    }

    /// Computes the map from the bytes of tokenizer.json.
    ///
    /// # Errors
    /// If they are no tokenizer, or one with more tokens than `vocab_size`.
    pub fn from_tokenizer(tokenizer_json: &[u8], vocab_size: usize) -> Result<Self, TokenMapError> {
        let tokenizer =
            Tokenizer::from_bytes(tokenizer_json).map_err(|e| TokenMapError::Tokenizer(e.to_string()))?;
        let largest = tokenizer.get_vocab(true).into_values().max().unwrap_or(0);
        if largest as usize >= vocab_size {
            return Err(TokenMapError::TooLarge { largest, vocab_size });
        }
        let count = tokenizer.get_vocab_size(true) as u32;
        let (mut numbers, mut ids) = (HashMap::new(), Vec::with_capacity(count as usize));
        for key in keys(&tokenizer, count)? {
            let next = numbers.len() as u32;
            ids.push(*numbers.entry(key).or_insert(next));
        }
        Ok(Self { ids, compressed: numbers.len() })
    }

    /// Every id is its own compressed id.
    pub(crate) fn identity(len: usize) -> Self {
        Self { ids: (0..len as u32).collect(), compressed: len }
    }

    /// Compressed id of a raw token.
    pub fn get(&self, token: u32) -> Option<u32> {
        self.ids.get(token as usize).copied()
    }

    /// Number of raw tokens.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// Whether there is no token at all.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// Number of compressed ids.
    pub fn compressed_len(&self) -> usize {
        self.compressed
    }
}

/// What each token is compared by. Decoding and normalizing a real vocabulary takes a second: two halves at
/// once.
fn keys(tokenizer: &Tokenizer, count: u32) -> Result<Vec<String>, TokenMapError> {
    let rules = Rules::new();
    let part = |range: std::ops::Range<u32>| {
        range.map(|token| rules.key(tokenizer, token)).collect::<tokenizers::Result<Vec<String>>>()
    };
    let halves = std::thread::scope(|scope| {
        let first = scope.spawn(|| part(0..count / 2));
        let second = part(count / 2..count);
        [first.join().expect("the normalizers do not panic"), second]
    });
    let mut keys = Vec::with_capacity(count as usize);
    for half in halves {
        keys.extend(half.map_err(|e| TokenMapError::Tokenizer(e.to_string()))?);
    }
    Ok(keys)
}

/// A character of the private use area keeps a text that is one space apart from the empty text.
const LONE_SPACE: &str = "\u{e000}";

/// The normalizers, with their expressions compiled once.
struct Rules {
    blanks: Replace,
    protect: Replace,
    restore: Replace,
}

impl Rules {
    fn new() -> Self {
        let replace = |pattern, with: &str| Replace::new(pattern, with).expect("the patterns are constants");
        Self {
            blanks: replace(ReplacePattern::Regex(r"[ \t\r\n]+".to_string()), " "),
            protect: replace(ReplacePattern::Regex("^ $".to_string()), LONE_SPACE),
            restore: replace(ReplacePattern::String(LONE_SPACE.to_string()), " "),
        }
    }

    fn key(&self, tokenizer: &Tokenizer, token: u32) -> tokenizers::Result<String> {
        let text = tokenizer.decode(&[token], false)?;
        if text.contains(char::REPLACEMENT_CHARACTER) {
            // Part of a character: only the token itself tells it apart.
            return Ok(tokenizer.id_to_token(token).unwrap_or(text));
        }
        let mut normalized = NormalizedString::from(text.as_str());
        NFKC.normalize(&mut normalized)?;
        NFD.normalize(&mut normalized)?;
        StripAccents.normalize(&mut normalized)?;
        Lowercase.normalize(&mut normalized)?;
        self.blanks.normalize(&mut normalized)?;
        self.protect.normalize(&mut normalized)?;
        Strip::new(true, true).normalize(&mut normalized)?;
        self.restore.normalize(&mut normalized)?;
        let normalized = normalized.get();
        Ok(if normalized.is_empty() { text } else { normalized.to_string() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn golden(checkpoint: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../e2e/golden").join(checkpoint)
    }

    #[test]
    fn the_map_of_the_golden_tokenizers_is_the_oracles() {
        for checkpoint in ["tiny-bf16", "tiny-quant"] {
            let dir = golden(checkpoint);
            let map = TokenMap::from_tokenizer_file(&dir.join("tokenizer.json"), 512).unwrap();
            let want: Vec<u32> =
                serde_json::from_slice(&std::fs::read(dir.join("engram_token_map.json")).unwrap()).unwrap();
            assert_eq!(map.ids, want);
            assert_eq!(map.compressed_len(), 347);
            assert!(map.compressed_len() < map.len(), "some tokens share an id");
        }
    }

    #[test]
    fn the_map_of_the_shipped_model_has_as_many_ids_as_its_configuration_says() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/models/tiny-v41");
        let map = TokenMap::from_tokenizer_file(&dir.join("tokenizer.json"), 3072).unwrap();
        assert_eq!((map.len(), map.compressed_len()), (3072, 2490));
    }

    #[test]
    fn a_tokenizer_larger_than_the_embedding_is_refused() {
        let error =
            TokenMap::from_tokenizer_file(&golden("tiny-quant").join("tokenizer.json"), 500).unwrap_err();
        assert!(matches!(error, TokenMapError::TooLarge { largest: 511, vocab_size: 500 }), "{error}");
        assert!(error.to_string().contains("vocab_size is 500"));
    }

    #[test]
    fn what_is_no_tokenizer_is_refused() {
        assert!(matches!(TokenMap::from_tokenizer(b"{}", 10), Err(TokenMapError::Tokenizer(_))));
        let missing = TokenMap::from_tokenizer_file(Path::new("nowhere/tokenizer.json"), 10);
        assert!(missing.unwrap_err().to_string().contains("nowhere/tokenizer.json"));
    }
}
