//! The printed objects: what they are, and that the file in the tree is what is printed.

use std::path::Path;

use clap::Parser;
use k8s_openapi::api::rbac::v1::PolicyRule;
use serde::Deserialize;
use serde_json::Value;

use super::*;
use crate::args::{Cli, Command};

fn options(flags: &[&str]) -> InstallOptions {
    let words = ["deepinfer-operator", "manifests"].into_iter().chain(flags.iter().copied());
    match Cli::try_parse_from(words).unwrap().command {
        Command::Manifests(args) => args.options(),
        other => panic!("{other:?}"),
    }
}

fn objects(text: &str) -> Vec<Value> {
    serde_yaml::Deserializer::from_str(text)
        .map(|document| Value::deserialize(document).unwrap())
        .filter(|value| !value.is_null())
        .collect()
}

fn kinds(text: &str) -> Vec<String> {
    objects(text).iter().map(|object| object["kind"].as_str().unwrap().to_owned()).collect()
}

/// Written anew by `UPDATE_MANIFESTS=1 cargo test -p deepinfer-operator manifests`.
#[test]
fn the_file_in_the_tree_is_what_is_printed() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("manifests/install.yaml");
    let text = install(&options(&[]));
    if crate::args::update_manifests() {
        std::fs::write(&path, &text).unwrap();
    }
    let file = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        file == text,
        "{} is stale: UPDATE_MANIFESTS=1 cargo test -p deepinfer-operator manifests",
        path.display()
    );
}

#[test]
fn an_installation_has_two_replicas_with_probes_and_an_optional_master_key() {
    let text = install(&options(&["--namespace=odd", "--image=x/op:1"]));
    let all = objects(&text);
    let deployment = all.iter().find(|object| object["kind"] == "Deployment").unwrap();
    assert_eq!(deployment["metadata"]["namespace"], "odd");
    assert_eq!(deployment["spec"]["replicas"], 2);
    let pod = &deployment["spec"]["template"]["spec"];
    assert_eq!(pod["volumes"][0]["secret"]["optional"], true);
    let container = &pod["containers"][0];
    assert_eq!(container["image"], "x/op:1");
    assert_eq!(container["readinessProbe"]["httpGet"]["path"], "/readyz");
    let words: Vec<&str> =
        container["args"].as_array().unwrap().iter().map(|a| a.as_str().unwrap()).collect();
    let run = ["deepinfer-operator"].into_iter().chain(words);
    assert!(matches!(Cli::try_parse_from(run).unwrap().command, Command::Run(_)), "the flags are ours");
    assert!(text.contains("system:serviceaccount:odd:deepinfer-operator"), "the policies name the account");
    let named = all.iter().filter(|object| !object["metadata"]["namespace"].is_null());
    assert!(named.into_iter().all(|object| object["metadata"]["namespace"] == "odd"));
}

#[test]
fn watched_namespaces_get_a_role_each_and_no_right_elsewhere() {
    let text =
        rbac_only(&options(&["--watch-namespace=a", "--watch-namespace=b", "--no-nodes", "--rbac-only"]));
    let all = objects(&text);
    let roles: Vec<&str> = all
        .iter()
        .filter(|object| object["kind"] == "Role")
        .map(|object| object["metadata"]["namespace"].as_str().unwrap())
        .collect();
    assert_eq!(roles, ["a", "b", "deepinfer-system"]);
    let global: Vec<&Value> = all.iter().filter(|object| object["kind"] == "ClusterRole").collect();
    assert_eq!(global.len(), 1);
    assert_eq!(global[0]["rules"].as_array().unwrap().len(), 1, "the CRDs of our own, by name");
    assert!(!kinds(&text).contains(&"Deployment".to_owned()));
}

#[test]
fn no_rule_is_wide_and_no_secret_is_read() {
    let rules: Vec<PolicyRule> =
        [rbac::namespaced_rules(), rbac::own_rules(), rbac::global_rules(true)].concat();
    for rule in &rules {
        let words = [rule.api_groups.clone(), rule.resources.clone(), Some(rule.verbs.clone())];
        assert!(words.iter().flatten().flatten().all(|word| !word.contains('*')), "{rule:?}");
        let resources = rule.resources.clone().unwrap_or_default();
        if resources.iter().any(|resource| resource == "secrets") {
            assert_eq!(rule.verbs, ["create"]);
        }
        if resources.iter().any(|resource| resource == "nodes") {
            assert_eq!(rule.verbs, ["list", "watch"]);
        }
        let forbidden = ["escalate", "bind", "impersonate", "deletecollection"];
        assert!(rule.verbs.iter().all(|verb| !forbidden.contains(&verb.as_str())), "{rule:?}");
    }
}

#[test]
fn the_crds_are_printed_whole() {
    assert_eq!(kinds(&crds()), ["CustomResourceDefinition"; 4]);
}
