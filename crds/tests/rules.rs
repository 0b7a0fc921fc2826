//! Every CEL rule accepts what it should and refuses the rest.

mod cases;

use std::collections::BTreeSet;

use deepinfer_crds::cel;
use deepinfer_crds::crd::{Kind, definition};
use serde_json::{Value, json};

use cases::{all_cases, cluster, supernode, transitions, with};

#[test]
fn a_sound_cluster_breaks_no_rule() {
    assert_eq!(cel::validate(&cluster(), None), []);
}

#[test]
fn each_rule_accepts_and_refuses_and_blames_its_field() {
    for case in all_cases() {
        let of_rule = |changes: &Value| {
            let found = cel::validate(&with(cluster(), changes), None);
            found.into_iter().filter(|v| v.rule == case.rule.rule && !v.unevaluated).collect::<Vec<_>>()
        };
        for changes in &case.accepts {
            let found = of_rule(changes)
                .into_iter()
                .filter(|v| v.path.to_string() == case.blames)
                .collect::<Vec<_>>();
            assert!(found.is_empty(), "{changes}: {found:?}");
        }
        for changes in &case.refuses {
            let found = of_rule(changes);
            let blamed: Vec<String> = found.iter().map(|v| v.path.to_string()).collect();
            assert_eq!(blamed, [case.blames], "{changes} against {}", case.rule.rule);
            assert_eq!(found[0].message, case.rule.message);
        }
    }
}

#[test]
fn rules_about_changes_speak_only_of_updates() {
    for (kind, rule, old, new, blamed) in transitions() {
        assert_eq!(cel::validate_kind(kind, &new, None), [], "at creation there is nothing to compare with");
        assert_eq!(cel::validate_kind(kind, &old, Some(&old)), [], "nothing changed");
        let found = cel::validate_kind(kind, &new, Some(&old));
        let ours: Vec<String> = found
            .iter()
            .filter(|v| v.rule == rule.rule && v.message == rule.message)
            .map(|v| v.path.to_string())
            .collect();
        assert_eq!(ours, [blamed], "{found:?}");
    }
}

#[test]
fn everything_else_of_a_spec_can_be_changed() {
    let other = json!({
        "/spec/accelerator/acceleratorsPerNode": 4, "/spec/engine/image": "registry.example/deepinfer:2",
        "/spec/model/name": "n", "/spec/prefill/replicas": 3, "/spec/decode/supernode/nodes": 16,
        "/spec/kvCache": {"mode": "External", "external": {"endpoint": "https://kv:1"}},
    });
    assert_eq!(cel::validate(&with(cluster(), &other), Some(&cluster())), []);
    let drained = json!({
        "requestedAt": "2026-05-01T10:00:00Z", "deadline": "2026-05-01T10:10:00Z",
        "reason": "ScaleDown", "handoff": "Peer"
    });
    let draining =
        with(supernode(), &json!({"/spec/drain": drained, "/spec/rankMap": [{"rank": 0, "pod": "p"}]}));
    assert_eq!(cel::validate_kind(Kind::Supernode, &draining, Some(&supernode())), []);
}

#[test]
fn no_rule_of_a_crd_is_untested() {
    fn rules(schema: &Value, into: &mut BTreeSet<(String, String)>) {
        for entry in schema["x-kubernetes-validations"].as_array().into_iter().flatten() {
            into.insert((entry["rule"].as_str().unwrap().into(), entry["message"].as_str().unwrap().into()));
        }
        let below = schema["properties"].as_object().into_iter().flat_map(|p| p.values());
        below
            .chain(["items", "additionalProperties"].iter().filter_map(|k| schema.get(*k)))
            .for_each(|s| rules(s, into));
    }
    let mut in_schemas = BTreeSet::new();
    Kind::ALL.iter().for_each(|k| rules(definition(*k).schema(), &mut in_schemas));
    let tested = all_cases().into_iter().map(|c| c.rule).chain(transitions().into_iter().map(|t| t.1));
    let tested: BTreeSet<(String, String)> = tested.map(|r| (r.rule.into(), r.message.into())).collect();
    let untested: Vec<_> = in_schemas.difference(&tested).collect();
    assert!(untested.is_empty(), "{untested:?}");
    let unused: Vec<_> = tested.difference(&in_schemas).collect();
    assert!(unused.is_empty(), "in no schema: {unused:?}");
}

#[test]
fn a_rule_that_meets_a_wrong_type_says_so_instead_of_passing() {
    let broken = with(cluster(), &json!({"/spec/decode/supernode/nodes": "eight"}));
    let found = cel::validate(&broken, None);
    assert!(found.iter().any(|v| v.unevaluated), "{found:?}");
}
