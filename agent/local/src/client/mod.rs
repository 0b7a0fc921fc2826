//! Commands that ask a running cluster: finding its socket, asking, showing what it says.

pub mod apply;
pub mod experts;
mod heat;
pub mod status;

use std::io::{self, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::cluster::args::StateArgs;
use crate::up::control::{Answer, MAX_ANSWER_BYTES, Question};
use crate::up::state::{SOCKET, folder};

/// Time for an answer: an apply reads the headers of a large model.
const ANSWER_TIME: Duration = Duration::from_secs(120);
/// Between two looks of `--watch` and `--wait`.
pub const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The state folder of all clusters.
///
/// # Errors
/// If nothing names one.
pub fn root(state: &StateArgs) -> Result<PathBuf> {
    state.root().context("--state-dir: give a folder, as neither XDG_STATE_HOME nor HOME is set")
}

/// Asks a cluster that should be running.
///
/// # Errors
/// If it does not run, or does not answer.
pub fn ask(root: &Path, cluster: &str, question: &Question) -> Result<Answer> {
    let folder = folder(root, cluster);
    let answer = ask_if_running(root, cluster, question)?;
    answer.with_context(|| {
        format!(
            "no cluster {cluster} runs with the state folder {}: start it with `deepinfer up -f FILE`",
            folder.display()
        )
    })
}

/// Asks a cluster; `None` if nobody listens.
///
/// # Errors
/// If somebody listens and does not answer.
pub fn ask_if_running(root: &Path, cluster: &str, question: &Question) -> Result<Option<Answer>> {
    let path = folder(root, cluster).join(SOCKET);
    let mut stream = match UnixStream::connect(&path) {
        Ok(stream) => stream,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
            return Ok(None);
        }
        Err(error) => return Err(error).with_context(|| path.display().to_string()),
    };
    let context = || format!("cluster {cluster} does not answer at {}", path.display());
    stream.set_read_timeout(Some(ANSWER_TIME)).with_context(context)?;
    let mut line = serde_json::to_vec(question)?;
    line.push(b'\n');
    stream.write_all(&line).with_context(context)?;
    let mut text = String::new();
    BufReader::new(stream).take(MAX_ANSWER_BYTES).read_to_string(&mut text).with_context(context)?;
    serde_json::from_str(&text).map(Some).with_context(context)
}

/// The cluster that is meant: the named one, or the only one that runs.
///
/// # Errors
/// If none runs, or several do.
pub fn choose(root: &Path, name: Option<&str>) -> Result<String> {
    if let Some(name) = name {
        return Ok(name.to_owned());
    }
    let running = running(root)?;
    match running.as_slice() {
        [one] => Ok(one.clone()),
        [] => bail!(
            "no cluster runs with the state folder {}: start one with `deepinfer up -f FILE`",
            root.display()
        ),
        several => bail!("several clusters run, name one: {}", several.join(", ")),
    }
}

/// Clusters that run, by name.
fn running(root: &Path) -> Result<Vec<String>> {
    let entries = match std::fs::read_dir(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.with_context(|| root.display().to_string())?,
    };
    let mut names = Vec::new();
    for entry in entries.flatten() {
        if UnixStream::connect(entry.path().join(SOCKET)).is_ok() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// Prints what `draw` gives, once or each second; a terminal is cleared before each.
///
/// # Errors
/// Those of `draw`, and a reader that has gone.
pub fn show(watch: bool, mut draw: impl FnMut() -> Result<String>) -> Result<()> {
    use std::io::IsTerminal;
    loop {
        let text = draw()?;
        let clear = if watch && io::stdout().is_terminal() { "\x1b[2J\x1b[H" } else { "" };
        crate::report::print(&format!("{clear}{text}"))?;
        if !watch {
            return Ok(());
        }
        std::thread::sleep(LOOK_EVERY);
    }
}
