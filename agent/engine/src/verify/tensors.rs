//! Tensor files of recorded vectors.
//!
//! Whatever the stored type, values are held as the two kinds that comparisons know: floats and whole numbers.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};

use super::VerifyError;

/// Values of one tensor.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Values {
    /// F32.
    Floats(Vec<f32>),
    /// I32 and U8.
    Whole(Vec<i64>),
}

/// One tensor.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tensor {
    /// Sizes of the dimensions.
    pub shape: Vec<usize>,
    /// Row-major values.
    pub values: Values,
}

impl Tensor {
    /// Product of all dimensions but the first; 1 for a vector.
    pub fn width(&self) -> usize {
        self.shape.iter().skip(1).product()
    }
}

/// All tensors of one file.
#[derive(Debug)]
pub(crate) struct VectorFile {
    path: PathBuf,
    tensors: BTreeMap<String, Tensor>,
}

impl VectorFile {
    /// Reads a file whole.
    pub fn read(path: &Path) -> Result<Self, VerifyError> {
        let bytes =
            fs::read(path).map_err(|source| VerifyError::Read { path: path.to_path_buf(), source })?;
        let bad = |detail: String| VerifyError::Vector { path: path.to_path_buf(), detail };
        let file = SafeTensors::deserialize(&bytes).map_err(|e| bad(e.to_string()))?;
        let mut tensors = BTreeMap::new();
        for (name, view) in file.iter() {
            let data = view.data();
            let values = match view.dtype() {
                Dtype::F32 => Values::Floats(words(data).map(f32::from_le_bytes).collect()),
                Dtype::I32 => Values::Whole(words(data).map(|w| i64::from(i32::from_le_bytes(w))).collect()),
                Dtype::U8 => Values::Whole(data.iter().map(|b| i64::from(*b)).collect()),
                other => {
                    return Err(bad(format!("tensor `{name}` has type {other:?}; F32, I32 and U8 are read")));
                }
            };
            let shape = view.shape().to_vec();
            tensors.insert(name.to_string(), Tensor { shape, values });
        }
        Ok(Self { path: path.to_path_buf(), tensors })
    }

    /// All tensors by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// A tensor, if the file has it.
    pub fn find(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// A float tensor and its shape.
    pub fn floats(&self, name: &str) -> Result<(&[usize], &[f32]), VerifyError> {
        match self.tensors.get(name) {
            Some(Tensor { shape, values: Values::Floats(v) }) => Ok((shape, v)),
            _ => Err(self.lacks(name, "F32")),
        }
    }

    /// A float tensor that must have the given shape.
    pub fn shaped(&self, name: &str, shape: &[usize]) -> Result<&[f32], VerifyError> {
        let (have, values) = self.floats(name)?;
        if have == shape {
            return Ok(values);
        }
        Err(VerifyError::Vector {
            path: self.path.clone(),
            detail: format!("tensor `{name}` has shape {have:?}, the case needs {shape:?}"),
        })
    }

    /// A tensor of whole numbers and its shape.
    pub fn whole(&self, name: &str) -> Result<(&[usize], &[i64]), VerifyError> {
        match self.tensors.get(name) {
            Some(Tensor { shape, values: Values::Whole(v) }) => Ok((shape, v)),
            _ => Err(self.lacks(name, "I32 or U8")),
        }
    }

    fn lacks(&self, name: &str, kind: &str) -> VerifyError {
        VerifyError::Vector { path: self.path.clone(), detail: format!("no {kind} tensor `{name}`") }
    }
}

fn words(data: &[u8]) -> impl Iterator<Item = [u8; 4]> {
    data.chunks_exact(4).map(|w| w.try_into().expect("chunks have four bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_truncated_file_is_an_error_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("short.safetensors");
        fs::write(&path, [9, 0, 0, 0, 0, 0, 0, 0, b'{']).unwrap();
        let error = VectorFile::read(&path).unwrap_err().to_string();
        assert!(error.contains("short.safetensors"), "{error}");
        let error = VectorFile::read(&dir.path().join("none.safetensors")).unwrap_err().to_string();
        assert!(error.contains("none.safetensors"), "{error}");
    }
}
