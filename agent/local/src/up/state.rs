//! The state folder of a cluster: one process at a time, files that are whole or absent.
//!
//! ```text
//! <root>/<cluster>/lock             held while the cluster runs; the kernel frees it, however the process ends
//!                  control.sock     where `status`, `apply` and `experts` ask
//!                  blueprint.json   the planner's memory
//!                  status.json      the last status, for when nothing runs
//! ```

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use deepinfer_planner::Blueprint;

/// The planner's memory.
pub const BLUEPRINT: &str = "blueprint.json";
/// The last status.
pub const STATUS: &str = "status.json";
/// The socket.
pub const SOCKET: &str = "control.sock";
/// The lock.
const LOCK: &str = "lock";
/// Largest file of ours that is read back, in bytes; real ones have some kilobytes.
const MAX_FILE_BYTES: u64 = 4 << 20;
/// Longest path of a socket that every system takes, in bytes.
const MAX_SOCKET_PATH: usize = 100;

/// The folder of a cluster under the root of all.
pub fn folder(root: &Path, cluster: &str) -> PathBuf {
    root.join(cluster)
}

/// A folder that this process has to itself.
#[derive(Debug)]
pub struct StateDir {
    folder: PathBuf,
    /// Locked as long as it is open.
    _lock: File,
}

impl StateDir {
    /// Makes and locks the folder.
    ///
    /// # Errors
    /// If another process runs the cluster (its number is named), or the folder cannot be used.
    pub fn open(root: &Path, cluster: &str) -> Result<Self> {
        let folder = folder(root, cluster);
        let shown = folder.display();
        let socket = folder.join(SOCKET);
        if socket.as_os_str().len() > MAX_SOCKET_PATH {
            bail!(
                "--state-dir: {} is too long for a socket: choose a folder with a shorter path",
                socket.display()
            );
        }
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&folder);
        made.with_context(|| format!("--state-dir: {shown}"))?;
        let path = folder.join(LOCK);
        let opened =
            OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(&path);
        let mut lock = opened.with_context(|| format!("--state-dir: {}", path.display()))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut pid = String::new();
                let _ = (&lock).take(20).read_to_string(&mut pid);
                bail!(
                    "cluster {cluster} runs already, as process {} with the state folder {shown}: change it with \
                     `deepinfer apply`, or stop it, or give this one another metadata.name or --state-dir",
                    pid.trim()
                );
            }
            Err(TryLockError::Error(error)) => {
                return Err(error).with_context(|| format!("--state-dir: lock {}", path.display()));
            }
        }
        // For the message above only; a full disk does not hinder the lock itself.
        let _ = lock.set_len(0).and_then(|()| lock.write_all(std::process::id().to_string().as_bytes()));
        Ok(Self { folder, _lock: lock })
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The socket's path. A file that a killed process left there is removed: the lock says that nobody listens.
    ///
    /// # Errors
    /// If something is there that cannot be removed.
    pub fn free_socket(&self) -> io::Result<PathBuf> {
        let path = self.folder.join(SOCKET);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(path),
        }
    }

    /// The memory of the last run, without its failures: whoever starts a cluster again has looked at them. A file
    /// that cannot be read costs history only, so it is reported and passed over.
    pub fn blueprint(&self) -> Option<Blueprint> {
        let path = self.folder.join(BLUEPRINT);
        let text = match read(&path) {
            Ok(text) => text?,
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "the planner starts without its memory");
                return None;
            }
        };
        match serde_json::from_str::<Blueprint>(&text) {
            Ok(blueprint) => Some(Blueprint { failures: Default::default(), ..blueprint }),
            Err(error) => {
                tracing::warn!(path = %path.display(), %error, "the planner starts without its memory");
                None
            }
        }
    }

    /// Writes a file: all of it is there, on the disk, or the one before is.
    ///
    /// # Errors
    /// What the system says, for example that the disk is full.
    pub fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let temporary = self.folder.join(format!("{name}.tmp"));
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, self.folder.join(name))?;
        File::open(&self.folder)?.sync_all()
    }
}

/// A small file; `None` if there is none.
///
/// # Errors
/// If it cannot be read or is far too large.
pub fn read(path: &Path) -> io::Result<Option<String>> {
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    let mut text = String::new();
    let bytes = file.take(MAX_FILE_BYTES + 1).read_to_string(&mut text)?;
    if bytes as u64 > MAX_FILE_BYTES {
        return Err(io::Error::other(format!("more than {MAX_FILE_BYTES} bytes")));
    }
    Ok(Some(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_process_is_refused_and_told_who_has_it() {
        let root = tempfile::tempdir().expect("a folder");
        let first = StateDir::open(root.path(), "a").expect("free");
        let error = StateDir::open(root.path(), "a").expect_err("taken").to_string();
        assert!(error.contains(&std::process::id().to_string()), "{error}");
        assert!(error.contains(&root.path().display().to_string()), "{error}");
        StateDir::open(root.path(), "b").expect("another cluster is free");
        drop(first);
        StateDir::open(root.path(), "a").expect("free again");
    }

    #[test]
    fn what_is_written_comes_back_and_a_broken_memory_is_passed_over() {
        let root = tempfile::tempdir().expect("a folder");
        let state = StateDir::open(root.path(), "a").expect("free");
        assert_eq!(state.blueprint(), None);
        let blueprint = Blueprint { prefill_epoch: deepinfer_protocol::Epoch(7), ..Blueprint::default() };
        state.write(BLUEPRINT, &serde_json::to_vec(&blueprint).expect("JSON")).expect("a disk");
        assert_eq!(state.blueprint(), Some(blueprint));
        state.write(BLUEPRINT, b"{half a").expect("a disk");
        assert_eq!(state.blueprint(), None);
    }

    #[test]
    fn a_write_that_fails_leaves_the_file_before_it() {
        let root = tempfile::tempdir().expect("a folder");
        let state = StateDir::open(root.path(), "a").expect("free");
        state.write(STATUS, b"one").expect("a disk");
        fs::create_dir(state.folder().join("status.json.tmp")).expect("in the way");
        state.write(STATUS, b"two").expect_err("no file can be written there");
        assert_eq!(read(&state.folder().join(STATUS)).expect("readable").as_deref(), Some("one"));
    }

    #[test]
    fn a_path_that_is_too_long_for_a_socket_is_refused_with_the_flag() {
        let root = tempfile::tempdir().expect("a folder");
        let error = StateDir::open(&root.path().join("x".repeat(90)), "a").expect_err("too long").to_string();
        assert!(error.contains("--state-dir"), "{error}");
    }
}
