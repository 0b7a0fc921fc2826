//! `deepinfer make-random`: a checkpoint of random weights.

use std::process::ExitCode;

use anyhow::{Context, Result};
use deepinfer_engine::random;
use indicatif::{ProgressBar, ProgressStyle};

use crate::args::MakeRandomArgs;
use crate::report;

/// Writes it, with progress on standard error.
pub fn run(args: MakeRandomArgs) -> Result<ExitCode> {
    let bar = ProgressBar::new(0);
    let style = ProgressStyle::with_template(
        "{bar:40} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} eta {eta}",
    )
    .expect("the template is a constant");
    bar.set_style(style);
    let written =
        random::write(&args.config, &args.out, args.seed, args.tokenizer.as_deref(), &mut |done, total| {
            bar.set_length(total);
            bar.set_position(done);
        })
        .with_context(|| format!("random checkpoint {}", args.out.display()))?;
    bar.finish_and_clear();
    report::print(&format!(
        "wrote {} tensors, {} parameters, {} in {} files to {}\n",
        report::count(written.tensors as u64),
        report::count(written.parameters),
        report::bytes(written.bytes),
        written.files,
        args.out.display()
    ))?;
    Ok(ExitCode::SUCCESS)
}
