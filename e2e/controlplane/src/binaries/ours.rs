//! The binaries of this workspace: a test finds them beside itself.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::Error;

/// A binary of this workspace, from the same build as the program that asks; built if it is missing.
///
/// `cargo test --workspace` has built all of them. A test that is run alone uses what lies there, which may be older
/// than the sources: build the crate first.
///
/// # Errors
/// If it is missing and cargo cannot build it.
pub fn workspace_binary(name: &'static str) -> Result<PathBuf, Error> {
    let at = |error| Error::Io("the path of this program".into(), error);
    let this = std::env::current_exe().map_err(at)?;
    let profile = profile_folder(&this).ok_or_else(|| {
        at(io::Error::other(format!("{} does not lie in a target folder of cargo", this.display())))
    })?;
    let binary = profile.join(name);
    if !binary.is_file() {
        build(name, profile)?;
    }
    Ok(binary)
}

/// Where plugins of kubectl from this workspace's build lie.
pub(crate) fn plugin_folder() -> Option<PathBuf> {
    let this = std::env::current_exe().ok()?;
    profile_folder(&this).map(Path::to_path_buf)
}

/// `target/debug` of `target/debug/deps/plane-0123` or `target/debug/controlplane`.
fn profile_folder(program: &Path) -> Option<&Path> {
    let folder = program.parent()?;
    match folder.file_name()?.to_str()? {
        "deps" | "examples" => folder.parent(),
        _ => Some(folder),
    }
}

fn build(name: &'static str, profile: &Path) -> Result<(), Error> {
    let package = if name == "controlplane" { "deepinfer-controlplane" } else { name };
    eprintln!("controlplane: building {name} with cargo");
    let profile_name = match profile.file_name().and_then(|n| n.to_str()) {
        Some("debug") | None => "dev",
        Some(other) => other,
    };
    let mut command = Command::new("cargo");
    command.args(["build", "--quiet", "--package", package, "--bin", name, "--profile", profile_name]);
    command.current_dir(env!("CARGO_MANIFEST_DIR"));
    if let Some(target) = profile.parent() {
        command.arg("--target-dir").arg(target);
    }
    let output = command.output().map_err(|error| Error::Io("cargo build".into(), error))?;
    if output.status.success() {
        return Ok(());
    }
    let tail = String::from_utf8_lossy(&output.stderr).into_owned();
    Err(Error::Build { name, status: output.status.to_string(), tail })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_finds_the_binaries_one_folder_up() {
        let folder = profile_folder(Path::new("/t/debug/deps/plane-0123456789abcdef"));
        assert_eq!(folder, Some(Path::new("/t/debug")));
        assert_eq!(profile_folder(Path::new("/t/release/controlplane")), Some(Path::new("/t/release")));
    }
}
