//! The CEL rules of the CRDs, run in process where no API server runs them.
//! Invariant: what is evaluated here is what stands in the CRD's schema; no rule is listed a second time.

mod eval;
mod rules;

use std::collections::BTreeMap;

use cel::Program;
use serde_json::Value;

pub use rules::*;

use crate::crd::{self, Kind};
use crate::path::FieldPath;

/// A rule that a value breaks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The field to blame.
    pub path: FieldPath,
    /// What is wrong and how to fix it.
    pub message: String,
    /// The expression that was false.
    pub rule: String,
    /// Whether the expression could not be evaluated, as happens when a field has the wrong type.
    pub unevaluated: bool,
}

/// The rules of a schema, compiled once.
pub(crate) type Programs = BTreeMap<String, Program>;

/// Checks a DeepInferCluster (a whole object) against the rules of its CRD. `old` is the object before an
/// update: without it, rules about changes do not apply, as at creation. Returns every broken rule, in the
/// order of the schema.
pub fn validate(object: &Value, old: Option<&Value>) -> Vec<Violation> {
    validate_kind(Kind::Cluster, object, old)
}

/// Like [`validate`], for an object of any of our kinds.
pub fn validate_kind(kind: Kind, object: &Value, old: Option<&Value>) -> Vec<Violation> {
    let definition = crd::definition(kind);
    let mut walk = Walk { programs: definition.programs(), found: Vec::new() };
    walk.node(definition.schema(), object, old, &FieldPath::root());
    walk.found
}

/// Compiles all rules below a node of a schema. Errors: a rule that is not CEL.
pub(crate) fn compile(schema: &Value, into: &mut Programs) -> Result<(), String> {
    for (rule, _) in rules_of(schema) {
        if !into.contains_key(rule) {
            let program = Program::compile(rule).map_err(|e| format!("rule {rule:?}: {e}"))?;
            into.insert(rule.to_owned(), program);
        }
    }
    for child in children(schema) {
        compile(child, into)?;
    }
    Ok(())
}

/// The schemas right below a schema.
pub(crate) fn children(schema: &Value) -> impl Iterator<Item = &Value> {
    let properties = schema.get("properties").and_then(Value::as_object);
    let inner = ["items", "additionalProperties"].into_iter().filter_map(|k| schema.get(k));
    properties.into_iter().flat_map(|p| p.values()).chain(inner.filter(|s| s.is_object()))
}

/// The rules that stand at a schema: expression and the whole entry.
fn rules_of(schema: &Value) -> impl Iterator<Item = (&str, &Value)> {
    let list = schema.get("x-kubernetes-validations").and_then(Value::as_array);
    list.into_iter().flatten().filter_map(|r| Some((r.get("rule")?.as_str()?, r)))
}

struct Walk<'a> {
    programs: &'a Programs,
    found: Vec<Violation>,
}

impl Walk<'_> {
    fn node(&mut self, schema: &Value, value: &Value, old: Option<&Value>, path: &FieldPath) {
        for (rule, entry) in rules_of(schema) {
            self.rule(rule, entry, value, old, path);
        }
        match value {
            Value::Object(map) => {
                for (name, child) in map {
                    let Some(below) = property(schema, name) else { continue };
                    let old = old.and_then(|o| o.get(name));
                    self.node(below, child, old, &path.field(name));
                }
            }
            Value::Array(list) => {
                let Some(below) = schema.get("items") else { return };
                for (i, child) in list.iter().enumerate() {
                    let old = old.and_then(|o| correlated(schema, o, child));
                    self.node(below, child, old, &path.index(i));
                }
            }
            _ => {}
        }
    }

    fn rule(&mut self, rule: &str, entry: &Value, value: &Value, old: Option<&Value>, path: &FieldPath) {
        // A rule about a change has nothing to say when there was nothing before.
        if rule.contains("oldSelf") && old.is_none() {
            return;
        }
        let Some(program) = self.programs.get(rule) else { return };
        let outcome = eval::holds(program, value, old);
        if outcome == Ok(true) {
            return;
        }
        let message = match &outcome {
            Ok(_) => entry.get("message").and_then(Value::as_str).unwrap_or(rule).to_owned(),
            Err(why) => format!("the rule {rule:?} can not be evaluated: {why}"),
        };
        let blamed = entry.get("fieldPath").and_then(Value::as_str).unwrap_or_default();
        let path = blamed.split('.').filter(|s| !s.is_empty()).fold(path.clone(), |p, s| p.field(s));
        self.found.push(Violation { path, message, rule: rule.to_owned(), unevaluated: outcome.is_err() });
    }
}

/// The schema of a property, by its name or as a value of a map.
pub(crate) fn property<'a>(schema: &'a Value, name: &str) -> Option<&'a Value> {
    let named = schema.get("properties").and_then(|p| p.get(name));
    named.or_else(|| schema.get("additionalProperties").filter(|s| s.is_object()))
}

/// The element of an old list that is the same as a new one: by its keys, for lists that are maps.
fn correlated<'a>(schema: &Value, old: &'a Value, element: &Value) -> Option<&'a Value> {
    let keys = schema.get("x-kubernetes-list-map-keys")?.as_array()?;
    let same = |o: &Value| keys.iter().filter_map(Value::as_str).all(|k| o.get(k) == element.get(k));
    old.as_array()?.iter().find(|o| same(o))
}
