//! Statuses: server-side apply on the subresource, and not more often than anybody can read them.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use deepinfer_crds::names::manager;
use deepinfer_planner::{Key, Kind};
use serde_json::{Value, json};

use super::{Done, Executor, On};
use crate::error::Error;
use crate::rest::{Resource, Verb};

/// Least time between two writes of one status.
const PAUSE: Duration = Duration::from_secs(1);

/// When each status was written last.
#[derive(Debug, Default)]
pub struct Limiter {
    last: Mutex<BTreeMap<(String, Key), Instant>>,
}

impl Limiter {
    /// Whether a status may be written now; then it counts as written.
    fn admit(&self, namespace: &str, key: &Key) -> bool {
        let mut last = self.last.lock().expect("no holder of the limiter panics");
        let now = Instant::now();
        if last.len() > 1_000 {
            last.retain(|_, at| now.duration_since(*at) < PAUSE);
        }
        let at = last.entry((namespace.to_owned(), key.clone()));
        match at {
            std::collections::btree_map::Entry::Occupied(at) if now.duration_since(*at.get()) < PAUSE => {
                false
            }
            at => {
                at.insert_entry(now);
                true
            }
        }
    }
}

impl Executor {
    /// Writes a status. What people read is held back for up to a second; what the next plan reads (the phase and the
    /// place of a supernode) is not.
    pub(super) async fn write_status(&self, on: &On<'_>, key: &Key, status: &Value) -> Result<Done, Error> {
        let live = self.live(on, key).ok_or_else(|| Error::Gone { key: key.clone() })?;
        let decisive = matches!(key.kind, Kind::Supernode | Kind::Placement)
            && decisive(&live.to_value()["status"], status);
        if !self.limiter.admit(on.namespace(), key) && !decisive {
            return Ok(Done::HeldBack);
        }
        let resource = Resource::of_object(&live);
        let mut status = status.clone();
        super::prune(&mut status);
        let body = json!({
            "apiVersion": resource.api_version(),
            "kind": resource.kind,
            "metadata": {"name": key.name, "namespace": on.namespace(), "uid": live.meta().uid},
            "status": status,
        });
        self.patch(on, &resource, key, Verb::Status, "/status", manager::STATUS, body).await
    }
}

/// Whether a status says something that the next plan reads: phase, place, and whether there were pods.
fn decisive(before: &Value, after: &Value) -> bool {
    let nodes = |status: &Value| status["nodes"].as_array().map_or(0, Vec::len);
    let same = ["/phase", "/placement/domain"].iter().all(|path| before.pointer(path) == after.pointer(path));
    !same || nodes(before) != nodes(after)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_phase_a_place_and_the_first_pods_are_never_held_back() {
        let status = json!({"phase": "Placing", "placement": {"domain": "a"}, "nodes": [{"pod": "x"}]});
        let mut other = status.clone();
        other["nodes"][0]["pod"] = json!("y");
        assert!(!decisive(&status, &other));
        other["phase"] = json!("Serving");
        assert!(decisive(&status, &other));
        assert!(decisive(&json!({"phase": "Placing", "placement": {"domain": "a"}}), &status));
    }

    #[test]
    fn a_status_is_written_at_most_once_a_second() {
        let limiter = Limiter::default();
        let key = Key::new(Kind::Cluster, "c");
        assert!(limiter.admit("ns", &key));
        assert!(!limiter.admit("ns", &key));
        assert!(limiter.admit("other", &key));
        let earlier = Instant::now().checked_sub(PAUSE).expect("the machine runs for a second");
        limiter.last.lock().expect("unpoisoned").insert(("ns".into(), key.clone()), earlier);
        assert!(limiter.admit("ns", &key));
    }
}
