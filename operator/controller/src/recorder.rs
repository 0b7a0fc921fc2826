//! Events (operator.md section 11) of `events.k8s.io/v1`.
//!
//! Invariants: recording never blocks and never fails a reconcile; an object gets at most one event with the same reason
//! a minute, what comes in between is counted in the event's series.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use deepinfer_planner::{EventKind, Object};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::events::v1::{Event, EventSeries};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;

/// Who reports, as events say it.
const CONTROLLER: &str = "deepinfer.io/operator";
/// Events that wait; more are dropped and counted.
const QUEUE: usize = 1024;
/// An object gets an event of the same reason no more often than this.
const PAUSE: Duration = Duration::from_secs(60);
/// A series that was silent for this long is over; the next event is a new one.
const SERIES_END: Duration = Duration::from_secs(6 * 60);
/// Series in memory; beyond, the oldest are forgotten.
const SERIES: usize = 10_000;
/// Longest note in bytes that the API server takes.
const NOTE_BYTES: usize = 1024;
/// Longest call to the API server.
const CALL_TIME: Duration = Duration::from_secs(10);

/// What an event is about.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Regarding {
    /// Group and version.
    pub api_version: String,
    /// Kind.
    pub kind: String,
    /// Namespace.
    pub namespace: String,
    /// Name.
    pub name: String,
    /// UID, so that `kubectl describe` of a successor does not show it.
    pub uid: String,
}

impl Regarding {
    /// An object that was read or written.
    pub fn of(object: &Object) -> Self {
        let (api_version, kind) = object.type_meta();
        let meta = object.meta();
        Self {
            api_version,
            kind,
            namespace: meta.namespace.clone().unwrap_or_default(),
            name: meta.name.clone().unwrap_or_default(),
            uid: meta.uid.clone().unwrap_or_default(),
        }
    }
}

/// What happened to it.
#[derive(Clone, Debug)]
struct Happened {
    regarding: Regarding,
    kind: EventKind,
    reason: &'static str,
    note: String,
}

/// Takes events; clones share the queue.
#[derive(Clone, Debug)]
pub struct Recorder {
    queue: mpsc::Sender<Happened>,
    metrics: Arc<Metrics>,
}

impl Recorder {
    /// Starts sending; `identity` is the name of this replica. Ends with `stop`, after what is queued was tried once.
    pub fn start(client: Client, identity: &str, metrics: Arc<Metrics>, stop: CancellationToken) -> Self {
        let (queue, events) = tokio::sync::mpsc::channel(QUEUE);
        let writer = Writer { client, identity: identity.to_owned(), metrics: Arc::clone(&metrics) };
        tokio::spawn(writer.run(events, stop));
        Self { queue, metrics }
    }

    /// Says what happened. A full queue drops it.
    pub fn record(&self, regarding: Regarding, kind: EventKind, reason: &'static str, note: String) {
        if self.queue.try_send(Happened { regarding, kind, reason, note }).is_err() {
            self.metrics.event("dropped");
        }
    }
}

/// Events of one reason about one object.
#[derive(Clone, Debug)]
struct Series {
    /// Name of the event object.
    event: String,
    sent: Instant,
    last: Instant,
    /// Occurrences, the first among them.
    count: i32,
    /// Some of them are not in the event yet.
    unsent: bool,
}

/// What to do with an occurrence.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    /// The first: make an event.
    Create,
    /// Count it; it is written later.
    Count,
    /// Write the count into this event.
    Update(String, i32),
}

/// The memory of series: pure.
#[derive(Debug, Default)]
struct Memory {
    series: BTreeMap<(Regarding, &'static str), Series>,
}

impl Memory {
    fn occurs(&mut self, happened: &Happened, now: Instant) -> Step {
        let key = (happened.regarding.clone(), happened.reason);
        let running = self.series.get_mut(&key).filter(|s| now.duration_since(s.last) < SERIES_END);
        let Some(series) = running else { return Step::Create };
        series.last = now;
        series.count = series.count.saturating_add(1);
        if now.duration_since(series.sent) < PAUSE {
            series.unsent = true;
            return Step::Count;
        }
        (series.sent, series.unsent) = (now, false);
        Step::Update(series.event.clone(), series.count)
    }

    fn created(&mut self, happened: &Happened, event: String, now: Instant) {
        if self.series.len() >= SERIES {
            let oldest = self.series.iter().min_by_key(|(_, s)| s.last).map(|(key, _)| key.clone());
            oldest.map(|key| self.series.remove(&key));
        }
        let series = Series { event, sent: now, last: now, count: 1, unsent: false };
        self.series.insert((happened.regarding.clone(), happened.reason), series);
    }

    fn lost(&mut self, happened: &Happened) {
        self.series.remove(&(happened.regarding.clone(), happened.reason));
    }

    /// Counts that may be written now: namespace, event, count. Series that are over are forgotten.
    fn due(&mut self, now: Instant) -> Vec<(String, String, i32)> {
        let mut due = Vec::new();
        for ((regarding, _), series) in &mut self.series {
            if series.unsent && now.duration_since(series.sent) >= PAUSE {
                (series.sent, series.unsent) = (now, false);
                due.push((regarding.namespace.clone(), series.event.clone(), series.count));
            }
        }
        self.series.retain(|_, series| now.duration_since(series.last) < SERIES_END);
        due
    }
}

struct Writer {
    client: Client,
    identity: String,
    metrics: Arc<Metrics>,
}

impl Writer {
    async fn run(self, mut events: mpsc::Receiver<Happened>, stop: CancellationToken) {
        let mut memory = Memory::default();
        let mut number: u64 = 0;
        let mut tick = tokio::time::interval(PAUSE / 4);
        loop {
            tokio::select! {
                biased;
                happened = events.recv() => {
                    let Some(happened) = happened else { return };
                    number += 1;
                    self.take(&mut memory, &happened, number).await;
                }
                () = stop.cancelled() => return,
                _ = tick.tick() => {
                    for (namespace, event, count) in memory.due(Instant::now()) {
                        self.update(&namespace, &event, count).await;
                    }
                }
            }
        }
    }

    async fn take(&self, memory: &mut Memory, happened: &Happened, number: u64) {
        let now = Instant::now();
        match memory.occurs(happened, now) {
            Step::Count => self.metrics.event("counted"),
            Step::Update(event, count) => {
                if !self.update(&happened.regarding.namespace, &event, count).await {
                    memory.lost(happened);
                }
            }
            Step::Create => {
                let event = event(happened, &self.identity, number, Timestamp::now());
                let name = event.metadata.name.clone().unwrap_or_default();
                let api: Api<Event> = Api::namespaced(self.client.clone(), &happened.regarding.namespace);
                let params = PostParams::default();
                if self.bounded(api.create(&params, &event)).await {
                    memory.created(happened, name, now);
                }
            }
        }
    }

    async fn update(&self, namespace: &str, event: &str, count: i32) -> bool {
        let api: Api<Event> = Api::namespaced(self.client.clone(), namespace);
        let series = EventSeries { count, last_observed_time: MicroTime(Timestamp::now()) };
        let patch = json!({ "series": series });
        self.bounded(api.patch(event, &PatchParams::default(), &Patch::Merge(patch))).await
    }

    /// A call within its time; events are not worth a retry.
    async fn bounded(&self, call: impl Future<Output = kube::Result<Event>>) -> bool {
        let why = match tokio::time::timeout(CALL_TIME, call).await {
            Ok(Ok(_)) => {
                self.metrics.event("sent");
                return true;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {} s", CALL_TIME.as_secs()),
        };
        self.metrics.event("dropped");
        tracing::debug!(err = %why, "an event was not written");
        false
    }
}

/// The object of an event. Its name is unique by time, replica and number.
fn event(happened: &Happened, identity: &str, number: u64, now: Timestamp) -> Event {
    let Regarding { api_version, kind, namespace, name, uid } = happened.regarding.clone();
    let mut short = name.clone();
    short.truncate(200);
    Event {
        metadata: ObjectMeta {
            name: Some(format!("{short}.{:x}{number:x}", now.as_microsecond())),
            namespace: Some(namespace.clone()),
            ..ObjectMeta::default()
        },
        action: Some(happened.reason.to_owned()),
        event_time: Some(MicroTime(now)),
        note: Some(cut(&happened.note)),
        reason: Some(happened.reason.to_owned()),
        regarding: Some(ObjectReference {
            api_version: Some(api_version),
            kind: Some(kind),
            namespace: Some(namespace),
            name: Some(name),
            uid: Some(uid),
            ..ObjectReference::default()
        }),
        reporting_controller: Some(CONTROLLER.to_owned()),
        reporting_instance: Some(identity.chars().take(128).collect()),
        type_: Some(
            match happened.kind {
                EventKind::Normal => "Normal",
                EventKind::Warning => "Warning",
            }
            .to_owned(),
        ),
        ..Event::default()
    }
}

/// At most [`NOTE_BYTES`], cut between characters.
fn cut(note: &str) -> String {
    if note.len() <= NOTE_BYTES {
        return note.to_owned();
    }
    let end = (0..=NOTE_BYTES - "...".len()).rev().find(|at| note.is_char_boundary(*at)).unwrap_or(0);
    format!("{}...", &note[..end])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn happened(name: &str, reason: &'static str) -> Happened {
        let regarding = Regarding {
            api_version: "deepinfer.io/v1alpha1".into(),
            kind: "Supernode".into(),
            namespace: "ns".into(),
            name: name.into(),
            uid: "u".into(),
        };
        Happened { regarding, kind: EventKind::Warning, reason, note: "n".into() }
    }

    #[test]
    fn an_object_gets_one_event_of_a_reason_a_minute_and_the_rest_is_counted() {
        let mut memory = Memory::default();
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let again = happened("sn", "Unplaceable");
        assert_eq!(memory.occurs(&again, at(0)), Step::Create);
        memory.created(&again, "e1".into(), at(0));
        assert_eq!(memory.occurs(&happened("sn", "GangTimeout"), at(1)), Step::Create);
        assert_eq!(memory.occurs(&happened("other", "Unplaceable"), at(1)), Step::Create);
        assert_eq!(memory.occurs(&again, at(30)), Step::Count);
        assert_eq!(memory.occurs(&again, at(59)), Step::Count);
        assert!(memory.due(at(59)).is_empty());
        assert_eq!(memory.occurs(&again, at(60)), Step::Update("e1".into(), 4));
        assert_eq!(memory.occurs(&again, at(61)), Step::Count);
        assert_eq!(memory.due(at(120)), [("ns".into(), "e1".into(), 5)]);
        assert!(memory.due(at(121)).is_empty());
        assert_eq!(memory.occurs(&again, at(61 + 360)), Step::Create, "the series is over");
    }

    #[test]
    fn memory_is_bounded() {
        let mut memory = Memory::default();
        let now = Instant::now();
        for i in 0..SERIES + 5 {
            memory.created(&happened(&i.to_string(), "Unplaceable"), "e".into(), now);
        }
        assert_eq!(memory.series.len(), SERIES);
    }

    #[test]
    fn an_event_has_what_the_api_server_wants_and_long_notes_are_cut_between_characters() {
        let mut long = happened("sn", "Unplaceable");
        long.note = "é".repeat(600);
        let event = event(&long, "op-1", 7, Timestamp::UNIX_EPOCH);
        let note = event.note.unwrap();
        assert!(note.len() <= NOTE_BYTES && note.ends_with("é..."), "{}", note.len());
        assert_eq!(event.type_.as_deref(), Some("Warning"));
        assert_eq!(event.reporting_instance.as_deref(), Some("op-1"));
        assert_eq!(event.regarding.unwrap().uid.as_deref(), Some("u"));
    }
}
