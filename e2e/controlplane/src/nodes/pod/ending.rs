//! How containers end: exit codes, last words, hooks, and the back-off before the next start.

use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::ExitStatus;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Container, ContainerStateTerminated, LifecycleHandler};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;

use super::super::log;
use super::probe::Prober;

/// How much of a log a termination message takes.
const MESSAGE_BYTES: usize = 2048;

/// How much of the file that a container writes for it.
const MESSAGE_FILE_BYTES: usize = 4096;

/// The exit code as Kubernetes says it: 128 and the signal, if a signal ended the process.
pub(crate) fn exit_code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// The end of a container whose process could not be started.
pub(crate) fn not_started(message: String) -> ContainerStateTerminated {
    ContainerStateTerminated {
        exit_code: 128,
        reason: Some("StartError".to_owned()),
        message: Some(message),
        finished_at: Some(Time(Timestamp::now())),
        ..ContainerStateTerminated::default()
    }
}

/// The termination message: what the container wrote into the file for it, or the end of its log if it wants that.
pub(crate) fn last_words(container: &Container, code: i32, file: &Path, log: &Path) -> Option<String> {
    let written = std::fs::read(file).unwrap_or_default();
    if !written.is_empty() {
        let kept = &written[..written.len().min(MESSAGE_FILE_BYTES)];
        return Some(String::from_utf8_lossy(kept).into_owned());
    }
    let fallback = container.termination_message_policy.as_deref() == Some("FallbackToLogsOnError");
    Some(log::tail(log, MESSAGE_BYTES)).filter(|text| fallback && code != 0 && !text.is_empty())
}

/// Runs a hook before a container ends. A failed hook is told and changes nothing.
pub(crate) async fn hook(hook: &LifecycleHandler, prober: &Prober<'_>) {
    let result = if let Some(action) = &hook.exec {
        prober.exec(action).await
    } else if let Some(action) = &hook.http_get {
        prober.http(action).await
    } else if let Some(action) = &hook.sleep {
        tokio::time::sleep(Duration::from_secs(u64::try_from(action.seconds).unwrap_or(0))).await;
        Ok(())
    } else {
        Err("process nodes know exec, httpGet and sleep hooks only".to_owned())
    };
    if let Err(error) = result {
        prober.context.warn("FailedPreStopHook", &format!("PreStopHook failed: {error}"));
    }
}

/// The waits between the starts of a container: the first restart is at once.
#[derive(Debug)]
pub(crate) struct Backoff {
    next: Duration,
    base: Duration,
    longest: Duration,
}

impl Backoff {
    pub(crate) fn new(base: Duration, longest: Duration) -> Self {
        Backoff { next: Duration::ZERO, base, longest }
    }

    /// How long to wait after a run that took this long. A long run is forgiven what was before it.
    pub(crate) fn after(&mut self, ran: Duration) -> Duration {
        if ran > 2 * self.longest {
            self.next = Duration::ZERO;
        }
        let delay = self.next;
        self.next = if delay.is_zero() { self.base } else { (delay * 2).min(self.longest) };
        delay
    }
}

/// A duration as kubelet messages have it: `1s`, `1m20s`, `500ms`.
pub(crate) fn spoken(delay: Duration) -> String {
    let seconds = delay.as_secs();
    match (seconds / 60, seconds % 60) {
        (0, 0) => format!("{}ms", delay.as_millis()),
        (0, seconds) => format!("{seconds}s"),
        (minutes, seconds) => format!("{minutes}m{seconds}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_restart_is_at_once_and_then_waits_double() {
        let seconds = Duration::from_secs;
        let mut backoff = Backoff::new(seconds(1), seconds(4));
        let waits: Vec<_> = [1, 1, 1, 1, 1, 9, 1].map(|ran| backoff.after(seconds(ran)).as_secs()).to_vec();
        assert_eq!(waits, [0, 1, 2, 4, 4, 0, 1]);
        assert_eq!((spoken(seconds(80)), spoken(Duration::from_millis(50))), ("1m20s".into(), "50ms".into()));
    }

    #[test]
    fn the_last_words_are_the_file_or_on_errors_the_log() {
        let temp = tempfile::tempdir().unwrap();
        let (file, log) = (temp.path().join("message"), temp.path().join("0.log"));
        std::fs::write(&file, "").unwrap();
        std::fs::write(&log, "2026-01-01T00:00:00Z cannot open x\n").unwrap();
        let mut container = Container::default();
        assert_eq!(last_words(&container, 1, &file, &log), None);
        container.termination_message_policy = Some("FallbackToLogsOnError".to_owned());
        assert_eq!(last_words(&container, 1, &file, &log).as_deref(), Some("cannot open x\n"));
        assert_eq!(last_words(&container, 0, &file, &log), None);
        std::fs::write(&file, "said").unwrap();
        assert_eq!(last_words(&container, 0, &file, &log).as_deref(), Some("said"));
    }
}
