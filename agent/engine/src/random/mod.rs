//! Checkpoints with random weights: the real layout, names and formats, at any size.
//!
//! Invariants: the same configuration, tokenizer and seed give the same tensors, however they are cut into
//! files and whatever the number of threads. The target directory appears complete or not at all.

mod draw;
mod tokenizer;
mod writer;

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use crate::config::{self, ConfigError};
use crate::engram::{self, TokenMap, TokenMapError};
use crate::shape::{EngramShape, ModelShape};
use crate::tensors;
use writer::Planned;

/// Bytes of a file, at most (a larger tensor has one of its own).
pub const SHARD_BYTES: u64 = 4 << 30;

/// Why no checkpoint was written. Nothing is left behind.
#[derive(Debug, thiserror::Error)]
pub enum RandomError {
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The target is in use.
    #[error("{}: is there already and not empty; name a new directory", .0.display())]
    Exists(PathBuf),
    /// The configuration was refused.
    #[error("{}: {source}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// Its problems.
        source: ConfigError,
    },
    /// The tokenizer does not fit the configuration.
    #[error("{}: {source}", path.display())]
    TokenMap {
        /// The tokenizer file.
        path: PathBuf,
        /// What is wrong.
        source: TokenMapError,
    },
    /// No tokenizer can be made for this configuration.
    #[error("{}: {problem}", path.display())]
    Tokenizer {
        /// The configuration.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
}

/// What to write.
#[derive(Clone, Debug)]
pub struct RandomOptions {
    /// Numbers the draw.
    pub seed: u64,
    /// Tokenizer to copy; without one it is made.
    pub tokenizer: Option<PathBuf>,
    /// Bytes of a file, at most.
    pub shard_bytes: u64,
    /// Threads that draw and write.
    pub threads: usize,
}

impl RandomOptions {
    /// A made tokenizer, files of [`SHARD_BYTES`], as many threads as the machine has, at most 8.
    pub fn new(seed: u64) -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(8);
        Self { seed, tokenizer: None, shard_bytes: SHARD_BYTES, threads }
    }
}

/// What was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// Safetensors files.
    pub files: usize,
    /// Tensors, scales not counted.
    pub tensors: usize,
    /// Values.
    pub parameters: u64,
    /// Bytes of all tensors.
    pub bytes: u64,
}

/// Writes a checkpoint with random weights for the configuration in `config_json` to the new directory `out`.
///
/// The written config.json is that configuration with the Engram counts that follow from the tokenizer.
/// `progress` is called with bytes written and bytes in all.
///
/// # Errors
/// [`RandomError`]; then `out` is as it was.
pub fn write(
    config_json: &Path,
    out: &Path,
    seed: u64,
    tokenizer: Option<&Path>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Written, RandomError> {
    let tokenizer = tokenizer.map(Path::to_path_buf);
    write_with(config_json, out, &RandomOptions { tokenizer, ..RandomOptions::new(seed) }, progress)
}

/// As [`write()`], with all options.
///
/// # Errors
/// As there.
pub fn write_with(
    config_json: &Path,
    out: &Path,
    options: &RandomOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Written, RandomError> {
    check_target(out)?;
    let model = Model::read(config_json, options.tokenizer.as_deref())?;
    let plan = plan(&model.shape, options.shard_bytes);
    let target = Target::create(out)?;
    target.write("config.json", &format!("{:#}\n", Value::Object(model.config)))?;
    target.write("tokenizer.json", &model.tokenizer)?;
    let all = || plan.iter().flatten();
    let written = Written {
        files: plan.len(),
        tensors: all().count(),
        parameters: all().map(|t| t.spec.elements()).sum(),
        bytes: all().map(Planned::bytes).sum(),
    };
    let (mut done, mut weight_map) = (0, Map::new());
    progress(0, written.bytes);
    for (i, tensors) in plan.iter().enumerate() {
        let file = format!("model-{:05}-of-{:05}.safetensors", i + 1, plan.len());
        let path = target.dir.join(&file);
        let mut wrote = |bytes| {
            done += bytes;
            progress(done, written.bytes);
        };
        writer::write_file(&path, tensors, options.seed, options.threads, &mut wrote)
            .map_err(|source| RandomError::Io { path, source })?;
        weight_map.extend(tensors.iter().flat_map(Planned::names).map(|name| (name, json!(file))));
    }
    let index = json!({"metadata": {"total_size": written.bytes}, "weight_map": weight_map});
    target.write("model.safetensors.index.json", &format!("{index:#}\n"))?;
    target.publish(out)?;
    Ok(written)
}

/// Tensors by file, in the order of the model.
fn plan(shape: &ModelShape, shard_bytes: u64) -> Vec<Vec<Planned>> {
    let (mut files, mut room) = (vec![Vec::new()], shard_bytes);
    for spec in tensors::expected(shape) {
        let draw = draw::draw_of(&spec, shape);
        let format = spec.kind.format(shape.quantized);
        let planned = Planned { spec, format, draw };
        let last = files.last_mut().expect("never empty");
        if planned.bytes() > room && !last.is_empty() {
            room = shard_bytes.saturating_sub(planned.bytes());
            files.push(vec![planned]);
        } else {
            room = room.saturating_sub(planned.bytes());
            last.push(planned);
        }
    }
    files
}

/// What is written beside the tensors.
struct Model {
    config: Map<String, Value>,
    shape: ModelShape,
    tokenizer: String,
}

impl Model {
    fn read(config_json: &Path, tokenizer: Option<&Path>) -> Result<Self, RandomError> {
        let refused = |source| RandomError::Config { path: config_json.to_path_buf(), source };
        let bytes = fs::read(config_json).map_err(|source| io(config_json, source))?;
        let mut config: Map<String, Value> =
            serde_json::from_slice(&bytes).map_err(|e| refused(ConfigError::NotJson(e.to_string())))?;
        let given = match tokenizer {
            Some(path) => Some((path, fs::read_to_string(path).map_err(|source| io(path, source))?)),
            None => None,
        };
        // The counts are ours to set: give them values that cannot be the reason for a refusal.
        set_counts(&mut config, None);
        let (shape, _) = config::parse_object(&config).map_err(refused)?;
        let (path, tokenizer) = match given {
            Some((path, text)) => (path, text),
            None => {
                let unmade = |problem| RandomError::Tokenizer { path: config_json.to_path_buf(), problem };
                (config_json, tokenizer::make(&shape).map_err(unmade)?)
            }
        };
        let map = TokenMap::from_tokenizer(tokenizer.as_bytes(), shape.vocab_size)
            .map_err(|source| RandomError::TokenMap { path: path.to_path_buf(), source })?;
        set_counts(&mut config, Some(map.compressed_len()));
        let (shape, _) = config::parse_object(&config).map_err(refused)?;
        Ok(Self { config, shape, tokenizer })
    }
}

/// Sets the Engram counts of a configuration that has Engram layers: the table rows follow from its hash
/// sizes, the number of compressed ids from the tokenizer (1 while that is unknown). Fields that cannot be
/// read are left for the configuration's own check to name.
fn set_counts(config: &mut Map<String, Value>, compressed: Option<usize>) {
    let Some(Value::Object(text)) = config.get_mut("text_config") else {
        return;
    };
    let Some(rows) = engram_rows(text) else { return };
    text.insert("engram_num_embeddings".to_string(), json!(rows));
    text.insert("engram_compressed_vocab_size".to_string(), json!(compressed.unwrap_or(1)));
}

fn engram_rows(text: &Map<String, Value>) -> Option<Vec<usize>> {
    let size = |key: &str| usize::try_from(text.get(key)?.as_u64()?).ok().filter(|&n| n <= u32::MAX as usize);
    let layers = text.get("engram_layer_ids")?.as_array()?;
    let layer_ids =
        layers.iter().map(|id| usize::try_from(id.as_u64()?).ok()).collect::<Option<Vec<usize>>>()?;
    let engram = EngramShape {
        layer_ids,
        num_embeddings: Vec::new(),
        max_ngram_size: size("engram_max_ngram_size").filter(|&n| n >= 2)?,
        vocab_size: size("engram_vocab_size")?,
        n_heads: size("engram_n_heads").filter(|&n| n > 0)?,
        head_dim: 1,
        pad_token_id: 0,
        compressed_vocab_size: 1,
    };
    if engram.layer_ids.is_empty() {
        return None;
    }
    engram::table_rows(&engram).ok()
}

fn check_target(out: &Path) -> Result<(), RandomError> {
    match fs::read_dir(out) {
        Ok(mut entries) => match entries.next() {
            None => Ok(()),
            Some(_) => Err(RandomError::Exists(out.to_path_buf())),
        },
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(_) if out.exists() => Err(RandomError::Exists(out.to_path_buf())),
        Err(source) => Err(io(out, source)),
    }
}

/// A directory under a temporary name, removed unless it is published.
struct Target {
    dir: PathBuf,
    published: bool,
}

impl Target {
    fn create(out: &Path) -> Result<Self, RandomError> {
        let parent = out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let name = out.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        fs::create_dir_all(parent).map_err(|source| io(parent, source))?;
        let dir = parent.join(format!(".{name}.{}.part", std::process::id()));
        fs::create_dir(&dir).map_err(|source| io(&dir, source))?;
        Ok(Self { dir, published: false })
    }

    fn write(&self, file: &str, text: &str) -> Result<(), RandomError> {
        let path = self.dir.join(file);
        fs::write(&path, text).map_err(|source| RandomError::Io { path, source })
    }

    fn publish(mut self, out: &Path) -> Result<(), RandomError> {
        // An empty directory is replaced; one that has got files meanwhile makes this fail.
        fs::rename(&self.dir, out).map_err(|source| io(out, source))?;
        self.published = true;
        Ok(())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if !self.published {
            // What is left behind is named so that it can be told apart; there is nobody to report to.
            let _ = fs::remove_dir_all(&self.dir);
        }
    }
}

fn io(path: &Path, source: std::io::Error) -> RandomError {
    RandomError::Io { path: path.to_path_buf(), source }
}
