//! The schema and the Rust types say the same.

use deepinfer_crds::crd::{Kind, definition};
use deepinfer_crds::{DeepInferCluster, DeepInferPool, ExpertPlacement, Supernode, manifest, schema, yaml};
use proptest::prelude::*;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};

/// Draws values that a schema allows.
struct Draw(u64);

impl Draw {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }

    fn value(&mut self, schema: &Value) -> Value {
        if let Some(allowed) = schema["enum"].as_array() {
            return allowed[self.below(allowed.len() as u64) as usize].clone();
        }
        if schema.get("x-kubernetes-int-or-string").is_some() {
            return json!(["250m", "3"][self.below(2) as usize]);
        }
        match schema["type"].as_str() {
            Some("object") => self.object(schema),
            Some("array") => self.list(schema),
            Some("boolean") => json!(self.below(2) == 0),
            Some("integer") => {
                let low = schema["minimum"].as_i64().unwrap_or(0);
                let high = schema["maximum"].as_i64().unwrap_or(i64::from(i32::MAX));
                json!([low, high, low + (self.below((high - low + 1) as u64)) as i64][self.below(3) as usize])
            }
            Some("number") => {
                let bound = |key: &str, other: f64| schema[key].as_f64().unwrap_or(other);
                let (low, high) = (bound("minimum", 0.0), bound("maximum", 1e6));
                json!(low + (high - low) * (self.below(1000) as f64 / 1000.0))
            }
            _ => self.text(schema),
        }
    }

    fn text(&mut self, schema: &Value) -> Value {
        if schema["format"] == "date-time" {
            return json!("2026-05-01T10:00:00Z");
        }
        if schema.get("pattern").is_some() {
            return json!(["2Ti", "1.5Gi", "100"][self.below(3) as usize]);
        }
        let words = ["Off", "a", "file://x", "1", "über: #", "no", "x y", "null", "-", "\n"];
        let word = words[self.below(words.len() as u64) as usize];
        let (least, most) =
            (schema["minLength"].as_u64().unwrap_or(0), schema["maxLength"].as_u64().unwrap_or(999));
        let padded = format!("{word}{}", "z".repeat(least.saturating_sub(1) as usize));
        json!(padded.chars().take(most as usize).collect::<String>())
    }

    fn list(&mut self, schema: &Value) -> Value {
        let least = schema["minItems"].as_u64().unwrap_or(0);
        let wanted = least + self.below(3);
        let mut list: Vec<Value> = Vec::new();
        for _ in 0..wanted {
            let element = self.value(&schema["items"]);
            list.push(element);
            // Lists that are sets or maps take an element once only.
            if least < list.len() as u64 && !schema::check(schema, &Value::from(list.clone())).is_empty() {
                list.pop();
            }
        }
        Value::from(list)
    }

    fn object(&mut self, schema: &Value) -> Value {
        let mut map = Map::new();
        let required = schema["required"].as_array().cloned().unwrap_or_default();
        for (name, below) in schema["properties"].as_object().into_iter().flatten() {
            if required.contains(&json!(name)) || self.below(2) == 0 {
                map.insert(name.clone(), self.value(below));
            }
        }
        if let Some(below) = schema.get("additionalProperties") {
            for name in ["a", "b.c/d"].iter().take(self.below(3) as usize) {
                map.insert((*name).to_owned(), self.value(below));
            }
        }
        Value::Object(map)
    }
}

/// A value without what a writer leaves out: lists and maps with nothing in them.
fn essence(value: &Value) -> Value {
    match value {
        Value::Object(map) => {
            let kept = map.iter().map(|(k, v)| (k.clone(), essence(v)));
            Value::Object(kept.filter(|(_, v)| *v != json!([]) && *v != json!({})).collect())
        }
        Value::Array(list) => list.iter().map(essence).collect(),
        other => other.clone(),
    }
}

/// Whether a type takes a value that its schema allows, and gives back an equal one.
fn agrees<T: DeserializeOwned + Serialize>(kind: Kind, seed: u64) -> Result<(), TestCaseError> {
    let mut draw = Draw(seed | 1);
    let part = |name: &str| &definition(kind).schema()["properties"][name];
    let object = json!({
        "apiVersion": "deepinfer.io/v1alpha1", "kind": kind.name(), "metadata": {"name": "a"},
        "spec": draw.value(part("spec")), "status": draw.value(part("status")),
    });
    let problems = schema::check(&schema::local(kind), &object);
    prop_assert_eq!(&problems, &vec![], "{}", object);
    let typed: T = match serde_json::from_value(object.clone()) {
        Ok(typed) => typed,
        Err(e) => return Err(TestCaseError::fail(format!("{e}: {object}"))),
    };
    let back = serde_json::to_value(&typed).expect("our types are JSON");
    let problems = schema::check(&schema::local(kind), &back);
    prop_assert_eq!(&problems, &vec![], "{}", back);
    prop_assert_eq!(essence(&back), essence(&object));
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn the_types_take_what_the_schema_allows_and_lose_nothing(seed in any::<u64>()) {
        agrees::<DeepInferCluster>(Kind::Cluster, seed)?;
        agrees::<DeepInferPool>(Kind::Pool, seed)?;
        agrees::<Supernode>(Kind::Supernode, seed)?;
        agrees::<ExpertPlacement>(Kind::Placement, seed)?;
    }

    #[test]
    fn a_file_gives_the_errors_of_its_rules_only_when_its_structure_is_sound(seed in any::<u64>()) {
        let mut draw = Draw(seed | 1);
        let spec = draw.value(&definition(Kind::Cluster).schema()["properties"]["spec"]);
        let object = json!({
            "apiVersion": "deepinfer.io/v1alpha1", "kind": "DeepInferCluster", "metadata": {"name": "a"},
            "spec": spec,
        });
        let text = yaml::to_yaml(&object).expect("JSON");
        let broken = deepinfer_crds::cel::validate(&object, None);
        prop_assert!(broken.iter().all(|v| !v.unevaluated), "{:?}", broken);
        match manifest::parse(&text) {
            Ok(accepted) => {
                prop_assert!(broken.is_empty());
                prop_assert_eq!(accepted.warnings, vec![], "{}", text);
            }
            Err(errors) => {
                let mut wanted: Vec<String> = broken.iter().map(|v| v.path.to_string()).collect();
                let mut found: Vec<String> = errors.iter().map(|e| e.path.clone()).collect();
                for paths in [&mut wanted, &mut found] {
                    paths.sort();
                    paths.dedup();
                }
                prop_assert_eq!(found, wanted, "{}", text);
                prop_assert!(errors.iter().all(|e| e.line > 0), "{:?}", errors);
            }
        }
    }
}
