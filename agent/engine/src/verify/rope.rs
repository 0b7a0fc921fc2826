//! `rope`: rotations of the real configuration, up to the last position of its context.

use deepinfer_kernels::Backend;

use super::checks::{Checks, ROPE};
use super::numbers::{buffer, contents};
use super::{Case, Stop};
use crate::model::rope::{frequencies, push_cos_sin};
use crate::shape::RopeScaling;

/// RoPE base of window-only layers.
const PLAIN_THETA: f64 = 10_000.0;
/// RoPE base of layers with compressed KV, and their YaRN.
const COMPRESSED_THETA: f64 = 160_000.0;
const COMPRESSED_SCALING: RopeScaling =
    RopeScaling { factor: 16.0, beta_fast: 32.0, beta_slow: 1.0, original_max_position_embeddings: 65_536 };

/// The engine's frequencies and tables, and the backend's rotation with them.
pub(super) fn run<B: Backend>(case: &Case<'_, B>, checks: &mut Checks) -> Result<(), Stop> {
    let file = case.vector()?;
    let (shape, x) = file.floats("x")?;
    let [rows, heads, width] = *shape else {
        return Err(case.bad(format!("x has shape {shape:?}, [rows, heads, width] is needed")).into());
    };
    let (_, positions) = file.whole("positions")?;
    if positions.len() != rows {
        return Err(case.bad(format!("{} positions of {rows} rows", positions.len())).into());
    }
    let backend = (case.backend)();
    for (kind, theta, scaling, inverse) in
        [("swa", PLAIN_THETA, None, false), ("compressed", COMPRESSED_THETA, Some(&COMPRESSED_SCALING), true)]
    {
        let name = format!("freqs_{kind}");
        let (_, want) = file.floats(&name)?;
        let frequencies = frequencies(2 * want.len(), theta, scaling);
        checks.close(&name, want, &frequencies, ROPE);
        let mut table = Vec::new();
        for position in positions {
            push_cos_sin(&frequencies, *position as usize, &mut table);
        }
        let table = buffer(&backend, &table);
        let forward = format!("rotated_{kind}");
        let ways = [(forward.clone(), false), (format!("{forward}_inverse"), true)];
        for (name, inverse) in &ways[..1 + usize::from(inverse)] {
            let want = file.shaped(name, shape)?;
            let mut rotated = buffer(&backend, x);
            backend.rope(&mut rotated, rows, heads, width, 2 * frequencies.len(), &table, *inverse);
            checks.close(name, want, &contents(&backend, &rotated, x.len()), ROPE);
        }
    }
    Ok(())
}
