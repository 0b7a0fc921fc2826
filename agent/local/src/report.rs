//! Numbers and errors as people read them.

use std::io::{self, Write};

use anyhow::Result;

/// Bytes with a binary unit and three digits: `7.43 MiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: &[&str] = &["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{} {}", three_digits(value), UNITS[unit]) }
}

/// Bytes per second with a decimal unit, as memory is sold: `21.4 GB/s`.
pub fn bandwidth(bytes_per_second: f64) -> String {
    format!("{} GB/s", three_digits(bytes_per_second / 1e9))
}

/// A count with thousands separated: `7,514,862`.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// Three significant digits for values of at least one, two decimals below.
pub fn three_digits(value: f64) -> String {
    match value.abs() {
        v if v >= 100.0 => format!("{value:.0}"),
        v if v >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

/// Prints to standard output; a reader that has gone is an error, not a panic.
///
/// # Errors
/// What writing answers.
pub fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// Lowest, median and highest of a few measurements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// Lowest.
    pub low: f64,
    /// Median; the mean of the middle two for an even count.
    pub median: f64,
    /// Highest.
    pub high: f64,
}

impl Spread {
    /// # Panics
    /// If there is no value.
    pub fn of(values: &[f64]) -> Self {
        assert!(!values.is_empty(), "a spread needs a value");
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let median =
            if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 };
        Self { low: sorted[0], median, high: sorted[sorted.len() - 1] }
    }
}

/// An error with its causes, each said once: many errors name their cause already.
pub fn chain(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text += ": ";
            text += &cause;
        }
    }
    text
}

/// Whether the reader of our output has gone.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .any(|cause| cause.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_readable() {
        assert_eq!(bytes(512), "512 B");
        assert_eq!(bytes(7_794_696), "7.43 MiB");
        assert_eq!(bytes(509_000_000_000), "474 GiB");
        assert_eq!(count(7_514_862), "7,514,862");
        assert_eq!(count(12), "12");
        assert_eq!(bandwidth(21.44e9), "21.4 GB/s");
    }

    #[test]
    fn a_cause_is_said_once() {
        let error = anyhow::anyhow!("disk full").context("writing x: disk full").context("batch");
        assert_eq!(chain(&error), "batch: writing x: disk full");
    }

    #[test]
    fn a_spread_has_the_middle_in_the_middle() {
        let odd = Spread::of(&[3.0, 1.0, 2.0]);
        assert_eq!((odd.low, odd.median, odd.high), (1.0, 2.0, 3.0));
        assert_eq!(Spread::of(&[4.0, 1.0, 2.0, 3.0]).median, 2.5);
    }
}
