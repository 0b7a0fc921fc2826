//! Types, bounds, patterns and enums of single values.

use regex::Regex;
use serde_json::Value;

use super::hints;

/// What is wrong with the type of a value, if anything.
pub fn wrong_type(schema: &Value, value: &Value) -> Option<String> {
    if schema.get("x-kubernetes-int-or-string").is_some() {
        let fits = value.is_string() || is_whole(value);
        return (!fits).then(|| format!("must be a quantity as 500m, 2 or 16Gi, not {}", named(value)));
    }
    let wanted = schema.get("type").and_then(Value::as_str)?;
    let fits = match wanted {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => is_whole(value),
        "number" => value.is_number(),
        _ => true,
    };
    if fits {
        return None;
    }
    let fix = match (wanted, value) {
        (_, Value::Null) => ": give it a value, or remove the line",
        ("string", Value::Number(_) | Value::Bool(_)) => ": put it in quotes",
        ("integer" | "number" | "boolean", Value::String(_)) => ": write it without quotes",
        ("array", _) => ": write a list, one \"- \" for each element",
        ("object", Value::Array(_)) => ": remove the \"- \" in front of its fields",
        _ => "",
    };
    Some(format!("must be {}, not {}{fix}", article(wanted), named(value)))
}

fn is_whole(value: &Value) -> bool {
    value.is_i64() || value.is_u64()
}

/// A type for humans.
pub fn article(wanted: &str) -> &'static str {
    match wanted {
        "object" => "a group of fields",
        "array" => "a list",
        "string" => "a text",
        "boolean" => "true or false",
        "integer" => "a whole number",
        _ => "a number",
    }
}

/// A value for humans, short. Texts are not repeated beyond a few characters.
pub fn named(value: &Value) -> String {
    match value {
        Value::Null => "empty".to_owned(),
        Value::Bool(b) => format!("the boolean {b}"),
        Value::Number(n) => format!("the number {n}"),
        Value::String(s) if s.chars().count() <= 40 => format!("the text {s:?}"),
        Value::String(_) => "a text".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "a group of fields".to_owned(),
    }
}

/// What is wrong with a value of the right type.
pub fn wrong_value(schema: &Value, value: &Value) -> Vec<String> {
    let mut found = Vec::new();
    if let Some(allowed) = schema.get("enum").and_then(Value::as_array)
        && !allowed.contains(value)
    {
        found.push(not_one_of(allowed, value));
    }
    match value {
        Value::Number(_) => found.extend(out_of_range(schema, value)),
        Value::String(text) => found.extend(wrong_text(schema, text)),
        _ => {}
    }
    found
}

fn not_one_of(allowed: &[Value], value: &Value) -> String {
    let names: Vec<&str> = allowed.iter().filter_map(Value::as_str).collect();
    let near = value.as_str().and_then(|v| hints::nearest(v, names.iter().copied()));
    let hint = near.map(|n| format!("; did you mean {n}?")).unwrap_or_default();
    match names.as_slice() {
        [only] => format!("must be {only}, not {}{hint}", named(value)),
        _ => format!("must be one of {}, not {}{hint}", names.join(", "), named(value)),
    }
}

fn out_of_range(schema: &Value, value: &Value) -> Option<String> {
    let bound = |key: &str| schema.get(key).filter(|b| b.is_number());
    let (low, high) = (bound("minimum"), bound("maximum"));
    let below = low.is_some_and(|l| is_less(value, l));
    let above = high.is_some_and(|h| is_less(h, value));
    if !below && !above {
        return None;
    }
    Some(match (low, high) {
        (Some(low), Some(high)) => format!("must be from {low} to {high}, not {value}"),
        (Some(low), None) => format!("must be at least {low}, not {value}"),
        (_, high) => format!("must be at most {}, not {value}", high.unwrap_or(&Value::Null)),
    })
}

/// Whole numbers are compared as such: a double would round the large ones.
fn is_less(a: &Value, b: &Value) -> bool {
    let whole = |v: &Value| v.as_i64().map(i128::from).or_else(|| v.as_u64().map(i128::from));
    match (whole(a), whole(b)) {
        (Some(a), Some(b)) => a < b,
        _ => a.as_f64().zip(b.as_f64()).is_some_and(|(a, b)| a < b),
    }
}

fn wrong_text(schema: &Value, text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let length = text.chars().count();
    let bound = |key: &str| super::lists::bound(schema, key);
    if bound("minLength").is_some_and(|least| length < least) {
        let empty = length == 0;
        found.push(if empty { "must not be empty".to_owned() } else { "is too short".to_owned() });
    } else if let Some(most) = bound("maxLength").filter(|most| length > *most) {
        found.push(format!("has {length} characters: at most {most} are allowed"));
    } else if let Some(pattern) = schema.get("pattern").and_then(Value::as_str)
        && Regex::new(pattern).is_ok_and(|r| !r.is_match(text))
    {
        let quantity = pattern == crate::cel::QUANTITY_PATTERN;
        let form = if quantity { "a quantity as 500m, 2 or 16Gi" } else { pattern };
        found.push(format!("{text:?} does not have the form of {form}"));
    }
    found
}
