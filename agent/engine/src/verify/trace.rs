//! Recorded runs of a whole prompt: `exact_full_trace`, `exact_long`, `image_span`.
//!
//! The file says what is compared: every tensor in it but the inputs. A name that ends in `_lastN` holds the last N
//! rows of what the engine records under the rest of the name.

use deepinfer_kernels::Backend;
use deepinfer_serving::batch::{ImageSpan, Logits};

use super::checks::Checks;
use super::session::{Session, Setup, Step, argmax};
use super::tensors::{Tensor, Values, VectorFile};
use super::{Case, Stop, VerifyError};
use crate::record::{Probe, Recorded};

/// Tensors that feed the run.
const INPUTS: [&str; 2] = ["image_mask", "span_embeddings"];

/// Runs the prompt in one step and compares all that the file records.
pub(super) fn run<B: Backend>(case: &Case<'_, B>, checks: &mut Checks) -> Result<(), Stop> {
    let file = case.vector()?;
    let images = images(case, &file)?;
    let tokens = case.tokens()?;
    let rows = tokens.len();
    let mut probe = Probe::default();
    let step = Step { tokens: tokens.to_vec(), logits: Logits::All, prompt_tokens: Some(rows), images };
    let setup = Setup::exact(case.numerics, rows, rows);
    let mut session = case.session(setup)?;
    session.step(step, Some(&mut probe))?;
    compare(&file, &probe, &session, checks);
    Ok(())
}

/// The image span of the case, with its embeddings.
fn images<B: Backend>(case: &Case<'_, B>, file: &VectorFile) -> Result<Vec<ImageSpan>, VerifyError> {
    let Some([first, end]) = case.entry.span else {
        return Ok(Vec::new());
    };
    let tokens = case.tokens()?.len();
    if first >= end || end > tokens {
        return Err(case.bad(format!("span [{first}, {end}] of {tokens} tokens")));
    }
    let hidden = case.checkpoint.shape.hidden_size;
    let embeddings = file.shaped("span_embeddings", &[end - first, hidden])?.to_vec();
    let (_, mask) = file.whole("image_mask")?;
    let span: Vec<i64> = (0..tokens).map(|p| i64::from((first..end).contains(&p))).collect();
    if mask != span {
        return Err(case.bad(format!("image_mask is not the span [{first}, {end}]")));
    }
    Ok(vec![ImageSpan { first, embeddings }])
}

fn compare<B: Backend>(file: &VectorFile, probe: &Probe, session: &Session<B>, checks: &mut Checks) {
    for (name, want) in file.iter().filter(|(name, _)| !INPUTS.contains(name)) {
        let (key, last) = split(name);
        match (key, &want.values) {
            ("logits", Values::Floats(values)) => {
                let got = session.logits();
                let from = got.len().saturating_sub(last.unwrap_or(usize::MAX).saturating_mul(want.width()));
                checks.logits(name, values, &got[from..]);
            }
            ("argmax", Values::Whole(values)) => {
                let got: Vec<i64> = session.rows().map(|row| i64::from(argmax(row))).collect();
                checks.equal(name, values, &got);
            }
            _ => match probe.get(key) {
                Some(got) => recorded(name, want, last, got, checks),
                None => checks.refuse(format!("the engine does not record `{key}`")),
            },
        }
    }
}

/// The engine's name of a recorded tensor, and how many last rows it holds (`None`: all).
fn split(name: &str) -> (&str, Option<usize>) {
    match name.rsplit_once("_last") {
        Some((key, rows)) if !rows.is_empty() => match rows.parse() {
            Ok(rows) => (key, Some(rows)),
            Err(_) => (name, None),
        },
        _ => (name, None),
    }
}

/// Compares one recorded tensor by what it is.
fn recorded(name: &str, want: &Tensor, last: Option<usize>, got: &Recorded, checks: &mut Checks) {
    let part = last.map_or(usize::MAX, |rows| rows.saturating_mul(want.width()));
    match (&want.values, got) {
        (Values::Floats(floats), Recorded::Floats { values, .. }) => {
            let values = &values[values.len().saturating_sub(part)..];
            checks.stream(name, floats, values, want.width());
        }
        (Values::Whole(values), Recorded::Whole { values: got, .. }) => {
            let got = &got[got.len().saturating_sub(part)..];
            let mut got: Vec<i64> = got.iter().map(|v| i64::from(*v)).collect();
            let mut values = values.clone();
            if name.ends_with("route_ids") {
                // The set decides what is computed. The order among the picked is compared through their weights,
                // which are recorded in it: two that are equal up to rounding may change places.
                sort_rows(&mut values, want.width());
                sort_rows(&mut got, want.width());
            }
            checks.equal(name, &values, &got);
        }
        _ => checks.refuse(format!("{name}: the engine records another kind of number")),
    }
}

fn sort_rows(values: &mut [i64], width: usize) {
    values.chunks_mut(width.max(1)).for_each(<[i64]>::sort_unstable);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_last_rows_is_read_off_the_name() {
        assert_eq!(split("layers.3.stream_out_last8"), ("layers.3.stream_out", Some(8)));
        assert_eq!(split("logits"), ("logits", None));
        assert_eq!(split("exact_logits_last"), ("exact_logits_last", None));
        assert_eq!(split("x_lastly"), ("x_lastly", None));
    }
}
