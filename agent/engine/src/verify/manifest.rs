//! The manifest of a golden directory: which vectors exist and how each is run.
//!
//! Fields that no kind needs are ignored. Python writes `Infinity` and `NaN` where JSON has no such number; they
//! stand only in fields that are ignored here, and are read as null.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::VerifyError;
use crate::numerics::Numerics;

/// One case of the manifest.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Entry {
    /// Name of the tensor file, relative to the manifest.
    pub file: Option<String>,
    /// What is recorded.
    pub kind: String,
    /// Checkpoint it belongs to; `None`: any.
    pub checkpoint: Option<String>,
    /// `f32` or `act_fp8+kv`.
    pub numerics: Option<String>,
    /// The prompt.
    pub tokens: Vec<u32>,
    /// Lengths of the prefill chunks; empty: one chunk.
    pub chunks: Vec<usize>,
    /// Greedy tokens, the prefill's own first.
    pub generated: Vec<u32>,
    /// Cycles of speculative decoding.
    pub steps: Vec<SpeculativeStep>,
    /// What the cycles emit together.
    pub emitted: Vec<u32>,
    /// Rows of the prompt that the consumer half computes.
    pub keep_tokens: Option<usize>,
    /// Whether the first consumer layer's own window is cut too.
    pub boundary_swa: Option<String>,
    /// First position of the image span, and the one after its last.
    pub span: Option<[usize; 2]>,
}

/// One cycle of draft, verification and rollback.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
pub(crate) struct SpeculativeStep {
    /// Position of `token`.
    pub position: usize,
    /// The known token.
    pub token: u32,
    /// Proposed tokens.
    pub drafts: Vec<u32>,
    /// Accepted drafts and the target's token after them.
    pub emitted: Vec<u32>,
}

impl Entry {
    /// Numerics of the case; f32 unless it says otherwise.
    pub fn numerics(&self) -> Result<Numerics, String> {
        match self.numerics.as_deref() {
            None | Some("f32") => Ok(Numerics::F32),
            Some("act_fp8+kv") => Ok(Numerics::Quantized),
            Some(other) => Err(format!("numerics `{other}` are not known; f32 and act_fp8+kv are")),
        }
    }

    /// Name for people: the file, or the kind where there is none.
    pub fn name(&self) -> String {
        self.file.clone().unwrap_or_else(|| match &self.checkpoint {
            Some(checkpoint) => format!("{} of {checkpoint}", self.kind),
            None => self.kind.clone(),
        })
    }
}

/// Where the manifest of `dir` lies: in it, or in its folder `vectors`.
pub(crate) fn folder(dir: &Path) -> PathBuf {
    let inner = dir.join("vectors");
    if !dir.join("manifest.json").is_file() && inner.join("manifest.json").is_file() {
        inner
    } else {
        dir.to_path_buf()
    }
}

/// Reads the manifest of a folder of vectors.
pub(crate) fn read(folder: &Path) -> Result<Vec<Entry>, VerifyError> {
    let path = folder.join("manifest.json");
    json(&path)
}

/// Reads a JSON file that may hold Python's numbers.
pub(crate) fn json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T, VerifyError> {
    let text =
        fs::read_to_string(path).map_err(|source| VerifyError::Read { path: path.to_path_buf(), source })?;
    serde_json::from_str(&without_infinities(&text))
        .map_err(|source| VerifyError::Json { path: path.to_path_buf(), source })
}

/// Replaces the bare words `Infinity`, `-Infinity` and `NaN` by `null`; strings keep theirs.
fn without_infinities(text: &str) -> String {
    const WORDS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        if c == '"' {
            let end = string_end(rest);
            out.push_str(&rest[..end]);
            rest = &rest[end..];
        } else if let Some(word) = WORDS.iter().find(|w| rest.starts_with(**w)) {
            out.push_str("null");
            rest = &rest[word.len()..];
        } else {
            out.push(c);
            rest = &rest[c.len_utf8()..];
        }
    }
    out
}

/// Length of the string literal that `text` starts with, quotes included; all of it if it never ends.
fn string_end(text: &str) -> usize {
    let mut escaped = false;
    for (i, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return i + 1,
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn infinities_outside_strings_become_null() {
        let text = r#"{"a": [Infinity, -Infinity, 1.5, NaN], "b": "NaN \" Infinity", "c": "-Infinity"}"#;
        let want = r#"{"a": [null, null, 1.5, null], "b": "NaN \" Infinity", "c": "-Infinity"}"#;
        assert_eq!(without_infinities(text), want);
        assert_eq!(without_infinities("\"open"), "\"open");
    }

    #[test]
    fn unknown_fields_are_ignored_and_missing_ones_have_defaults() {
        let entry: Entry =
            serde_json::from_str(r#"{"kind": "rope", "gaps": [1, null], "note": {}}"#).unwrap();
        assert_eq!(entry.kind, "rope");
        assert!(entry.file.is_none() && entry.tokens.is_empty());
        assert_eq!(entry.numerics(), Ok(Numerics::F32));
        assert_eq!(entry.name(), "rope");
    }

    #[test]
    fn a_missing_or_broken_manifest_is_an_error_that_names_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let missing = read(dir.path()).unwrap_err().to_string();
        assert!(missing.contains("manifest.json"), "{missing}");
        fs::write(dir.path().join("manifest.json"), "[{\"kind\": 3}]").unwrap();
        let broken = read(dir.path()).unwrap_err().to_string();
        assert!(broken.contains("manifest.json"), "{broken}");
    }
}
