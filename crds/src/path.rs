//! Paths of fields: `spec.engine.env[2].name`, `metadata.labels["a.b/c"]`.
//! Invariant: equal paths are written equally, so that a path can be a key.

use std::fmt;

/// A way from the root of an object to a field.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct FieldPath(Vec<Step>);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Field(String),
    Index(usize),
}

impl FieldPath {
    /// The object itself.
    pub fn root() -> Self {
        Self::default()
    }

    /// A field of the value at this path.
    pub fn field(&self, name: &str) -> Self {
        let mut steps = self.0.clone();
        steps.push(Step::Field(name.to_owned()));
        Self(steps)
    }

    /// An element of the list at this path.
    pub fn index(&self, index: usize) -> Self {
        let mut steps = self.0.clone();
        steps.push(Step::Index(index));
        Self(steps)
    }

    /// The value that holds this one. Absent for the root.
    pub fn parent(&self) -> Option<Self> {
        let (_, rest) = self.0.split_last()?;
        Some(Self(rest.to_vec()))
    }

    /// Whether this path is `other` or below it.
    pub fn starts_with(&self, other: &FieldPath) -> bool {
        self.0.starts_with(&other.0)
    }

    /// The value at this path of an object.
    pub fn find_mut<'a>(&self, root: &'a mut serde_json::Value) -> Option<&'a mut serde_json::Value> {
        let mut at = root;
        for step in &self.0 {
            at = match step {
                Step::Field(name) => at.get_mut(name)?,
                Step::Index(index) => at.get_mut(index)?,
            };
        }
        Some(at)
    }

    /// The part of a schema that describes this path.
    pub fn schema<'a>(&self, root: &'a serde_json::Value) -> Option<&'a serde_json::Value> {
        let mut at = root;
        for step in &self.0 {
            at = match step {
                Step::Field(name) => crate::cel::property(at, name)?,
                Step::Index(_) => at.get("items")?,
            };
        }
        Some(at)
    }
}

impl fmt::Display for FieldPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, step) in self.0.iter().enumerate() {
            match step {
                Step::Index(index) => write!(f, "[{index}]")?,
                Step::Field(name) if is_plain(name) => {
                    let dot = if i == 0 { "" } else { "." };
                    write!(f, "{dot}{name}")?;
                }
                Step::Field(name) => write!(f, "[{name:?}]")?,
            }
        }
        Ok(())
    }
}

fn is_plain(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
}
