//! The CRDs as an API server gets them.

use std::collections::BTreeSet;
use std::path::Path;

use deepinfer_crds::crd::{Kind, definition};
use deepinfer_crds::{names, policy};
use serde_json::Value;

/// Largest YAML of one CRD, in bytes (operator.md section 2).
const YAML_MAX_BYTES: usize = 200 * 1024;

/// Calls `visit` for every schema of a kind with its path.
fn each_schema(kind: Kind, mut visit: impl FnMut(&str, &Value)) {
    fn walk(path: &str, schema: &Value, visit: &mut impl FnMut(&str, &Value)) {
        visit(path, schema);
        for (name, below) in schema["properties"].as_object().into_iter().flatten() {
            walk(&format!("{path}.{name}"), below, visit);
        }
        for inner in ["items", "additionalProperties"] {
            if let Some(below) = schema.get(inner).filter(|s| s.is_object()) {
                walk(&format!("{path}[]"), below, visit);
            }
        }
    }
    walk("", definition(kind).schema(), &mut visit);
}

#[test]
fn the_checked_in_yaml_is_current() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("yaml");
    let crds = Kind::ALL.into_iter().map(|kind| (kind.plural(), definition(kind).yaml()));
    for (name, wanted) in crds.chain([("policies", policy::yaml(names::rbac::OPERATOR_USER))]) {
        let path = folder.join(format!("{name}.yaml"));
        let written = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            written == wanted,
            "{} is stale: cargo run -p deepinfer-crds --bin crdgen -- crds/yaml",
            path.display()
        );
    }
}

#[test]
fn policies_name_the_operator_that_is_given_and_refuse_everywhere() {
    let policies = policy::policies("system:serviceaccount:elsewhere:op");
    let named: Vec<&str> = policies.iter().filter_map(|p| p.policy.metadata.name.as_deref()).collect();
    assert_eq!(named, [names::policy::OWNED_KINDS, names::policy::DELETION_PROTECTION]);
    for policy::Policy { policy, binding } in &policies {
        let spec = policy.spec.as_ref().unwrap();
        assert_eq!(spec.failure_policy.as_deref(), Some("Fail"));
        let binding = &binding.spec;
        assert_eq!(Some(&binding.policy_name), policy.metadata.name.as_ref());
        assert_eq!(
            (binding.validation_actions.as_slice(), &binding.match_resources),
            (&["Deny".to_owned()][..], &None)
        );
    }
    assert!(policy::yaml("system:serviceaccount:elsewhere:op").contains("elsewhere:op"));
    assert_eq!(
        names::rbac::OPERATOR_USER,
        format!(
            "system:serviceaccount:{}:{}",
            names::rbac::OPERATOR_NAMESPACE,
            names::rbac::OPERATOR_SERVICE_ACCOUNT
        )
    );
}

#[test]
fn each_crd_is_small_enough_to_apply() {
    for kind in Kind::ALL {
        let bytes = definition(kind).yaml().len();
        assert!(bytes < YAML_MAX_BYTES, "{}: {bytes} bytes", kind.name());
    }
}

#[test]
fn no_schema_has_a_default_a_null_or_unknown_fields() {
    for kind in Kind::ALL {
        each_schema(kind, |path, schema| {
            for word in [
                "default",
                "nullable",
                "x-kubernetes-preserve-unknown-fields",
                "oneOf",
                "anyOf",
                "allOf",
                "$ref",
            ] {
                assert!(schema.get(word).is_none(), "{}{path} has {word}", kind.name());
            }
        });
    }
}

#[test]
fn every_schema_has_a_type_that_kubernetes_knows() {
    for kind in Kind::ALL {
        each_schema(kind, |path, schema| {
            let known = ["object", "array", "string", "integer", "number", "boolean"];
            let either = schema.get("x-kubernetes-int-or-string").is_some();
            let typed = schema["type"].as_str().is_some_and(|t| known.contains(&t));
            assert!(either || typed, "{}{path}: {:?}", kind.name(), schema["type"]);
            let formats = ["int32", "int64", "double", "date-time"];
            let format = schema.get("format").and_then(Value::as_str);
            assert!(format.is_none_or(|f| formats.contains(&f)), "{}{path}: format {format:?}", kind.name());
        });
    }
}

#[test]
fn every_field_of_a_user_is_described_and_every_optional_one_names_its_default() {
    // Fields whose absence is a case of its own, so that there is no value to name.
    let by_rule = ["replicas", "scaling", "value", "valueFrom"];
    let mut without = BTreeSet::new();
    each_schema(Kind::Cluster, |path, schema| {
        let required: BTreeSet<&str> =
            schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        for (name, below) in schema["properties"].as_object().into_iter().flatten() {
            if !format!("{path}.{name}").starts_with(".spec") {
                continue;
            }
            let text = below["description"].as_str().unwrap_or_default();
            assert!(text.len() > 5, "{path}.{name} has no description");
            let scalar =
                ["string", "integer", "number", "boolean"].contains(&below["type"].as_str().unwrap_or("-"));
            if scalar && !required.contains(name.as_str()) && !by_rule.contains(&name.as_str()) {
                let names_default = text.contains("Default") || text.contains("This or");
                if !names_default {
                    without.insert(format!("{path}.{name}: {text}"));
                }
            }
        }
    });
    assert!(without.is_empty(), "no default named:\n{}", without.into_iter().collect::<Vec<_>>().join("\n"));
}

#[test]
fn durations_are_whole_seconds_and_counts_are_integers() {
    each_schema(Kind::Cluster, |path, schema| {
        if path.ends_with("Seconds") || path.ends_with("eplicas") || path.to_lowercase().ends_with("nodes") {
            assert!(matches!(schema["type"].as_str(), Some("integer" | "array")), "{path}: {schema}");
        }
    });
}

#[test]
fn every_list_of_a_user_has_a_list_type_and_a_bound() {
    each_schema(Kind::Cluster, |path, schema| {
        if schema["type"] == "array" && path.starts_with(".spec") {
            let kind = schema["x-kubernetes-list-type"].as_str();
            assert!(matches!(kind, Some("map" | "set" | "atomic")), "{path} has list type {kind:?}");
            assert!(schema["maxItems"].is_u64(), "{path} has no maxItems");
            if kind == Some("map") {
                assert!(schema["x-kubernetes-list-map-keys"].is_array(), "{path} has no keys");
            }
        }
        if schema["type"] == "string" && path.starts_with(".spec") && schema.get("enum").is_none() {
            assert!(schema["maxLength"].is_u64(), "{path} has no maxLength");
        }
        if schema["type"] == "integer" && path.starts_with(".spec") {
            assert!(schema["minimum"].is_i64() && schema["maximum"].is_i64(), "{path} has no bounds");
        }
    });
}

#[test]
fn no_description_is_an_essay() {
    for kind in Kind::ALL {
        each_schema(kind, |path, schema| {
            let text = schema["description"].as_str().unwrap_or_default();
            assert!(text.chars().count() <= 403 && !text.contains('\n'), "{}{path}: {text}", kind.name());
        });
    }
}

#[test]
fn kinds_have_the_names_that_scripts_rely_on() {
    for (kind, short) in Kind::ALL.into_iter().zip(["dic", "dip", "sn", "xp"]) {
        let crd = definition(kind).object();
        assert_eq!(crd["metadata"]["name"], format!("{}.{}", kind.plural(), names::GROUP));
        assert_eq!(crd["spec"]["names"]["kind"], kind.name());
        assert_eq!(crd["spec"]["names"]["shortNames"][0], short);
        assert_eq!(crd["spec"]["names"]["categories"][0], names::CATEGORY);
        assert_eq!(crd["spec"]["scope"], "Namespaced");
        assert_eq!(crd["spec"]["versions"][0]["name"], names::VERSION);
        assert!(crd["spec"]["versions"][0]["subresources"]["status"].is_object());
        assert_eq!(
            crd["metadata"]["annotations"][names::annotation::SCHEMA_REVISION],
            names::SCHEMA_REVISION.to_string()
        );
    }
    assert_eq!(names::API_VERSION, format!("{}/{}", names::GROUP, names::VERSION));
}

#[test]
fn a_pool_can_be_scaled_and_both_children_can_be_selected() {
    let version = |kind| &definition(kind).object()["spec"]["versions"][0];
    let scale = &version(Kind::Pool)["subresources"]["scale"];
    assert_eq!(scale["specReplicasPath"], ".spec.replicas");
    assert_eq!(scale["statusReplicasPath"], ".status.replicas");
    assert_eq!(scale["labelSelectorPath"], ".status.selector");
    let fields = |kind| -> Vec<&str> {
        let list = version(kind)["selectableFields"].as_array().unwrap();
        list.iter().filter_map(|f| f["jsonPath"].as_str()).collect()
    };
    assert_eq!(fields(Kind::Pool), [".spec.clusterName", ".spec.role"]);
    assert_eq!(fields(Kind::Supernode), [".spec.clusterName", ".spec.poolName", ".status.phase"]);
}

#[test]
fn printer_columns_show_fields_that_exist() {
    for kind in Kind::ALL {
        let columns =
            definition(kind).object()["spec"]["versions"][0]["additionalPrinterColumns"].as_array().unwrap();
        for column in columns {
            let path = column["jsonPath"].as_str().unwrap();
            if path.starts_with(".metadata") {
                continue;
            }
            let mut at = definition(kind).schema();
            for step in path.trim_start_matches('.').split('.').take_while(|s| !s.contains('[')) {
                at = &at["properties"][step];
            }
            let conditions = path.contains("conditions[?");
            assert!(at.is_object() || conditions, "{}: {path}", kind.name());
        }
    }
}

#[test]
fn kubectl_reads_every_word_of_the_yaml_as_we_mean_it() {
    // YAML 1.1 takes these bare words for booleans.
    let words = ["Off", "On", "off", "on", "yes", "no", "y", "n", "Yes", "No"];
    for kind in Kind::ALL {
        for line in definition(kind).yaml().lines() {
            let (name, value) = line.split_once(':').unwrap_or((line, ""));
            let name = name.trim().trim_start_matches("- ");
            assert!(!words.contains(&name) && !words.contains(&value.trim()), "{}: {line}", kind.name());
        }
    }
    assert!(definition(Kind::Cluster).yaml().contains("- \"Off\""));
}
