//! A cluster file: YAML text in, a checked `DeepInferCluster` or all that is wrong with it out.
//! Invariants: every error has its line; structure and rules are reported together; what passes without a
//! warning is what kubectl makes of the same bytes.

mod scalar;
mod tree;
mod values;

use std::collections::BTreeMap;
use std::fmt;

use serde_json::Value;

pub(crate) use scalar::is_plain_text;
pub use tree::Position;

use crate::crd::Kind;
use crate::path::FieldPath;
use crate::{DeepInferCluster, cel, names, schema};
use tree::{Node, Tree};
use values::Values;

/// Largest file, in bytes: far above any real one, and little work for a parser.
pub const FILE_MAX_BYTES: usize = 1 << 20;
/// Deepest nesting: the schema is 12 deep.
pub const DEPTH_MAX: usize = 64;
/// Most values after aliases are followed; what a bomb of aliases runs into.
pub const VALUES_MAX: usize = 100_000;
/// Most documents of one file.
pub const DOCUMENTS_MAX: usize = 64;

/// A checked cluster file.
#[derive(Clone, Debug)]
pub struct Manifest {
    /// The cluster that it describes.
    pub cluster: DeepInferCluster,
    /// What is allowed and yet worth a look.
    pub warnings: Vec<ManifestError>,
    positions: BTreeMap<String, Position>,
}

impl Manifest {
    /// Where a field stands in the file, as `spec.decode.replicas`; for a field that is not there, where its
    /// nearest ancestor stands.
    pub fn position(&self, path: &str) -> Option<Position> {
        let mut path = path;
        loop {
            if let Some(found) = self.positions.get(path) {
                return Some(*found);
            }
            path = &path[..path.rfind(['.', '['])?];
        }
    }

    /// What an update of `running` to this cluster may not change, each with its line.
    pub fn check_update(&self, running: &DeepInferCluster) -> Vec<ManifestError> {
        let as_json = |c: &DeepInferCluster| serde_json::to_value(c).expect("a cluster is JSON");
        let broken = cel::validate(&as_json(&self.cluster), Some(&as_json(running)));
        let errors = broken.into_iter().map(|v| {
            let path = v.path.to_string();
            let at = self.position(&path).unwrap_or_default();
            ManifestError::at(at, path, v.message)
        });
        sorted(errors.collect())
    }
}

/// Something wrong (or, as a warning, odd) at a place of a file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ManifestError {
    /// Line, from 1. 0 if it is about the file as a whole.
    pub line: usize,
    /// Column in characters, from 1. 0 if it is about the file as a whole.
    pub column: usize,
    /// The field, as `spec.decode.replicas`. Empty if it is about the text.
    pub path: String,
    /// What is wrong and how to fix it.
    pub message: String,
}

impl fmt::Display for ManifestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line > 0 {
            write!(f, "{}:{}: ", self.line, self.column)?;
        }
        if !self.path.is_empty() {
            write!(f, "{}: ", self.path)?;
        }
        f.write_str(&self.message)
    }
}

impl ManifestError {
    fn file(message: impl Into<String>) -> Self {
        Self { line: 0, column: 0, path: String::new(), message: message.into() }
    }

    fn at(position: Position, path: impl fmt::Display, message: impl Into<String>) -> Self {
        let Position { line, column } = position;
        Self { line, column, path: path.to_string(), message: message.into() }
    }
}

/// Reads a cluster file from bytes. Errors: as [`parse`], and text that is not UTF-8.
pub fn parse_bytes(bytes: &[u8]) -> Result<Manifest, Vec<ManifestError>> {
    too_large(bytes.len())?;
    let text = std::str::from_utf8(bytes).map_err(|e| {
        let line = bytes[..e.valid_up_to()].iter().filter(|b| **b == b'\n').count() + 1;
        let message = "the file is not UTF-8 text: save it as UTF-8";
        vec![ManifestError::at(Position { line, column: 1 }, "", message)]
    })?;
    parse(text)
}

/// Reads a cluster file: exactly one DeepInferCluster; other documents are passed over with a warning.
/// Errors: all that is wrong, sorted by line.
pub fn parse(text: &str) -> Result<Manifest, Vec<ManifestError>> {
    too_large(text.len())?;
    let tree = tree::read(text).map_err(|e| vec![e])?;
    let mut errors = tree.errors.clone();
    let (document, mut warnings) = match choose(&tree) {
        Ok(chosen) => chosen,
        Err(more) => {
            errors.extend(more);
            return Err(sorted(errors));
        }
    };
    let mut values = values::convert(document);
    errors.append(&mut values.errors);
    warnings.extend(without_status(&mut values));
    let schema = schema::local(Kind::Cluster);
    warnings.extend(values.settle_words(&schema));
    let more = check(&schema, &values);
    // A scalar that could not be read has been reported; its type is no second mistake.
    errors.extend(more.into_iter().filter(|e| !values.unread.contains(&e.path)));
    if !errors.is_empty() {
        return Err(sorted(errors));
    }
    // Every rule passed, so the types must take it: if they do not, schema and types have come apart.
    let cluster = serde_json::from_value(values.root)
        .map_err(|e| vec![ManifestError::file(format!("the file can not be taken over: {e}"))])?;
    warnings.sort();
    Ok(Manifest { cluster, warnings, positions: values.positions })
}

fn too_large(bytes: usize) -> Result<(), Vec<ManifestError>> {
    if bytes <= FILE_MAX_BYTES {
        return Ok(());
    }
    let message = format!("the file has {bytes} bytes: at most {FILE_MAX_BYTES} are read");
    Err(vec![ManifestError::file(message)])
}

fn sorted(mut errors: Vec<ManifestError>) -> Vec<ManifestError> {
    errors.sort();
    errors.dedup();
    if errors.len() > schema::ERRORS_MAX {
        errors.truncate(schema::ERRORS_MAX);
        errors.push(ManifestError::file(format!("only the first {} errors are shown", schema::ERRORS_MAX)));
    }
    errors
}

/// The one document that is a cluster, and warnings about the others.
fn choose(tree: &Tree) -> Result<(&Node, Vec<ManifestError>), Vec<ManifestError>> {
    let filled: Vec<&Node> = tree.documents.iter().map(|d| &**d).filter(|d| !d.is_null()).collect();
    let (ours, others): (Vec<&Node>, Vec<&Node>) =
        filled.iter().partition(|d| d.text_of("kind") == Some(Kind::Cluster.name()));
    match (ours.as_slice(), others.as_slice()) {
        ([one], others) => {
            let passed_over = |d: &&Node| {
                let kind = d.text_of("kind").unwrap_or("a document without kind");
                ManifestError::at(
                    d.at,
                    "",
                    format!("{kind} is passed over: only DeepInferCluster is read here"),
                )
            };
            Ok((one, others.iter().map(passed_over).collect()))
        }
        ([], []) => Err(vec![ManifestError::file("the file is empty: it must hold a DeepInferCluster")]),
        // It is surely meant: its errors say what is wrong with apiVersion and kind.
        ([], [one]) if is_meant(one) => Ok((one, Vec::new())),
        ([], [one, ..]) => Err(vec![ManifestError::at(
            one.at,
            "",
            "no document of the file is a DeepInferCluster: begin with apiVersion: deepinfer.io/v1alpha1 and \
             kind: DeepInferCluster",
        )]),
        ([_, second, ..], _) => Err(vec![ManifestError::at(
            second.at,
            "",
            "a second DeepInferCluster in one file: keep each in a file of its own",
        )]),
    }
}

/// Whether a lone document is meant as one of ours.
fn is_meant(document: &Node) -> bool {
    let group = document.text_of("apiVersion").is_some_and(|v| v.starts_with(names::GROUP));
    let kind = document.text_of("kind");
    document.is_map()
        && (group || kind.is_none_or(|k| schema::nearest(k, [Kind::Cluster.name()].into_iter()).is_some()))
}

/// The first document of a text as JSON, without any check of its fields.
#[cfg(test)]
pub(crate) fn to_json(text: &str) -> Result<Value, Vec<ManifestError>> {
    let tree = tree::read(text).map_err(|e| vec![e])?;
    let Some(document) = tree.documents.first() else { return Ok(Value::Null) };
    let values = values::convert(document);
    if values.errors.is_empty() { Ok(values.root) } else { Err(values.errors) }
}

/// Takes the status away, as an API server does.
fn without_status(values: &mut Values) -> Option<ManifestError> {
    let object = values.root.as_object_mut()?;
    object.remove("status")?;
    let at = values.positions.get("status").copied().unwrap_or_default();
    Some(ManifestError::at(at, "status", "is passed over: it is written by the operator"))
}

/// Structure and rules of an object.
fn check(schema: &Value, values: &Values) -> Vec<ManifestError> {
    let structure = schema::check(schema, &values.root);
    let mut errors: Vec<ManifestError> = structure
        .iter()
        .map(|e| {
            let at = if e.about_name { values.name_at(&e.path) } else { values.value_at(&e.path) };
            ManifestError::at(at, &e.path, &e.message)
        })
        .collect();
    for broken in cel::validate(&values.root, None) {
        // A rule that stumbles over a wrong type or a missing field adds nothing to that error.
        let known = |p: &FieldPath| structure.iter().any(|e| e.path == *p);
        if (broken.unevaluated && !structure.is_empty()) || known(&broken.path) {
            continue;
        }
        errors.push(ManifestError::at(values.value_at(&broken.path), &broken.path, &broken.message));
    }
    errors
}
