//! A checkpoint directory: `config.json`, safetensors shards by index, memory-mapped.
//!
//! Invariant: an open [`Checkpoint`] is whole. Every tensor that the configuration calls for is there in a
//! format that the kernels read, no scale is NaN, and nothing unknown lies beside them. Weights are never
//! copied: a [`MatrixSource`] points into the mapped files.

mod check;
mod digest;
pub mod header;
pub mod index;
mod prefault;

use std::collections::HashMap;
use std::fmt;
use std::path::{Path, PathBuf};

use deepinfer_kernels::{ByteView, MatrixSource, WeightFormat};
use safetensors::Dtype;

use crate::config::{self, ConfigError};
use crate::engram::{TokenMap, TokenMapError};
use crate::shape::ModelShape;
use crate::tensors::{self, TensorSpec};

const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
const TOKENIZER: &str = "tokenizer.json";

/// Why a directory is not a usable checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// There is no such directory.
    #[error("{}: no such directory; name a checkpoint directory with config.json and *.safetensors", .0.display())]
    Missing(PathBuf),
    /// The path is a file.
    #[error("{}: is a file; name the directory that holds config.json and *.safetensors", .0.display())]
    NotADirectory(PathBuf),
    /// A file cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The configuration was refused.
    #[error("{}: {source}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// Its problems.
        source: ConfigError,
    },
    /// Files or tensors are missing, damaged or of another model.
    #[error("{}: {kind}:{problems}", dir.display())]
    Broken {
        /// The checkpoint directory.
        dir: PathBuf,
        /// What kind of problem it is.
        kind: &'static str,
        /// All problems of this kind, each with file and tensor.
        problems: Problems,
    },
}

/// A list of problems; printing shows the first 20 and the count of the rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problems(pub Vec<String>);

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 20;
        for problem in self.0.iter().take(SHOWN) {
            write!(f, "\n  {problem}")?;
        }
        match self.0.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, "\n  and {more} more"),
        }
    }
}

/// A mapped file.
#[derive(Debug)]
struct Shard {
    file: String,
    bytes: ByteView,
}

/// Where a tensor lies.
#[derive(Clone, Debug)]
struct Stored {
    shard: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    offset: usize,
    len: usize,
}

/// An open checkpoint. See the module's invariant.
#[derive(Debug)]
pub struct Checkpoint {
    /// Sizes of the model.
    pub shape: ModelShape,
    /// Keys of config.json that nothing reads, as paths; worth one warning.
    pub ignored_keys: Vec<String>,
    dir: PathBuf,
    /// Of config.json as it was read.
    config_digest: [u8; 32],
    shards: Vec<Shard>,
    specs: Vec<TensorSpec>,
    by_name: HashMap<String, usize>,
    stored: HashMap<String, Stored>,
}

impl Checkpoint {
    /// Opens and checks a directory. Reads the headers and all scales; other weights stay on disk until used.
    ///
    /// # Errors
    /// The first kind of problem that was found, with all problems of that kind.
    pub fn open(dir: &Path) -> Result<Self, CheckpointError> {
        if dir.is_file() {
            return Err(CheckpointError::NotADirectory(dir.to_path_buf()));
        }
        if !dir.is_dir() {
            return Err(CheckpointError::Missing(dir.to_path_buf()));
        }
        let path = dir.join(CONFIG);
        let config = read(&path)?;
        let (shape, ignored_keys) =
            config::parse(&config).map_err(|source| CheckpointError::Config { path, source })?;
        let config_digest = blake3::hash(&config).into();
        let (shards, stored) = check::load(dir)?;
        let specs = tensors::expected(&shape);
        let by_name = specs.iter().enumerate().map(|(i, spec)| (spec.name.clone(), i)).collect();
        let dir = dir.to_path_buf();
        let checkpoint = Self { shape, ignored_keys, dir, config_digest, shards, specs, by_name, stored };
        checkpoint.check_tensors()?;
        checkpoint.check_scales()?;
        Ok(checkpoint)
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Number of mapped files.
    pub fn shard_count(&self) -> usize {
        self.shards.len()
    }

    /// Bytes of all mapped files.
    pub fn mapped_bytes(&self) -> u64 {
        self.shards.iter().map(|shard| shard.bytes.len() as u64).sum()
    }

    /// tokenizer.json, if the directory has one.
    pub fn tokenizer_path(&self) -> Option<PathBuf> {
        let path = self.dir.join(TOKENIZER);
        path.is_file().then_some(path)
    }

    /// The compressed Engram vocabulary, computed from tokenizer.json; `None` if the model has no Engram
    /// layer.
    ///
    /// # Errors
    /// If tokenizer.json is missing, unreadable or another model's.
    pub fn token_map(&self) -> Result<Option<TokenMap>, TokenMapError> {
        if self.shape.engram.is_none() {
            return Ok(None);
        }
        TokenMap::from_tokenizer_file(&self.dir.join(TOKENIZER), self.shape.vocab_size).map(Some)
    }

    /// Tensors of the model, optional ones that the directory lacks left out.
    pub fn specs(&self) -> impl Iterator<Item = &TensorSpec> {
        self.specs.iter().filter(|spec| self.has(&spec.name))
    }

    /// Whether the directory has a tensor of this name (without `model.`).
    pub fn has(&self, name: &str) -> bool {
        self.stored.contains_key(name)
    }

    /// Format in which a tensor of the model is stored.
    ///
    /// # Panics
    /// If [`tensors::expected`] does not have the name: a typing error of the caller.
    pub fn format(&self, name: &str) -> WeightFormat {
        let kind = self.specs[self.by_name[name]].kind;
        let dtype = self.stored(name).dtype;
        kind.format_of(dtype, self.shape.quantized).expect("checked when the checkpoint was opened")
    }

    /// A tensor as a matrix in its stored format; a vector is one row.
    ///
    /// # Panics
    /// If [`tensors::expected`] does not have the name: a typing error of the caller.
    pub fn matrix(&self, name: &str) -> MatrixSource {
        let spec = &self.specs[self.by_name[name]];
        let format = self.format(name);
        let scaled = format.scale_shape(spec.rows(), spec.cols()) != (0, 0);
        MatrixSource {
            format,
            rows: spec.rows(),
            cols: spec.cols(),
            data: self.view(name),
            scales: scaled.then(|| self.view(&spec.scale_name())),
        }
    }

    /// All values of a BF16 or F32 tensor as float32, row after row.
    ///
    /// # Panics
    /// If [`tensors::expected`] does not have the name, or its kind may be stored with scales.
    pub fn vector(&self, name: &str) -> Vec<f32> {
        let bytes = self.view(name);
        match self.format(name) {
            WeightFormat::F32 => {
                bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes"))).collect()
            }
            WeightFormat::Bf16 => bytes
                .chunks_exact(2)
                .map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16))
                .collect(),
            other => panic!("{name} is {other}, not a vector"),
        }
    }

    /// Stored bytes of a tensor without its scale.
    fn view(&self, name: &str) -> ByteView {
        let stored = self.stored(name);
        self.shards[stored.shard].bytes.slice(stored.offset, stored.len)
    }

    fn stored(&self, name: &str) -> &Stored {
        self.stored.get(name).unwrap_or_else(|| panic!("no tensor {name} in the checkpoint"))
    }

    fn file_of(&self, stored: &Stored) -> &str {
        &self.shards[stored.shard].file
    }

    fn broken(&self, kind: &'static str, problems: Vec<String>) -> Result<(), CheckpointError> {
        broken(&self.dir, kind, problems)
    }
}

fn broken(dir: &Path, kind: &'static str, problems: Vec<String>) -> Result<(), CheckpointError> {
    if problems.is_empty() {
        return Ok(());
    }
    Err(CheckpointError::Broken { dir: dir.to_path_buf(), kind, problems: Problems(problems) })
}

fn read(path: &Path) -> Result<Vec<u8>, CheckpointError> {
    std::fs::read(path).map_err(|source| CheckpointError::Io { path: path.to_path_buf(), source })
}
