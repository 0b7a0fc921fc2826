//! Logs of containers: one line of the process is one line of the file, with the time it came in front.

use std::fs;
use std::io;
use std::path::Path;

use k8s_openapi::jiff::Timestamp;
use tokio::fs::OpenOptions;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::unix::pipe;

/// A line longer than this is cut in two.
const LONGEST_LINE: usize = 256 << 10;

/// Copies what a process prints into a file, until every copy of its output is closed.
pub(crate) async fn pump(mut reader: pipe::Receiver, path: std::path::PathBuf) {
    if let Err(error) = copy(&mut reader, &path).await {
        tracing::warn!(%error, path = %path.display(), "a log cannot be written");
        // The process must not stop at a full pipe.
        tokio::io::copy(&mut reader, &mut tokio::io::sink()).await.ok();
    }
}

async fn copy(reader: &mut pipe::Receiver, path: &Path) -> io::Result<()> {
    let mut file = OpenOptions::new().create(true).append(true).open(path).await?;
    let mut pending = Vec::new();
    loop {
        let read = reader.read_buf(&mut pending).await?;
        let whole = match pending.iter().rposition(|byte| *byte == b'\n') {
            Some(at) => at + 1,
            None if read == 0 || pending.len() > LONGEST_LINE => pending.len(),
            None => continue,
        };
        let mut stamped = Vec::with_capacity(whole + 64);
        for line in pending[..whole].split_inclusive(|byte| *byte == b'\n') {
            stamped.extend_from_slice(stamp().as_bytes());
            stamped.extend_from_slice(line);
            if !line.ends_with(b"\n") {
                stamped.push(b'\n');
            }
        }
        pending.drain(..whole);
        file.write_all(&stamped).await?;
        file.flush().await?;
        if read == 0 && pending.is_empty() {
            return Ok(());
        }
    }
}

/// The time now with nine digits, so that all stamps are equally long.
fn stamp() -> String {
    format!("{:.9} ", Timestamp::now())
}

/// A line of a log file: its time and its text.
pub(crate) fn split(line: &[u8]) -> (&[u8], &[u8]) {
    match line.iter().position(|byte| *byte == b' ') {
        Some(at) => (&line[..at], &line[at + 1..]),
        None => (&[], line),
    }
}

/// The text of a whole log, without times. A log that does not exist is empty.
pub(crate) fn text(path: &Path) -> String {
    let bytes = fs::read(path).unwrap_or_default();
    let text: Vec<u8> =
        bytes.split_inclusive(|b| *b == b'\n').flat_map(|line| split(line).1).copied().collect();
    String::from_utf8_lossy(&text).into_owned()
}

/// The end of a log: at most this many bytes.
pub(crate) fn tail(path: &Path, bytes: usize) -> String {
    let text = text(path);
    let mut from = text.len().saturating_sub(bytes);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    text[from..].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::os::fd::OwnedFd;

    #[tokio::test]
    async fn each_line_gets_its_time_and_loses_it_again() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("0.log");
        let (reader, mut writer) = io::pipe().unwrap();
        writer.write_all(b"one\n\ntwo words\nno end").unwrap();
        drop(writer);
        pump(pipe::Receiver::from_owned_fd(OwnedFd::from(reader)).unwrap(), path.clone()).await;
        assert_eq!(text(&path), "one\n\ntwo words\nno end\n");
        assert_eq!(tail(&path, 7), "no end\n");
        let raw = fs::read_to_string(&path).unwrap();
        for line in raw.lines() {
            let (time, _) = split(line.as_bytes());
            std::str::from_utf8(time).unwrap().parse::<Timestamp>().unwrap();
            assert_eq!(time.len(), 30, "{line}");
        }
        assert_eq!(text(&temp.path().join("none")), "");
    }
}
