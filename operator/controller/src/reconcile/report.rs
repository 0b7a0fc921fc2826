//! What is said about a look: log lines, the status that names a broken rule, and the classes of errors in metrics.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use deepinfer_crds::condition::{self, Truth};
use deepinfer_crds::names::label;
use deepinfer_planner::{Action, Finding, Namespaced, Object, World, time};
use serde_json::json;

use crate::error::Error;
use crate::metrics::ErrorClass;

/// The status that says that our own plan broke a rule; `None` if it says so already.
pub(super) fn accuse(world: &World, findings: &[Finding]) -> Option<Action> {
    let cluster = world.cluster()?;
    let mut status = cluster.status.clone().unwrap_or_default();
    let said: Vec<String> = findings.iter().map(ToString::to_string).collect();
    let message =
        format!("a plan of the operator breaks its own rules and is not carried out: {}", said.join("; "));
    let stalled = (condition::kind::STALLED, Truth::True);
    let generation = cluster.metadata.generation;
    let now = time(world.now);
    let news = condition::set(&mut status.conditions, stalled, ("PlanRefused", &message), generation, &now);
    let key = Object::from(cluster.clone()).key();
    news.then(|| Action::Status { key, status: json!(status) })
}

/// One line for each action that people look for; the rest at debug.
pub(super) fn log_details(key: &Namespaced, id: u64, actions: &[Action]) {
    for action in actions {
        match action {
            Action::Status { .. } => continue,
            Action::Create(object) | Action::Apply(object) => tracing::debug!(
                namespace = key.0, cluster = key.1, reconcile_id = id, action = %action,
                pool = object.label(label::POOL), supernode = object.label(label::SUPERNODE),
                revision = object.label(label::REVISION), "did"
            ),
            other => {
                tracing::debug!(namespace = key.0, cluster = key.1, reconcile_id = id, action = %other, "did");
            }
        }
    }
}

/// One line for each supernode that goes on to another phase.
pub(super) fn log_phases(world: &World, actions: &[Action], id: u64) {
    for action in actions {
        let Action::Status { key, status } = action else { continue };
        let Some(Object::Supernode(supernode)) = world.objects.get(key) else { continue };
        let phase =
            supernode.status.as_ref().map(|status| json!(status)["phase"].clone()).unwrap_or_default();
        let (from, to) = (phase.as_str().unwrap_or_default(), status["phase"].as_str().unwrap_or_default());
        if from != to {
            tracing::info!(
                namespace = world.namespace,
                cluster = supernode.spec.cluster_name,
                pool = supernode.spec.pool_name,
                supernode = key.name,
                revision = supernode.spec.revision,
                reconcile_id = id,
                from,
                to,
                "phase"
            );
        }
    }
}

/// `create 16, status 2`.
pub(super) struct Summary<'a>(pub &'a BTreeMap<&'static str, usize>);

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (word, count)) in self.0.iter().enumerate() {
            write!(f, "{}{word} {count}", if at > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}

pub(super) fn metric(error: &Error) -> ErrorClass {
    match error {
        Error::TimedOut { .. } => ErrorClass::Timeout,
        Error::Transport { .. } => ErrorClass::Transport,
        Error::Shape { .. } | Error::NotLeader => ErrorClass::Internal,
        Error::Collision { .. } | Error::Unreadable { .. } => ErrorClass::Invalid,
        Error::Gone { .. } => ErrorClass::Conflict,
        Error::Answered { answer, .. } => match answer.code {
            409 => ErrorClass::Conflict,
            429 => ErrorClass::Throttled,
            403 if answer.message.contains("exceeded quota") => ErrorClass::Quota,
            401 | 403 => ErrorClass::Denied,
            400..500 => ErrorClass::Invalid,
            _ => ErrorClass::Server,
        },
    }
}

pub(super) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_reads_like_a_list() {
        let done = BTreeMap::from([("create", 16), ("status", 2)]);
        assert_eq!(Summary(&done).to_string(), "create 16, status 2");
    }
}
