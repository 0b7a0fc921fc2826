//! Rules that are visible in the text of one file.

use std::collections::BTreeSet;
use std::path::Path;

use super::{Finding, SourceFile};

/// The only places where `unsafe` may be written, and why.
pub const UNSAFE_FENCE: &[(&str, &str)] = &[
    ("kernels/src/cpu/simd/", "vector intrinsics behind feature detection"),
    ("kernels/src/cpu/pool.rs", "threads that borrow the caller's stack, and disjoint writes to one output"),
    ("kernels/src/mapped.rs", "read-only mapping of checkpoint files"),
    (
        "kernels/benches/support/yardstick.rs",
        "the GEMM crate that benches compare with has an unsafe interface",
    ),
];

/// `unsafe` outside of [`UNSAFE_FENCE`].
pub fn unsafe_outside_fence(files: &[SourceFile]) -> Vec<Finding> {
    let fenced = |path: &str| UNSAFE_FENCE.iter().any(|(place, _)| path.starts_with(place));
    search(files, |path| !fenced(path), |line| has_word(line, "unsafe"), "unsafe code outside its fence")
}

/// Channels without a bound.
pub fn unbounded_channels(files: &[SourceFile]) -> Vec<Finding> {
    const PATTERNS: &[&str] = &[
        "unbounded_channel(",
        "unbounded_channel::<",
        "channel::unbounded",
        "mpsc::channel(",
        "mpsc::channel::<",
        "unbounded()",
    ];
    search(
        files,
        |_| true,
        |line| {
            let bounded_by_argument = line.contains("tokio::sync::mpsc::channel(");
            !bounded_by_argument && PATTERNS.iter().any(|p| line.contains(p))
        },
        "a channel without a bound: use sync_channel or a bounded one and say what a full one does",
    )
}

/// The environment read outside `args.rs` and `build.rs`.
pub fn environment_reads(files: &[SourceFile]) -> Vec<Finding> {
    let allowed = |path: &str| path.ends_with("/args.rs") || path.ends_with("build.rs");
    search(
        files,
        |path| !allowed(path),
        |line| line.contains("env::var") || line.contains("env::vars"),
        "the environment is read in args.rs only",
    )
}

/// What must not be left behind.
pub fn leftovers(files: &[SourceFile]) -> Vec<Finding> {
    const MACROS: &[&str] = &["dbg!(", "todo!(", "unimplemented!("];
    let mut findings = search(files, |_| true, |l| MACROS.iter().any(|m| l.contains(m)), "a leftover macro");
    for file in files {
        for (i, line) in file.text.lines().enumerate() {
            // Written in two parts so that this file does not find itself.
            let words = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("XX", "X"), concat!("HA", "CK")];
            if let Some(word) = words.iter().find(|w| has_word(line, w)) {
                let message = format!("a leftover {word}: do it or file it");
                findings.push(Finding { place: file.path.clone(), line: i + 1, message });
            }
        }
    }
    findings
}

/// Files that do not begin with a sentence about themselves.
pub fn missing_headers(files: &[SourceFile]) -> Vec<Finding> {
    let headless = files.iter().filter(|f| !f.text.starts_with("//!"));
    headless
        .map(|f| Finding {
            place: f.path.clone(),
            line: 1,
            message: "no `//!` header: say what lives here".to_owned(),
        })
        .collect()
}

/// Source files that no `mod` reaches: they are never compiled.
pub fn dead_files(files: &[SourceFile]) -> Vec<Finding> {
    let known: BTreeSet<&str> = files.iter().map(|f| f.path.as_str()).collect();
    let mut reached: BTreeSet<String> =
        files.iter().filter(|f| is_root(&f.path)).map(|f| f.path.clone()).collect();
    let mut open: Vec<String> = reached.iter().cloned().collect();
    while let Some(path) = open.pop() {
        let file = files.iter().find(|f| f.path == path).expect("only known files are opened");
        for target in declared_modules(file) {
            if known.contains(target.as_str()) && reached.insert(target.clone()) {
                open.push(target);
            }
        }
    }
    let dead = files.iter().filter(|f| !reached.contains(&f.path));
    dead.map(|f| Finding { place: f.path.clone(), line: 0, message: "no `mod` reaches this file".to_owned() })
        .collect()
}

/// Files that cargo compiles by themselves.
fn is_root(path: &str) -> bool {
    let parts: Vec<&str> = path.split('/').collect();
    if let [.., "tests" | "benches", _, "main.rs"] = parts[..] {
        return true;
    }
    let [.., folder, name] = parts[..] else { return false };
    match folder {
        "src" => matches!(name, "lib.rs" | "main.rs"),
        "bin" | "tests" | "benches" | "examples" | "fuzz_targets" => true,
        _ => name == "build.rs",
    }
}

/// Paths that the `mod` lines of a file may mean.
fn declared_modules(file: &SourceFile) -> Vec<String> {
    let path = Path::new(&file.path);
    let folder = path.parent().expect("a file lies in a folder").to_string_lossy().into_owned();
    let stem = path.file_stem().expect("a file has a name").to_string_lossy().into_owned();
    let base = if is_root(&file.path) || stem == "mod" { folder.clone() } else { format!("{folder}/{stem}") };
    let mut targets = Vec::new();
    let mut attribute_path: Option<String> = None;
    for line in file.text.lines() {
        let line = line.trim();
        if let Some(rest) = line.strip_prefix("#[path = \"") {
            attribute_path = rest.split('"').next().map(str::to_owned);
            continue;
        }
        let Some(name) = module_name(line) else { continue };
        match attribute_path.take() {
            Some(relative) => targets.push(normalise(&format!("{folder}/{relative}"))),
            None => targets.extend([format!("{base}/{name}.rs"), format!("{base}/{name}/mod.rs")]),
        }
    }
    targets
}

/// The name in `mod name;` with any visibility before it.
fn module_name(line: &str) -> Option<&str> {
    let rest = line.strip_suffix(';')?;
    let rest = match rest.strip_prefix("pub") {
        Some(after) => {
            after.trim_start().strip_prefix('(').map_or(after, |a| a.split_once(')').map_or(a, |(_, r)| r))
        }
        None => rest,
    };
    let name = rest.trim().strip_prefix("mod ")?;
    name.chars().all(|c| c.is_alphanumeric() || c == '_').then_some(name)
}

/// Resolves `..` in a path of the tree.
fn normalise(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "." | "" => {}
            ".." => {
                parts.pop();
            }
            other => parts.push(other),
        }
    }
    parts.join("/")
}

fn search(
    files: &[SourceFile],
    applies: impl Fn(&str) -> bool,
    hit: impl Fn(&str) -> bool,
    message: &str,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files.iter().filter(|f| applies(&f.path)) {
        for (line, code) in file.code_lines() {
            if hit(&code) {
                findings.push(Finding { place: file.path.clone(), line, message: message.to_owned() });
            }
        }
    }
    findings
}

/// `word` in `line`, not as a part of a longer name.
fn has_word(line: &str, word: &str) -> bool {
    line.match_indices(word).any(|(at, _)| {
        let joins = |c: char| c.is_alphanumeric() || c == '_';
        let before = line[..at].chars().next_back();
        let after = line[at + word.len()..].chars().next();
        !before.is_some_and(joins) && !after.is_some_and(joins)
    })
}
