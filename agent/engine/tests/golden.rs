//! Every recorded vector of the repository, on both backends, by the same code that `deepinfer verify` runs.

// Helpers of tests unwrap like tests; the lint knows functions marked as tests only.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::path::{Path, PathBuf};

use deepinfer_engine::verify::{self, VectorResult, VerifyError};
use deepinfer_kernels::{Backend, Cpu, Reference};
use support::repository;

/// Runs one checkpoint of a golden directory and fails with all lines if one of them does.
fn passes<B: Backend>(backend: &dyn Fn() -> B, golden: &str, checkpoint: &Path) -> Vec<VectorResult> {
    let results = verify::run(backend, checkpoint, &repository(golden), None, &mut |_| ())
        .unwrap_or_else(|e| panic!("{}: {e}", checkpoint.display()));
    let lines: Vec<String> = results
        .iter()
        .map(|r| {
            let verdict = if r.ok { "ok" } else { "FAILED" };
            format!("{:<36} {:.2e} of {:.2e} {verdict}: {}", r.name, r.worst_error, r.tolerance, r.detail)
        })
        .collect();
    println!("{}\n{}", checkpoint.display(), lines.join("\n"));
    assert!(results.iter().all(|r| r.ok), "{}:\n{}", checkpoint.display(), lines.join("\n"));
    results
}

/// Kinds among the results.
fn kinds(results: &[VectorResult]) -> Vec<&str> {
    let mut kinds: Vec<&str> = results.iter().map(|r| r.kind.as_str()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    kinds
}

/// Checkpoint directories inside a golden directory.
fn checkpoints(golden: &str) -> Vec<PathBuf> {
    let dir = repository(golden);
    let mut found: Vec<PathBuf> = fs::read_dir(&dir)
        .unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.join("config.json").is_file())
        .collect();
    found.sort();
    found
}

/// A copy of a checkpoint in which only what the real one has is left.
fn without_engram_files(checkpoint: &Path, into: &Path) -> PathBuf {
    let copy = into.join(checkpoint.file_name().unwrap());
    fs::create_dir(&copy).unwrap();
    let mut left_out = 0;
    for entry in fs::read_dir(checkpoint).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if ["engram_token_map.json", "engram_hash.json"].contains(&name) {
            left_out += 1;
        } else {
            fs::copy(&path, copy.join(name)).unwrap();
        }
    }
    assert_eq!(left_out, 2, "{} has both files", checkpoint.display());
    copy
}

fn golden_vectors_pass<B: Backend>(backend: &dyn Fn() -> B) {
    let dir = tempfile::tempdir().unwrap();
    let mut seen = Vec::new();
    for name in ["tiny-bf16", "tiny-quant"] {
        let original = repository("e2e/golden").join(name);
        let copy = without_engram_files(&original, dir.path());
        seen.extend(passes(backend, "e2e/golden", &copy));
    }
    assert_eq!(
        kinds(&seen),
        [
            "bounded_replay",
            "engram_real",
            "exact_full_trace",
            "exact_long",
            "greedy_decode",
            "image_span",
            "layer_local_quantized",
            "number_formats",
            "rope",
            "spec_decode",
            "speculative_greedy"
        ],
        "every kind is there"
    );
}

fn shapes_pass<B: Backend>(backend: &dyn Fn() -> B) {
    let found = checkpoints("e2e/shapes");
    assert!(found.len() >= 5, "five other shapes, found {found:?}");
    for checkpoint in found {
        let results = passes(backend, "e2e/shapes", &checkpoint);
        assert!(results.len() >= 5, "{}: {} vectors", checkpoint.display(), results.len());
    }
}

#[test]
fn golden_vectors_pass_on_reference_without_the_precomputed_engram_files() {
    golden_vectors_pass(&|| Reference);
}

#[test]
fn golden_vectors_pass_on_cpu_without_the_precomputed_engram_files() {
    golden_vectors_pass(&support::cpu);
}

#[test]
fn five_other_shapes_pass_on_reference() {
    shapes_pass(&|| Reference);
}

#[test]
fn five_other_shapes_pass_on_cpu() {
    shapes_pass(&support::cpu);
}

#[test]
fn a_wrong_weight_fails_the_vectors_that_see_it_and_leaves_the_others() {
    let dir = tempfile::tempdir().unwrap();
    let copy = without_engram_files(&repository("e2e/golden/tiny-bf16"), dir.path());
    let shard = copy.join("model-00001-of-00001.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    // The last tensor bytes of the file belong to some weight; turning one value's exponent shows.
    let last = bytes.len() - 1;
    bytes[last] ^= 0x30;
    let half = (last / 2) | 1;
    bytes[half] ^= 0x30;
    fs::write(&shard, bytes).unwrap();
    let results = verify::run(&|| Cpu::new(1), &copy, &repository("e2e/golden"), None, &mut |_| ()).unwrap();
    let failed: Vec<&str> = results.iter().filter(|r| !r.ok).map(|r| r.kind.as_str()).collect();
    assert!(failed.contains(&"exact_long"), "{failed:?}");
    assert!(!failed.contains(&"number_formats") && !failed.contains(&"rope"), "{failed:?}");
}

#[test]
fn unknown_kinds_fail_and_unknown_names_and_broken_files_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let model = repository("e2e/golden/tiny-bf16");
    let run = |manifest: &str, name: Option<&str>| {
        fs::write(dir.path().join("manifest.json"), manifest).unwrap();
        verify::run(&|| Cpu::new(1), &model, dir.path(), name, &mut |_| ())
    };
    let results = run(r#"[{"kind": "sorcery", "checkpoint": "tiny-bf16", "tokens": [3]}]"#, None).unwrap();
    assert!(results.len() == 1 && !results[0].ok);
    assert!(results[0].detail.contains("sorcery"), "{}", results[0].detail);

    let error = run(r#"[{"kind": "rope", "checkpoint": "other"}]"#, None).unwrap_err();
    assert!(matches!(error, VerifyError::NoEntries { .. }));
    assert!(error.to_string().contains("other"), "{error}");

    let manifest =
        r#"[{"kind": "exact_long", "file": "none.safetensors", "checkpoint": "x", "tokens": [3]}]"#;
    let error = run(manifest, Some("x")).unwrap_err().to_string();
    assert!(error.contains("none.safetensors"), "{error}");

    let error = run("[{", None).unwrap_err().to_string();
    assert!(error.contains("manifest.json"), "{error}");
}
