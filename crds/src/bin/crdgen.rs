//! Prints the CRDs and the admission policies as YAML, or writes them into a folder: `crdgen [FOLDER]`.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use deepinfer_crds::crd::{Kind, definition};
use deepinfer_crds::{names, policy};

fn main() -> ExitCode {
    let folder = std::env::args_os().nth(1).map(PathBuf::from);
    let crds = Kind::ALL.into_iter().map(|kind| (kind.plural(), definition(kind).yaml()));
    for (name, yaml) in crds.chain([("policies", policy::yaml(names::rbac::OPERATOR_USER))]) {
        let outcome = match &folder {
            None => writeln!(std::io::stdout(), "---\n{}", yaml.trim_end()),
            Some(folder) => std::fs::write(folder.join(format!("{name}.yaml")), yaml),
        };
        if let Err(e) = outcome {
            eprintln!("{name}: {e}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
