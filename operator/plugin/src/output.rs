//! Printing, and how a command ended.

use std::io::{self, Write};

use anyhow::Result;
use serde::Serialize;

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All is well.
    Good,
    /// What was asked about has a problem.
    Problem,
}

impl Outcome {
    /// A problem if there is one.
    pub fn problem_if(problem: bool) -> Self {
        if problem { Self::Problem } else { Self::Good }
    }
}

/// Prints to standard output.
///
/// # Errors
/// What writing answers.
pub fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// Prints a value as JSON.
///
/// # Errors
/// What writing answers.
pub fn json(value: &impl Serialize) -> Result<()> {
    print(&(serde_json::to_string_pretty(value)? + "\n"))
}

/// Whether the reader of standard output has gone.
pub fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .any(|e| e.downcast_ref::<io::Error>().is_some_and(|e| e.kind() == io::ErrorKind::BrokenPipe))
}
