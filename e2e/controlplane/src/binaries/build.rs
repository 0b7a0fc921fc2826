//! A build of one Go module into the cache: one builder at a time, nothing half-built is ever seen.

use std::fs::{self, File, TryLockError};
use std::io::{self, BufRead, BufReader};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use super::{Error, Need};

/// How often a build that says nothing else says that it goes on.
const REPORT: Duration = Duration::from_secs(30);
/// Lines that are kept for the error message.
const TAIL: usize = 30;

/// Builds into `folder`, or waits for another process that does.
pub(super) fn build(need: Need, cache: &Path, folder: &Path) -> Result<(), Error> {
    let at = |path: &Path| {
        let path = path.display().to_string();
        move |error: io::Error| Error::Io(path, error)
    };
    fs::create_dir_all(cache).map_err(at(cache))?;
    let lock_path = cache.join(format!("{}.lock", need.name()));
    let lock = File::create(&lock_path).map_err(at(&lock_path))?;
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            eprintln!("controlplane: waiting for another process that builds {}", need.name());
            lock.lock().map_err(at(&lock_path))?;
        }
        Err(TryLockError::Error(error)) => return Err(at(&lock_path)(error)),
    }
    // The other builder may have done it. The kernel gives the lock back when its holder dies.
    if folder.join(need.name()).is_file() {
        return Ok(());
    }
    let unfinished = cache.join(format!(".{}-{}", need.name(), std::process::id()));
    fs::create_dir_all(&unfinished).map_err(at(&unfinished))?;
    let result = compile(need, folder, &unfinished);
    let result = result.and_then(|()| finish(need, &unfinished, folder).map_err(at(folder)));
    if result.is_err() {
        let _ = fs::remove_dir_all(&unfinished);
    }
    result
}

fn finish(need: Need, unfinished: &Path, folder: &Path) -> io::Result<()> {
    if need == Need::Kubernetes {
        symlink("kubernetes", unfinished.join("kubectl"))?;
    }
    fs::rename(unfinished, folder)
}

fn compile(need: Need, folder: &Path, unfinished: &Path) -> Result<(), Error> {
    eprintln!(
        "controlplane: building {} from source into {} (once; {})",
        need.name(),
        folder.display(),
        need.cost()
    );
    let start = Instant::now();
    let mut child = command(need, unfinished).spawn().map_err(|error| Error::Io("go build".into(), error))?;
    let lines = lines_of(child.stderr.take().expect("stderr is piped"));
    let tail = follow(need, &lines, start);
    let status = child.wait().map_err(|error| Error::Io("go build".into(), error))?;
    if !status.success() {
        return Err(Error::Build { name: need.name(), status: status.to_string(), tail: tail.join("\n") });
    }
    eprintln!("controlplane: built {} in {} s", need.name(), start.elapsed().as_secs());
    Ok(())
}

/// `go build` with low priority: it runs beside other builds and tests.
fn command(need: Need, unfinished: &Path) -> Command {
    let mut command = Command::new("nice");
    command.args(["-n", "10", "go", "build", "-v", "-trimpath", "-buildvcs=false"]);
    command.arg(format!("-ldflags={}", need.linker_flags()));
    command.arg("-o").arg(unfinished.join(need.name())).arg(need.package());
    command.current_dir(need.sources());
    // Modules as go.sum pins them; a workspace file or flags of the person who builds must not change the result.
    command.env("CGO_ENABLED", "0").env("GOWORK", "off").env("GOFLAGS", "-mod=readonly");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

fn lines_of(stderr: impl io::Read + Send + 'static) -> Receiver<String> {
    let (sender, lines) = sync_channel(1024);
    thread::spawn(move || {
        for line in BufReader::new(stderr).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    lines
}

/// Reads what the build says until it ends. Go names each package that it compiled and each module that it fetches.
fn follow(need: Need, lines: &Receiver<String>, start: Instant) -> Vec<String> {
    let mut tail: Vec<String> = Vec::new();
    let (mut packages, mut modules) = (0, 0);
    let mut reported = Instant::now();
    loop {
        match lines.recv_timeout(REPORT) {
            Ok(line) => {
                if line.starts_with("go: downloading") {
                    modules += 1;
                } else {
                    packages += 1;
                }
                if tail.len() == TAIL {
                    tail.remove(0);
                }
                tail.push(line);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return tail,
        }
        if reported.elapsed() >= REPORT {
            reported = Instant::now();
            let seconds = start.elapsed().as_secs();
            eprintln!(
                "controlplane: {}: {seconds} s, {modules} modules fetched, {packages} packages compiled",
                need.name()
            );
        }
    }
}
