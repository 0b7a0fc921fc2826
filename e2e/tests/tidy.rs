//! The house is tidy: each test is one rule of ARCHITECTURE.md, and each rule is shown to bite.

use std::process::Command;

use deepinfer_e2e::tidy::{self, Finding, SourceFile};

fn expect_clean(findings: Vec<Finding>) {
    let lines: Vec<String> = findings.iter().map(Finding::to_string).collect();
    assert!(lines.is_empty(), "{} findings:\n{}", lines.len(), lines.join("\n"));
}

fn tree() -> Vec<SourceFile> {
    let files = tidy::sources(&tidy::workspace_root());
    assert!(files.len() > 20, "the walk found only {} files", files.len());
    files
}

fn file(path: &str, text: &str) -> SourceFile {
    SourceFile { path: path.to_owned(), text: text.to_owned() }
}

fn metadata() -> serde_json::Value {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version", "1", "--no-deps", "--offline"])
        .current_dir(tidy::workspace_root())
        .output()
        .expect("cargo runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("cargo prints JSON")
}

#[test]
fn import_arrows_point_down() {
    expect_clean(tidy::arrows(&metadata()).expect("metadata as documented"));
}

#[test]
fn an_arrow_that_points_up_is_found() {
    let up = serde_json::json!({"packages": [
        {"name": "deepinfer-kernels", "dependencies": [{"name": "deepinfer-engine", "kind": null}, {"name": "serde", "kind": null}]},
        {"name": "deepinfer-engine", "dependencies": [{"name": "deepinfer-kernels", "kind": null}]},
        {"name": "deepinfer-attic", "dependencies": []},
    ]});
    let places: Vec<String> = tidy::arrows(&up).expect("well formed").into_iter().map(|f| f.place).collect();
    assert_eq!(places, ["deepinfer-kernels", "deepinfer-kernels", "deepinfer-attic"]);
}

#[test]
fn unsafe_stays_inside_its_fence() {
    expect_clean(tidy::unsafe_outside_fence(&tree()));
    let bad = file("agent/engine/src/lib.rs", "//! a\nfn f() { unsafe { g() } }\n// unsafe in prose\n");
    let found = tidy::unsafe_outside_fence(&[bad]);
    assert_eq!(found.iter().map(|f| f.line).collect::<Vec<_>>(), [2]);
}

#[test]
fn every_fence_post_still_stands() {
    let files = tree();
    for (place, why) in tidy::UNSAFE_FENCE {
        let used = files.iter().any(|f| f.path.starts_with(place) && f.text.contains("unsafe"));
        assert!(used, "{place} has no unsafe code any more ({why}): take it out of the fence");
    }
}

#[test]
fn channels_are_bounded() {
    expect_clean(tidy::unbounded_channels(&tree()));
    let bad = file("agent/x.rs", "let (a, b) = std::sync::mpsc::channel();\nlet c = sync_channel(4);\n");
    assert_eq!(tidy::unbounded_channels(&[bad]).len(), 1);
}

#[test]
fn the_environment_is_read_in_args_only() {
    expect_clean(tidy::environment_reads(&tree()));
    let bad = file("agent/x.rs", "let home = std::env::var(\"HOME\");\n");
    assert_eq!(tidy::environment_reads(&[bad]).len(), 1);
}

#[test]
fn nothing_is_left_behind() {
    expect_clean(tidy::leftovers(&tree()));
    let bad = file("agent/x.rs", concat!("// TO", "DO later\nlet y = 1;\n"));
    assert_eq!(tidy::leftovers(&[bad]).len(), 1);
}

#[test]
fn every_file_says_what_lives_there() {
    expect_clean(tidy::missing_headers(&tree()));
}

#[test]
fn every_file_is_reached_by_a_mod() {
    expect_clean(tidy::dead_files(&tree()));
    let root = file("agent/a/src/lib.rs", "//! a\npub(crate) mod live;\n");
    let live = file("agent/a/src/live.rs", "//! b\n");
    let dead = file("agent/a/src/dead.rs", "//! c\n");
    let found = tidy::dead_files(&[root, live, dead]);
    assert_eq!(found.iter().map(|f| f.place.as_str()).collect::<Vec<_>>(), ["agent/a/src/dead.rs"]);
}
