//! `deepinfer validate`: everything that is wrong with cluster files, at once.

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::process::ExitCode;

use anyhow::Result;
use deepinfer_planner::{Report, World, plan};

use super::args::ValidateArgs;
use super::file::ClusterFile;
use super::target::{LocalModel, local_target};
use crate::report;

/// Checks the files; exit code 1 if one has an error.
pub fn run(args: ValidateArgs) -> Result<ExitCode> {
    let mut good = true;
    let mut text = String::new();
    for path in &args.files {
        let file = ClusterFile::read(path)?;
        match file.parse() {
            Ok(manifest) => {
                text += &file.lines(&manifest.warnings).replace('\n', " (warning)\n");
                let model = LocalModel::look(&manifest.cluster, &file.base);
                let mut world = World::new("local", 0);
                world.user_applies(manifest.cluster);
                let target = local_target(&model, SocketAddr::from(([127, 0, 0, 1], 8000)), None);
                let report = plan(&world, &target).report;
                let _ = writeln!(text, "{}: valid", file.name);
                text += &notes(&file.name, &report);
            }
            Err(lines) => {
                good = false;
                text += &lines;
            }
        }
    }
    report::print(&text)?;
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// What the planner has to say about a valid file on this machine.
fn notes(name: &str, report: &Report) -> String {
    let mut text = String::new();
    for problem in report.refused.iter().chain(&report.ignored) {
        let _ = writeln!(text, "{name}: note: {problem}");
    }
    for scaled in &report.scaled_down {
        let _ = writeln!(text, "{name}: note: on this machine {scaled}");
    }
    text
}
