//! A document as JSON, with the position of every field.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use super::scalar::{Scalar, resolve};
use super::tree::{Content, Node, Position};
use super::{ManifestError, tree::Entry};
use crate::path::FieldPath;

/// A document as JSON.
pub struct Values {
    pub root: Value,
    /// Where names stand (elements of lists: where they begin), by path.
    pub positions: BTreeMap<String, Position>,
    /// Where values stand, by path.
    values: BTreeMap<String, Position>,
    /// Bare words that YAML 1.1 takes for booleans.
    words: Vec<(FieldPath, bool, Position)>,
    pub errors: Vec<ManifestError>,
    /// Paths of scalars that could not be read; they are among the errors.
    pub unread: Vec<String>,
}

/// A document as JSON. The recursion is as deep as the tree, which is bounded.
pub fn convert(document: &Node) -> Values {
    let mut values = Values {
        root: Value::Null,
        positions: BTreeMap::from([(String::new(), document.at)]),
        values: BTreeMap::from([(String::new(), document.at)]),
        words: Vec::new(),
        errors: Vec::new(),
        unread: Vec::new(),
    };
    values.root = values.node(document, &FieldPath::root());
    values
}

impl Values {
    /// Where the name of a field stands, or of its nearest ancestor.
    pub fn name_at(&self, path: &FieldPath) -> Position {
        nearest(&self.positions, path)
    }

    /// Where the value of a field stands. A missing field is reported at the name of the field that should
    /// have it.
    pub fn value_at(&self, path: &FieldPath) -> Position {
        match self.values.get(&path.to_string()) {
            Some(at) => *at,
            None => nearest(&self.positions, path),
        }
    }

    /// Gives bare words like Off the type that their field has. A text gets a warning: kubectl reads it
    /// differently.
    pub fn settle_words(&mut self, schema: &Value) -> Vec<ManifestError> {
        let mut warnings = Vec::new();
        for (path, meant, at) in std::mem::take(&mut self.words) {
            let wanted = path.schema(schema).and_then(|s| s.get("type")).and_then(Value::as_str);
            let Some(place) = path.find_mut(&mut self.root) else { continue };
            match wanted {
                Some("boolean") => *place = Value::Bool(meant),
                Some("string") => {
                    let word = place.as_str().unwrap_or_default();
                    let message = format!("kubectl reads a bare {word} as a boolean: write \"{word}\"");
                    warnings.push(ManifestError::at(at, path, message));
                }
                _ => {}
            }
        }
        warnings
    }

    fn node(&mut self, node: &Node, path: &FieldPath) -> Value {
        match &node.content {
            Content::Scalar { text, plain: false } => Value::String(text.clone()),
            Content::Scalar { text, plain: true } => self.scalar(text, node.at, path),
            Content::List(items) => {
                let mut list = Vec::with_capacity(items.len());
                for (i, item) in items.iter().enumerate() {
                    let path = path.index(i);
                    self.positions.insert(path.to_string(), item.at);
                    self.values.insert(path.to_string(), item.at);
                    list.push(self.node(item, &path));
                }
                Value::Array(list)
            }
            Content::Map(entries) => {
                let mut map = Map::new();
                for Entry { name, at, value } in entries {
                    let path = path.field(name);
                    self.positions.insert(path.to_string(), *at);
                    // A block below its name is best shown by the name.
                    let value_at = if value.at.line == at.line { value.at } else { *at };
                    self.values.insert(path.to_string(), value_at);
                    map.insert(name.clone(), self.node(value, &path));
                }
                Value::Object(map)
            }
        }
    }

    fn scalar(&mut self, text: &str, at: Position, path: &FieldPath) -> Value {
        match resolve(text) {
            Scalar::Sure(value) => value,
            Scalar::Word(meant) => {
                self.words.push((path.clone(), meant, at));
                Value::String(text.to_owned())
            }
            Scalar::Doubtful(fix) => {
                let message = format!("{text:?} is read differently by programs: {fix}");
                self.errors.push(ManifestError::at(at, path, message));
                self.unread.push(path.to_string());
                // What follows must not complain about the same value again.
                Value::String(text.to_owned())
            }
        }
    }
}

fn nearest(positions: &BTreeMap<String, Position>, path: &FieldPath) -> Position {
    let mut at = Some(path.clone());
    while let Some(path) = at {
        if let Some(found) = positions.get(&path.to_string()) {
            return *found;
        }
        at = path.parent();
    }
    Position::default()
}
