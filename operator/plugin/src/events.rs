//! Events of objects, newest last.

use std::collections::BTreeSet;

use anyhow::Result;
use k8s_openapi::api::events::v1::Event;
use kube::api::ListParams;
use serde::Serialize;

use crate::client::Session;

/// An event in short.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Happening {
    /// When it was last seen, in seconds since 1970; 0 if unknown.
    pub at: i64,
    /// Kind and name of the object.
    pub object: String,
    /// Whether it is a warning.
    pub warning: bool,
    /// One word.
    pub reason: String,
    /// For people.
    pub note: String,
}

/// Events of the namespace about the named objects.
///
/// # Errors
/// What the API server answers.
pub async fn about(session: &Session, names: &BTreeSet<String>) -> Result<Vec<Happening>> {
    let events = session.list(&session.api::<Event>(), ListParams::default(), "events").await?;
    Ok(digest(&events, names))
}

/// The same, pure.
pub fn digest(events: &[Event], names: &BTreeSet<String>) -> Vec<Happening> {
    let of_these = |event: &&Event| {
        event.regarding.as_ref().and_then(|r| r.name.as_ref()).is_some_and(|name| names.contains(name))
    };
    let mut found: Vec<Happening> = events.iter().filter(of_these).map(short).collect();
    found.sort();
    found
}

fn short(event: &Event) -> Happening {
    let regarding = event.regarding.clone().unwrap_or_default();
    let seconds = event
        .series
        .as_ref()
        .map(|series| series.last_observed_time.0.as_second())
        .or_else(|| event.deprecated_last_timestamp.as_ref().map(|t| t.0.as_second()))
        .or_else(|| event.event_time.as_ref().map(|t| t.0.as_second()))
        .or_else(|| event.metadata.creation_timestamp.as_ref().map(|t| t.0.as_second()));
    Happening {
        at: seconds.unwrap_or(0),
        object: format!("{}/{}", regarding.kind.unwrap_or_default(), regarding.name.unwrap_or_default()),
        warning: event.type_.as_deref() == Some("Warning"),
        reason: event.reason.clone().unwrap_or_default(),
        note: event.note.clone().unwrap_or_default(),
    }
}
