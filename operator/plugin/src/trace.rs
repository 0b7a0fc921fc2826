//! `trace`: what gateways and engines logged about one request, in the order of time.
//! Invariants: logs are streamed and only lines that name the request are kept; what is kept is bounded.

use anyhow::{Result, bail};
use deepinfer_crds::names::label;
use futures_util::{AsyncBufReadExt, StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use kube::api::{ListParams, LogParams};
use serde_json::Value;

use crate::args::TraceArgs;
use crate::client::Session;
use crate::output::{self, Outcome};
use crate::view::{label_of, name_of};

/// Logs that are read at once.
const AT_ONCE: usize = 8;
/// Most lines that are kept of one log.
const LINES_MAX: usize = 500;
/// Longest part of a line that is shown, in characters.
const LINE_MAX: usize = 2000;
/// Shortest id: anything shorter would be in lines of other requests.
const ID_MIN: usize = 6;

/// A line that names the request.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Line {
    /// When it was written.
    pub at: Timestamp,
    /// Pod and container.
    pub from: String,
    /// The line.
    pub text: String,
}

/// Searches.
///
/// # Errors
/// If the id is none, or the API server cannot be asked.
pub async fn run(session: &Session, args: &TraceArgs) -> Result<Outcome> {
    let needle = needle(&args.id)?;
    let mut selector = format!("{}={}", label::APP_NAME, label::APP_NAME_VALUE);
    if let Some(cluster) = &args.cluster {
        selector += &format!(",{}={cluster}", label::CLUSTER);
    }
    let api = session.api::<Pod>();
    let pods = session.list(&api, ListParams::default().labels(&selector), "pods").await?;
    if pods.is_empty() {
        bail!(
            "no pod of DeepInfer is in namespace {} (labels {selector}): -n chooses another",
            session.namespace
        );
    }
    let logs = pods.iter().flat_map(logs);
    let since = i64::from(args.hours) * 3600;
    let api = &api;
    let needle = &needle;
    let read: Vec<(String, Result<Vec<Line>, kube::Error>)> = stream::iter(logs)
        .map(|log| async move { (log.name(), search(api, &log, needle, since).await) })
        .buffer_unordered(AT_ONCE)
        .collect()
        .await;
    let mut lines = Vec::new();
    for (name, outcome) in read {
        match outcome {
            Ok(found) => lines.extend(found),
            Err(error) => eprintln!("{name}: its log cannot be read: {error}"),
        }
    }
    lines.sort();
    if lines.is_empty() {
        output::print(&format!(
            "no log line of {} pods names {needle} in the last {} hours: logs of pods that are gone are gone with them\n",
            pods.len(),
            args.hours
        ))?;
        return Ok(Outcome::Problem);
    }
    output::print(&text(&lines))?;
    Ok(Outcome::Good)
}

/// What is searched for: ids of answers carry the kind of the answer in front.
fn needle(id: &str) -> Result<String> {
    let bare = ["chatcmpl-", "cmpl-", "resp_", "msg_"]
        .iter()
        .find_map(|prefix| id.strip_prefix(prefix))
        .unwrap_or(id);
    let sound = bare.chars().all(|c| c.is_ascii_graphic());
    if bare.len() < ID_MIN || bare.len() > 128 || !sound {
        bail!("REQUEST-ID {id:?} is no id of a request: it has {ID_MIN} to 128 visible characters");
    }
    Ok(bare.to_owned())
}

/// One log of a container.
struct Log {
    pod: String,
    container: String,
    previous: bool,
}

impl Log {
    fn name(&self) -> String {
        let previous = if self.previous { " (before its restart)" } else { "" };
        format!("{}/{}{previous}", self.pod, self.container)
    }
}

fn logs(pod: &Pod) -> Vec<Log> {
    let name = name_of(&pod.metadata).to_owned();
    let role = label_of(&pod.metadata, label::APP_COMPONENT).unwrap_or_default();
    let statuses = pod.status.iter().flat_map(|s| s.container_statuses.iter().flatten());
    let ours = |container: &str| matches!(container, "engine" | "gateway" | "agent") || container == role;
    statuses
        .filter(|s| ours(&s.name))
        .flat_map(|s| {
            let log = |previous| Log { pod: name.clone(), container: s.name.clone(), previous };
            let now = s.state.as_ref().is_some_and(|state| state.waiting.is_none());
            [now.then(|| log(false)), (s.restart_count > 0).then(|| log(true))]
        })
        .flatten()
        .collect()
}

async fn search(api: &Api<Pod>, log: &Log, needle: &str, since: i64) -> Result<Vec<Line>, kube::Error> {
    let params = LogParams {
        container: Some(log.container.clone()),
        previous: log.previous,
        timestamps: true,
        since_seconds: Some(since),
        ..LogParams::default()
    };
    let mut lines = api.log_stream(&log.pod, &params).await?.lines();
    let (mut found, mut last) = (Vec::new(), Timestamp::UNIX_EPOCH);
    while let Some(line) = lines.try_next().await.map_err(kube::Error::ReadEvents)? {
        if !line.contains(needle) {
            continue;
        }
        let (at, text) = stamped(&line, last);
        last = at;
        found.push(Line { at, from: log.name(), text: readable(text) });
        if found.len() == LINES_MAX {
            let text = format!("(more lines of this log name it: only the first {LINES_MAX} are shown)");
            found.push(Line { at, from: log.name(), text });
            break;
        }
    }
    Ok(found)
}

/// The time in front of a line, which the node writes; without one the line belongs to the line before.
fn stamped(line: &str, last: Timestamp) -> (Timestamp, &str) {
    match line.split_once(' ').map(|(at, text)| (at.parse(), text)) {
        Some((Ok(at), text)) => (at, text),
        _ => (last, line),
    }
}

/// A line of JSON as level, message and fields; any other line as it is.
fn readable(line: &str) -> String {
    let text = match serde_json::from_str::<Value>(line) {
        Ok(Value::Object(mut map)) => {
            let mut fields = match map.remove("fields") {
                Some(Value::Object(fields)) => fields,
                _ => std::mem::take(&mut map),
            };
            let level = map.remove("level").or_else(|| fields.remove("level"));
            let message = fields.remove("message");
            for drop in ["timestamp", "ts", "target"] {
                fields.remove(drop);
            }
            let word = |v: Option<Value>| v.map(|v| bare(&v)).unwrap_or_default();
            let mut rest: Vec<String> = fields.iter().map(|(k, v)| format!("{k}={}", bare(v))).collect();
            // Maps of JSON keep no order that one could rely on.
            rest.sort();
            let parts = [word(level), word(message), rest.join(" ")];
            parts.into_iter().filter(|p| !p.is_empty()).collect::<Vec<_>>().join("  ")
        }
        _ => line.to_owned(),
    };
    text.chars().take(LINE_MAX).collect()
}

fn bare(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// Lines with their time and origin.
pub fn text(lines: &[Line]) -> String {
    let width = lines.iter().map(|l| l.from.chars().count()).max().unwrap_or(0);
    lines.iter().map(|Line { at, from, text }| format!("{at:.3}  {from:width$}  {text}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_of_answers_are_searched_without_their_kind() {
        assert_eq!(needle("chatcmpl-00ff00ff").expect("an id"), "00ff00ff");
        assert!(needle("a").is_err() && needle("a b c d e f").is_err());
    }

    #[test]
    fn lines_stand_in_the_order_of_time_and_json_is_readable() {
        let raw = "2026-05-01T10:00:01.5Z {\"level\":\"INFO\",\"fields\":{\"message\":\"request\",\"request\":\"00ff\",\"tokens\":3}}";
        let (at, rest) = stamped(raw, Timestamp::UNIX_EPOCH);
        let late = Line { at, from: "gw-1/gateway".to_owned(), text: readable(rest) };
        let (at, rest) = stamped("2026-05-01T10:00:00Z enqueued 00ff", Timestamp::UNIX_EPOCH);
        let early = Line { at, from: "d-00/engine".to_owned(), text: readable(rest) };
        let mut lines = vec![late, early];
        lines.sort();
        let wanted = "\
2026-05-01T10:00:00.000Z  d-00/engine   enqueued 00ff
2026-05-01T10:00:01.500Z  gw-1/gateway  INFO  request  request=00ff tokens=3
";
        assert_eq!(text(&lines), wanted);
    }

    #[test]
    fn a_line_without_a_time_follows_the_line_before() {
        let at: Timestamp = "2026-05-01T10:00:00Z".parse().expect("a time");
        assert_eq!(stamped("  at frame 3", at), (at, "  at frame 3"));
    }
}
