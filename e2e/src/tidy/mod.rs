//! The house rules as functions from the tree to findings. An empty list is a clean house.
//!
//! Every check reads the sources as text or the manifests through `cargo metadata`; none needs a build.

mod arrows;
mod sources;

pub use arrows::{ALLOWED_ARROWS, arrows};
pub use sources::{
    UNSAFE_FENCE, dead_files, environment_reads, leftovers, missing_headers, unbounded_channels,
    unsafe_outside_fence,
};

use std::fs;
use std::path::{Path, PathBuf};

/// One broken rule: where, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// File relative to the workspace, or a crate name.
    pub place: String,
    /// Line, counted from 1; 0 if the whole file or crate is meant.
    pub line: usize,
    /// What is wrong and how to mend it.
    pub message: String,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}: {}", self.place, self.line, self.message)
    }
}

/// A source file of the workspace.
#[derive(Clone, Debug)]
pub struct SourceFile {
    /// Path relative to the workspace, with `/`.
    pub path: String,
    /// Whole text.
    pub text: String,
}

impl SourceFile {
    /// Lines of code with their numbers from 1: line comments and the text of string literals are blanked, so that
    /// a rule does not fire on prose about it.
    pub fn code_lines(&self) -> Vec<(usize, String)> {
        self.text.lines().enumerate().map(|(i, line)| (i + 1, strip(line))).collect()
    }
}

/// Blanks comments and the insides of plain string literals of one line.
fn strip(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    let mut chars = line.chars().peekable();
    let mut in_string = false;
    while let Some(c) = chars.next() {
        match c {
            '\\' if in_string => {
                chars.next();
            }
            '"' => {
                in_string = !in_string;
                out.push('"');
            }
            '\'' if !in_string && chars.peek() == Some(&'"') => {
                chars.next();
                chars.next();
            }
            '/' if !in_string && chars.peek() == Some(&'/') => break,
            _ if in_string => {}
            _ => out.push(c),
        }
    }
    out
}

/// The workspace's root, from this crate's place in it.
pub fn workspace_root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().expect("the crate lies one folder below the root").to_path_buf()
}

/// All `.rs` files of the workspace but build outputs, sorted by path.
pub fn sources(root: &Path) -> Vec<SourceFile> {
    let mut files = Vec::new();
    let mut folders = vec![root.to_path_buf()];
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        for entry in entries {
            let path = entry.expect("a readable folder entry").path();
            let name = path.file_name().and_then(|n| n.to_str()).unwrap_or_default().to_owned();
            if path.is_dir() {
                if name != "target" && !name.starts_with('.') {
                    folders.push(path);
                }
            } else if name.ends_with(".rs") {
                let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
                let relative = path.strip_prefix(root).expect("found below the root");
                files.push(SourceFile { path: relative.to_string_lossy().replace('\\', "/"), text });
            }
        }
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    files
}
