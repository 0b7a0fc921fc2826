//! The folder of one run, and a small shell process that cleans up if this one is killed.
//!
//! The guard waits until its input closes, which the kernel does when this process ends however it ends. Runs whose
//! guard was killed too are found by the next run: each folder says whose it is.

use std::fs;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use anyhow::Context as _;

use super::process::kill_groups;
use crate::network::clean_up_after_the_dead;

/// The file in a run's folder with the number and the start time of its process.
const OWNER: &str = "owner";

/// What the guard does when its input closes: as [`bury`], but without us.
const SCRIPT: &str = r#"
trap '' HUP INT TERM
cat > /dev/null
for f in "$1"/groups/*; do kill -s KILL -- "-${f##*/}" 2> /dev/null; done
if [ -f "$1/network.json" ]; then
  id=$(sed 's/.*"id":"\([0-9a-f]*\)".*/\1/' "$1/network.json")
  range=$(sed 's/.*"range":\([0-9]*\).*/\1/' "$1/network.json")
  for ns in /run/netns/deepinfer-"$id"-*; do
    [ -e "$ns" ] || continue
    ns=${ns##*/}
    ip netns pids "$ns" | while read -r pid; do kill -s KILL "$pid"; done
    ip netns del "$ns"
    rm -rf "/etc/netns/$ns"
  done
  ip link del "dib$id"
  ip route del unreachable "10.$range.0.0/16"
fi
rm -rf "$1"
"#;

/// The folder of this run and its guard. Dropping it removes the folder.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) root: PathBuf,
    guard: Mutex<Option<Child>>,
}

impl Run {
    /// Makes a folder of this run, after the folders of dead runs are gone.
    pub(crate) fn start() -> anyhow::Result<Run> {
        let home = std::env::temp_dir().join("deepinfer-nodes");
        fs::create_dir_all(&home).with_context(|| format!("cannot make {}", home.display()))?;
        for entry in fs::read_dir(&home)?.flatten() {
            if !is_alive(&entry.path()) {
                bury(&entry.path());
            }
        }
        let root = tempfile::Builder::new().prefix("run-").tempdir_in(&home)?.keep();
        fs::write(root.join(OWNER), identity(std::process::id()).context("/proc is not there")?)?;
        let guard = guard(&root);
        if let Err(error) = &guard {
            eprintln!("process nodes run without a guard, so a killed run leaves its pods: {error}");
        }
        Ok(Run { root, guard: Mutex::new(guard.ok()) })
    }
}

impl Run {
    /// Removes the folder and sends the guard home. Doing it again is fine.
    pub(crate) fn remove(&self) {
        // The folder first: if we are killed in between, the guard does the rest.
        fs::remove_dir_all(&self.root).ok();
        if let Some(mut guard) = self.guard.lock().unwrap_or_else(PoisonError::into_inner).take() {
            guard.kill().ok();
            guard.wait().ok();
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.remove();
    }
}

fn guard(root: &Path) -> io::Result<Child> {
    let mut command = Command::new("/bin/sh");
    command.arg("-c").arg(SCRIPT).arg("deepinfer-nodes-guard").arg(root).process_group(0);
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()).current_dir("/").spawn()
}

/// The number of a process and the moment it started, so that a number used again is not taken for it.
fn identity(pid: u32) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program is in brackets and may hold anything; the start time is the 20th word after it.
    let start = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?;
    Some(format!("{pid} {start}"))
}

fn is_alive(root: &Path) -> bool {
    // A folder that is being made has no owner yet: it is left alone while it is young.
    let Ok(owner) = fs::read_to_string(root.join(OWNER)) else {
        let age = fs::metadata(root).and_then(|m| m.modified()).ok().and_then(|t| t.elapsed().ok());
        return age.is_some_and(|age| age.as_secs() < 60);
    };
    let pid = owner.split(' ').next().and_then(|pid| pid.parse().ok());
    pid.and_then(identity).is_some_and(|now| now == owner)
}

/// Removes what a dead run left.
fn bury(root: &Path) {
    kill_groups(&root.join("groups"));
    clean_up_after_the_dead(root);
    fs::remove_dir_all(root).ok();
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    #[test]
    fn the_guard_ends_what_its_owner_left() {
        let temp = tempfile::tempdir().unwrap();
        let root = temp.path().join("run");
        fs::create_dir_all(root.join("groups")).unwrap();
        let mut orphan = Command::new("/bin/sleep");
        orphan.arg("600").process_group(0).stdout(Stdio::null()).stderr(Stdio::null());
        let mut orphan = orphan.spawn().unwrap();
        fs::write(root.join("groups").join(orphan.id().to_string()), "").unwrap();
        let mut guard = guard(&root).unwrap();
        // The kernel does this when a process ends.
        drop(guard.stdin.take());
        assert!(guard.wait().is_ok() && !root.exists());
        let deadline = Instant::now() + Duration::from_secs(10);
        while orphan.try_wait().unwrap().is_none() {
            assert!(Instant::now() < deadline, "the orphan lives");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn only_folders_of_living_owners_are_kept() {
        let temp = tempfile::tempdir().unwrap();
        let me = identity(std::process::id()).unwrap();
        for (owner, alive) in [(me.as_str(), true), ("1 999999999999", false), ("nonsense", false)] {
            fs::write(temp.path().join(OWNER), owner).unwrap();
            assert_eq!(is_alive(temp.path()), alive, "{owner}");
        }
    }
}
