//! What a running cluster keeps on the disk. A disk that is full stops nothing: it is said, and tried again.
//!
//! Invariant: what was written last is what is found after a crash; a failure is logged once, not every time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use deepinfer_planner::Blueprint;
use serde_json::Value;

use super::state::{BLUEPRINT, STATUS, StateDir};

/// A write that failed is tried again after this.
const RETRY: Duration = Duration::from_secs(2);
/// A status is written at most this often: nobody reads it while the cluster runs.
const STATUS_EVERY: Duration = Duration::from_secs(1);

/// Files of one cluster.
pub struct Storage {
    state: Arc<StateDir>,
    blueprint: Option<Blueprint>,
    status: Option<Value>,
    status_at: Option<Instant>,
    problem: Option<String>,
    tried: Option<Instant>,
}

impl Storage {
    /// Of a folder; `blueprint` is what is there.
    pub fn new(state: Arc<StateDir>, blueprint: Option<Blueprint>) -> Self {
        Self { state, blueprint, status: None, status_at: None, problem: None, tried: None }
    }

    /// The folder.
    pub fn state(&self) -> &StateDir {
        &self.state
    }

    /// Why the last write failed.
    pub fn problem(&self) -> Option<&str> {
        self.problem.as_deref()
    }

    /// Writes the planner's memory if it has changed, before its actions are executed.
    pub async fn commit(&mut self, blueprint: &Blueprint) {
        if self.blueprint.as_ref() == Some(blueprint) || !self.may_try() {
            return;
        }
        let Ok(bytes) = serde_json::to_vec_pretty(blueprint) else { return };
        if self.write(BLUEPRINT, bytes).await {
            self.blueprint = Some(blueprint.clone());
        }
    }

    /// Writes the status if it has changed; `last` writes it whatever the time.
    pub async fn status(&mut self, status: Value, last: bool) {
        let early = self.status_at.is_some_and(|at| at.elapsed() < STATUS_EVERY);
        if self.status.as_ref() == Some(&status) || (early && !last) || !self.may_try() {
            return;
        }
        if self.write(STATUS, status.to_string().into_bytes()).await {
            self.status = Some(status);
            self.status_at = Some(Instant::now());
        }
    }

    fn may_try(&self) -> bool {
        self.problem.is_none() || self.tried.is_none_or(|at| at.elapsed() >= RETRY)
    }

    async fn write(&mut self, name: &'static str, bytes: Vec<u8>) -> bool {
        let state = Arc::clone(&self.state);
        let written = tokio::task::spawn_blocking(move || state.write(name, &bytes)).await;
        let error = match written {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(error) => Some(error.to_string()),
        };
        self.tried = Some(Instant::now());
        let folder = self.state.folder().display();
        let problem = error.map(|error| format!("{folder}/{name} cannot be written: {error}"));
        match (&problem, &self.problem) {
            (Some(problem), known) if known.as_ref() != Some(problem) => {
                tracing::warn!(%problem, "serving goes on; the state is written again as soon as it can be");
            }
            (None, Some(_)) => tracing::info!(state = %folder, "the state is written again"),
            _ => {}
        }
        self.problem = problem;
        self.problem.is_none()
    }
}
