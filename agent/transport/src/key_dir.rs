//! The cluster's keys in a folder: one file for each generation, named by its number, with the key in 64 hex digits.
//! So a mounted Secret looks, and so a test writes them.
//!
//! Invariant: what is wrong is named with its file, never with its content.

use std::path::{Path, PathBuf};
use std::time::Duration;

use deepinfer_protocol::Generation;
use thiserror::Error;
use tokio_util::sync::CancellationToken;

use crate::control_auth::bytes_of;
use crate::key::{ClusterKey, GenerationKey};

/// Most files of a folder: while keys roll there are two.
const MAX_FILES: usize = 16;
/// Longest file: the digits and a line end.
const MAX_FILE_BYTES: u64 = 256;

/// Why a folder gives no keys.
#[derive(Debug, Error)]
pub enum KeyDirError {
    /// The folder or a file cannot be read.
    #[error("--key-dir: {}: {source}; mount the Secret <cluster>-agent-<generation> there", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Nothing in it.
    #[error(
        "--key-dir: {} holds no key; each key is a file named by its generation, for example {}/1",
        .0.display(),
        .0.display()
    )]
    Empty(PathBuf),
    /// Far more than keys that roll.
    #[error("--key-dir: {} holds more than {MAX_FILES} files; leave the keys of the last two generations", .0.display())]
    TooMany(PathBuf),
    /// A file that is not named by a number.
    #[error("--key-dir: {}: expected a file name that is a generation, such as 1; rename or remove it", .0.display())]
    Name(PathBuf),
    /// A file without a key in it.
    #[error("--key-dir: {}: expected a key of exactly 64 hex digits; write the Secret again", .0.display())]
    Malformed(PathBuf),
}

/// Keys of a folder, newest generation first. Blocks.
///
/// # Errors
/// [`KeyDirError`], which names the file.
pub fn read(dir: &Path) -> Result<Vec<GenerationKey>, KeyDirError> {
    let fail = |path: &Path, source| KeyDirError::Read { path: path.to_owned(), source };
    let mut keys = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(|source| fail(dir, source))? {
        let path = entry.map_err(|source| fail(dir, source))?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        // A mounted Secret keeps its versions in folders with such names.
        if name.starts_with('.') {
            continue;
        }
        if keys.len() == MAX_FILES {
            return Err(KeyDirError::TooMany(dir.to_owned()));
        }
        let generation = name.parse().map_err(|_| KeyDirError::Name(path.clone()))?;
        let bytes = std::fs::metadata(&path).map_err(|source| fail(&path, source))?.len();
        if bytes > MAX_FILE_BYTES {
            return Err(KeyDirError::Malformed(path));
        }
        let text = std::fs::read(&path).map_err(|source| fail(&path, source))?;
        let key = std::str::from_utf8(&text).ok().and_then(|text| bytes_of(text.trim()));
        keys.push((Generation(generation), key.ok_or(KeyDirError::Malformed(path))?));
    }
    if keys.is_empty() {
        return Err(KeyDirError::Empty(dir.to_owned()));
    }
    keys.sort_unstable_by_key(|(generation, _)| std::cmp::Reverse(*generation));
    Ok(keys)
}

/// The keys of a folder, for [`follow`].
///
/// # Errors
/// [`KeyDirError`].
pub fn open(dir: &Path) -> Result<ClusterKey, KeyDirError> {
    read(dir).map(ClusterKey::of)
}

/// Looks at the folder again and again and puts in force what it finds; what cannot be read leaves the keys as they
/// are. Kubernetes swaps a link when a Secret changes, so there is no file to watch.
pub async fn follow(dir: PathBuf, key: ClusterKey, every: Duration, stop: CancellationToken) {
    let mut said = String::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(every) => {}
        }
        let folder = dir.clone();
        let Ok(found) = tokio::task::spawn_blocking(move || read(&folder)).await else { return };
        match found {
            Ok(keys) => {
                said.clear();
                if !key.holds(&keys) {
                    key.replace(keys);
                    tracing::info!(generations = ?key.numbers(), "the cluster's keys have changed");
                }
            }
            Err(error) => {
                // One line for each new reason, not one for each look.
                let text = error.to_string();
                if text != said {
                    tracing::error!(error = text, "the keys before stay in force");
                    said = text;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        dir
    }

    #[test]
    fn keys_are_read_newest_first_and_what_kubernetes_puts_beside_them_is_passed_over() {
        let dir = folder(&[("3", &"0a".repeat(32)), ("12", &format!("{}\n", "Ff".repeat(32)))]);
        fs::create_dir(dir.path().join("..2026_01_01")).unwrap();
        let keys = read(dir.path()).unwrap();
        assert_eq!(keys, [(Generation(12), [255; 32]), (Generation(3), [10; 32])]);
    }

    #[test]
    fn what_is_wrong_is_named_with_its_file_and_never_shown() {
        let secret = "5e".repeat(31);
        let cases = [
            (folder(&[]), "holds no key"),
            (folder(&[("one", &"0a".repeat(32))]), "/one: expected a file name"),
            (folder(&[("1", &secret)]), "/1: expected a key of exactly 64 hex digits"),
            (folder(&[("1", &"5e".repeat(4000))]), "/1: expected a key"),
        ];
        for (dir, expected) in cases {
            let error = read(dir.path()).unwrap_err();
            let text = format!("{error} {error:?}");
            assert!(text.contains(expected), "{text}");
            assert!(!text.contains("5e5e"), "{text}");
        }
        let gone = read(Path::new("/nonexistent/keys")).unwrap_err().to_string();
        assert!(gone.contains("/nonexistent/keys") && gone.contains("mount the Secret"), "{gone}");
    }

    #[tokio::test]
    async fn a_changed_folder_is_in_force_in_every_clone_and_a_broken_one_changes_nothing() {
        let dir = folder(&[("1", &"01".repeat(32))]);
        let key = open(dir.path()).unwrap();
        let (clone, stop) = (key.clone(), CancellationToken::new());
        let task = tokio::spawn(follow(dir.path().to_owned(), key, Duration::from_millis(5), stop.clone()));
        let becomes = async |numbers: &[u64]| {
            let numbers: Vec<_> = numbers.iter().copied().map(Generation).collect();
            let wait = async {
                while clone.numbers() != numbers {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            };
            tokio::time::timeout(Duration::from_secs(20), wait).await.expect("the keys change");
        };
        fs::write(dir.path().join("2"), "02".repeat(32)).unwrap();
        becomes(&[2, 1]).await;
        let (_, old) = ClusterKey::new(Generation(1), [1; 32]).sign(&[b"x"]);
        assert!(clone.verify_any(&[b"x"], &old), "n-1 is accepted");
        fs::write(dir.path().join("3"), "no key").unwrap();
        fs::remove_file(dir.path().join("1")).unwrap();
        fs::write(dir.path().join("3"), "03".repeat(32)).unwrap();
        becomes(&[3, 2]).await;
        assert!(!clone.verify_any(&[b"x"], &old), "n-2 is not");
        stop.cancel();
        task.await.unwrap();
    }
}
