//! Processes of containers: each leads a process group, its output goes to a log, and no group outlives its owner.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use tokio::net::unix::pipe;
use tokio::process::{Child, Command};
use tokio::task::JoinHandle;

use super::log::pump;
use super::pod::env::CommandLine;

/// How long the last lines of a process that has ended may take to reach its log.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A folder with one empty file for each living process group, named by its number. The guard reads it.
#[derive(Debug)]
pub(crate) struct Groups {
    folder: PathBuf,
    /// Set at the end. Held for reading while a process starts, so that none starts behind the back of the last kill.
    closed: RwLock<bool>,
}

impl Groups {
    pub(crate) fn new(root: &Path) -> io::Result<Self> {
        let folder = root.join("groups");
        fs::create_dir_all(&folder)?;
        Ok(Groups { folder, closed: RwLock::new(false) })
    }

    /// Starts a command as the leader of a new group.
    fn spawn(&self, command: &mut Command) -> io::Result<(Child, Group)> {
        let closed = self.closed.read().unwrap_or_else(PoisonError::into_inner);
        if *closed {
            return Err(io::Error::other("the node is stopping"));
        }
        let child = command.spawn()?;
        let pid = child.id().expect("it was not waited for yet");
        let file = self.folder.join(pid.to_string());
        // Without the file only the guard is weaker; the group is killed by its owner all the same.
        fs::write(&file, "").ok();
        Ok((child, Group { pid, file }))
    }

    /// Kills every group; none starts any more.
    pub(crate) fn close(&self) {
        *self.closed.write().unwrap_or_else(PoisonError::into_inner) = true;
        kill_groups(&self.folder);
    }
}

/// Kills the groups that a folder names.
pub(crate) fn kill_groups(folder: &Path) {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let groups: Vec<_> = entries.map(|e| format!("-{}", e.file_name().to_string_lossy())).collect();
    if !groups.is_empty() {
        std::process::Command::new("kill").args(["-KILL", "--"]).args(groups).output().ok();
    }
}

/// A process group. Dropping it kills what is left of it.
#[derive(Debug)]
struct Group {
    pid: u32,
    file: PathBuf,
}

impl Drop for Group {
    fn drop(&mut self) {
        let group = format!("-{}", self.pid);
        std::process::Command::new("kill").args(["-KILL", "--", &group]).output().ok();
        fs::remove_file(&self.file).ok();
    }
}

/// Where and how a command line runs.
pub(crate) struct Place<'a> {
    pub namespace: Option<&'a str>,
    pub folder: &'a Path,
    pub groups: &'a Groups,
}

fn command(line: &CommandLine, place: &Place<'_>) -> Command {
    let mut command = match place.namespace {
        Some(space) => {
            let mut command = Command::new("ip");
            command.args(["netns", "exec", space]).arg(&line.program);
            command
        }
        None => Command::new(&line.program),
    };
    command.args(&line.args).env_clear().envs(&line.env).current_dir(place.folder).stdin(Stdio::null());
    command.process_group(0).kill_on_drop(true);
    command
}

/// A running process of a container.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    group: Group,
    pump: JoinHandle<()>,
}

impl Running {
    /// Starts a process whose output goes to the file `log`.
    pub(crate) fn start(line: &CommandLine, place: &Place<'_>, log: &Path) -> io::Result<Running> {
        let (reader, writer) = io::pipe()?;
        let mut command = command(line, place);
        command.stdout(writer.try_clone()?).stderr(writer);
        let (child, group) = place.groups.spawn(&mut command)?;
        // The command holds our copies of the writing end; the pump ends when the last copy is closed.
        drop(command);
        let reader = pipe::Receiver::from_owned_fd(OwnedFd::from(reader))?;
        let pump = tokio::spawn(pump(reader, log.to_owned()));
        Ok(Running { child, group, pump })
    }

    /// The number of the process.
    pub(crate) fn pid(&self) -> u32 {
        self.group.pid
    }

    /// Waits for the end of the process. Cancel safe.
    pub(crate) async fn wait(&mut self) -> io::Result<ExitStatus> {
        self.child.wait().await
    }

    /// Asks the process to end.
    pub(crate) fn terminate(&self) {
        // An error means that it has ended already.
        crate::children::send(self.group.pid, crate::children::Signal::Term).ok();
    }

    /// Ends the whole group now, and gives the exit status and a complete log.
    pub(crate) async fn finish(self) -> io::Result<ExitStatus> {
        let Running { mut child, group, pump } = self;
        drop(group);
        let status = child.wait().await;
        tokio::time::timeout(LAST_WORDS, pump).await.ok();
        status
    }
}

/// Runs a command to its end: for probes and hooks. The error holds what it printed.
pub(crate) async fn run(line: &CommandLine, place: &Place<'_>) -> Result<(), String> {
    let mut command = command(line, place);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let (child, _group) = place.groups.spawn(&mut command).map_err(|error| error.to_string())?;
    let output = child.wait_with_output().await.map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    let text = [output.stdout, output.stderr].concat();
    Err(format!("command ended with {}: {}", output.status, String::from_utf8_lossy(&text).trim()))
}
