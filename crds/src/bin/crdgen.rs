//! Prints the CRDs as YAML, or writes them into a folder: `crdgen [FOLDER]`.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use deepinfer_crds::crd::{Kind, definition};

fn main() -> ExitCode {
    let folder = std::env::args_os().nth(1).map(PathBuf::from);
    for kind in Kind::ALL {
        let yaml = definition(kind).yaml();
        let outcome = match &folder {
            None => writeln!(std::io::stdout(), "---\n{}", yaml.trim_end()),
            Some(folder) => std::fs::write(folder.join(format!("{}.yaml", kind.plural())), yaml),
        };
        if let Err(e) = outcome {
            eprintln!("{}: {e}", kind.plural());
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
