//! What the system is not doing, and why: for the user's status, `deepinfer plan` and logs.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Something that waits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Waiting {
    /// What waits, as `kind/name`.
    pub object: String,
    /// One word.
    pub reason: String,
    /// Since when, in seconds since 1970; 0 if unknown.
    pub since: i64,
    /// For people: what it waits for and what would help.
    pub message: String,
}

/// Where a resolved value came from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub enum Origin {
    /// The spec says so.
    Spec,
    /// A default, and why it is what it is.
    Default(&'static str),
    /// Follows from another value.
    Derived(String),
    /// The machine cannot give what the spec asks for.
    ScaledDown {
        /// What the spec asks for.
        asked: String,
        /// Why it is less.
        why: String,
    },
}

/// A resolved value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Explained {
    /// Field of the spec.
    pub path: String,
    /// What it is.
    pub value: String,
    /// Where it came from.
    pub origin: Origin,
}

impl fmt::Display for Explained {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} = {}", self.path, self.value)?;
        match &self.origin {
            Origin::Spec => f.write_str("  (spec)"),
            Origin::Default(why) => write!(f, "  (default: {why})"),
            Origin::Derived(from) => write!(f, "  (from {from})"),
            Origin::ScaledDown { asked, why } => write!(f, "  (scaled down from {asked}: {why})"),
        }
    }
}

/// Everything a plan has to say beside its actions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[must_use = "an unread report helps nobody"]
pub struct Report {
    /// Problems that only an edit of the spec solves; nothing is created while there are any.
    pub refused: Vec<Problem>,
    /// Fields that have no effect yet, with the reason.
    pub ignored: Vec<Problem>,
    /// Values that the machine could not give as asked.
    pub scaled_down: Vec<Explained>,
    /// What waits for what.
    pub waiting: Vec<Waiting>,
    /// All resolved values with their origin.
    pub explained: Vec<Explained>,
}

/// A field and what is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Problem {
    /// Field of the spec.
    pub path: String,
    /// `NotSupported`, `InvalidSpec`, `RefNotFound`.
    pub reason: &'static str,
    /// What is wrong and how to fix it.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.path, self.reason, self.message)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for problem in &self.refused {
            writeln!(f, "refused   {problem}")?;
        }
        for problem in &self.ignored {
            writeln!(f, "ignored   {problem}")?;
        }
        for scaled in &self.scaled_down {
            writeln!(f, "scaled    {scaled}")?;
        }
        for waiting in &self.waiting {
            writeln!(f, "waiting   {}: {}: {}", waiting.object, waiting.reason, waiting.message)?;
        }
        Ok(())
    }
}
