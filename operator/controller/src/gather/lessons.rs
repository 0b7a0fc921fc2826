//! What executing learned and no watch says.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use deepinfer_planner::{Key, Namespaced, Refusal};

use super::now;

/// A Secret that was there before us may be one of a cluster of the same name that is being collected as garbage: its
/// creation is tried again after this long, and then after three times as long, as often as [`DOUBTS`].
const DOUBT: Duration = Duration::from_secs(5);
const DOUBTS: u32 = 4;
/// Pause between two doubts about the Secrets of pods that do not start.
pub(super) const DOUBT_AGAIN: Duration = Duration::from_secs(300);
/// Drifts of one object in a minute after which it is left alone.
const DRIFTS: usize = 3;
/// A namespace that refused a create because it is being deleted is taken for dying for so long.
const TERMINATING: Duration = Duration::from_secs(300);

/// What executing learned and no watch says: refused writes and dying namespaces.
#[derive(Debug, Default)]
pub struct Lessons {
    inner: Mutex<Learned>,
}

#[derive(Debug, Default)]
struct Learned {
    refusals: BTreeMap<Namespaced, BTreeMap<Key, (Refusal, Instant)>>,
    terminating: BTreeMap<String, Instant>,
    /// When the service account of a cluster was last read.
    accounts: BTreeMap<Namespaced, Instant>,
    /// Clusters whose Secret was there before us: since when, and how often.
    assumed: BTreeMap<Namespaced, (Instant, u32)>,
    /// When the Secrets of a cluster were last taken for lost.
    doubted: BTreeMap<Namespaced, Instant>,
    /// When fields of ours were set back, by cluster and object.
    drifts: BTreeMap<(Namespaced, Key), Vec<Instant>>,
}

impl Lessons {
    /// A write of a cluster's child was refused.
    pub fn refused(&self, cluster: &Namespaced, key: Key, reason: &str, message: String) {
        let refusal = Refusal { reason: reason.to_owned(), message, at: now() };
        self.lock().refusals.entry(cluster.clone()).or_default().insert(key, (refusal, Instant::now()));
    }

    /// A write of it was done.
    pub fn accepted(&self, cluster: &Namespaced, key: &Key) {
        let mut learned = self.lock();
        if let Some(refusals) = learned.refusals.get_mut(cluster) {
            refusals.remove(key);
            if refusals.is_empty() {
                learned.refusals.remove(cluster);
            }
        }
    }

    /// Whether a write is not worth trying yet: it was refused a short while ago.
    pub fn is_refused(&self, cluster: &Namespaced, key: &Key) -> bool {
        let learned = self.lock();
        let refused = learned.refusals.get(cluster).and_then(|refusals| refusals.get(key));
        refused.is_some_and(|(refusal, at)| at.elapsed() < patience(&refusal.reason))
    }

    /// A create said that the namespace is being deleted.
    pub fn terminates(&self, namespace: &str) {
        self.lock().terminating.insert(namespace.to_owned(), Instant::now());
    }

    /// The Secret of a cluster was there already.
    pub fn assumed_secret(&self, cluster: &Namespaced) {
        let mut learned = self.lock();
        let before = learned.assumed.get(cluster).map_or(0, |(_, times)| *times);
        learned.assumed.insert(cluster.clone(), (Instant::now(), before + 1));
    }

    /// Whether the creation of a Secret that was there already is to be tried again.
    pub(super) fn secret_in_doubt(&self, cluster: &Namespaced) -> bool {
        let learned = self.lock();
        learned.assumed.get(cluster).is_some_and(|(at, times)| {
            *times <= DOUBTS && at.elapsed() >= DOUBT * 3_u32.pow(times.saturating_sub(1))
        })
    }

    /// Whether the Secrets of a cluster whose pods do not start are to be created again: they may have been deleted,
    /// which nobody may see. Asked for the first time it says yes, and then every five minutes.
    pub(super) fn doubt_secret(&self, cluster: &Namespaced) -> bool {
        let mut learned = self.lock();
        let doubted = learned.doubted.get(cluster).is_some_and(|at| at.elapsed() < DOUBT_AGAIN);
        if !doubted {
            learned.doubted.insert(cluster.clone(), Instant::now());
        }
        !doubted
    }

    /// Fields of ours were set back. Whoever changes them again and again gets the object for five minutes: gives
    /// whether that is so now.
    pub fn drifted(&self, cluster: &Namespaced, key: &Key, by: &str) -> bool {
        let contested = {
            let mut learned = self.lock();
            let times = learned.drifts.entry((cluster.clone(), key.clone())).or_default();
            times.retain(|at| at.elapsed() < Duration::from_secs(60));
            times.push(Instant::now());
            let contested = times.len() >= DRIFTS;
            learned
                .drifts
                .retain(|_, times| times.last().is_some_and(|at| at.elapsed() < Duration::from_secs(60)));
            contested
        };
        if contested {
            let message = format!(
                "{by} changes fields that the operator owns again and again: left alone for 5 minutes"
            );
            self.refused(cluster, key.clone(), "Contested", message);
        }
        contested
    }

    /// The cluster object is gone, and with it what was learned of it.
    pub fn forget(&self, cluster: &Namespaced) {
        let mut learned = self.lock();
        learned.refusals.remove(cluster);
        learned.accounts.remove(cluster);
        learned.doubted.remove(cluster);
        learned.assumed.remove(cluster);
        learned.drifts.retain(|(of, _), _| of != cluster);
        let alive = learned.accounts.keys().any(|other| other.0 == cluster.0);
        if !alive {
            learned.terminating.remove(&cluster.0);
        }
    }

    pub(super) fn refusals(&self, cluster: &Namespaced) -> BTreeMap<Key, Refusal> {
        let learned = self.lock();
        let known = learned.refusals.get(cluster).into_iter().flatten();
        // Twice its patience after the last try nobody tries any more: the object is not wanted now.
        known
            .filter(|(_, (refusal, at))| at.elapsed() < patience(&refusal.reason) * 2)
            .map(|(key, (refusal, _))| (key.clone(), refusal.clone()))
            .collect()
    }

    pub(super) fn is_terminating(&self, namespace: &str) -> bool {
        self.lock().terminating.get(namespace).is_some_and(|at| at.elapsed() < TERMINATING)
    }

    /// Whether the account is to be read again; then it counts as read.
    pub(super) fn account_due(&self, cluster: &Namespaced, every: Duration) -> bool {
        let mut learned = self.lock();
        let due = learned.accounts.get(cluster).is_none_or(|at| at.elapsed() >= every);
        if due {
            learned.accounts.insert(cluster.clone(), Instant::now());
        }
        due
    }

    pub(super) fn account_missed(&self, cluster: &Namespaced) {
        self.lock().accounts.remove(cluster);
    }

    fn lock(&self) -> MutexGuard<'_, Learned> {
        self.inner.lock().expect("no holder of the lessons panics")
    }
}

/// How long a refused write is left alone. A quota is freed by others at any moment; rights and objects are changed
/// by people.
fn patience(reason: &str) -> Duration {
    Duration::from_secs(match reason {
        "QuotaExceeded" => 15,
        "NameCollision" => 30,
        "Denied" | "Contested" => 300,
        _ => 60,
    })
}

#[cfg(test)]
mod tests {
    use deepinfer_planner::Kind;

    use super::*;

    #[test]
    fn a_refused_write_is_left_alone_for_a_while_and_forgotten_when_it_is_done() {
        let lessons = Lessons::default();
        let cluster = ("ns".to_owned(), "c".to_owned());
        let key = Key::new(Kind::Pod, "a");
        lessons.refused(&cluster, key.clone(), "QuotaExceeded", "exceeded quota: small".to_owned());
        assert!(lessons.is_refused(&cluster, &key));
        assert_eq!(lessons.refusals(&cluster)[&key].reason, "QuotaExceeded");
        lessons.accepted(&cluster, &key);
        assert!(!lessons.is_refused(&cluster, &key) && lessons.refusals(&cluster).is_empty());
    }

    #[test]
    fn who_changes_an_object_again_and_again_gets_it_for_a_while() {
        let lessons = Lessons::default();
        let cluster = ("ns".to_owned(), "c".to_owned());
        let key = Key::new(Kind::Deployment, "c-gateway");
        assert!(!lessons.drifted(&cluster, &key, "kubectl-edit"));
        assert!(!lessons.drifted(&cluster, &key, "kubectl-edit"));
        assert!(!lessons.is_refused(&cluster, &key));
        assert!(lessons.drifted(&cluster, &key, "kubectl-edit"));
        assert!(lessons.is_refused(&cluster, &key));
        assert!(lessons.refusals(&cluster)[&key].message.contains("kubectl-edit"));
    }
}
