//! One JSON object of the configuration, read field by field. Every problem is kept, none stops the reading.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

/// The fields of an object at `path` of `config.json`, and what was wrong with them so far.
pub(super) struct Fields<'a> {
    path: &'static str,
    map: &'a Map<String, Value>,
    seen: BTreeSet<&'static str>,
    bad: BTreeSet<&'static str>,
    pub(super) problems: Vec<String>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(path: &'static str, map: &'a Map<String, Value>) -> Self {
        Self { path, map, seen: BTreeSet::new(), bad: BTreeSet::new(), problems: Vec::new() }
    }

    /// Full name of a field, for people.
    pub(super) fn name(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_string() } else { format!("{}.{key}", self.path) }
    }

    /// Keeps a problem of a field: "`path.key` ...".
    pub(super) fn problem(&mut self, key: &'static str, what: impl std::fmt::Display) {
        let name = self.name(key);
        self.problems.push(format!("{name} {what}"));
        self.bad.insert(key);
    }

    /// Whether all of these fields could be read, so that they can be compared with others.
    pub(super) fn ok(&self, keys: &[&str]) -> bool {
        keys.iter().all(|key| !self.bad.contains(key))
    }

    /// The value of a field; `None` if absent or null.
    pub(super) fn get(&mut self, key: &'static str) -> Option<&'a Value> {
        self.seen.insert(key);
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn required(&mut self, key: &'static str, what: &str) -> Option<&'a Value> {
        let value = self.get(key);
        if value.is_none() {
            self.problem(key, format!("is missing, expected {what}"));
        }
        value
    }

    /// A required whole number in `min..=max`; `min` after a problem.
    pub(super) fn size(&mut self, key: &'static str, min: usize, max: usize) -> usize {
        let what = format!("a whole number from {min} to {max}");
        match self.required(key, &what) {
            Some(value) => self.size_of(key, value, min, max).unwrap_or(min),
            None => min,
        }
    }

    /// A whole number that may be absent.
    pub(super) fn optional_size(&mut self, key: &'static str, min: usize, max: usize) -> Option<usize> {
        let value = self.get(key)?;
        self.size_of(key, value, min, max)
    }

    fn size_of(&mut self, key: &'static str, value: &Value, min: usize, max: usize) -> Option<usize> {
        let number = value.as_u64().and_then(|n| usize::try_from(n).ok()).filter(|n| (min..=max).contains(n));
        if number.is_none() {
            self.problem(key, format!("is {}, expected a whole number from {min} to {max}", short(value)));
        }
        number
    }

    /// A required number in `min..=max`; `min` after a problem.
    pub(super) fn number(&mut self, key: &'static str, min: f64, max: f64) -> f64 {
        let what = format!("a number from {min:e} to {max:e}");
        let Some(value) = self.required(key, &what) else {
            return min;
        };
        match value.as_f64().filter(|n| (min..=max).contains(n)) {
            Some(number) => number,
            None => {
                self.problem(key, format!("is {}, expected {what}", short(value)));
                min
            }
        }
    }

    /// A required `true` or `false`.
    pub(super) fn flag(&mut self, key: &'static str) -> bool {
        let Some(value) = self.required(key, "true or false") else {
            return false;
        };
        value.as_bool().unwrap_or_else(|| {
            self.problem(key, format!("is {}, expected true or false", short(value)));
            false
        })
    }

    /// A required list of whole numbers in `min..=max`; empty after a problem.
    pub(super) fn list(&mut self, key: &'static str, min: usize, max: usize) -> Vec<usize> {
        match self.required(key, "a list of whole numbers") {
            Some(value) => self.list_of(key, value, min, max),
            None => Vec::new(),
        }
    }

    /// A list of whole numbers that may be absent (then empty).
    pub(super) fn optional_list(&mut self, key: &'static str, min: usize, max: usize) -> Vec<usize> {
        match self.get(key) {
            Some(value) => self.list_of(key, value, min, max),
            None => Vec::new(),
        }
    }

    fn list_of(&mut self, key: &'static str, value: &Value, min: usize, max: usize) -> Vec<usize> {
        let numbers = value.as_array().and_then(|items| {
            let numbers = items.iter().map(|item| usize::try_from(item.as_u64()?).ok());
            numbers.collect::<Option<Vec<usize>>>()
        });
        match numbers {
            Some(numbers) if numbers.iter().all(|n| (min..=max).contains(n)) => numbers,
            _ => {
                let what =
                    format!("is {}, expected a list of whole numbers from {min} to {max}", short(value));
                self.problem(key, what);
                Vec::new()
            }
        }
    }

    /// A field for which the code supports one value; absent means that value.
    pub(super) fn only(&mut self, key: &'static str, supported: Value) {
        if let Some(value) = self.get(key)
            && !same(value, &supported)
        {
            self.problem(key, format!("is {}, only {supported} is supported", short(value)));
        }
    }

    /// A field for which the code supports several values; absent means any of them.
    pub(super) fn one_of(&mut self, key: &'static str, supported: &[&str]) {
        if let Some(value) = self.get(key)
            && !supported.iter().any(|s| value == s)
        {
            self.problem(key, format!("is {}, supported are {}", short(value), supported.join(" and ")));
        }
    }

    /// Like [`Fields::only`], for a field that must be present.
    pub(super) fn exactly(&mut self, key: &'static str, supported: Value) {
        if self.required(key, &supported.to_string()).is_some() {
            self.only(key, supported);
        }
    }

    /// An object that may be absent; `None` after a problem, too.
    pub(super) fn object(&mut self, key: &'static str) -> Option<&'a Map<String, Value>> {
        let value = self.get(key)?;
        let object = value.as_object();
        if object.is_none() {
            self.problem(key, format!("is {}, expected an object", short(value)));
        }
        object
    }

    /// Names of the fields that nobody asked for.
    pub(super) fn ignored(&self) -> impl Iterator<Item = String> + '_ {
        self.map.keys().filter(|key| !self.seen.contains(key.as_str())).map(|key| self.name(key))
    }
}

/// Equality that takes 0 and 0.0 for the same number.
fn same(a: &Value, b: &Value) -> bool {
    a == b || (a.is_number() && b.is_number() && a.as_f64() == b.as_f64())
}

/// A value for an error line: long ones are cut.
fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
