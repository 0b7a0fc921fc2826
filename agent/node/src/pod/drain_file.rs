//! A drain by file: the pod's annotation `deepinfer.io/drain`, mounted as a file. So an agent drains although the
//! operator cannot reach it.
//!
//! Invariant: only a change of the file does something. What the control port was told meanwhile stays.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use deepinfer_protocol::Span;
use serde::Deserialize;
use tokio_util::sync::CancellationToken;

use crate::handle::AgentHandle;

/// How often the file is read.
const EVERY: Duration = Duration::from_secs(1);
/// Longest file that is read.
const MAX_BYTES: u64 = 16 << 10;

/// What the file holds.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct Wanted {
    /// Seconds since 1970 after which what runs is cut.
    deadline: u64,
    /// For people.
    #[serde(default)]
    reason: String,
}

/// Follows the file until `stop`.
pub async fn follow(path: PathBuf, handle: Arc<AgentHandle>, stop: CancellationToken) {
    let mut before = String::new();
    loop {
        let file = path.clone();
        let Ok(text) = tokio::task::spawn_blocking(move || read(&file)).await else { return };
        match text {
            Ok(text) if text != before => {
                act(&path, &text, &handle);
                before = text;
            }
            Ok(_) => {}
            Err(error) => tracing::debug!(file = %path.display(), %error, "cannot be read"),
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(EVERY) => {}
        }
    }
}

/// The text without space around it; empty if there is no file.
fn read(path: &Path) -> std::io::Result<String> {
    match std::fs::metadata(path) {
        Ok(file) if file.len() > MAX_BYTES => Err(std::io::Error::other("longer than any drain")),
        Ok(_) => Ok(std::fs::read_to_string(path)?.trim().to_owned()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(error),
    }
}

fn act(path: &Path, text: &str, handle: &AgentHandle) {
    let file = path.display();
    if text.is_empty() {
        match handle.undrain() {
            Ok(_) => tracing::info!(%file, "the drain is taken back"),
            Err(late) => tracing::warn!(%file, %late, "the drain is not taken back"),
        }
        return;
    }
    match serde_json::from_str::<Wanted>(text) {
        Ok(Wanted { deadline, reason }) => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
            let seconds = deadline.saturating_sub(now);
            tracing::info!(%file, seconds, reason, "drain");
            handle.drain(Span::secs(seconds.min(MAX_SECONDS)));
        }
        Err(error) => {
            tracing::error!(%file, %error, "expected {{\"deadline\": UNIX_SECONDS, \"reason\": TEXT}}: ignored");
        }
    }
}

/// A deadline further away is none: a hundred years, so that no sum overflows.
const MAX_SECONDS: u64 = 100 * 366 * 86_400;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_and_an_empty_file_ask_for_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("drain");
        assert_eq!(read(&path).unwrap(), "");
        std::fs::write(&path, " \n").unwrap();
        assert_eq!(read(&path).unwrap(), "");
        std::fs::write(&path, "x".repeat(20_000)).unwrap();
        assert!(read(&path).is_err());
    }

    #[test]
    fn the_annotation_is_read_with_and_without_a_reason() {
        let wanted = |text| serde_json::from_str::<Wanted>(text);
        assert_eq!(wanted("{\"deadline\": 7}").unwrap(), Wanted { deadline: 7, reason: String::new() });
        let all = wanted("{\"deadline\": 7, \"reason\": \"maintenance\", \"later\": 1}").unwrap();
        assert_eq!(all.reason, "maintenance");
        assert!(wanted("soon").is_err());
    }
}
