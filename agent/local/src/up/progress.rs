//! What a person sees while a cluster starts: bars in a terminal, a few lines elsewhere. Logs go between them.

use std::collections::BTreeMap;
use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, PoisonError};

use deepinfer_agent::Progress;
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::cluster::args::{LogFormat, LogLevel};
use crate::report;

/// Lines of a load without a terminal: one for each such part.
const PARTS: u64 = 4;

/// Shows how starts come on.
#[derive(Debug)]
pub struct Screen {
    bars: MultiProgress,
    terminal: bool,
    shown: Mutex<BTreeMap<String, Shown>>,
}

#[derive(Debug)]
struct Shown {
    bar: ProgressBar,
    parts: u64,
}

impl Screen {
    /// On standard error.
    pub fn new() -> Self {
        let terminal = io::stderr().is_terminal();
        let target = if terminal { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        Self { bars: MultiProgress::with_draw_target(target), terminal, shown: Mutex::default() }
    }

    /// An agent has come further.
    pub fn agent(&self, name: &str, progress: &Progress) {
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = shown.entry(name.to_owned()).or_insert_with(|| {
            let bar = self.bars.add(ProgressBar::new(0));
            let style =
                ProgressStyle::with_template("{prefix} {bar:30} {binary_bytes}/{binary_total_bytes} {msg}");
            bar.set_style(style.expect("the template is a constant"));
            bar.set_prefix(name.to_owned());
            Shown { bar, parts: 0 }
        });
        match progress {
            Progress::Loading { done, total } => {
                entry.bar.set_length(*total);
                entry.bar.set_position(*done);
                let parts = done.saturating_mul(PARTS).checked_div(*total).unwrap_or(PARTS) + 1;
                if !self.terminal && parts > entry.parts {
                    entry.parts = parts;
                    let (done, total) = (report::bytes(*done), report::bytes(*total));
                    self.line(&format!("{name}: {done} of {total} of weights are in memory"));
                }
            }
            Progress::Warming { sizes } => {
                entry.bar.finish_and_clear();
                self.line(&format!("{name}: warming up with {sizes}"));
            }
        }
    }

    /// A line for people.
    pub fn line(&self, text: &str) {
        self.bars.suspend(|| {
            let _ = writeln!(io::stderr().lock(), "{text}");
        });
    }

    /// No more bars.
    pub fn clear(&self) {
        let _ = self.bars.clear();
    }

    /// Starts logging to standard error.
    ///
    /// # Errors
    /// If this process logs already.
    pub fn log(&self, format: LogFormat, level: Option<LogLevel>) -> anyhow::Result<()> {
        let quiet = self.terminal && format == LogFormat::Text;
        let level = level.unwrap_or(if quiet { LogLevel::Warn } else { LogLevel::Info });
        let others = if level == LogLevel::Error { "error" } else { "warn" };
        let filter = EnvFilter::try_new(format!("{others},deepinfer={}", level.as_str()))?;
        let builder =
            tracing_subscriber::fmt().with_env_filter(filter).with_writer(Between(self.bars.clone()));
        // A log that cannot be written (its disk is full) loses lines; told to the same place, it would end the process.
        let builder = builder.log_internal_errors(false);
        let started = match format {
            LogFormat::Text => builder.with_ansi(self.terminal).try_init(),
            LogFormat::Json => builder.json().flatten_event(true).try_init(),
        };
        started.map_err(|error| anyhow::anyhow!("logs: {error}"))
    }
}

/// Writes between the bars.
struct Between(MultiProgress);

impl<'a> MakeWriter<'a> for Between {
    type Writer = BetweenWriter<'a>;

    fn make_writer(&'a self) -> BetweenWriter<'a> {
        BetweenWriter(&self.0)
    }
}

/// See [`Between`].
struct BetweenWriter<'a>(&'a MultiProgress);

impl Write for BetweenWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.suspend(|| io::stderr().lock().write_all(bytes))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().lock().flush()
    }
}
