//! What can be wrong with a checkpoint directory, kind by kind.

use std::collections::HashMap;
use std::path::Path;

use deepinfer_kernels::{ByteView, WeightFormat};
use safetensors::Dtype;

use super::header::{self, Header};
use super::index::{self, Index};
use super::{Checkpoint, CheckpointError, INDEX, SINGLE, Shard, Stored, broken, read};
use crate::tensors::{self, TensorKind, TensorSpec};

/// The mapped shards of a directory and where each tensor lies, by name without `model.`.
pub(super) fn load(dir: &Path) -> Result<(Vec<Shard>, HashMap<String, Stored>), CheckpointError> {
    let index = read_index(dir)?;
    let files: Vec<String> = match &index {
        Some(index) => index.shards().into_iter().map(String::from).collect(),
        None => vec![SINGLE.to_string()],
    };
    let missing = files.iter().filter(|file| !dir.join(file).is_file());
    let missing = missing.map(|file| match &index {
        Some(index) => {
            let tensors = index.files.values().filter(|f| f == &file).count();
            format!("{file}: named by {INDEX} for {tensors} tensors, but not there")
        }
        None => format!("neither {INDEX} nor {SINGLE} is there"),
    });
    broken(dir, "files are missing", missing.collect())?;

    let (mut shards, mut headers, mut problems) = (Vec::new(), Vec::new(), Vec::new());
    for file in files {
        let path = dir.join(&file);
        let bytes = ByteView::map(&path).map_err(|source| CheckpointError::Io { path, source })?;
        match header::parse(&bytes) {
            Ok(header) => headers.push(header),
            Err(found) => problems.extend(found.into_iter().map(|problem| format!("{file}: {problem}"))),
        }
        shards.push(Shard { file, bytes });
    }
    broken(dir, "files are damaged", problems)?;
    if let Some(index) = &index {
        broken(dir, "the index does not fit its files", compare(index, &shards, &headers))?;
    }
    let stored = gather(dir, &shards, headers)?;
    Ok((shards, stored))
}

fn read_index(dir: &Path) -> Result<Option<Index>, CheckpointError> {
    let path = dir.join(INDEX);
    if !path.is_file() {
        return Ok(None);
    }
    match index::parse(&read(&path)?) {
        Ok(index) => Ok(Some(index)),
        Err(problems) => {
            let problems = problems.into_iter().map(|problem| format!("{INDEX} {problem}")).collect();
            broken(dir, "the index is damaged", problems)?;
            Ok(None)
        }
    }
}

/// Tensors that are not where the index says, and tensors of the files that it does not name there.
fn compare(index: &Index, shards: &[Shard], headers: &[Header]) -> Vec<String> {
    let mut problems = Vec::new();
    let mut held: HashMap<&str, Vec<&str>> = HashMap::new();
    for (shard, header) in shards.iter().zip(headers) {
        for entry in &header.entries {
            held.entry(&entry.name).or_default().push(&shard.file);
            match index.files.get(&entry.name) {
                None => problems.push(format!("{}: tensor {} is not in {INDEX}", shard.file, entry.name)),
                Some(file) if *file != shard.file => {
                    problems.push(format!(
                        "{}: tensor {} lies here, {INDEX} says {file}",
                        shard.file, entry.name
                    ));
                }
                Some(_) => {}
            }
        }
    }
    for (name, file) in &index.files {
        if !held.contains_key(name.as_str()) {
            problems.push(format!("{file}: tensor {name} is not there, {INDEX} says it is"));
        }
    }
    problems
}

/// One table of all tensors, names without `model.`.
fn gather(
    dir: &Path,
    shards: &[Shard],
    headers: Vec<Header>,
) -> Result<HashMap<String, Stored>, CheckpointError> {
    let (mut stored, mut problems) = (HashMap::<String, Stored>::new(), Vec::new());
    for (shard, header) in headers.into_iter().enumerate() {
        for entry in header.entries {
            let name = entry.name.strip_prefix("model.").unwrap_or(&entry.name).to_string();
            let new = Stored {
                shard,
                dtype: entry.dtype,
                shape: entry.shape,
                offset: entry.offset,
                len: entry.len,
            };
            if let Some(old) = stored.insert(name, new) {
                let (here, there) = (&shards[shard].file, &shards[old.shard].file);
                problems.push(format!(
                    "{here}: tensor {} is also in {there} (with or without model.)",
                    entry.name
                ));
            }
        }
    }
    broken(dir, "tensors are there twice", problems)?;
    Ok(stored)
}

impl Checkpoint {
    /// Names, dtypes and shapes of all tensors against the configuration.
    pub(super) fn check_tensors(&self) -> Result<(), CheckpointError> {
        let (mut problems, mut known) = (Vec::new(), std::collections::HashSet::new());
        for spec in &self.specs {
            known.insert(spec.name.clone());
            let Some(stored) = self.stored.get(&spec.name) else {
                if spec.required {
                    problems.push(format!("tensor {} {:?} is missing in all files", spec.name, spec.shape));
                }
                continue;
            };
            let Some(format) = spec.kind.format_of(stored.dtype, self.shape.quantized) else {
                let expected = spec.kind.expected(self.shape.quantized);
                let (file, dtype) = (self.file_of(stored), stored.dtype);
                problems.push(format!("{file}: tensor {} is {dtype}, expected {expected}", spec.name));
                known.insert(spec.scale_name());
                continue;
            };
            self.check_shape(spec, stored, format, &mut problems);
            if format.scale_shape(spec.rows(), spec.cols()) != (0, 0) {
                known.insert(spec.scale_name());
                self.check_scale(spec, stored, format, &mut problems);
            }
        }
        let mut unknown: Vec<(&String, &Stored)> = self
            .stored
            .iter()
            .filter(|(name, _)| !known.contains(*name) && !tensors::is_skipped(name))
            .collect();
        unknown.sort_by_key(|(name, _)| *name);
        problems.extend(unknown.into_iter().map(|(name, stored)| {
            format!("{}: tensor {name} is unknown: config.json does not call for it", self.file_of(stored))
        }));
        self.broken("tensors do not fit config.json", problems)
    }

    fn check_shape(
        &self,
        spec: &TensorSpec,
        stored: &Stored,
        format: WeightFormat,
        problems: &mut Vec<String>,
    ) {
        let (name, file) = (&spec.name, self.file_of(stored));
        if format == WeightFormat::Fp4 && !spec.cols().is_multiple_of(deepinfer_kernels::formats::GROUP) {
            let cols = spec.cols();
            problems.push(format!(
                "{file}: tensor {name} is FP4, which needs a multiple of 32 columns, not {cols}"
            ));
            return;
        }
        let expected = spec.data_shape(format);
        if stored.shape != expected {
            problems
                .push(format!("{file}: tensor {name} has shape {:?}, expected {expected:?}", stored.shape));
        }
    }

    fn check_scale(
        &self,
        spec: &TensorSpec,
        stored: &Stored,
        format: WeightFormat,
        problems: &mut Vec<String>,
    ) {
        let (name, file) = (spec.scale_name(), self.file_of(stored));
        let Some(scale) = self.stored.get(&name) else {
            problems
                .push(format!("{file}: tensor {} is {format}, but its scale {name} is missing", spec.name));
            return;
        };
        let scale_file = self.file_of(scale);
        if scale.dtype != Dtype::F8_E8M0 {
            problems.push(format!("{scale_file}: tensor {name} is {}, expected F8_E8M0", scale.dtype));
        }
        let (rows, cols) = format.scale_shape(spec.rows(), spec.cols());
        if scale.shape != [rows, cols] {
            let found = &scale.shape;
            problems
                .push(format!("{scale_file}: tensor {name} has shape {found:?}, expected [{rows}, {cols}]"));
        }
        if spec.kind == TensorKind::Table && scale.shard != stored.shard {
            problems.push(format!(
                "{scale_file}: tensor {name} must lie in one file with its table {} (that is in {file})",
                spec.name
            ));
        }
    }

    /// Scales that are NaN, or so large that a weight would overflow float32. Reads every scale byte.
    pub(super) fn check_scales(&self) -> Result<(), CheckpointError> {
        let scaled: Vec<(&TensorSpec, WeightFormat)> = self
            .specs()
            .map(|spec| (spec, self.format(&spec.name)))
            .filter(|(spec, format)| format.scale_shape(spec.rows(), spec.cols()) != (0, 0))
            .collect();
        let threads = std::thread::available_parallelism().map_or(1, usize::from).min(16);
        let each = scaled.len().div_ceil(threads).max(1);
        let problems = std::thread::scope(|scope| {
            let parts: Vec<_> = scaled
                .chunks(each)
                .map(|part| {
                    let check =
                        move || part.iter().filter_map(|(spec, format)| self.bad_scale(spec, *format));
                    scope.spawn(move || check().collect::<Vec<String>>())
                })
                .collect();
            parts.into_iter().flat_map(|part| part.join().expect("scanning bytes does not panic")).collect()
        });
        self.broken("scales are damaged", problems)
    }

    fn bad_scale(&self, spec: &TensorSpec, format: WeightFormat) -> Option<String> {
        let name = spec.scale_name();
        // The largest code is 448 below 2^9, or 6 below 2^3; byte b means 2^(b - 127).
        let largest = if format == WeightFormat::Fp4 { 252 } else { 246 };
        let bytes = self.view(&name);
        // Whole-tensor maximum first: it runs at the speed of memory.
        if bytes.iter().fold(0, |max, &b| max.max(b)) <= largest {
            return None;
        }
        let at = bytes.iter().position(|&b| b > largest)?;
        let (_, cols) = format.scale_shape(spec.rows(), spec.cols());
        let what = match bytes[at] {
            0xFF => "is NaN (byte 255)".to_string(),
            byte => format!("is byte {byte}, too large for float32 weights"),
        };
        let count = bytes.iter().filter(|&&b| b > largest).count();
        let file = self.file_of(self.stored(&name));
        Some(format!(
            "{file}: tensor {name}: scale [{}, {}] {what}; {count} such scales",
            at / cols,
            at % cols
        ))
    }
}
