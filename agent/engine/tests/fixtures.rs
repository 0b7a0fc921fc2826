//! The fixtures are the ones that the oracle's scripts made: every file, and the scripts themselves, by
//! digest.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use sha2::{Digest, Sha256};

/// Contents of DIGESTS.json.
#[derive(Deserialize)]
struct Digests {
    format: u32,
    files: BTreeMap<String, String>,
    sources: BTreeMap<String, String>,
}

fn e2e() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../e2e")
}

fn digest(path: &Path) -> String {
    let bytes = fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Every file below a directory, by relative path; digests and descriptions at the top aside.
fn files_below(dir: &Path) -> BTreeSet<String> {
    let (mut found, mut open) = (BTreeSet::new(), vec![dir.to_path_buf()]);
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(&next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                open.push(path);
                continue;
            }
            let relative: Vec<&str> =
                path.strip_prefix(dir).unwrap().iter().map(|part| part.to_str().unwrap()).collect();
            found.insert(relative.join("/"));
        }
    }
    found.remove("DIGESTS.json");
    found.remove("README.md");
    found
}

fn check(dir: &str, at_least: usize) {
    let dir = e2e().join(dir);
    let digests: Digests = serde_json::from_slice(&fs::read(dir.join("DIGESTS.json")).unwrap()).unwrap();
    assert_eq!(digests.format, 1);
    let listed: BTreeSet<String> = digests.files.keys().cloned().collect();
    assert_eq!(files_below(&dir), listed, "{}: files and DIGESTS.json differ", dir.display());
    assert!(listed.len() >= at_least, "{} files", listed.len());
    for (file, want) in &digests.files {
        assert_eq!(digest(&dir.join(file)), *want, "{}/{file} is not what the scripts made", dir.display());
    }
    assert!(!digests.sources.is_empty());
    for (script, want) in &digests.sources {
        let path = e2e().join("oracle").join(script);
        assert_eq!(digest(&path), *want, "{}: changed since it made {}", path.display(), dir.display());
    }
}

#[test]
fn the_golden_files_are_those_that_the_scripts_made() {
    check("golden", 30);
}

#[test]
fn the_files_of_the_other_shapes_are_those_that_the_scripts_made() {
    check("shapes", 50);
}
