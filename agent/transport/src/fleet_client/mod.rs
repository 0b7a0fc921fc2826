//! Follows the FleetView that the operator serves, and keeps the last one for when nobody serves it.
//!
//! ```text
//!  ledger file --at start--+
//!                          +--> current view (watch channel) --> agents, gateways
//!  operator --long-poll----+            |
//!    several addresses, in turn         +--> ledger file (temporary file, then rename)
//! ```
//!
//! Invariants: the generation that is given out never goes down; a view of another cluster is never given out; while
//! nobody answers, the last view stays, without any limit of time.

mod ledger;
mod probe;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use deepinfer_protocol::Generation;
use deepinfer_protocol::fleet::FleetView;
use http::{StatusCode, Uri};
use thiserror::Error;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::ledger::Ledger;
pub use self::probe::{FleetHealth, FleetProbe};
use crate::call::{self, CallError, CallLimits};
use crate::jittered;
use crate::key::ClusterKey;

/// Longest view, as JSON: some ten thousand agents.
pub const MAX_VIEW_BYTES: usize = 16 << 20;
/// How long the operator is asked to hold an answer back while nothing changes.
const WAIT: Duration = Duration::from_secs(25);
/// Beyond that, for a slow way back.
const GRACE: Duration = Duration::from_secs(5);
/// First and longest pause after a failure; doubles with each round over all addresses.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));
/// An answer without news that came sooner than this was not held back: the next question waits.
const TOO_SOON: Duration = Duration::from_millis(50);
/// Silence that is worth a line in the log.
const AWAY: Duration = Duration::from_secs(30);

/// What a client is started with.
#[derive(Clone, Debug)]
pub struct FleetClientOptions {
    /// Base URLs of the operator's replicas, such as `http://10.0.0.3:8082`.
    pub urls: Vec<String>,
    /// `/v1/fleet/<namespace>/<cluster>`.
    pub path: String,
    /// The cluster's keys.
    pub key: ClusterKey,
    /// Where the last view is kept; nowhere without it.
    pub ledger: Option<PathBuf>,
}

/// What cannot be followed.
#[derive(Debug, Error)]
pub enum FleetClientError {
    /// Nobody to ask.
    #[error(
        "--fleet-url: name at least one base URL, for example http://deepinfer-operator.deepinfer-system:8082"
    )]
    NoUrl,
    /// Not a base URL.
    #[error("--fleet-url {0:?}: expected http://HOST:PORT without a path")]
    Url(String),
    /// Not a path of a cluster.
    #[error("--fleet-path {0:?}: expected /v1/fleet/NAMESPACE/CLUSTER")]
    Path(String),
}

/// Why a try brought no view.
#[derive(Debug, Error)]
enum AskError {
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("{0} {1}")]
    Status(StatusCode, &'static str),
    #[error("not a fleet view: {0}")]
    Body(#[from] serde_json::Error),
    #[error("a view of cluster {0:?}, this one is {1:?}")]
    Cluster(String, String),
    #[error("generation {0}, lower than {1} that is followed")]
    Older(Generation, Generation),
}

/// Starts to follow; ends with `stop`. The channel holds the view of the ledger at once, or an empty one of generation 0.
///
/// # Errors
/// [`FleetClientError`], before anything was started.
///
/// # Panics
/// Outside a tokio runtime.
pub fn start(
    options: FleetClientOptions,
    stop: CancellationToken,
) -> Result<(watch::Receiver<Arc<FleetView>>, FleetProbe), FleetClientError> {
    let hosts = options.urls.iter().map(|url| authority(url)).collect::<Result<Vec<_>, _>>()?;
    if hosts.is_empty() {
        return Err(FleetClientError::NoUrl);
    }
    let cluster = cluster_of(&options.path)?;
    let ledger = options.ledger.map(|path| Ledger::new(path, cluster.clone()));
    let kept = ledger.as_ref().and_then(Ledger::read).unwrap_or_default();
    let probe = FleetProbe::new(kept.generation);
    let (view, receiver) = watch::channel(Arc::new(kept));
    let follower = Follower {
        hosts,
        path: options.path,
        cluster,
        key: options.key,
        ledger,
        view,
        probe: probe.clone(),
        said: String::new(),
        away: false,
    };
    tokio::spawn(async move {
        tokio::select! {
            () = stop.cancelled() => {}
            () = follower.run() => {}
        }
    });
    Ok((receiver, probe))
}

/// Host and port of a base URL.
fn authority(url: &str) -> Result<String, FleetClientError> {
    let wrong = || FleetClientError::Url(url.to_owned());
    let uri: Uri = url.trim().parse().map_err(|_| wrong())?;
    let authority = uri.authority().filter(|a| a.port_u16().is_some()).ok_or_else(wrong)?;
    if uri.scheme_str() != Some("http") || !matches!(uri.path(), "" | "/") || uri.query().is_some() {
        return Err(wrong());
    }
    Ok(authority.as_str().to_owned())
}

/// The last part of the path.
fn cluster_of(path: &str) -> Result<String, FleetClientError> {
    let parts: Vec<&str> = path.split('/').collect();
    match parts[..] {
        ["", "v1", "fleet", namespace, cluster] if !namespace.is_empty() && !cluster.is_empty() => {
            Ok(cluster.to_owned())
        }
        _ => Err(FleetClientError::Path(path.to_owned())),
    }
}

struct Follower {
    hosts: Vec<String>,
    path: String,
    cluster: String,
    key: ClusterKey,
    ledger: Option<Ledger>,
    view: watch::Sender<Arc<FleetView>>,
    probe: FleetProbe,
    /// The last reason that was logged.
    said: String,
    away: bool,
}

impl Follower {
    async fn run(mut self) {
        let mut at = 0;
        let mut pause = BACK_OFF.0;
        loop {
            let begun = Instant::now();
            match self.ask(&self.hosts[at]).await {
                Ok(news) => {
                    self.heard();
                    pause = BACK_OFF.0;
                    if let Some(view) = news {
                        self.follow(view).await;
                    } else if begun.elapsed() < TOO_SOON {
                        tokio::time::sleep(TOO_SOON).await;
                    }
                }
                Err(error) => {
                    self.failed(at, &error);
                    at = (at + 1) % self.hosts.len();
                    // Another replica may know: it is asked soon. Only a round without an answer waits longer.
                    tokio::time::sleep(jittered(pause)).await;
                    if at == 0 {
                        pause = (pause * 2).min(BACK_OFF.1);
                    }
                }
            }
        }
    }

    /// A newer view, or `None` if there is none yet.
    async fn ask(&self, host: &str) -> Result<Option<FleetView>, AskError> {
        let after = self.view.borrow().generation;
        // Who has nothing yet wants an answer at once, also that there is none.
        let wait = if after.0 == 0 { Duration::from_secs(1) } else { WAIT };
        let query = format!("after={after}&waitSeconds={}", wait.as_secs());
        let limits = CallLimits { time: wait + GRACE, bytes: MAX_VIEW_BYTES };
        let answer = call::get(host, &self.path, &query, &self.key, limits).await?;
        match answer.status {
            StatusCode::NO_CONTENT => return Ok(None),
            StatusCode::OK => {}
            other => return Err(AskError::Status(other, meaning(other))),
        }
        let view: FleetView = serde_json::from_slice(&answer.body)?;
        if view.cluster != self.cluster {
            return Err(AskError::Cluster(view.cluster, self.cluster.clone()));
        }
        if view.generation < after {
            return Err(AskError::Older(view.generation, after));
        }
        Ok((view.generation > after).then_some(view))
    }

    async fn follow(&mut self, view: FleetView) {
        let view = Arc::new(view);
        tracing::info!(
            generation = view.generation.0,
            members = view.members.len(),
            serving = view.members.iter().filter(|member| member.serving).count(),
            "a newer fleet view"
        );
        self.probe.followed(view.generation);
        self.view.send_replace(view.clone());
        if let Some(ledger) = self.ledger.take() {
            let (ledger, written) = ledger.write(view).await;
            self.ledger = ledger;
            self.probe.ledger_written(written);
        }
    }

    fn heard(&mut self) {
        self.probe.heard();
        self.said.clear();
        if std::mem::take(&mut self.away) {
            tracing::info!("the operator answers again");
        }
    }

    fn failed(&mut self, at: usize, error: &AskError) {
        self.probe.failed(matches!(error, AskError::Older(..) | AskError::Cluster(..)));
        let text = error.to_string();
        if text != self.said {
            // One line for each new reason, not one for each try.
            tracing::warn!(operator = self.hosts[at], error = text, "no fleet view, trying again");
            self.said = text;
        }
        let age = self.probe.health().age;
        if age >= AWAY && !self.away {
            self.away = true;
            let generation = self.view.borrow().generation.0;
            tracing::warn!(
                seconds = age.as_secs(),
                generation,
                "the operator is away: serving goes on with the last fleet view"
            );
        }
    }
}

/// What a status of the operator says, for people.
fn meaning(status: StatusCode) -> &'static str {
    match status.as_u16() {
        401 => "(the operator does not accept this cluster's key: compare --key-dir with the Secret)",
        404 => "(the operator does not know this cluster: compare --fleet-path)",
        503 => "(the operator has not read its objects yet)",
        _ => "(expected 200 or 204)",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base_urls_and_paths_are_checked_before_anything_starts() {
        assert_eq!(authority("http://10.0.0.1:8082").unwrap(), "10.0.0.1:8082");
        assert_eq!(authority(" http://[::1]:8082/ ").unwrap(), "[::1]:8082");
        for wrong in ["", "10.0.0.1:8082", "https://a:1", "http://a", "http://a:1/v1", "http://a:1?x"] {
            let error = authority(wrong).unwrap_err().to_string();
            assert!(error.contains("--fleet-url"), "{error}");
        }
        assert_eq!(cluster_of("/v1/fleet/ns/c").unwrap(), "c");
        for wrong in ["", "/v1/fleet/ns", "/v1/fleet/ns/", "/v2/fleet/ns/c", "/v1/fleet/ns/c/d"] {
            assert!(cluster_of(wrong).unwrap_err().to_string().contains("--fleet-path"), "{wrong}");
        }
    }
}
