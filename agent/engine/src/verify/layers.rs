//! `layer_local_quantized`: every layer on its recorded input, in the numerics of caches and activations.
//!
//! One rounding flip early on spreads through a whole run, so each layer is fed what was recorded before it and
//! compared by itself. Rows may still differ where a value sat on a rounding edge or a selection flipped.

use deepinfer_kernels::Backend;
use deepinfer_serving::batch::Logits;

use super::checks::Checks;
use super::session::{Setup, Step};
use super::{Case, Stop};
use crate::record::{Probe, Recorded};

/// Runs the prompt once with the input of every layer replaced.
pub(super) fn run<B: Backend>(case: &Case<'_, B>, checks: &mut Checks) -> Result<(), Stop> {
    let file = case.vector()?;
    let tokens = case.tokens()?;
    let shape = &case.checkpoint.shape;
    let (rows, copies, hidden) = (tokens.len(), shape.hc_mult, shape.hidden_size);
    let mut probe = Probe::default();
    for layer in 0..shape.num_hidden_layers {
        let before = match layer {
            0 => "stream_0".to_string(),
            n => format!("layers.{}.stream_out", n - 1),
        };
        let stream = file.shaped(&before, &[rows, copies, hidden])?;
        let pre = file.shaped(&format!("layers.{layer}.pre_in"), &[rows, copies])?;
        probe.force(layer, stream.to_vec(), pre.to_vec());
    }
    let step =
        Step { tokens: tokens.to_vec(), logits: Logits::All, prompt_tokens: Some(rows), ..Step::default() };
    let setup = Setup::exact(case.numerics, rows, rows);
    let mut session = case.session(setup)?;
    session.step(step, Some(&mut probe))?;
    for layer in 0..shape.num_hidden_layers {
        for (key, needed) in [("stream_out", true), ("compressed_kv", false), ("index_k", false)] {
            let key = format!("layers.{layer}.{key}");
            if file.find(&key).is_none() && !needed {
                continue;
            }
            let (shape, want) = file.floats(&key)?;
            let width = shape.iter().skip(1).product();
            match probe.get(&key) {
                Some(Recorded::Floats { values, .. }) => checks.most_rows(&key, want, values, width),
                _ => checks.refuse(format!("the engine does not record `{key}`")),
            }
        }
    }
    if let Some(want) = file.find("logits") {
        let (_, values) = file.floats("logits")?;
        checks.most_rows("logits", values, session.logits(), want.width());
    }
    Ok(())
}
