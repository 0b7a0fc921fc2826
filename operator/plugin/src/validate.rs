//! `validate`: everything that is wrong with cluster files, without a cluster.
//! Invariant: the schema, the rules and the planner are those that the API server and the operator use.

use std::fmt::Write as _;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result};
use deepinfer_crds::condition::reason;
use deepinfer_crds::manifest::{self, FILE_MAX_BYTES, Manifest, ManifestError};
use deepinfer_planner::{KubernetesTarget, Problem, Target, World, plan};
use serde::Serialize;

use crate::args::ValidateArgs;
use crate::output::{self, Outcome};

/// What a line of the outcome means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
enum Severity {
    /// The API server refuses the file.
    Error,
    /// The operator refuses the cluster: nothing is created.
    Refused,
    /// Worth a look.
    Warning,
}

/// Something about a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Remark {
    severity: Severity,
    file: String,
    /// From 1; 0 if it is about the file as a whole.
    line: usize,
    column: usize,
    path: String,
    message: String,
}

/// Checks the files.
///
/// # Errors
/// If one cannot be read.
pub fn run(args: &ValidateArgs) -> Result<Outcome> {
    let mut all = Vec::new();
    let mut good = Vec::new();
    for path in &args.files {
        let (name, bytes) = read(path)?;
        let remarks = check(&name, &bytes);
        if remarks.iter().all(|r| r.severity == Severity::Warning) {
            good.push(name);
        }
        all.extend(remarks);
    }
    if args.output.is_some() {
        output::json(&all)?;
    } else {
        output::print(&text(&all, &good))?;
    }
    Ok(Outcome::problem_if(good.len() < args.files.len()))
}

fn read(path: &Path) -> Result<(String, Vec<u8>)> {
    // One byte more than allowed, so that the check says that the file is too large.
    let limit = FILE_MAX_BYTES as u64 + 1;
    let mut bytes = Vec::new();
    if path == Path::new("-") {
        std::io::stdin().lock().take(limit).read_to_end(&mut bytes).context("standard input")?;
        return Ok(("standard input".to_owned(), bytes));
    }
    let name = path.display().to_string();
    let file = std::fs::File::open(path).with_context(|| format!("-f {name}"))?;
    file.take(limit).read_to_end(&mut bytes).with_context(|| format!("-f {name}"))?;
    Ok((name, bytes))
}

fn check(file: &str, bytes: &[u8]) -> Vec<Remark> {
    let of = |severity: Severity, e: &ManifestError| Remark {
        severity,
        file: file.to_owned(),
        line: e.line,
        column: e.column,
        path: e.path.clone(),
        message: e.message.clone(),
    };
    match manifest::parse_bytes(bytes) {
        Err(errors) => errors.iter().map(|e| of(Severity::Error, e)).collect(),
        Ok(manifest) => {
            let warnings = manifest.warnings.iter().map(|e| of(Severity::Warning, e));
            warnings.chain(planned(file, &manifest)).collect()
        }
    }
}

/// What the operator would say, as far as it depends on the file alone.
fn planned(file: &str, manifest: &Manifest) -> Vec<Remark> {
    let of = |severity: Severity, problem: &Problem| {
        let at = manifest.position(&problem.path).unwrap_or_default();
        Remark {
            severity,
            file: file.to_owned(),
            line: at.line,
            column: at.column,
            path: problem.path.clone(),
            message: format!("{}: {}", problem.reason, problem.message),
        }
    };
    let mut cluster = manifest.cluster.clone();
    let namespace = cluster.metadata.namespace.take().unwrap_or_else(|| "default".to_owned());
    let mut world = World::new(namespace, 0);
    world.user_applies(cluster);
    let target = Target::Kubernetes(KubernetesTarget::new("gateway", "http://operator"));
    let report = plan(&world, &target).report;
    // What the file refers to is looked up in a cluster, which there is none of here.
    let knowable = report.refused.iter().filter(|p| p.reason != reason::REF_NOT_FOUND);
    let refused = knowable.map(|p| of(Severity::Refused, p));
    refused.chain(report.ignored.iter().map(|p| of(Severity::Warning, p))).collect()
}

/// Lines of `file:line:column: path: message`, as editors understand them.
fn text(remarks: &[Remark], good: &[String]) -> String {
    let mut text = String::new();
    for Remark { severity, file, line, column, path, message } in remarks {
        let place = if *line > 0 { format!("{file}:{line}:{column}") } else { file.clone() };
        let path = if path.is_empty() { String::new() } else { format!("{path}: ") };
        let kind = match severity {
            Severity::Error => "",
            Severity::Refused => " (the operator would create nothing)",
            Severity::Warning => " (warning)",
        };
        let _ = writeln!(text, "{place}: {path}{message}{kind}");
    }
    for name in good {
        let _ = writeln!(text, "{name}: valid");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "apiVersion: deepinfer.io/v1alpha1\nkind: DeepInferCluster\nmetadata:\n  name: a\nspec:\n  \
        accelerator:\n    vendor: cpu\n  engine:\n    image: x\n  model:\n    name: m\n    source:\n      \
        uri: file:///m\n  prefill:\n    replicas: 1\n  decode:\n    replicas: 1\n    supernode:\n      nodes: 1\n";

    #[test]
    fn a_good_file_is_valid() {
        let remarks = check("c.yaml", GOOD.as_bytes());
        assert!(remarks.iter().all(|r| r.severity == Severity::Warning), "{remarks:?}");
        assert!(text(&[], &["c.yaml".to_owned()]).ends_with("c.yaml: valid\n"));
    }

    #[test]
    fn all_errors_are_named_with_their_lines_rules_included() {
        let bad = GOOD.replace("vendor: cpu", "vendor: tpu").replace("name: a\n", "name: A\n");
        let remarks = check("c.yaml", bad.as_bytes());
        let text = text(&remarks, &[]);
        assert!(text.contains("c.yaml:4:9: metadata.name: must begin with a letter"), "{text}");
        assert!(text.contains("c.yaml:7:13: spec.accelerator.vendor: "), "{text}");
    }

    #[test]
    fn what_this_release_does_not_do_is_named_where_it_stands() {
        let asked = GOOD.replace("      nodes: 1\n", "      nodes: 1\n      spareNodes: 1\n");
        let remarks = check("c.yaml", asked.as_bytes());
        let refused: Vec<_> = remarks.iter().filter(|r| r.severity == Severity::Refused).collect();
        assert_eq!(refused.len(), 1, "{remarks:?}");
        assert_eq!((refused[0].line, refused[0].path.as_str()), (20, "spec.decode.supernode.spareNodes"));
        assert!(text(&remarks, &[]).contains("create nothing"));
    }
}
