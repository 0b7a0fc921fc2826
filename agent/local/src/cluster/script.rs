//! `deepinfer script`: tells the planner a story and prints what came of it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use deepinfer_crds::DeepInferCluster;
use deepinfer_planner::script;

use super::args::ScriptArgs;
use super::file::ClusterFile;
use crate::report;

/// Runs a script.
pub fn run(args: ScriptArgs) -> Result<ExitCode> {
    let name = args.file.display();
    let text = fs::read_to_string(&args.file).with_context(|| format!("script {name}"))?;
    let folder = args.file.parent().unwrap_or(Path::new("")).to_path_buf();
    let load = |cluster: &str| load(&folder, cluster);
    let told = script::run(&text, &load).with_context(|| format!("script {name}"))?;
    report::print(&told)?;
    Ok(ExitCode::SUCCESS)
}

/// The cluster of a file, or of an example by its name.
fn load(folder: &Path, cluster: &str) -> Result<DeepInferCluster, String> {
    let example = PathBuf::from("examples/clusters").join(format!("{cluster}.yaml"));
    let beside = folder.join(cluster);
    let path = [beside, PathBuf::from(cluster), example].into_iter().find(|path| path.is_file());
    let path = path.ok_or_else(|| format!("{cluster}: neither a file nor one of examples/clusters"))?;
    let file = ClusterFile::read(&path).map_err(|error| error.to_string())?;
    Ok(file.parse()?.cluster)
}
