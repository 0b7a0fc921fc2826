//! The CRDs as objects: what the derives make, made fit for an API server.
//! Invariants: no schema default, no nullable field, no preserved unknown field; descriptions are short.

use std::sync::LazyLock;

use kube::CustomResourceExt;
use serde_json::{Map, Value, json};

use crate::cel::{self, Programs};
use crate::{DeepInferCluster, DeepInferPool, ExpertPlacement, Supernode, names};

/// Longest description, in characters: embedded types of Kubernetes bring essays along.
const DESCRIPTION_MAX: usize = 400;

/// One of our kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// `DeepInferCluster`.
    Cluster,
    /// `DeepInferPool`.
    Pool,
    /// `Supernode`.
    Supernode,
    /// `ExpertPlacement`.
    Placement,
}

impl Kind {
    /// All kinds, the user's first.
    pub const ALL: [Kind; 4] = [Kind::Cluster, Kind::Pool, Kind::Supernode, Kind::Placement];

    /// The name in `kind:`.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Cluster => "DeepInferCluster",
            Kind::Pool => "DeepInferPool",
            Kind::Supernode => "Supernode",
            Kind::Placement => "ExpertPlacement",
        }
    }

    /// The name in URLs, also the name of its file in `crds/yaml`.
    pub fn plural(self) -> &'static str {
        match self {
            Kind::Cluster => "deepinferclusters",
            Kind::Pool => "deepinferpools",
            Kind::Supernode => "supernodes",
            Kind::Placement => "expertplacements",
        }
    }
}

/// The CRD of a kind, with its schema and its compiled rules.
pub struct Definition {
    object: Value,
    programs: Programs,
}

impl Definition {
    /// The CustomResourceDefinition as JSON.
    pub fn object(&self) -> &Value {
        &self.object
    }

    /// Its OpenAPI schema.
    pub fn schema(&self) -> &Value {
        &self.object["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    }

    pub(crate) fn programs(&self) -> &Programs {
        &self.programs
    }

    /// The CustomResourceDefinition as YAML, with a note on where it comes from.
    pub fn yaml(&self) -> String {
        let body = crate::yaml::to_yaml(&self.object).expect("the object is JSON already");
        format!(
            "# Generated from the Rust types: cargo run -p deepinfer-crds --bin crdgen -- crds/yaml\n{body}"
        )
    }
}

/// The definition of a kind; built once.
pub fn definition(kind: Kind) -> &'static Definition {
    static CLUSTER: LazyLock<Definition> = LazyLock::new(|| build(Kind::Cluster));
    static POOL: LazyLock<Definition> = LazyLock::new(|| build(Kind::Pool));
    static SUPERNODE: LazyLock<Definition> = LazyLock::new(|| build(Kind::Supernode));
    static PLACEMENT: LazyLock<Definition> = LazyLock::new(|| build(Kind::Placement));
    match kind {
        Kind::Cluster => &CLUSTER,
        Kind::Pool => &POOL,
        Kind::Supernode => &SUPERNODE,
        Kind::Placement => &PLACEMENT,
    }
}

fn build(kind: Kind) -> Definition {
    let derived = match kind {
        Kind::Cluster => DeepInferCluster::crd(),
        Kind::Pool => DeepInferPool::crd(),
        Kind::Supernode => Supernode::crd(),
        Kind::Placement => ExpertPlacement::crd(),
    };
    let mut object = serde_json::to_value(derived).expect("a CRD is JSON");
    object["metadata"]["annotations"] =
        json!({ names::annotation::SCHEMA_REVISION: names::SCHEMA_REVISION.to_string() });
    let schema = &mut object["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
    tidy(schema);
    schema["properties"]["apiVersion"] =
        json!({"type": "string", "description": "Always deepinfer.io/v1alpha1."});
    schema["properties"]["kind"] =
        json!({"type": "string", "description": format!("Always {}.", kind.name())});
    // The name is spelled out because a rule blames it, and bounded so that the rule has a known cost.
    schema["properties"]["metadata"] =
        json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 253}}});
    if kind == Kind::Cluster {
        schema["x-kubernetes-validations"] = cel::rules(&[cel::CLUSTER_NAME]);
    }
    let mut programs = Programs::new();
    // The rules are constants of this crate; a test compiles them all.
    cel::compile(schema, &mut programs).expect("the rules of this crate are CEL");
    Definition { object, programs }
}

/// For enum types: the description of the field is the one that users should read.
pub(crate) fn without_description(schema: &mut schemars::Schema) {
    schema.remove("description");
}

/// Makes a derived schema fit for an API server, at every depth.
fn tidy(schema: &mut Value) {
    let Some(node) = schema.as_object_mut() else { return };
    // What serde does with an absent list is no promise of the API.
    node.remove("default");
    // A null is a mistake, not a way to say "absent": the API server would store it and rules would take it
    // for a value.
    node.remove("nullable");
    if let Some(Value::String(text)) = node.get_mut("description") {
        *text = short(text);
    }
    whole_numbers(node);
    if node.get("x-kubernetes-int-or-string") == Some(&Value::Bool(true)) {
        // The type's own essay tells how quantities are stored, not how they are written.
        node.insert("description".into(), "A quantity, as 500m, 2 or 16Gi.".into());
        node.insert("pattern".into(), cel::QUANTITY_PATTERN.into());
    }
    if let Some(Value::Object(properties)) = node.get_mut("properties") {
        properties.values_mut().for_each(tidy);
    }
    for inner in ["items", "additionalProperties"] {
        if let Some(below) = node.get_mut(inner) {
            tidy(below);
        }
    }
}

/// Formats that Kubernetes knows, with the bounds that the Rust type has.
fn whole_numbers(node: &mut Map<String, Value>) {
    let bounds = match node.get("format").and_then(Value::as_str) {
        Some("uint32") => (0, Some(u32::MAX)),
        Some("uint64") => (0, None),
        _ => return,
    };
    node.insert("format".into(), "int64".into());
    // Bounds are written as whole numbers; the derive writes them as it finds them.
    let whole = |v: Option<&Value>| v.and_then(Value::as_f64).map(|f| f as i64);
    let minimum = whole(node.get("minimum")).unwrap_or(bounds.0);
    node.insert("minimum".into(), minimum.into());
    if let Some(maximum) = whole(node.get("maximum")).or(bounds.1.map(i64::from)) {
        node.insert("maximum".into(), maximum.into());
    }
}

/// The first paragraph of a description, on one line.
fn short(text: &str) -> String {
    let paragraph = text.split("\n\n").next().unwrap_or_default();
    let line = paragraph.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(DESCRIPTION_MAX) {
        Some((cut, _)) => format!("{}...", &line[..cut]),
        None => line,
    }
}
