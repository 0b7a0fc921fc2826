//! One rule on one value.
//! Invariant: whole numbers of JSON are signed integers in CEL, as in the API server.

use std::collections::HashMap;
use std::sync::Arc;

use cel::objects::{Key, Map};
use cel::{Context, Program, Value as Cel};
use serde_json::Value;

/// Whether a rule holds. Errors: it can not be evaluated, or its outcome is not a boolean.
pub fn holds(program: &Program, value: &Value, old: Option<&Value>) -> Result<bool, String> {
    let mut context = Context::default();
    context.add_variable_from_value("self", to_cel(value));
    if let Some(old) = old {
        context.add_variable_from_value("oldSelf", to_cel(old));
    }
    match program.execute(&context) {
        Ok(Cel::Bool(outcome)) => Ok(outcome),
        Ok(other) => Err(format!("its outcome is {:?}, not a boolean", other.type_of())),
        Err(e) => Err(e.to_string()),
    }
}

/// JSON as CEL. The recursion is as deep as the value, which `manifest` bounds.
fn to_cel(value: &Value) -> Cel {
    match value {
        Value::Null => Cel::Null,
        Value::Bool(b) => Cel::Bool(*b),
        Value::Number(n) => match (n.as_i64(), n.as_f64()) {
            (Some(i), _) => Cel::Int(i),
            (None, Some(f)) => Cel::Float(f),
            (None, None) => Cel::Null,
        },
        Value::String(s) => Cel::String(Arc::new(s.clone())),
        Value::Array(list) => Cel::List(Arc::new(list.iter().map(to_cel).collect())),
        Value::Object(map) => {
            // A hash map is what CEL takes; no decision depends on its order.
            let entries: HashMap<Key, Cel> =
                map.iter().map(|(k, v)| (Key::from(k.clone()), to_cel(v))).collect();
            Cel::Map(Map { map: Arc::new(entries) })
        }
    }
}
