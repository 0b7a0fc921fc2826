//! Recorded vectors against an engine: the library behind `deepinfer verify` and behind our own golden tests.
//!
//! A golden directory holds a manifest, the tensor files it names, and checkpoints in folders of their own. [`run`]
//! takes one checkpoint and runs every entry of the manifest that belongs to it or to none, in the entry's
//! numerics, on any backend, with one line per vector. Two files beside the manifest belong to the suite though no
//! entry names them: `spec_decode.json` and `engram_real.json`, where they exist.
//!
//! - [`manifest`], [`tensors`]: reading.
//! - [`checks`]: tolerances and comparisons.
//! - [`session`]: one sequence on an engine.
//! - [`trace`], [`decode`], [`layers`], [`numbers`], [`rope`], [`constants`]: the kinds.
//!
//! A file that cannot be read ends the suite with an error; whatever an engine answers, a refusal included, is the
//! result of the vector that asked.

mod checks;
mod constants;
mod decode;
mod layers;
mod manifest;
mod numbers;
mod rope;
mod session;
mod tensors;
mod trace;

use std::io;
use std::path::{Path, PathBuf};

use deepinfer_kernels::Backend;

use crate::numerics::Numerics;
use crate::weights::{Checkpoint, CheckpointError};
use checks::Checks;
use manifest::Entry;
use session::{Session, Setup};
use tensors::VectorFile;

/// What came of one vector.
#[derive(Clone, Debug, PartialEq)]
pub struct VectorResult {
    /// The file, or the kind and checkpoint of an entry without one.
    pub name: String,
    /// What is recorded in it.
    pub kind: String,
    /// Error of the comparison that came nearest to its tolerance or exceeded it most. Count of differing values
    /// where whole numbers differ; in `layer_local_quantized` without the one row in twenty that may flip.
    pub worst_error: f64,
    /// Tolerance of that comparison; 0 where values must be equal.
    pub tolerance: f64,
    /// Whether every comparison held.
    pub ok: bool,
    /// Which comparison was the worst, or what failed.
    pub detail: String,
}

/// Why the suite could not be run to its end.
#[derive(Debug, thiserror::Error)]
pub enum VerifyError {
    /// A file of the golden directory could not be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A JSON file is not what it should be.
    #[error("{path} is not readable as JSON of the expected form")]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// A tensor file is broken or lacks a tensor.
    #[error("{path}: {detail}")]
    Vector {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        detail: String,
    },
    /// An entry of the manifest contradicts itself or its file.
    #[error("{path}: entry `{entry}`: {detail}")]
    Entry {
        /// The manifest.
        path: PathBuf,
        /// File or kind of the entry.
        entry: String,
        /// What is wrong.
        detail: String,
    },
    /// The manifest says nothing about this checkpoint.
    #[error("{path} has no entry for checkpoint `{name}`, only for {known}; name one of them with --name")]
    NoEntries {
        /// The manifest.
        path: PathBuf,
        /// The name looked for.
        name: String,
        /// The names that entries have.
        known: String,
    },
    /// The checkpoint could not be opened.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

/// Why a vector ended early.
enum Stop {
    /// The engine refused, or the entry asks for what it cannot do: the vector has failed.
    Refused(String),
    /// The suite cannot go on.
    Broken(VerifyError),
}

impl From<VerifyError> for Stop {
    fn from(error: VerifyError) -> Self {
        Stop::Broken(error)
    }
}

/// One entry, and all that is needed to run it.
struct Case<'a, B> {
    backend: &'a dyn Fn() -> B,
    checkpoint: &'a Checkpoint,
    folder: &'a Path,
    entry: &'a Entry,
    numerics: Numerics,
}

impl<B: Backend> Case<'_, B> {
    /// The entry's tensor file.
    fn vector(&self) -> Result<VectorFile, VerifyError> {
        match &self.entry.file {
            Some(file) => VectorFile::read(&self.folder.join(file)),
            None => Err(self.bad("no file".to_string())),
        }
    }

    /// The entry's prompt, not empty.
    fn tokens(&self) -> Result<&[u32], VerifyError> {
        match self.entry.tokens.as_slice() {
            [] => Err(self.bad("no tokens".to_string())),
            tokens => Ok(tokens),
        }
    }

    /// Tokens that one draft block proposes.
    fn draft_block(&self) -> usize {
        self.checkpoint.shape.draft.as_ref().map_or(0, |d| d.block_size)
    }

    fn session(&self, setup: Setup) -> Result<Session<B>, Stop> {
        Session::open((self.backend)(), self.checkpoint, setup).map_err(Stop::Refused)
    }

    fn bad(&self, detail: String) -> VerifyError {
        VerifyError::Entry { path: self.folder.join("manifest.json"), entry: self.entry.name(), detail }
    }
}

/// Runs all vectors of `vectors` that belong to the checkpoint, and hands each result to `on_result` as it comes.
///
/// `vectors` is a folder with a `manifest.json`, or a golden directory that has one in its folder `vectors`. The
/// checkpoint is known to the manifest as `name`, or else by the name of its directory. `backend` makes a backend
/// for each engine that is opened, one after the other.
///
/// # Errors
/// Unreadable manifests, tensor files and checkpoints, each naming the file; a manifest without an entry for this
/// checkpoint. Failed vectors are results, not errors.
pub fn run<B: Backend>(
    backend: &dyn Fn() -> B,
    checkpoint: &Path,
    vectors: &Path,
    name: Option<&str>,
    on_result: &mut dyn FnMut(&VectorResult),
) -> Result<Vec<VectorResult>, VerifyError> {
    let folder = manifest::folder(vectors);
    let name = name.map_or_else(|| directory_name(checkpoint), str::to_string);
    let entries = manifest::read(&folder)?;
    let chosen = choose(&folder, &entries, &name)?;
    let checkpoint = Checkpoint::open(checkpoint)?;
    let mut results = Vec::new();
    let mut keep = |result: VectorResult| {
        on_result(&result);
        results.push(result);
    };
    for entry in chosen {
        keep(run_entry(backend, &checkpoint, &folder, entry)?);
    }
    for (file, kind, compare) in constants::FILES {
        let path = folder.join(file);
        if path.is_file() {
            let mut checks = Checks::default();
            compare(&path, &checkpoint.shape, &mut checks)?;
            keep(checks.into_result(file.to_string(), kind));
        }
    }
    Ok(results)
}

/// Entries of this checkpoint, and those of none.
fn choose<'a>(folder: &Path, entries: &'a [Entry], name: &str) -> Result<Vec<&'a Entry>, VerifyError> {
    let named = |entry: &&Entry| entry.checkpoint.as_deref() == Some(name);
    if !entries.iter().any(|e| named(&e)) {
        let mut known: Vec<String> =
            (entries.iter().filter_map(|e| e.checkpoint.as_ref())).map(|c| format!("`{c}`")).collect();
        known.sort_unstable();
        known.dedup();
        if !known.is_empty() || entries.is_empty() {
            return Err(VerifyError::NoEntries {
                path: folder.join("manifest.json"),
                name: name.to_string(),
                known: if known.is_empty() { "none".to_string() } else { known.join(", ") },
            });
        }
    }
    Ok(entries.iter().filter(|e| e.checkpoint.is_none() || named(e)).collect())
}

fn run_entry<B: Backend>(
    backend: &dyn Fn() -> B,
    checkpoint: &Checkpoint,
    folder: &Path,
    entry: &Entry,
) -> Result<VectorResult, VerifyError> {
    let mut checks = Checks::default();
    let ran = match entry.numerics() {
        Err(unknown) => Err(Stop::Refused(unknown)),
        Ok(numerics) => run_kind(&Case { backend, checkpoint, folder, entry, numerics }, &mut checks),
    };
    match ran {
        Ok(()) => {}
        Err(Stop::Refused(why)) => checks.refuse(why),
        Err(Stop::Broken(error)) => return Err(error),
    }
    Ok(checks.into_result(entry.name(), &entry.kind))
}

fn run_kind<B: Backend>(case: &Case<'_, B>, checks: &mut Checks) -> Result<(), Stop> {
    match case.entry.kind.as_str() {
        "exact_full_trace" | "exact_long" | "image_span" => trace::run(case, checks),
        "greedy_decode" => decode::greedy(case, checks),
        "speculative_greedy" => decode::speculative(case, checks),
        "bounded_replay" => decode::bounded_replay(case, checks),
        "layer_local_quantized" => layers::run(case, checks),
        "number_formats" => numbers::formats(case, checks),
        "rope" => rope::run(case, checks),
        other => Err(Stop::Refused(format!("kind `{other}` is not known to this version"))),
    }
}

/// Last part of the path; of the resolved one where the path itself ends in `.` or `..`.
fn directory_name(dir: &Path) -> String {
    let resolved = dir.canonicalize();
    (dir.file_name())
        .or_else(|| resolved.as_ref().ok().and_then(|d| d.file_name()))
        .map(|n| n.to_string_lossy().into_owned())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_is_known_by_the_last_part_of_its_path() {
        assert_eq!(directory_name(Path::new("models/tiny-bf16/")), "tiny-bf16");
        assert_eq!(directory_name(Path::new("tiny-bf16")), "tiny-bf16");
        let dir = tempfile::tempdir().unwrap();
        let inner = dir.path().join("tiny-x");
        std::fs::create_dir_all(inner.join("part")).unwrap();
        assert_eq!(directory_name(&inner.join(".")), "tiny-x");
        assert_eq!(directory_name(&inner.join("part/..")), "tiny-x");
    }
}
