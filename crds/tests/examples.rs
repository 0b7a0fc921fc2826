//! The example clusters, and files that nobody would write.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use deepinfer_crds::crd::{Kind, definition};
use deepinfer_crds::source::SourceUri;
use deepinfer_crds::{fuzzing, manifest, yaml};
use proptest::prelude::*;
use serde_json::Value;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/clusters")
}

fn files(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let entries = std::fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut paths: Vec<PathBuf> =
        entries.map(|e| e.expect("a readable entry").path()).filter(|p| p.is_file()).collect();
    paths.sort();
    paths.into_iter().map(|p| (p.clone(), std::fs::read(&p).expect("a readable file"))).collect()
}

#[test]
fn every_example_is_accepted_without_a_warning_and_survives_writing() {
    let examples = files(&folder());
    assert!(examples.len() >= 3);
    for (path, bytes) in examples {
        let accepted = manifest::parse_bytes(&bytes).unwrap_or_else(|e| panic!("{}: {e:#?}", path.display()));
        assert_eq!(accepted.warnings, [], "{}", path.display());
        let written = yaml::to_yaml(&accepted.cluster).unwrap();
        let again =
            manifest::parse(&written).unwrap_or_else(|e| panic!("{}: {e:#?}\n{written}", path.display()));
        assert_eq!(again.cluster, accepted.cluster, "{}", path.display());
        assert_eq!(again.warnings, [], "{}", path.display());
        assert_eq!(yaml::to_yaml(&again.cluster).unwrap(), written);
    }
}

#[test]
fn the_quickstart_serves_the_model_of_the_examples() {
    let path = folder().join("quickstart.yaml");
    let accepted = manifest::parse_bytes(&std::fs::read(path).unwrap()).unwrap();
    let source = SourceUri::parse(&accepted.cluster.spec.model.source.uri).unwrap();
    let checkpoint = source.local_path(&folder()).unwrap();
    assert!(checkpoint.join("config.json").is_file(), "{}", checkpoint.display());
}

/// Paths of all fields of a spec, parts that repeat (vision, pods, envs) counted once.
fn fields(schema: &Value, path: &str, into: &mut BTreeSet<String>) {
    for (name, below) in schema["properties"].as_object().into_iter().flatten() {
        let path = format!("{path}.{name}");
        into.insert(canonical(&path));
        fields(below, &path, into);
    }
    if let Some(below) = schema.get("items") {
        fields(below, path, into);
    }
}

fn canonical(path: &str) -> String {
    let mut path =
        path.replace(".vision.", ".prefill.").replace(".prefill.pod", ".pod").replace(".decode.pod", ".pod");
    path = path.replace(".pod.sidecars.env", ".engine.env");
    for shared in ["rollout", "drain", "scaling"] {
        path = path.replace(&format!(".decode.{shared}."), &format!(".prefill.{shared}."));
    }
    path
}

fn used(schema: &Value, value: &Value, path: &str, into: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) => {
            for (name, child) in map {
                let Some(below) = schema["properties"].get(name) else { continue };
                let path = format!("{path}.{name}");
                into.insert(canonical(&path));
                used(below, child, &path, into);
            }
        }
        Value::Array(list) => list.iter().for_each(|child| used(&schema["items"], child, path, into)),
        _ => {}
    }
}

#[test]
fn every_field_of_the_api_is_in_an_example() {
    let spec = &definition(Kind::Cluster).schema()["properties"]["spec"];
    let mut wanted = BTreeSet::new();
    fields(spec, "", &mut wanted);
    let mut shown = BTreeSet::new();
    for (_, bytes) in files(&folder()) {
        let accepted = manifest::parse_bytes(&bytes).unwrap();
        used(spec, &serde_json::to_value(accepted.cluster.spec).unwrap(), "", &mut shown);
    }
    let missing: Vec<&String> = wanted.difference(&shown).collect();
    assert!(missing.is_empty(), "{missing:#?}");
}

#[test]
fn the_corpus_of_odd_files_is_answered() {
    let corpus = files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/yaml"));
    assert!(corpus.len() >= 10);
    for (_, bytes) in corpus {
        fuzzing::fuzz_yaml(&bytes);
    }
}

fn full() -> Vec<u8> {
    std::fs::read(folder().join("full.yaml")).expect("the full example")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn any_text_is_answered(text in "(?s)[ -~\n\t\u{80}-\u{2100}]{0,200}") {
        fuzzing::fuzz_yaml(text.as_bytes());
    }

    #[test]
    fn any_text_of_yaml_marks_is_answered(text in "[-?:,\\[\\]{}#&*!|>'\"%@`<=~ \n\tab01]{0,120}") {
        fuzzing::fuzz_yaml(text.as_bytes());
    }

    #[test]
    fn an_example_with_damage_is_answered(
        cuts in prop::collection::vec(
            (any::<prop::sample::Index>(), 0_usize..12, "[-?:,\\[\\]{}#&*!|>'\"% \n\tOfny01]{0,6}"), 1..4
        )
    ) {
        let mut bytes = full();
        for (at, length, insert) in cuts {
            let at = at.index(bytes.len());
            let end = (at + length).min(bytes.len());
            bytes.splice(at..end, insert.into_bytes());
        }
        fuzzing::fuzz_yaml(&bytes);
    }
}
