//! The folder of one run: data, logs, kubeconfigs. It goes when the run ends, however it ends.
//!
//! Three ways, because a test may panic, be killed, or take the machine down with it: `Drop`; a guard process that waits
//! for our end on a pipe; and the next run, which removes what nobody owns any more.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::children::{self, Signal};

/// Space that a run wants in memory, else its folder goes to the disk.
const ROOM_KIB: u64 = 2 * 1024 * 1024;

/// What the guard does when the pipe closes: end whatever still runs, then remove the folder.
const GUARD: &str = r#"read -r word
for file in "$1"/*.pid; do [ -f "$file" ] && kill -9 "$(cat "$file")" 2>/dev/null; done
[ "$word" = keep ] || rm -rf "$1" || { sleep 1; rm -rf "$1"; }"#;

/// A folder that is removed with everything in it.
#[derive(Debug)]
pub struct Run {
    folder: PathBuf,
    guard: Option<Child>,
    keep: AtomicBool,
}

impl Run {
    /// A new folder, in memory if there is room. Removes first what earlier runs left behind.
    ///
    /// # Errors
    /// If no folder can be made.
    pub fn new() -> io::Result<Run> {
        let base = base_folder();
        fs::create_dir_all(&base)?;
        remove_leftovers(&base);
        let folder = tempfile::Builder::new().prefix("run-").tempdir_in(&base)?.keep();
        // Tokens of an administrator lie in it.
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700))?;
        let me = std::process::id();
        fs::write(folder.join("owner"), format!("{me} {}", birth(me).unwrap_or_default()))?;
        let guard = start_guard(&folder);
        Ok(Run { folder, guard, keep: AtomicBool::new(false) })
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Leaves the folder behind.
    pub fn keep(&self) {
        self.keep.store(true, Ordering::Relaxed);
        let _ = fs::remove_file(self.folder.join("owner"));
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let keep = *self.keep.get_mut();
        if let Some(guard) = &mut self.guard {
            if let Some(mut pipe) = guard.stdin.take()
                && keep
            {
                let _ = io::Write::write_all(&mut pipe, b"keep\n");
            }
            let _ = guard.wait();
        }
        if !keep {
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

fn start_guard(folder: &Path) -> Option<Child> {
    let mut command = Command::new("sh");
    command.args(["-c", GUARD, "guard"]).arg(folder);
    // A group of its own: Ctrl-C must not end it before us.
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).process_group(0);
    command.spawn().ok()
}

fn base_folder() -> PathBuf {
    let memory = Path::new("/dev/shm");
    let parent = if room_kib(memory) >= ROOM_KIB { memory.to_path_buf() } else { std::env::temp_dir() };
    parent.join("deepinfer-controlplane")
}

/// Free space of a folder by the program `df`; 0 if there is none or it is not writable.
fn room_kib(folder: &Path) -> u64 {
    if tempfile::tempfile_in(folder).is_err() {
        return 0;
    }
    let Ok(output) = Command::new("df").args(["-Pk"]).arg(folder).output() else { return 0 };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let fields = text.lines().nth(1).map(|line| line.split_whitespace().collect::<Vec<_>>());
    fields.and_then(|f| f.get(3)?.parse().ok()).unwrap_or(0)
}

/// Ends the programs of runs whose owner is gone, and removes their folders.
fn remove_leftovers(base: &Path) {
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        let folder = entry.path();
        // Without an owner it is kept on purpose, or just being made.
        let Ok(owner) = fs::read_to_string(folder.join("owner")) else { continue };
        let Some((pid, born)) = owner.split_once(' ') else { continue };
        let Ok(pid) = pid.parse::<u32>() else { continue };
        if birth(pid).is_some_and(|now| now == born) {
            continue;
        }
        for file in fs::read_dir(&folder).into_iter().flatten().flatten() {
            if file.path().extension().is_some_and(|e| e == "pid") {
                end_leftover(&file.path(), &folder);
            }
        }
        let _ = fs::remove_dir_all(&folder);
    }
}

/// Ends the process of a pid file, if it is still the one that works in that folder.
fn end_leftover(pid_file: &Path, folder: &Path) {
    let Some(pid) = fs::read_to_string(pid_file).ok().and_then(|text| text.trim().parse::<u32>().ok()) else {
        return;
    };
    let words = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    if String::from_utf8_lossy(&words).contains(&*folder.to_string_lossy()) {
        let _ = children::send(pid, Signal::Kill);
    }
}

/// When a process started, in the kernel's own count: the same number may belong to another process later.
fn birth(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the program's name in brackets and may hold anything.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(19).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_run_removes_its_folder_and_a_kept_one_stays() {
        let run = Run::new().unwrap();
        let folder = run.folder().to_path_buf();
        assert!(folder.is_dir());
        drop(run);
        assert!(!folder.exists());

        let kept = Run::new().unwrap();
        let folder = kept.folder().to_path_buf();
        kept.keep();
        drop(kept);
        assert!(folder.is_dir());
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn the_next_run_ends_and_removes_what_a_dead_one_left() {
        let base = tempfile::tempdir().unwrap();
        let folder = base.path().join("run-dead");
        fs::create_dir(&folder).unwrap();
        // The folder stands in the command line, as with the programs of a control plane.
        let mut child =
            Command::new("sh").args(["-c", "while :; do sleep 1; done"]).arg(&folder).spawn().unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        // Right after its start a process has no command line yet.
        while fs::read(format!("/proc/{}/cmdline", child.id())).unwrap().is_empty() {
            assert!(Instant::now() < deadline, "the process does not start");
        }
        fs::write(folder.join("etcd.pid"), child.id().to_string()).unwrap();
        fs::write(folder.join("owner"), format!("{} 1", std::process::id())).unwrap();
        remove_leftovers(base.path());
        let mut ended = child.try_wait().unwrap();
        while ended.is_none() && Instant::now() < deadline {
            ended = child.try_wait().unwrap();
        }
        // Nothing may outlive a test that fails either.
        let _ = child.kill();
        child.wait().unwrap();
        assert!(ended.is_some(), "the process of the dead run still runs");
        assert!(!folder.exists());
    }
}
