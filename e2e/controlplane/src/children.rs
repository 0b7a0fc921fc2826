//! Programs that we start: they write to a log file, say how much memory they hold, and never outlive us.
//!
//! The kernel kills a child marked by `setpriv --pdeathsig` when the *thread* that started it ends, and a test's thread
//! ends with its test. So one thread starts all of them and lives as long as the process.

use std::fs::{self, File};
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How often a child is asked whether it has ended.
const POLL: Duration = Duration::from_millis(10);

/// A signal that the test bed sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Please end.
    Term,
    /// End now.
    Kill,
    /// Stop running, keep everything.
    Stop,
    /// Run again after [`Signal::Stop`].
    Cont,
}

impl Signal {
    fn flag(self) -> &'static str {
        match self {
            Signal::Term => "-TERM",
            Signal::Kill => "-KILL",
            Signal::Stop => "-STOP",
            Signal::Cont => "-CONT",
        }
    }
}

/// Sends a signal by the program `kill`; the standard library knows only one signal.
///
/// # Errors
/// If there is no such process, or it is not ours.
pub fn send(pid: u32, signal: Signal) -> io::Result<()> {
    let output = Command::new("kill").arg(signal.flag()).arg(pid.to_string()).output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}

/// A command whose process dies with ours, where the machine has `setpriv`.
pub fn tied(program: &Path) -> Command {
    static SETPRIV: OnceLock<bool> = OnceLock::new();
    let usable = *SETPRIV.get_or_init(|| {
        let probe = Command::new("setpriv").args(["--pdeathsig", "KILL", "true"]).output();
        probe.is_ok_and(|output| output.status.success())
    });
    if !usable {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(program);
    command
}

/// Starts a command from the thread that lives as long as this process.
///
/// # Errors
/// As [`Command::spawn`].
pub fn spawn(command: Command) -> io::Result<Child> {
    type Order = (Command, SyncSender<io::Result<Child>>);
    static STARTER: OnceLock<SyncSender<Order>> = OnceLock::new();
    let starter = STARTER.get_or_init(|| {
        let (orders, inbox) = sync_channel::<Order>(16);
        let work = move || {
            for (mut command, answer) in inbox {
                // The one who asked may have gone: then the child is dropped, which leaves it running until we end.
                let _ = answer.send(command.spawn());
            }
        };
        thread::Builder::new().name("starter".into()).spawn(work).expect("a thread can be started");
        orders
    });
    let (answer, result) = sync_channel(1);
    starter
        .send((command, answer))
        .map_err(|_| io::Error::other("the thread that starts programs is gone"))?;
    result.recv().map_err(|_| io::Error::other("the thread that starts programs gave no answer"))?
}

/// A running program with its log. Dropping it kills it.
#[derive(Debug)]
pub struct Process {
    name: String,
    pid: u32,
    log: PathBuf,
    pid_file: PathBuf,
    child: Mutex<Child>,
}

impl Process {
    /// Starts `command` (best from [`tied`]) with both outputs appended to `folder/NAME.log`; `folder/NAME.pid` lets a
    /// later run end it should we die without a chance to.
    ///
    /// # Errors
    /// If the log cannot be written or the program cannot be started.
    pub fn start(name: &str, mut command: Command, folder: &Path) -> io::Result<Process> {
        let log = folder.join(format!("{name}.log"));
        let out = File::options().create(true).append(true).open(&log)?;
        command.stdin(Stdio::null()).stdout(out.try_clone()?).stderr(out);
        // Ctrl-C in a terminal is for us: we stop the children in the right order.
        command.process_group(0);
        let child = spawn(command)?;
        let pid = child.id();
        let pid_file = folder.join(format!("{name}.pid"));
        fs::write(&pid_file, pid.to_string())?;
        Ok(Process { name: name.to_owned(), pid, log, pid_file, child: Mutex::new(child) })
    }

    /// The name it was started under.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// How it ended; `None` while it runs.
    pub fn ended(&self) -> Option<ExitStatus> {
        self.child().try_wait().unwrap_or_else(|_| Some(ExitStatus::from_raw(0)))
    }

    /// Waits for its end, at most so long.
    pub fn wait(&self, at_most: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + at_most;
        loop {
            if let Some(status) = self.ended() {
                self.forget();
                return Some(status);
            }
            if Instant::now() >= deadline {
                return None;
            }
            thread::sleep(POLL);
        }
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// If it has ended.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        // Once it is reaped its number may belong to somebody else.
        match self.ended() {
            Some(status) => Err(io::Error::other(format!("{} has ended: {status}", self.name))),
            None => send(self.pid, signal),
        }
    }

    /// Kills it and waits until it is gone.
    pub fn kill(&self) {
        // An error means that it has ended already.
        let _ = self.child().kill();
        let _ = self.child().wait();
        self.forget();
    }

    /// Removes the pid file, unless a program that was started after this one has it.
    fn forget(&self) {
        if fs::read_to_string(&self.pid_file).is_ok_and(|text| text == self.pid.to_string()) {
            let _ = fs::remove_file(&self.pid_file);
        }
    }

    /// Asks it to end, and kills it after `grace`.
    pub fn stop(&self, grace: Duration) {
        if self.signal(Signal::Term).is_ok() && self.wait(grace).is_some() {
            return;
        }
        self.kill();
    }

    /// Everything that it wrote.
    pub fn log(&self) -> String {
        let bytes = fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The last lines of its log.
    pub fn tail(&self, lines: usize) -> String {
        let log = self.log();
        let all: Vec<&str> = log.lines().collect();
        all[all.len().saturating_sub(lines)..].join("\n")
    }

    /// Resident memory in bytes; 0 if it has ended.
    pub fn memory(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap_or_default();
        let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"));
        let kib = line.and_then(|l| l.trim().strip_suffix(" kB")).and_then(|n| n.trim().parse::<u64>().ok());
        kib.unwrap_or(0) * 1024
    }

    fn child(&self) -> MutexGuard<'_, Child> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleeper() -> Command {
        let mut command = tied(Path::new("sleep"));
        command.arg("1000");
        command
    }

    #[test]
    fn a_process_is_stopped_continued_and_killed() {
        let folder = tempfile::tempdir().unwrap();
        let process = Process::start("sleeper", sleeper(), folder.path()).unwrap();
        process.signal(Signal::Stop).unwrap();
        process.signal(Signal::Cont).unwrap();
        assert!(process.ended().is_none() && process.memory() > 0);
        process.kill();
        assert!(process.ended().is_some());
        assert!(process.signal(Signal::Term).is_err(), "a signal to a process that has ended");
        assert!(!folder.path().join("sleeper.pid").exists());
    }

    #[test]
    fn the_successor_keeps_its_pid_file_when_the_predecessor_goes() {
        let folder = tempfile::tempdir().unwrap();
        let first = Process::start("sleeper", sleeper(), folder.path()).unwrap();
        first.kill();
        let second = Process::start("sleeper", sleeper(), folder.path()).unwrap();
        drop(first);
        let written = fs::read_to_string(folder.path().join("sleeper.pid")).unwrap();
        assert_eq!(written, second.pid().to_string());
    }

    #[test]
    fn the_log_keeps_both_outputs_and_its_tail_is_its_end() {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo one; echo two >&2; echo three"]);
        let process = Process::start("talker", command, folder.path()).unwrap();
        assert!(process.wait(Duration::from_secs(10)).unwrap().success());
        assert_eq!(process.tail(2), "two\nthree");
    }
}
