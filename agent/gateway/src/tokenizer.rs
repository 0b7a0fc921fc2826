//! The tokenizer: text to ids and ids to bytes.
//!
//! Invariants: encoding text yields ordinary ids only, never those of added tokens, even where the text spells
//! one; every text can be encoded; decoding joins the bytes of all ids first and then reads them as UTF-8, so an
//! invalid sequence becomes U+FFFD exactly as in one-shot decoding. "Special" means: listed in `added_tokens`,
//! whatever the file's `special` flag says (the family's files set it to false for `<think>`).

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use deepseek_recipe::stream::StreamTokenizer;
use deepseek_recipe_encoding::TokenizerEncoder;
use serde_json::Value;

use crate::tokenizer_file::TokenizerFile;

/// Why a tokenizer cannot be opened or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The file cannot be read.
    #[error("cannot read the tokenizer {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },
    /// The file is not JSON, or ends too early.
    #[error("{name}: {}: {source}; copy the file again", json_trouble(source))]
    Json {
        /// The file, or what the caller called the bytes.
        name: String,
        /// The place of the error in the file.
        source: serde_json::Error,
    },
    /// The file is JSON, but a field is missing, contradictory or not supported.
    #[error("{name}: field `{field}`: {problem}")]
    Field {
        /// The file, or what the caller called the bytes.
        name: String,
        /// The field, such as `model.vocab`.
        field: String,
        /// What is wrong and what is expected.
        problem: String,
    },
    /// The encoder refuses the file: an unsupported normalizer, pre-tokenizer or pattern.
    #[error("{name}: no encoder can be built from it: {detail}")]
    Encoder {
        /// The file, or what the caller called the bytes.
        name: String,
        /// The encoder's message.
        detail: String,
    },
    /// The tokenizer has ids for which the model has no embedding row.
    #[error(
        "tokenizer larger than the embedding: its largest token id is {}, the embedding has {rows} rows; \
         use the tokenizer.json of this checkpoint",
        ids - 1
    )]
    LargerThanEmbedding {
        /// Ids of the tokenizer, 0 to `ids - 1`.
        ids: usize,
        /// Rows of the embedding.
        rows: usize,
    },
    /// The encoder failed on a text (a pattern ran into its matching limit).
    #[error("cannot encode a text of {bytes} bytes: {detail}")]
    Encode {
        /// Length of the text.
        bytes: usize,
        /// The encoder's message.
        detail: String,
    },
}

fn json_trouble(error: &serde_json::Error) -> &'static str {
    if error.is_eof() { "the file is truncated" } else { "not valid JSON" }
}

/// A byte-level BPE tokenizer, read from `tokenizer.json`.
///
/// Cheap to share (`Arc`), safe to use from several threads. Long texts are encoded by several threads of a pool
/// that the encoder keeps for the process.
pub struct Tokenizer {
    encoder: fastokens::Tokenizer,
    /// Bytes of all ids, one after another; `ends[id]` is where those of `id` end.
    bytes: Vec<u8>,
    ends: Vec<usize>,
    names: Vec<Option<Box<str>>>,
    special: Vec<bool>,
    special_ids: BTreeMap<String, u32>,
}

impl Tokenizer {
    /// Read a `tokenizer.json`.
    ///
    /// # Errors
    ///
    /// [`TokenizerError`] naming the file and, where the file is JSON, the field: unreadable, truncated or not
    /// JSON, not a byte-level BPE tokenizer, an empty vocabulary, ids that contradict each other.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, TokenizerError> {
        let path = path.as_ref();
        let bytes =
            std::fs::read(path).map_err(|source| TokenizerError::Read { path: path.to_owned(), source })?;
        Self::from_bytes(&path.display().to_string(), &bytes)
    }

    /// Read the content of a `tokenizer.json`; `name` is what error messages call it.
    ///
    /// # Errors
    ///
    /// As [`Tokenizer::open`], without [`TokenizerError::Read`].
    pub fn from_bytes(name: &str, bytes: &[u8]) -> Result<Self, TokenizerError> {
        let file = check(name, bytes)?;
        let encoder = fastokens::Tokenizer::from_json(file.encoder_json)
            .map_err(|error| explain(name, bytes, &error.to_string()))?;
        let mut tokenizer = Self {
            encoder,
            bytes: Vec::new(),
            ends: Vec::with_capacity(file.entries.len()),
            names: Vec::with_capacity(file.entries.len()),
            special: Vec::with_capacity(file.entries.len()),
            special_ids: file.special_ids,
        };
        for entry in file.entries {
            if let Some(entry) = &entry {
                tokenizer.bytes.extend_from_slice(&entry.bytes);
            }
            tokenizer.ends.push(tokenizer.bytes.len());
            tokenizer.special.push(entry.as_ref().is_some_and(|entry| entry.special));
            tokenizer.names.push(entry.map(|entry| entry.name));
        }
        Ok(tokenizer)
    }

    /// Number of ids: the largest id plus one. An embedding needs at least as many rows.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.names.len()
    }

    /// Check that the model has an embedding row for every id.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::LargerThanEmbedding`] if `rows` is less than [`Tokenizer::vocab_size`]. More rows than
    /// ids are normal: checkpoints pad their embeddings.
    pub fn check_embedding(&self, rows: usize) -> Result<(), TokenizerError> {
        let ids = self.vocab_size();
        if ids > rows { Err(TokenizerError::LargerThanEmbedding { ids, rows }) } else { Ok(()) }
    }

    /// Encode text. Characters that spell a special token are encoded as the characters they are; nothing is
    /// added at either end.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Encode`] if a pre-tokenizer pattern runs into its matching limit.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        if text.is_empty() {
            return Ok(Vec::new());
        }
        self.encoder
            .encode_ordinary(text)
            .map_err(|error| TokenizerError::Encode { bytes: text.len(), detail: error.to_string() })
    }

    /// The id of the special (added) token spelled `content`.
    #[must_use]
    pub fn special_id(&self, content: &str) -> Option<u32> {
        self.special_ids.get(content).copied()
    }

    /// All special (added) tokens with their ids, in the order of their spelling.
    pub fn special_tokens(&self) -> impl Iterator<Item = (&str, u32)> {
        self.special_ids.iter().map(|(content, &id)| (content.as_str(), id))
    }

    /// Whether `id` is a special (added) token.
    #[must_use]
    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// The vocabulary string of `id`: the spelling of a special token, the byte-alphabet form of any other
    /// (`Ġthe` for " the").
    #[must_use]
    pub fn id_to_token(&self, id: u32) -> Option<&str> {
        self.names.get(id as usize)?.as_deref()
    }

    /// The bytes that `id` stands for; empty for an id that the tokenizer does not have. One id may be a part of
    /// a character only.
    #[must_use]
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        let index = id as usize;
        let Some(&end) = self.ends.get(index) else {
            return &[];
        };
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.bytes[start..end]
    }

    /// The text of `ids`. Bytes that are not UTF-8 become U+FFFD; ids that the tokenizer does not have add
    /// nothing; with `skip_special` the special tokens add nothing either.
    #[must_use]
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut bytes = Vec::new();
        for &id in ids {
            if !(skip_special && self.is_special(id)) {
                bytes.extend_from_slice(self.token_bytes(id));
            }
        }
        match String::from_utf8(bytes) {
            Ok(text) => text,
            Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
        }
    }

    /// Encode a rendered prompt: each of `ranges` is one special token, the text between them is text.
    pub(crate) fn encode_ranges(&self, text: &str, ranges: &[Range<usize>]) -> Result<Vec<u32>, String> {
        let plain = |range: Range<usize>| {
            let part =
                text.get(range.clone()).ok_or_else(|| format!("range {range:?} is not in the prompt"))?;
            self.encode_text(part).map_err(|error| error.to_string())
        };
        let mut ids = Vec::new();
        let mut start = 0;
        for range in ranges {
            ids.extend(plain(start..range.start)?);
            let token =
                text.get(range.clone()).ok_or_else(|| format!("range {range:?} is not in the prompt"))?;
            let id = self
                .special_id(token)
                .ok_or_else(|| format!("the tokenizer has no special token {token:?}"))?;
            ids.push(id);
            start = range.end;
        }
        ids.extend(plain(start..text.len())?);
        Ok(ids)
    }
}

fn check(name: &str, bytes: &[u8]) -> Result<TokenizerFile, TokenizerError> {
    let root: Value = serde_json::from_slice(bytes)
        .map_err(|source| TokenizerError::Json { name: name.to_owned(), source })?;
    TokenizerFile::check(root).map_err(|found| TokenizerError::Field {
        name: name.to_owned(),
        field: found.field,
        problem: found.problem,
    })
}

/// The encoder reports a model that it cannot build as one of unknown type; reading the model alone gives the
/// reason.
fn explain(name: &str, bytes: &[u8], message: &str) -> TokenizerError {
    let model =
        check(name, bytes).ok().and_then(|mut file| file.encoder_json.get_mut("model").map(Value::take));
    let reason = model.and_then(|model| serde_json::from_value::<fastokens::models::bpe::Bpe>(model).err());
    match reason {
        Some(reason) => TokenizerError::Field {
            name: name.to_owned(),
            field: "model".to_owned(),
            problem: reason.to_string(),
        },
        None => TokenizerError::Encoder { name: name.to_owned(), detail: message.to_owned() },
    }
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("special_tokens", &self.special_ids.len())
            .finish_non_exhaustive()
    }
}

/// The encoder that `deepseek-recipe` renders with.
pub(crate) struct PromptEncoder(pub(crate) Arc<Tokenizer>);

impl TokenizerEncoder for PromptEncoder {
    fn encode_ids(&self, text: &str, special_ranges: &[Range<usize>]) -> Result<Vec<u32>, String> {
        self.0.encode_ranges(text, special_ranges)
    }
}

/// The decoder that `deepseek-recipe` parses output with; see [`crate::parse`] for the marks.
pub(crate) struct MarkingDecoder {
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// Special ids that the parser reads as markers, with the character that stands for each.
    pub(crate) marks: Vec<(u32, char)>,
}

impl StreamTokenizer for MarkingDecoder {
    fn decode_ids(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String, String> {
        if let [id] = ids
            && let Some((_, mark)) = self.marks.iter().find(|(marked, _)| marked == id)
        {
            return Ok(mark.to_string());
        }
        Ok(self.tokenizer.decode(ids, skip_special_tokens))
    }

    fn is_special_token(&self, id: u32) -> bool {
        self.tokenizer.is_special(id) || self.marks.iter().any(|(marked, _)| *marked == id)
    }
}
