//! Comparisons of one vector, and the one line that is left of them.
//!
//! Every comparison is kept as a ratio of its error to its tolerance; the line shows the one with the highest
//! ratio. Comparisons of whole numbers have no tolerance: their error is the count of differing values, and any is
//! a failure. NaN never passes.

use super::VectorResult;

/// Tolerance of streams and other activations, at magnitudes up to [`STREAM_MAGNITUDE`].
const STREAM: f64 = 2e-4;
/// Largest value of a stream for which [`STREAM`] holds; beyond, the tolerance grows in proportion.
const STREAM_MAGNITUDE: f64 = 40.0;
/// Tolerance of logits with a standard deviation up to [`LOGIT_DEVIATION`].
const LOGITS: f64 = 1e-4;
const LOGIT_DEVIATION: f64 = 1.5;
/// Tolerance of rotations at positions up to a million.
pub(crate) const ROPE: f64 = 1e-5;
/// Error of a row that still counts as equal where values are rounded to caches and activations.
const ROW: f64 = 1e-4;
/// Share of rows that may differ there by more, because a value sat on a rounding edge.
const FLIPPED_ROWS: f64 = 0.05;

/// The comparisons of one vector.
#[derive(Debug, Default)]
pub(crate) struct Checks {
    /// Highest ratio so far: ratio, error, tolerance, name.
    worst: Option<(f64, f64, f64, String)>,
    failures: Vec<String>,
    done: usize,
    /// Rows that [`Checks::most_rows`] left out because they were off.
    flipped: usize,
}

impl Checks {
    /// Whole numbers that must be equal.
    pub fn equal<T: PartialEq + std::fmt::Debug>(&mut self, what: &str, want: &[T], got: &[T]) {
        self.done += 1;
        if want.len() != got.len() {
            self.fail(f64::INFINITY, format!("{what}: {} values instead of {}", got.len(), want.len()));
            return;
        }
        let differing = want.iter().zip(got).filter(|(w, g)| w != g).count();
        if let Some(at) = want.iter().zip(got).position(|(w, g)| w != g) {
            self.fail(
                differing as f64,
                format!(
                    "{what}: {differing} of {} values differ, first at {at}: {:?} instead of {:?}",
                    want.len(),
                    got[at],
                    want[at]
                ),
            );
        }
    }

    /// Floats that must be the same numbers, bit for bit up to the sign of zero.
    pub fn same_numbers(&mut self, what: &str, want: &[f32], got: &[f32]) {
        self.close(what, want, got, 0.0);
    }

    /// Rows of activations: [`STREAM`], grown with their magnitude.
    pub fn stream(&mut self, what: &str, want: &[f32], got: &[f32], width: usize) {
        let top = finite(want).fold(0.0, |m: f64, v| m.max(v.abs()));
        let tolerance = STREAM * (top / STREAM_MAGNITUDE).max(1.0);
        let Some(errors) = self.row_errors(what, want, got, width) else {
            return;
        };
        let worst = errors.first().copied().unwrap_or(0.0);
        let off = errors.iter().filter(|e| **e > tolerance).count();
        let rows = errors.len();
        self.note(what, worst, tolerance, || {
            format!("{what}: {off} of {rows} rows are off, by up to {worst:.1e}")
        });
    }

    /// Logits: [`LOGITS`], grown with their deviation.
    pub fn logits(&mut self, what: &str, want: &[f32], got: &[f32]) {
        let count = finite(want).count().max(1) as f64;
        let deviation = (finite(want).map(|v| v * v).sum::<f64>() / count).sqrt();
        self.close(what, want, got, LOGITS * (deviation / LOGIT_DEVIATION).max(1.0));
    }

    /// Floats within an absolute tolerance; infinities must be the same ones.
    pub fn close(&mut self, what: &str, want: &[f32], got: &[f32], tolerance: f64) {
        self.done += 1;
        if want.len() != got.len() {
            self.fail(f64::INFINITY, format!("{what}: {} values instead of {}", got.len(), want.len()));
            return;
        }
        let (mut error, mut at) = (0.0, 0);
        for (i, (w, g)) in want.iter().zip(got).enumerate() {
            let e = difference(*w, *g);
            if e > error {
                (error, at) = (e, i);
            }
        }
        self.note(what, error, tolerance, || format!("{what}[{at}] is {} instead of {}", got[at], want[at]));
    }

    /// Rows that must be within [`ROW`], [`FLIPPED_ROWS`] of them excepted: the error is the highest one once these
    /// are left out.
    pub fn most_rows(&mut self, what: &str, want: &[f32], got: &[f32], width: usize) {
        let Some(errors) = self.row_errors(what, want, got, width) else {
            return;
        };
        let rows = errors.len();
        let off = errors.iter().filter(|e| **e > ROW).count();
        self.flipped += off;
        let left_out = (rows as f64 * FLIPPED_ROWS) as usize;
        let error = errors.get(left_out).copied().unwrap_or(0.0);
        self.note(what, error, ROW, || {
            format!("{what}: {off} of {rows} rows are off by more than {ROW:.0e}")
        });
    }

    /// A failure that is no comparison, for example a refused step.
    pub fn refuse(&mut self, why: String) {
        self.done += 1;
        self.fail(f64::INFINITY, why);
    }

    /// The line.
    pub fn into_result(self, name: String, kind: &str) -> VectorResult {
        let ok = self.failures.is_empty() && self.done > 0;
        let (worst_error, tolerance, at) = match self.worst {
            Some((ratio, error, tolerance, what)) if ratio > 0.0 => (error, tolerance, what),
            _ => (0.0, 0.0, String::new()),
        };
        let detail = if self.done == 0 {
            "nothing was compared".to_string()
        } else if !ok {
            summary(&self.failures)
        } else if at.is_empty() {
            format!("{} comparisons, all exact", self.done)
        } else {
            let mut text = format!("{} comparisons, worst at {at}", self.done);
            if self.flipped > 0 {
                text.push_str(&format!(", {} flipped rows", self.flipped));
            }
            text
        };
        VectorResult { name, kind: kind.to_string(), worst_error, tolerance, ok, detail }
    }

    /// Highest error of each row, highest first; `None` after a failure if there are no rows to compare.
    fn row_errors(&mut self, what: &str, want: &[f32], got: &[f32], width: usize) -> Option<Vec<f64>> {
        self.done += 1;
        if want.len() != got.len() || width == 0 {
            self.fail(f64::INFINITY, format!("{what}: {} values instead of {}", got.len(), want.len()));
            return None;
        }
        let mut errors: Vec<f64> = (want.chunks_exact(width).zip(got.chunks_exact(width)))
            .map(|(w, g)| w.iter().zip(g).map(|(w, g)| difference(*w, *g)).fold(0.0, f64::max))
            .collect();
        errors.sort_by(|a, b| b.total_cmp(a));
        Some(errors)
    }

    fn note(&mut self, what: &str, error: f64, tolerance: f64, failure: impl Fn() -> String) {
        if error > tolerance {
            self.failures.push(failure());
        }
        let ratio = match (error, tolerance) {
            (0.0, _) => 0.0,
            (_, 0.0) => f64::INFINITY,
            _ => error / tolerance,
        };
        self.raise(ratio, error, tolerance, what);
    }

    fn fail(&mut self, error: f64, why: String) {
        let what = why.clone();
        self.failures.push(why);
        self.raise(f64::INFINITY, error, 0.0, &what);
    }

    fn raise(&mut self, ratio: f64, error: f64, tolerance: f64, what: &str) {
        let higher = match &self.worst {
            None => true,
            Some((before, ..)) => ratio > *before,
        };
        if higher {
            self.worst = Some((ratio, error, tolerance, what.to_string()));
        }
    }
}

/// Absolute difference; equal infinities have none, NaN differs without bound.
fn difference(want: f32, got: f32) -> f64 {
    if want == got {
        return 0.0;
    }
    let d = (f64::from(want) - f64::from(got)).abs();
    if d.is_nan() { f64::INFINITY } else { d }
}

fn finite(values: &[f32]) -> impl Iterator<Item = f64> {
    values.iter().map(|v| f64::from(*v)).filter(|v| v.is_finite())
}

/// The first few failures, and how many there are besides.
fn summary(failures: &[String]) -> String {
    const SHOWN: usize = 3;
    let mut text = failures.iter().take(SHOWN).cloned().collect::<Vec<_>>().join("; ");
    if failures.len() > SHOWN {
        text.push_str(&format!("; and {} more", failures.len() - SHOWN));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(f: impl Fn(&mut Checks)) -> VectorResult {
        let mut checks = Checks::default();
        f(&mut checks);
        checks.into_result("x".to_string(), "kind")
    }

    #[test]
    fn the_worst_ratio_of_error_to_tolerance_is_shown() {
        let r = line(|c| {
            c.close("a", &[1.0], &[1.5], 1.0);
            c.close("b", &[1.0], &[1.0625], 0.0625);
            c.equal("ids", &[1], &[1]);
        });
        assert!(r.ok);
        assert_eq!((r.worst_error, r.tolerance), (0.0625, 0.0625));
        assert_eq!(r.detail, "3 comparisons, worst at b");
    }

    #[test]
    fn one_differing_id_nan_or_missing_value_fails() {
        assert!(!line(|c| c.equal("ids", &[1, 2], &[1, 3])).ok);
        assert!(!line(|c| c.close("x", &[1.0], &[f32::NAN], 1e9)).ok);
        assert!(!line(|c| c.close("x", &[1.0, 2.0], &[1.0], 1e9)).ok);
        assert!(!line(|c| c.close("x", &[f32::NEG_INFINITY], &[0.0], 1e9)).ok);
        assert!(line(|c| c.close("x", &[f32::NEG_INFINITY], &[f32::NEG_INFINITY], 0.0)).ok);
        assert!(!line(|_| ()).ok, "a vector without a comparison proves nothing");
    }

    #[test]
    fn tolerances_grow_with_the_values_but_never_shrink_below_their_base() {
        let streams = |top: f32, error: f32| {
            let want = [top, 0.0, 0.0];
            line(|c| c.stream("s", &want, &[top, error, error], 1))
        };
        assert!(streams(80.0, 3.9e-4).ok);
        assert!(!streams(40.0, 2.1e-4).ok);
        assert!(!streams(1.0, 2.1e-4).ok);
        assert!(line(|c| c.logits("l", &[0.0, 0.1], &[0.99e-4, 0.1])).ok);
        assert!(!line(|c| c.logits("l", &[1.0, 0.1], &[1.0, 0.1003])).ok);
    }

    #[test]
    fn one_row_beyond_the_tolerance_of_streams_fails_whatever_the_others_are() {
        let want = vec![1.0; 300];
        for error in [2.2e-4, 8e-4, f32::NAN] {
            let mut got = want.clone();
            got[7] += error;
            let result = line(|c| c.stream("s", &want, &got, 1));
            assert!(!result.ok && result.detail.contains("1 of 300 rows"), "{result:?}");
        }
    }

    #[test]
    fn one_row_in_twenty_may_flip_and_no_more() {
        let want = vec![0.0; 80];
        let mut got = vec![5e-5; 80];
        got[7] = 1.0;
        let r = line(|c| c.most_rows("s", &want, &got, 4));
        assert!(r.ok, "{r:?}");
        assert_eq!((r.worst_error, r.tolerance), (f64::from(5e-5_f32), ROW));
        got[11] = 1.0;
        let r = line(|c| c.most_rows("s", &want, &got, 4));
        assert!(!r.ok);
        assert_eq!(r.worst_error, 1.0);
    }
}
