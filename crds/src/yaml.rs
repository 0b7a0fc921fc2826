//! Objects as YAML text that every reader takes the same way.
//! Invariants: a text is bare only if YAML 1.1 and 1.2 both read it as that text; the same value gives the
//! same bytes.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde::Serialize;
use serde_json::{Map, Value};

use crate::manifest::is_plain_text;

/// Longest bare text, in characters: parsers look for the `:` of a name no further than this.
const BARE_MAX: usize = 512;

/// An object as YAML. Errors: a value that is not JSON, as a map with keys that are no texts.
pub fn to_yaml<T: Serialize>(value: &T) -> Result<String, serde_json::Error> {
    let mut out = String::new();
    block(&serde_json::to_value(value)?, 0, &mut out);
    Ok(out)
}

/// A value that begins on a line of its own.
fn block(value: &Value, indent: usize, out: &mut String) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (name, child) in sorted(map) {
                pad(indent, out);
                field(name, child, indent, out);
            }
        }
        Value::Array(list) if !list.is_empty() => {
            for child in list {
                pad(indent, out);
                element(child, indent, out);
            }
        }
        _ => {
            pad(indent, out);
            scalar(value, out);
            out.push('\n');
        }
    }
}

fn field(name: &str, value: &Value, indent: usize, out: &mut String) {
    text(name, out);
    out.push(':');
    match value {
        Value::Object(map) if !map.is_empty() => {
            out.push('\n');
            block(value, indent + 2, out);
        }
        // Lists stand right below their name, as kubectl writes them.
        Value::Array(list) if !list.is_empty() => {
            out.push('\n');
            block(value, indent, out);
        }
        _ => {
            out.push(' ');
            scalar(value, out);
            out.push('\n');
        }
    }
}

fn element(value: &Value, indent: usize, out: &mut String) {
    out.push_str("- ");
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (i, (name, child)) in sorted(map).into_iter().enumerate() {
                if i > 0 {
                    pad(indent + 2, out);
                }
                field(name, child, indent + 2, out);
            }
        }
        Value::Array(list) if !list.is_empty() => {
            for (i, child) in list.iter().enumerate() {
                if i > 0 {
                    pad(indent + 2, out);
                }
                element(child, indent + 2, out);
            }
        }
        _ => {
            scalar(value, out);
            out.push('\n');
        }
    }
}

/// Fields in one order, whatever order the maps of this build keep.
fn sorted(map: &Map<String, Value>) -> BTreeMap<&str, &Value> {
    map.iter().map(|(name, child)| (name.as_str(), child)).collect()
}

fn pad(indent: usize, out: &mut String) {
    out.extend(std::iter::repeat_n(' ', indent));
}

fn scalar(value: &Value, out: &mut String) {
    match value {
        Value::String(s) => text(s, out),
        Value::Array(_) => out.push_str("[]"),
        Value::Object(_) => out.push_str("{}"),
        Value::Null | Value::Bool(_) | Value::Number(_) => out.push_str(&value.to_string()),
    }
}

fn text(s: &str, out: &mut String) {
    if is_bare(s) {
        out.push_str(s);
        return;
    }
    out.push('"');
    for c in s.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            // Line breaks and marks that YAML 1.1 acts on, and what no terminal shows.
            '\u{2028}' | '\u{2029}' | '\u{feff}' => escape(c, out),
            c if c.is_control() => escape(c, out),
            c => out.push(c),
        }
    }
    out.push('"');
}

fn escape(c: char, out: &mut String) {
    // All characters that come here are in the first plane, so four digits are enough.
    let _ = write!(out, "\\u{:04x}", u32::from(c));
}

/// Whether a text needs no quotes anywhere in block YAML.
fn is_bare(s: &str) -> bool {
    let mut bytes = s.bytes();
    let begins = bytes.next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'/');
    begins
        && s.len() <= BARE_MAX
        && s.bytes().all(|b| (b' '..=b'~').contains(&b))
        && !s.contains(": ")
        && !s.contains(" #")
        && !s.ends_with([':', ' '])
        && is_plain_text(s)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    #[test]
    fn words_and_numbers_that_are_texts_get_quotes() {
        let value = json!({
            "a": "Off", "b": "on", "on": "1", "c": "x: y", "d": "# no", "e": "", "f": "plain text", "g": null
        });
        let yaml = to_yaml(&value).unwrap();
        let lines: Vec<&str> = yaml.lines().collect();
        assert_eq!(
            lines,
            [
                "a: \"Off\"",
                "b: \"on\"",
                "c: \"x: y\"",
                "d: \"# no\"",
                "e: \"\"",
                "f: plain text",
                "g: null",
                "\"on\": \"1\""
            ]
        );
    }

    #[test]
    fn lists_and_maps_nest_as_kubectl_writes_them() {
        let value = json!({"l": [{"a": 1, "b": [true, []]}, [[2], {}]], "m": {"k": {"o": "p"}}});
        let wanted = "l:\n- a: 1\n  b:\n  - true\n  - []\n- - - 2\n  - {}\nm:\n  k:\n    o: p\n";
        assert_eq!(to_yaml(&value).unwrap(), wanted);
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let text = prop_oneof![any::<String>(), "[a-zA-Z0-9:#\\-. \n\"'{}\\[\\],&*!|>%@`~]{0,12}"];
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            (-1e9..1e9_f64).prop_map(Value::from),
            text.clone().prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 4, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                prop::collection::btree_map(text.clone(), inner, 0..4)
                    .prop_map(|m| Value::Object(m.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_again_by_both_parsers(value in any_json()) {
            let yaml = to_yaml(&value).unwrap();
            let other: Value = serde_yaml::from_str(&yaml).unwrap();
            prop_assert_eq!(&other, &value, "{}", yaml);
            let ours = crate::manifest::to_json(&yaml).unwrap();
            prop_assert_eq!(&ours, &value, "{}", yaml);
        }
    }
}
