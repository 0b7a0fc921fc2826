//! Log lines: JSON with the field names of operator.md 12.3, or text for people.
//!
//! Invariant: a line is one JSON object with `ts`, `level`, `target`, `message` and the fields of the event and of the
//! spans around it; the innermost wins.

use std::fmt;

use k8s_openapi::jiff::Timestamp;
use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::{FormatEvent, FormatFields, JsonFields, Writer};
use tracing_subscriber::fmt::{FmtContext, FormattedFields};
use tracing_subscriber::registry::LookupSpan;

use crate::args::LogFormat;

/// A log level that is none.
#[derive(Debug, thiserror::Error)]
#[error(
    "--log-level {given:?}: {message}: write error, warn, info, debug, trace or target=level with commas"
)]
pub struct LevelError {
    given: String,
    message: String,
}

/// Sends log lines to standard error from now on; a second call changes nothing.
///
/// # Errors
/// [`LevelError`].
pub fn start(level: &str, format: LogFormat) -> Result<(), LevelError> {
    let fail = |message: String| LevelError { given: level.to_owned(), message };
    // The client calls every failed request an error; whoever made it says what it means, and tries again.
    let filter = EnvFilter::try_new(format!("kube_client::client::builder=off,{level}"))
        .map_err(|error| fail(error.to_string()))?;
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    // An error means that a subscriber is there already: of a test, which keeps its own.
    let _ = match format {
        LogFormat::Text => lines.with_ansi(false).try_init(),
        LogFormat::Json => lines.fmt_fields(JsonFields::new()).event_format(JsonLines).try_init(),
    };
    Ok(())
}

/// Writes events as flat JSON objects.
#[derive(Clone, Copy, Debug)]
pub struct JsonLines;

impl<S, N> FormatEvent<S, N> for JsonLines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut fields = Fields(Map::new());
        for span in context.event_scope().into_iter().flat_map(|scope| scope.from_root()) {
            let extensions = span.extensions();
            let of_span = extensions.get::<FormattedFields<N>>().map(|formatted| formatted.as_str());
            if let Some(Ok(Value::Object(of_span))) = of_span.map(serde_json::from_str) {
                fields.0.extend(of_span);
            }
        }
        event.record(&mut fields);
        let meta = event.metadata();
        let now = Timestamp::now();
        write!(
            writer,
            "{{\"ts\":\"{now:.3}\",\"level\":\"{}\",\"target\":\"{}\"",
            meta.level(),
            meta.target()
        )?;
        for (name, value) in &fields.0 {
            write!(writer, ",{}:{value}", Value::from(name.as_str()))?;
        }
        writeln!(writer, "}}")
    }
}

/// Fields of an event by name.
struct Fields(Map<String, Value>);

impl Fields {
    fn put(&mut self, field: &Field, value: impl Into<Value>) {
        self.0.insert(field.name().trim_start_matches("r#").to_owned(), value.into());
    }
}

impl Visit for Fields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, value);
    }
    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value);
    }
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value);
    }
    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value);
    }
    fn record_str(&mut self, field: &Field, value: &str) {
        self.put(field, value);
    }
    fn record_error(&mut self, field: &Field, value: &(dyn std::error::Error + 'static)) {
        self.put(field, value.to_string());
    }
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.put(field, format!("{value:?}"));
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::sync::{Arc, Mutex};

    use super::*;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_line_is_flat_json_with_the_fields_of_event_and_span() {
        let sink = Sink::default();
        let writer = sink.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .fmt_fields(JsonFields::new())
            .event_format(JsonLines)
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            let span = tracing::info_span!("reconcile", cluster = "c", reconcile_id = 7);
            let _in = span.enter();
            tracing::info!(action = "create Pod/\"x\"", duration_ms = 1.5, err = %"broken\nline", "acted");
        });
        let text = String::from_utf8(sink.0.lock().unwrap().clone()).unwrap();
        assert_eq!(text.lines().count(), 1, "{text}");
        let line: Value = serde_json::from_str(&text).unwrap();
        for (name, expected) in [
            ("level", Value::from("INFO")),
            ("message", Value::from("acted")),
            ("cluster", Value::from("c")),
            ("reconcile_id", Value::from(7)),
            ("action", Value::from("create Pod/\"x\"")),
            ("duration_ms", Value::from(1.5)),
            ("err", Value::from("broken\nline")),
        ] {
            assert_eq!(line[name], expected, "{name} in {text}");
        }
        assert!(line["ts"].as_str().unwrap().parse::<Timestamp>().is_ok(), "{text}");
    }

    #[test]
    fn a_wrong_level_is_named() {
        let error = start("loud=very", LogFormat::Json).unwrap_err().to_string();
        assert!(error.contains("loud=very") && error.contains("info"), "{error}");
    }
}
