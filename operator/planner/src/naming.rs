//! Names, labels and hashes of every child: once.

use std::collections::BTreeMap;

use deepinfer_crds::names::{GROUP, label};
use serde::Serialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

/// Digest of what was last applied to a child: tells our own changes from others'.
pub const APPLIED: &str = "deepinfer.io/applied";
/// Letters of random name parts: no vowels, so no words, and nothing that looks like another.
const LETTERS: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";

/// What a pool's members do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub enum Component {
    /// Runs prompts.
    Prefill,
    /// Generates tokens.
    Decode,
    /// Talks to clients.
    Gateway,
}

impl Component {
    /// As in names and labels.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Gateway => "gateway",
        }
    }
}

/// First `len` hex digits of the SHA-256 of a value's canonical JSON: keys of every object in order, whatever the order
/// in which they were written.
///
/// # Panics
/// If the value is not JSON: maps with keys that are not strings.
pub fn digest<T: Serialize + ?Sized>(value: &T, len: usize) -> String {
    let value = serde_json::to_value(value).expect("what is hashed is JSON");
    let mut hex: String =
        Sha256::digest(canonical(&value)).iter().map(|byte| format!("{byte:02x}")).collect();
    hex.truncate(len);
    hex
}

/// JSON with the keys of every object in order.
pub(crate) fn canonical(value: &Value) -> String {
    let mut out = String::new();
    write_canonical(value, &mut out);
    out
}

fn write_canonical(value: &Value, out: &mut String) {
    match value {
        Value::Object(map) => {
            let sorted: BTreeMap<&String, &Value> = map.iter().collect();
            out.push('{');
            for (at, (key, value)) in sorted.into_iter().enumerate() {
                out.push_str(if at > 0 { "," } else { "" });
                out.push_str(&Value::from(key.as_str()).to_string());
                out.push(':');
                write_canonical(value, out);
            }
            out.push('}');
        }
        Value::Array(list) => {
            out.push('[');
            for (at, value) in list.iter().enumerate() {
                out.push_str(if at > 0 { "," } else { "" });
                write_canonical(value, out);
            }
            out.push(']');
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {
            out.push_str(&value.to_string());
        }
    }
}

/// Five letters for the `number`-th name of a world; the same arguments give the same letters.
pub fn random_part(seed: u64, number: u64) -> String {
    let hash = Sha256::digest(format!("{seed}/{number}"));
    hash.iter().take(5).map(|byte| LETTERS[usize::from(*byte) % LETTERS.len()] as char).collect()
}

/// `<cluster>-<role>`: pool, deployment prefix, service.
pub fn pool_name(cluster: &str, component: Component) -> String {
    format!("{cluster}-{}", component.as_str())
}

/// Name of the pod with an index in a supernode.
pub fn supernode_pod(supernode: &str, index: u16) -> String {
    format!("{supernode}-{index:02}")
}

/// Secret with the key of control and data ports.
pub fn key_secret(cluster: &str, generation: u64) -> String {
    format!("{cluster}-agent-{generation}")
}

/// Whether a finalizer, label or annotation is ours.
pub fn is_ours(name: &str) -> bool {
    name.split_once('/').is_some_and(|(group, _)| group == GROUP)
}

/// Labels of operator.md 5.2 that every child has.
pub fn labels(cluster: &str, component: Option<Component>) -> BTreeMap<String, String> {
    let mut labels = BTreeMap::from([
        (label::APP_NAME.to_owned(), label::APP_NAME_VALUE.to_owned()),
        (label::APP_INSTANCE.to_owned(), cluster.to_owned()),
        (label::APP_MANAGED_BY.to_owned(), label::APP_MANAGED_BY_VALUE.to_owned()),
        (label::CLUSTER.to_owned(), cluster.to_owned()),
    ]);
    if let Some(component) = component {
        labels.insert(label::APP_COMPONENT.to_owned(), component.as_str().to_owned());
        labels.insert(label::POOL.to_owned(), pool_name(cluster, component));
        labels.insert(label::ROLE.to_owned(), component.as_str().to_owned());
    }
    labels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_does_not_depend_on_the_order_in_which_keys_were_written() {
        let one: Value = serde_json::from_str(r#"{"b":[{"y":1,"x":null}],"a":"t"}"#).expect("JSON");
        let other: Value = serde_json::from_str(r#"{"a":"t","b":[{"x":null,"y":1}]}"#).expect("JSON");
        assert_eq!(canonical(&one), r#"{"a":"t","b":[{"x":null,"y":1}]}"#);
        assert_eq!(digest(&one, 64), digest(&other, 64));
        assert_eq!(digest(&one, 8), "5d4bb01a");
    }

    #[test]
    fn random_parts_repeat_for_the_same_number_and_differ_otherwise() {
        let part = random_part(1, 2);
        assert_eq!(part, random_part(1, 2));
        assert_eq!(part.len(), 5);
        assert!(part.bytes().all(|b| LETTERS.contains(&b)));
        let mut all: Vec<String> = (0..1000).map(|nonce| random_part(1, nonce)).collect();
        all.sort_unstable();
        all.dedup();
        assert!(all.len() > 990, "{} of 1000 are distinct", all.len());
    }
}
