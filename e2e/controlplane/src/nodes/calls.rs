//! Calls to an API server that may be away: bounded, and tried again soon.

use std::time::Duration;

use kube::runtime::utils::Backoff;

/// How long an answer may take. A server that is stopped, not gone, would never answer.
const LIMIT: Duration = Duration::from_secs(10);

/// Bounds a call.
pub(crate) async fn within<T>(call: impl Future<Output = kube::Result<T>>) -> kube::Result<T> {
    match tokio::time::timeout(LIMIT, call).await {
        Ok(result) => result,
        Err(_) => Err(kube::Error::Service(format!("no answer within {} s", LIMIT.as_secs()).into())),
    }
}

/// The pause of a watch before it starts again: a test bed has few watches, so it can be short.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Soon;

impl Iterator for Soon {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        Some(Duration::from_secs(1))
    }
}

impl Backoff for Soon {
    fn reset(&mut self) {}
}
