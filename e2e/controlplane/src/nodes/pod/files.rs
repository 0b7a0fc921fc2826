//! A folder that holds exactly the given files: new content appears whole, what is no longer wanted goes.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, bail};

/// A file of a projected volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct File {
    pub content: Vec<u8>,
    pub mode: u32,
}

/// Files by their path inside the volume.
pub(crate) type Files = BTreeMap<PathBuf, File>;

/// Makes `folder` hold exactly `files`. A reader sees the old or the new content of a file, never a part: files are
/// written to `scratch` (on the same file system) and renamed.
pub(crate) fn write(folder: &Path, scratch: &Path, files: &Files) -> anyhow::Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    for (path, file) in files {
        if path.components().any(|part| !matches!(part, Component::Normal(_))) {
            bail!("the path {} leaves its volume", path.display());
        }
        let target = folder.join(path);
        let same = fs::read(&target).is_ok_and(|old| old == file.content);
        if same {
            continue;
        }
        place(&target, scratch, file).with_context(|| format!("cannot write {}", target.display()))?;
    }
    for found in list(folder, Path::new(""))? {
        if !files.contains_key(&found) {
            fs::remove_file(folder.join(&found)).ok();
        }
    }
    Ok(())
}

fn place(target: &Path, scratch: &Path, file: &File) -> io::Result<()> {
    if let Some(parent) = target.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(scratch, &file.content)?;
    fs::set_permissions(scratch, fs::Permissions::from_mode(file.mode))?;
    fs::rename(scratch, target)
}

fn list(folder: &Path, inner: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder.join(inner))? {
        let entry = entry?;
        let path = inner.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            found.extend(list(folder, &path)?);
        } else {
            found.push(path);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(pairs: &[(&str, &str)]) -> Files {
        let file = |text: &str| File { content: text.as_bytes().to_vec(), mode: 0o640 };
        pairs.iter().map(|(path, text)| (PathBuf::from(path), file(text))).collect()
    }

    #[test]
    fn a_folder_follows_its_files() {
        let temp = tempfile::tempdir().unwrap();
        let (folder, scratch) = (temp.path().join("v"), temp.path().join("scratch"));
        write(&folder, &scratch, &files(&[("1", "one"), ("deep/2", "two")])).unwrap();
        assert_eq!(fs::read_to_string(folder.join("deep/2")).unwrap(), "two");
        assert_eq!(fs::metadata(folder.join("1")).unwrap().permissions().mode() & 0o777, 0o640);
        write(&folder, &scratch, &files(&[("1", "other")])).unwrap();
        assert_eq!(fs::read_to_string(folder.join("1")).unwrap(), "other");
        assert!(!folder.join("deep/2").exists());
        assert!(write(&folder, &scratch, &files(&[("../out", "x")])).is_err());
    }
}
