//! A cluster file: its text, where it stands, and what is wrong with it.

use std::fmt::Write as _;
use std::io::Read;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use deepinfer_crds::manifest::{self, FILE_MAX_BYTES, Manifest, ManifestError};

/// A file as it was read.
#[derive(Clone, Debug)]
pub struct ClusterFile {
    /// As the user named it, for messages.
    pub name: String,
    /// What it holds.
    pub bytes: Vec<u8>,
    /// Folder that relative model paths start from: its own, or the current one for standard input.
    pub base: PathBuf,
}

impl ClusterFile {
    /// Reads a file; `-` is standard input.
    ///
    /// # Errors
    /// If it cannot be read. A file that is too large is read only so far that its check says so.
    pub fn read(path: &Path) -> Result<Self> {
        let limit = FILE_MAX_BYTES as u64 + 1;
        let mut bytes = Vec::new();
        if path == Path::new("-") {
            std::io::stdin().lock().take(limit).read_to_end(&mut bytes).context("standard input")?;
            let base = std::env::current_dir().context("the current folder")?;
            return Ok(Self { name: "standard input".to_owned(), bytes, base });
        }
        let name = path.display().to_string();
        let file = std::fs::File::open(path).with_context(|| format!("-f {name}"))?;
        file.take(limit).read_to_end(&mut bytes).with_context(|| format!("-f {name}"))?;
        let whole = std::path::absolute(path).with_context(|| format!("-f {name}"))?;
        let base = whole.parent().map_or_else(|| PathBuf::from("/"), Path::to_path_buf);
        Ok(Self { name, bytes, base })
    }

    /// Checks structure and rules.
    ///
    /// # Errors
    /// Everything that is wrong, as lines of `file:line:column: path: message`.
    pub fn parse(&self) -> Result<Manifest, String> {
        manifest::parse_bytes(&self.bytes).map_err(|errors| self.lines(&errors))
    }

    /// Reads and checks a file; warnings go to standard error.
    ///
    /// # Errors
    /// All that is wrong with it.
    pub fn open(path: &Path) -> Result<(Self, Manifest)> {
        let file = Self::read(path)?;
        match file.parse() {
            Ok(manifest) => {
                eprint!("{}", file.lines(&manifest.warnings).replace('\n', " (warning)\n"));
                Ok((file, manifest))
            }
            Err(lines) => bail!("{}", lines.trim_end()),
        }
    }

    /// Errors as lines that editors understand.
    pub fn lines(&self, errors: &[ManifestError]) -> String {
        let mut text = String::new();
        for error in errors {
            let separator = if error.line > 0 { ":" } else { ": " };
            let _ = writeln!(text, "{}{separator}{error}", self.name);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_errors_of_a_file_are_shown_with_their_lines() {
        let bytes = b"apiVersion: deepinfer.io/v1alpha1\nkind: DeepInferCluster\nmetadata:\n  name: a\nspec:\n  \
            accelerator:\n    vendor: tpu\n  engine:\n    image: x\n  model:\n    name: m\n    source:\n      \
            uri: file:///m\n  prefill:\n    replicas: many\n  decode:\n    supernode:\n      nodes: 1\n"
            .to_vec();
        let file = ClusterFile { name: "c.yaml".into(), bytes, base: "/".into() };
        let lines = file.parse().expect_err("two errors");
        assert!(lines.contains("c.yaml:7:"), "{lines}");
        assert!(
            lines.contains("spec.accelerator.vendor") && lines.contains("spec.prefill.replicas"),
            "{lines}"
        );
    }
}
