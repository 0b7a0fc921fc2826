//! `deepinfer verify`: golden vectors on this machine, a line per vector.

use std::process::ExitCode;

use anyhow::{Result, ensure};
use deepinfer_engine::verify::{self, VectorResult};
use deepinfer_kernels::{Backend, Reference};

use crate::args::{BackendChoice, VerifyArgs};
use crate::machine;
use crate::report;

/// Runs the vectors; exit code 1 if one of them fails.
pub fn run(args: VerifyArgs) -> Result<ExitCode> {
    let results = match args.backend {
        BackendChoice::Reference => vectors(&args, &|| Reference)?,
        BackendChoice::Auto | BackendChoice::Cpu => {
            // Said before the first vector runs; afterwards the same choice cannot fail.
            machine::cpu(args.threads, args.simd)?;
            let make = || machine::cpu(args.threads, args.simd).expect("the same flags worked above");
            vectors(&args, &make)?
        }
    };
    ensure!(!results.is_empty(), "{} has no vector for this checkpoint", args.vectors.display());
    let failed = results.iter().filter(|r| !r.ok).count();
    report::print(&format!("{} vectors, {failed} failed\n", results.len()))?;
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn vectors<B: Backend>(args: &VerifyArgs, backend: &dyn Fn() -> B) -> Result<Vec<VectorResult>> {
    report::print(&format!(
        "{} on {}\n{:<34} {:<22} {:>12} {:>10}\n",
        args.checkpoint.display(),
        backend().name(),
        "vector",
        "kind",
        "worst error",
        "tolerance"
    ))?;
    // A reader that has gone does not stop the comparison: the exit code still tells.
    let mut show = |result: &VectorResult| drop(report::print(&line(result)));
    Ok(verify::run(backend, &args.checkpoint, &args.vectors, args.name.as_deref(), &mut show)?)
}

fn line(result: &VectorResult) -> String {
    let verdict = if result.ok { "ok" } else { "FAILED" };
    let [error, tolerance] = [result.worst_error, result.tolerance].map(figure);
    let VectorResult { name, kind, detail, .. } = result;
    format!("{name:<34} {kind:<22} {error:>12} {tolerance:>10}  {verdict:<6}  {detail}\n")
}

/// Zero and whole counts plainly, the rest with its magnitude.
fn figure(value: f64) -> String {
    if value == 0.0 {
        "0".to_owned()
    } else if value.fract() == 0.0 && value.abs() < 1e6 {
        format!("{value:.0}")
    } else {
        format!("{value:.1e}")
    }
}
