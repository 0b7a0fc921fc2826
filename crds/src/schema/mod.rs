//! Structural validation of a value against our own OpenAPI schema: all errors at once, each with its field.
//! Invariant: what passes here passes an API server that has the CRD, and the other way round, except that
//! unknown fields are errors here.

mod hints;
mod lists;
mod scalars;

pub(crate) use hints::nearest;

use serde_json::{Map, Value, json};

use crate::crd::{self, Kind};
use crate::path::FieldPath;

/// Most errors that one check collects: a file with more needs a second look anyway.
pub const ERRORS_MAX: usize = 100;

/// Something wrong with one field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldError {
    /// The field.
    pub path: FieldPath,
    /// What is wrong and how to fix it. The path is not repeated.
    pub message: String,
    /// Whether the name of the field is at fault, not its value.
    pub about_name: bool,
}

/// The schema of a kind for whole objects from files: that of the CRD, with metadata spelled out.
pub fn local(kind: Kind) -> Value {
    let mut schema = crd::definition(kind).schema().clone();
    schema["properties"]["apiVersion"] = json!({"type": "string", "enum": [crate::names::API_VERSION]});
    schema["properties"]["kind"] = json!({"type": "string", "enum": [kind.name()]});
    schema["properties"]["metadata"] = metadata();
    schema["required"] = json!(["apiVersion", "kind", "metadata", "spec"]);
    schema
}

/// Metadata as users and `kubectl get -o yaml` write it.
fn metadata() -> Value {
    let text_map =
        json!({"type": "object", "additionalProperties": {"type": "string"}, "maxProperties": 256});
    let loose = json!({"x-any": true});
    json!({
        "type": "object",
        "required": ["name"],
        "properties": {
            "name": {"type": "string", "minLength": 1, "maxLength": 253},
            "namespace": {
                "type": "string", "minLength": 1, "maxLength": 63,
                "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
            },
            "labels": text_map, "annotations": text_map,
            "finalizers": {"type": "array", "items": {"type": "string"}, "maxItems": 64},
            "generateName": {"type": "string"},
            "uid": {"type": "string"},
            "resourceVersion": {"type": "string"},
            "generation": {"type": "integer"},
            "creationTimestamp": loose, "deletionTimestamp": loose, "deletionGracePeriodSeconds": loose,
            "managedFields": loose, "ownerReferences": loose, "selfLink": loose,
        }
    })
}

/// Checks a value against a schema. Returns the errors in the order of the value's fields, at most one more
/// than [`ERRORS_MAX`], so that a caller can tell that there are more.
pub fn check(schema: &Value, value: &Value) -> Vec<FieldError> {
    let mut check = Check { root: schema, errors: Vec::new() };
    check.node(schema, value, &FieldPath::root());
    check.errors
}

struct Check<'a> {
    root: &'a Value,
    errors: Vec<FieldError>,
}

impl Check<'_> {
    fn error(&mut self, path: &FieldPath, message: String) {
        self.push(FieldError { path: path.clone(), message, about_name: false });
    }

    fn push(&mut self, error: FieldError) {
        if self.errors.len() <= ERRORS_MAX {
            self.errors.push(error);
        }
    }

    fn node(&mut self, schema: &Value, value: &Value, path: &FieldPath) {
        if schema.get("x-any").is_some() {
            return;
        }
        if let Some(message) = scalars::wrong_type(schema, value) {
            return self.error(path, message);
        }
        match value {
            Value::Object(map) => self.object(schema, map, path),
            Value::Array(list) => self.list(schema, list, path),
            _ => {
                for message in scalars::wrong_value(schema, value) {
                    self.error(path, message);
                }
            }
        }
    }

    fn object(&mut self, schema: &Value, map: &Map<String, Value>, path: &FieldPath) {
        if let Some(most) = lists::bound(schema, "maxProperties").filter(|m| map.len() > *m) {
            self.error(path, format!("has {} entries: at most {most} are allowed", map.len()));
        }
        for (name, child) in map {
            match crate::cel::property(schema, name) {
                Some(below) => self.node(below, child, &path.field(name)),
                None if schema.get("properties").is_none() => {}
                None => self.unknown(schema, name, path),
            }
        }
        let required = schema.get("required").and_then(Value::as_array).into_iter().flatten();
        for name in required.filter_map(Value::as_str).filter(|n| !map.contains_key(*n)) {
            let what = crate::cel::property(schema, name).map(hints::what_to_write).unwrap_or_default();
            self.error(&path.field(name), format!("is required{what}"));
        }
    }

    fn unknown(&mut self, schema: &Value, name: &str, path: &FieldPath) {
        // Looking for what was meant is the dear part of an error that nobody would see.
        if self.errors.len() > ERRORS_MAX {
            return;
        }
        let hint = hints::for_unknown(self.root, schema, name);
        let path = path.field(name);
        self.push(FieldError { path, message: format!("unknown field{hint}"), about_name: true });
    }

    fn list(&mut self, schema: &Value, list: &[Value], path: &FieldPath) {
        if let Some(message) = lists::wrong_size(schema, list) {
            self.error(path, message);
        }
        for (i, message) in lists::repeated(schema, list) {
            self.error(&path.index(i), message);
        }
        let Some(below) = schema.get("items") else { return };
        for (i, child) in list.iter().enumerate() {
            self.node(below, child, &path.index(i));
        }
    }
}
