//! Traces: when a request comes and how long it is. Scaled to the machine by a factor of time and one of length.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use super::args::TraceFormat;

/// Requests of a trace that are read at most.
const MAX_REQUESTS: usize = 1_000_000;
/// Longest line of a trace in bytes: long prompts have thousands of block ids.
const MAX_LINE_BYTES: usize = 1 << 20;
/// Mooncake's times come in groups about this many milliseconds apart; each group is spread evenly over it.
const MOONCAKE_GROUP_MS: f64 = 3000.0;

/// A request of a trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Planned {
    /// Milliseconds from the start.
    pub at_ms: f64,
    /// Prompt tokens.
    pub prompt: u32,
    /// Answer tokens.
    pub output: u32,
}

/// Reads a trace, in order of time, from zero on.
///
/// # Errors
/// The line that is not of the format.
pub fn read(path: &Path, format: TraceFormat) -> Result<Vec<Planned>> {
    let name = path.display();
    let file = BufReader::new(File::open(path).with_context(|| format!("--trace {name}"))?);
    let mut requests = Vec::new();
    for (number, line) in file.lines().enumerate().take(MAX_REQUESTS) {
        let line = line.with_context(|| format!("--trace {name}"))?;
        if line.trim().is_empty() || (number == 0 && line.starts_with("TIMESTAMP")) {
            continue;
        }
        let request = if line.len() > MAX_LINE_BYTES { None } else { parse(&line, format) };
        let Some(request) = request else {
            bail!("--trace {name}: line {} is not of --format {format:?}", number + 1);
        };
        requests.push(request);
    }
    if requests.is_empty() {
        bail!("--trace {name}: there is no request in it");
    }
    requests.sort_by(|a, b| a.at_ms.total_cmp(&b.at_ms));
    if format == TraceFormat::Mooncake {
        spread_groups(&mut requests);
    }
    let first = requests[0].at_ms;
    requests.iter_mut().for_each(|request| request.at_ms -= first);
    Ok(requests)
}

fn parse(line: &str, format: TraceFormat) -> Option<Planned> {
    #[derive(Deserialize)]
    struct Mooncake {
        timestamp: f64,
        input_length: u32,
        output_length: u32,
    }
    let (at_ms, prompt, output) = match format {
        TraceFormat::Azure => {
            let mut columns = line.trim().split(',');
            let at = time_of_day(columns.next()?)?;
            (at, columns.next()?.parse().ok()?, columns.next()?.parse().ok()?)
        }
        TraceFormat::Mooncake => {
            let request: Mooncake = serde_json::from_str(line).ok()?;
            (request.timestamp, request.input_length, request.output_length)
        }
    };
    Some(Planned { at_ms, prompt, output })
}

/// Milliseconds since the first of the month of `2023-11-16 18:17:03.9799600`; the traces are an hour of one day.
fn time_of_day(text: &str) -> Option<f64> {
    let (date, time) = text.split_once(' ')?;
    let day: f64 = date.rsplit('-').next()?.parse().ok()?;
    let mut parts = time.splitn(3, ':').map(|part| part.parse::<f64>().ok());
    let (hour, minute, second) = (parts.next()??, parts.next()??, parts.next()??);
    Some((((day * 24.0 + hour) * 60.0 + minute) * 60.0 + second) * 1000.0)
}

/// Spreads requests of the same millisecond.
fn spread_groups(requests: &mut [Planned]) {
    let mut from = 0;
    while from < requests.len() {
        let at = requests[from].at_ms;
        let group = requests[from..].iter().take_while(|request| request.at_ms == at).count();
        for (index, request) in requests[from..from + group].iter_mut().enumerate() {
            request.at_ms += MOONCAKE_GROUP_MS * index as f64 / group as f64;
        }
        from += group;
    }
    requests.sort_by(|a, b| a.at_ms.total_cmp(&b.at_ms));
}

/// The factor by which lengths must be divided so that the longest request fits into `context`; at least 1.
pub fn fitting_length_scale(requests: &[Planned], context: u32) -> f64 {
    let longest = requests.iter().map(|r| u64::from(r.prompt) + u64::from(r.output)).max().unwrap_or(0);
    // A request is never shorter than one token and one more.
    (longest as f64 / f64::from(context.saturating_sub(2).max(1))).max(1.0)
}

/// The trace at other times and lengths.
pub fn scaled(requests: &[Planned], time: f64, length: f64) -> Vec<Planned> {
    let shorter = |tokens: u32| ((f64::from(tokens) / length) as u32).max(1);
    let scale =
        |r: &Planned| Planned { at_ms: r.at_ms * time, prompt: shorter(r.prompt), output: shorter(r.output) };
    requests.iter().map(scale).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn read_text(text: &str, format: TraceFormat) -> Result<Vec<Planned>> {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        file.write_all(text.as_bytes()).expect("written");
        read(file.path(), format)
    }

    #[test]
    fn azure_times_become_milliseconds_from_the_first() {
        let text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n\
                    2023-11-16 18:17:04.0319600,3180,8\n";
        let requests = read_text(text, TraceFormat::Azure).expect("a trace");
        assert_eq!((requests[0].prompt, requests[0].output, requests[0].at_ms), (4808, 10, 0.0));
        assert!((requests[1].at_ms - 52.0).abs() < 1e-3, "{}", requests[1].at_ms);
    }

    #[test]
    fn requests_of_one_millisecond_are_spread_over_the_time_to_the_next_group() {
        let line = |at: u32| {
            format!("{{\"timestamp\":{at},\"input_length\":600,\"output_length\":5,\"hash_ids\":[1]}}\n")
        };
        let text = [line(0), line(0), line(0), line(3000)].concat();
        let at: Vec<f64> =
            read_text(&text, TraceFormat::Mooncake).expect("a trace").iter().map(|r| r.at_ms).collect();
        assert_eq!(at, [0.0, 1000.0, 2000.0, 3000.0]);
    }

    #[test]
    fn a_line_of_another_format_is_named() {
        let error = read_text("1,2,3\n", TraceFormat::Mooncake).expect_err("not JSON").to_string();
        assert!(error.contains("line 1"), "{error}");
    }

    #[test]
    fn a_scaled_trace_fits_the_context() {
        let requests = [Planned { at_ms: 10.0, prompt: 100_000, output: 500 }];
        let factor = fitting_length_scale(&requests, 4096);
        let scaled = scaled(&requests, 3.0, factor)[0];
        assert!(scaled.prompt + scaled.output <= 4096 && scaled.prompt > 3900, "{scaled:?}");
        assert_eq!(scaled.at_ms, 30.0);
        assert_eq!(fitting_length_scale(&requests, 200_000), 1.0);
    }
}
