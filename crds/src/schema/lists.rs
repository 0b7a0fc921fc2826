//! Sizes of lists, and elements that must differ.

use std::collections::BTreeMap;

use serde_json::Value;

/// A bound of a schema that is a count.
pub fn bound(schema: &Value, key: &str) -> Option<usize> {
    schema.get(key).and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok())
}

/// What is wrong with the number of elements.
pub fn wrong_size(schema: &Value, list: &[Value]) -> Option<String> {
    if let Some(most) = bound(schema, "maxItems").filter(|most| list.len() > *most) {
        return Some(format!("has {} elements: at most {most} are allowed", list.len()));
    }
    let least = bound(schema, "minItems").filter(|least| list.len() < *least)?;
    Some(format!("has {} elements: at least {least} are needed", list.len()))
}

/// Elements of a set that are there twice, and elements of a map-like list whose keys are.
pub fn repeated(schema: &Value, list: &[Value]) -> Vec<(usize, String)> {
    let keys: Vec<&str> = match schema.get("x-kubernetes-list-type").and_then(Value::as_str) {
        Some("set") => Vec::new(),
        Some("map") => {
            let keys = schema.get("x-kubernetes-list-map-keys").and_then(Value::as_array);
            keys.into_iter().flatten().filter_map(Value::as_str).collect()
        }
        _ => return Vec::new(),
    };
    let mut seen: BTreeMap<String, usize> = BTreeMap::new();
    let mut found = Vec::new();
    for (i, element) in list.iter().enumerate() {
        let identity = if keys.is_empty() {
            element.to_string()
        } else if keys.iter().all(|k| element.get(*k).is_some()) {
            keys.iter().map(|k| format!("{k} {}", element[*k])).collect::<Vec<_>>().join(", ")
        } else {
            // A missing key is an error of its own.
            continue;
        };
        match seen.get(&identity) {
            Some(first) => found.push((i, format!("{identity} is already in element [{first}]: remove one"))),
            None => {
                seen.insert(identity, i);
            }
        }
    }
    found
}
