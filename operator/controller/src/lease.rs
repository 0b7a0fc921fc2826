//! One leader at a time: a Lease of the API server, and a permit that every write asks.
//!
//! The holder renews every `retry`; it may write until `renew_deadline` after the last renewal that was **sent** (not
//! answered), which is before anybody else may take over (`duration` after the last renewal that they **saw**). A
//! thread of its own, which needs neither the async runtime nor the network, ends the process when the permit has run
//! out: a leader that was stopped for a minute writes nothing when it goes on.
//! What two leaders would still do for one write that was on its way is fenced by resource versions and UIDs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use deepinfer_crds::names::manager;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::error::Error;
use crate::rest::{Call, Resource, Rest, Verb};

/// Times and names of the election.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Election {
    /// Namespace of the Lease.
    pub namespace: String,
    /// Name of the Lease.
    pub name: String,
    /// Who we are.
    pub identity: String,
    /// A holder that was not seen to renew for this long has lost.
    pub duration: Duration,
    /// A holder that could not renew for this long stops writing.
    pub renew_deadline: Duration,
    /// Pause between two tries.
    pub retry: Duration,
}

/// Whether this process may write, until when: read by every write, without a lock.
#[derive(Debug)]
pub struct Permit {
    origin: Instant,
    until_ms: AtomicU64,
    held: AtomicBool,
}

impl Default for Permit {
    fn default() -> Self {
        Self { origin: Instant::now(), until_ms: AtomicU64::new(0), held: AtomicBool::new(false) }
    }
}

impl Permit {
    /// A permit that never ends, for programs that are alone.
    pub fn unlimited() -> Self {
        Self { until_ms: AtomicU64::new(u64::MAX), held: AtomicBool::new(true), ..Self::default() }
    }

    /// The next write may go out.
    pub fn may_write(&self) -> bool {
        self.now() < self.until_ms.load(Ordering::Acquire)
    }

    /// This process got the lease and has not let it go.
    pub fn is_held(&self) -> bool {
        self.held.load(Ordering::Acquire)
    }

    fn extend(&self, sent: Instant, by: Duration) {
        let until = sent.saturating_duration_since(self.origin) + by;
        self.until_ms.store(u64::try_from(until.as_millis()).unwrap_or(u64::MAX), Ordering::Release);
        self.held.store(true, Ordering::Release);
    }

    /// Nothing may be written from now on; not a loss.
    fn give_up(&self) {
        self.held.store(false, Ordering::Release);
        self.until_ms.store(0, Ordering::Release);
    }

    /// Held once, and run out.
    fn is_lost(&self) -> bool {
        self.is_held() && !self.may_write()
    }

    fn now(&self) -> u64 {
        u64::try_from(self.origin.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Starts the thread that calls `lost` as soon as the permit has run out.
    ///
    /// # Errors
    /// If the system gives no thread.
    pub fn guard(
        self: &Arc<Self>,
        lost: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<std::thread::JoinHandle<()>> {
        const LOOK: Duration = Duration::from_millis(50);
        let permit = Arc::downgrade(self);
        std::thread::Builder::new().name("lease-guard".to_owned()).spawn(move || {
            while let Some(permit) = permit.upgrade() {
                if permit.is_lost() {
                    return lost();
                }
                drop(permit);
                std::thread::sleep(LOOK);
            }
        })
    }
}

/// A Lease as it was read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Record {
    holder: String,
    /// Whatever a renewal changes.
    renewed: String,
    duration: Duration,
    transitions: i32,
    version: String,
}

impl Record {
    fn of(lease: &Lease) -> Self {
        let spec = lease.spec.clone().unwrap_or_default();
        Self {
            holder: spec.holder_identity.unwrap_or_default(),
            renewed: spec.renew_time.map(|time| time.0.to_string()).unwrap_or_default(),
            duration: Duration::from_secs(
                spec.lease_duration_seconds.and_then(|s| u64::try_from(s).ok()).unwrap_or(0),
            ),
            transitions: spec.lease_transitions.unwrap_or(0),
            version: lease.metadata.resource_version.clone().unwrap_or_default(),
        }
    }
}

/// What to do about a Lease.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Move {
    /// There is none: make it.
    Create,
    /// Ours, or free, or its holder is silent: write it over this version.
    Write { version: String, transitions: i32 },
    /// Somebody else leads.
    Wait,
}

/// A Lease over time, as one replica sees it: by its own clock, never by the times written in it.
#[derive(Debug, Default)]
struct Observer {
    last: Option<(Record, Duration)>,
}

impl Observer {
    /// What to do now; `now` from any origin.
    fn decide(&mut self, me: &str, seen: Option<Record>, now: Duration) -> Move {
        let Some(record) = seen else {
            self.last = None;
            return Move::Create;
        };
        let since = match &self.last {
            Some((before, since)) if before.holder == record.holder && before.renewed == record.renewed => {
                *since
            }
            _ => now,
        };
        let silent = now.saturating_sub(since);
        self.last = Some((record.clone(), since));
        let mine = record.holder == me;
        if mine || record.holder.is_empty() || silent >= record.duration {
            let transitions = record.transitions + i32::from(!mine);
            return Move::Write { version: record.version, transitions };
        }
        Move::Wait
    }
}

/// The lease as we wrote it last; without version: to be made.
#[derive(Clone, Debug, Default)]
struct Held {
    version: Option<String>,
    transitions: i32,
    acquired: Option<MicroTime>,
}

/// The election as a task.
pub struct Elector {
    election: Election,
    rest: Rest,
    permit: Arc<Permit>,
    observer: Observer,
    held: Option<Held>,
    origin: Instant,
}

impl Elector {
    /// Takes part in an election; `rest` is not guarded by the permit.
    pub fn new(election: Election, rest: Rest, permit: Arc<Permit>) -> Self {
        Self { election, rest, permit, observer: Observer::default(), held: None, origin: Instant::now() }
    }

    /// Takes part until `stop`. Calls `elected` once, when the lease is ours; gives whether it was lost afterwards.
    /// At the end the lease is let go, so that the next leader need not wait.
    pub async fn run(mut self, stop: CancellationToken, mut elected: impl FnMut()) -> bool {
        let mut leads = false;
        loop {
            let mine = match self.round().await {
                Ok(mine) => mine,
                Err(error) => {
                    tracing::warn!(err = %error, err_class = error.class().as_str(), leads, "lease");
                    leads
                }
            };
            if leads && (!mine || !self.permit.may_write()) {
                return true;
            }
            if mine && !leads {
                leads = true;
                tracing::info!(lease = self.election.name, identity = self.election.identity, "leading");
                elected();
            }
            tokio::select! {
                () = stop.cancelled() => break,
                () = tokio::time::sleep(self.election.retry) => {}
            }
        }
        if leads {
            self.release().await;
        }
        false
    }

    /// One look and, if it is ours to write, one write. Gives whether we hold the lease.
    async fn round(&mut self) -> Result<bool, Error> {
        if let Some(held) = self.held.take() {
            // The version that we wrote ourselves is still there unless somebody took over: no need to look first.
            match self.renew(&held).await {
                Err(error) if matches!(error.status(), Some(404 | 409)) => {}
                Err(error) => {
                    self.held = Some(held);
                    return Err(error);
                }
                done => return done,
            }
        }
        let seen = self.read().await?;
        let me = self.election.identity.clone();
        let known = seen.as_ref().map(Record::of);
        let moved = match self.observer.decide(&me, known, self.origin.elapsed()) {
            Move::Wait => return Ok(false),
            Move::Create => self.renew(&Held::default()).await,
            Move::Write { version, transitions } => {
                let before = seen.and_then(|lease| lease.spec);
                let mine = before.as_ref().and_then(|s| s.holder_identity.as_deref()) == Some(me.as_str());
                let acquired = before.filter(|_| mine).and_then(|spec| spec.acquire_time);
                self.renew(&Held { version: Some(version), transitions, acquired }).await
            }
        };
        match moved {
            // The race was lost: the next round sees to whom.
            Err(error) if error.status() == Some(409) => Ok(self.permit.is_held() && self.permit.may_write()),
            other => other,
        }
    }

    /// Writes the lease over a version of it; the permit grows from the moment at which the write was sent.
    async fn renew(&mut self, held: &Held) -> Result<bool, Error> {
        let sent = Instant::now();
        let body = self.body(held);
        let verb = if held.version.is_some() { Verb::Update } else { Verb::Create };
        let value = self.write(verb, body).await?;
        self.permit.extend(sent, self.election.renew_deadline);
        let acquired = serde_json::from_value(value["spec"]["acquireTime"].clone()).ok();
        let version = value["metadata"]["resourceVersion"].as_str().map(str::to_owned);
        self.held =
            version.map(|version| Held { version: Some(version), transitions: held.transitions, acquired });
        Ok(true)
    }

    async fn read(&self) -> Result<Option<Lease>, Error> {
        let uri = self.uri(true);
        let what = format!("Lease/{}", self.election.name);
        let request = http::Request::get(uri).body(Vec::new()).map_err(|error| Error::Shape {
            verb: "get",
            what: what.clone(),
            message: error.to_string(),
        })?;
        match self.bounded(self.rest.read(Verb::Get, &what, request)).await {
            Ok(lease) => Ok(Some(lease)),
            Err(error) if error.is_missing() => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn write(&self, verb: Verb, body: Value) -> Result<Value, Error> {
        let call = Call {
            verb,
            kind: None,
            what: format!("Lease/{}", self.election.name),
            uri: format!("{}?fieldManager={}", self.uri(verb != Verb::Create), manager::MAIN),
            content: "application/json",
            body,
        };
        self.bounded(self.rest.call(call)).await
    }

    /// A call of the election must end while there is time for another one.
    async fn bounded<T>(&self, call: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        let limit = (self.election.renew_deadline * 2 / 5).min(self.rest.deadline());
        tokio::time::timeout(limit, call).await.unwrap_or_else(|_| {
            let what = format!("Lease/{}", self.election.name);
            Err(Error::TimedOut { verb: "renew", what, seconds: limit.as_secs().max(1) })
        })
    }

    fn uri(&self, named: bool) -> String {
        let path = Resource::leases().path(Some(&self.election.namespace));
        if named { format!("{path}/{}", self.election.name) } else { path }
    }

    fn body(&self, held: &Held) -> Value {
        let now = MicroTime(Timestamp::now());
        // Whole seconds only: a shorter one than ours would let others take over too early.
        let seconds = self.election.duration.as_secs() + u64::from(self.election.duration.subsec_nanos() > 0);
        let mut body = json!({
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self.election.name, "namespace": self.election.namespace},
            "spec": {
                "holderIdentity": self.election.identity,
                "leaseDurationSeconds": seconds,
                "leaseTransitions": held.transitions,
                "acquireTime": held.acquired.clone().unwrap_or_else(|| now.clone()),
                "renewTime": now,
            },
        });
        if let Some(version) = &held.version {
            body["metadata"]["resourceVersion"] = json!(version);
        }
        body
    }

    /// Lets the lease go. Nothing is written after it.
    async fn release(&mut self) {
        self.permit.give_up();
        let lease = match self.read().await {
            Ok(Some(lease)) => lease,
            Ok(None) => return,
            Err(error) => {
                tracing::warn!(err = %error, "the lease is not released: the next leader waits until it runs out");
                return;
            }
        };
        let record = Record::of(&lease);
        if record.holder != self.election.identity {
            return;
        }
        let held = Held { version: Some(record.version), transitions: record.transitions, acquired: None };
        let mut body = self.body(&held);
        body["spec"]["holderIdentity"] = json!("");
        body["spec"]["leaseDurationSeconds"] = json!(1);
        match self.write(Verb::Update, body).await {
            Ok(_) => tracing::info!(lease = self.election.name, "lease released"),
            Err(error) => {
                tracing::warn!(err = %error, "the lease is not released: the next leader waits for it")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn record(holder: &str, renewed: u32) -> Option<Record> {
        Some(Record {
            holder: holder.to_owned(),
            renewed: renewed.to_string(),
            duration: 15 * SECOND,
            transitions: 3,
            version: format!("v{renewed}"),
        })
    }

    fn write(version: &str, transitions: i32) -> Move {
        Move::Write { version: version.to_owned(), transitions }
    }

    #[test]
    fn a_missing_lease_is_made_and_a_free_one_is_taken() {
        let mut observer = Observer::default();
        assert_eq!(observer.decide("a", None, SECOND), Move::Create);
        assert_eq!(observer.decide("a", record("", 1), SECOND), write("v1", 4));
    }

    #[test]
    fn our_own_lease_is_renewed_without_a_transition() {
        let mut observer = Observer::default();
        assert_eq!(observer.decide("a", record("a", 1), SECOND), write("v1", 3));
    }

    #[test]
    fn somebody_elses_lease_is_taken_only_after_it_was_seen_unchanged_for_its_whole_duration() {
        let mut observer = Observer::default();
        // However old the times in it are: only what we saw counts, so clocks that differ do not matter.
        assert_eq!(observer.decide("a", record("b", 1), 100 * SECOND), Move::Wait);
        assert_eq!(observer.decide("a", record("b", 1), 114 * SECOND), Move::Wait);
        assert_eq!(observer.decide("a", record("b", 2), 114 * SECOND), Move::Wait);
        assert_eq!(observer.decide("a", record("b", 2), 128 * SECOND), Move::Wait);
        assert_eq!(observer.decide("a", record("b", 2), 129 * SECOND), write("v2", 4));
    }

    #[test]
    fn a_change_of_holder_starts_the_wait_anew() {
        let mut observer = Observer::default();
        assert_eq!(observer.decide("a", record("b", 1), SECOND), Move::Wait);
        assert_eq!(observer.decide("a", record("c", 1), 20 * SECOND), Move::Wait);
        assert_eq!(observer.decide("a", record("c", 1), 35 * SECOND), write("v1", 4));
    }

    #[test]
    fn a_permit_that_runs_out_is_noticed_by_the_guard_without_any_runtime() {
        let permit = Arc::new(Permit::default());
        assert!(!permit.may_write() && !permit.is_lost(), "never held is not lost");
        let (tell, told) = std::sync::mpsc::sync_channel(1);
        permit.extend(Instant::now(), Duration::from_millis(200));
        let _thread = permit.guard(move || tell.send(()).expect("the test listens")).expect("a thread");
        assert!(permit.may_write());
        told.recv_timeout(Duration::from_secs(20)).expect("the loss is told");
        assert!(!permit.may_write());
    }

    #[test]
    fn a_lease_that_was_given_up_is_not_lost() {
        let permit = Permit::default();
        permit.extend(Instant::now(), 10 * SECOND);
        permit.give_up();
        assert!(!permit.may_write() && !permit.is_lost());
    }
}
