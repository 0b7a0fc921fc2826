//! Cluster files: what is accepted, and what is said about the rest.

use deepinfer_crds::manifest::{self, ManifestError};

const SOUND: &str = "\
apiVersion: deepinfer.io/v1alpha1
kind: DeepInferCluster
metadata:
  name: quick
spec:
  accelerator:
    vendor: cpu
  engine:
    image: registry.example/deepinfer:1
  model:
    name: m
    source:
      uri: file:///models/m
  prefill:
    replicas: 1
  decode:
    replicas: 1
    supernode:
      nodes: 2
";

fn errors(text: &str) -> Vec<String> {
    let found = manifest::parse(text).expect_err("the file should be refused");
    found.iter().map(ManifestError::to_string).collect()
}

fn replaced(from: &str, to: &str) -> String {
    assert!(SOUND.contains(from), "{from:?} is not in the sound file");
    SOUND.replacen(from, to, 1)
}

#[test]
fn a_sound_file_becomes_a_cluster() {
    let accepted = manifest::parse(SOUND).unwrap();
    assert_eq!(accepted.cluster.metadata.name.as_deref(), Some("quick"));
    assert_eq!(accepted.cluster.spec.decode.supernode.nodes, 2);
    assert_eq!(accepted.cluster.spec.gateway, None, "an absent field stays absent");
    assert_eq!(accepted.warnings, []);
}

#[test]
fn an_unknown_field_is_named_with_its_line_and_the_nearest_name() {
    let text = replaced("  prefill:\n    replicas: 1", "  prefill:\n    replica: 1");
    let found = errors(&text);
    assert!(
        found.contains(&"15:5: spec.prefill.replica: unknown field; did you mean replicas?".to_owned()),
        "{found:?}"
    );
}

#[test]
fn a_field_in_the_wrong_place_is_told_where_it_belongs() {
    let text = replaced("    supernode:\n      nodes: 2", "    nodes: 2\n    supernode:\n      nodes: 2");
    let found = errors(&text);
    assert_eq!(found, ["18:5: spec.decode.nodes: unknown field; there is spec.decode.supernode.nodes"]);
}

#[test]
fn two_errors_of_different_kinds_are_shown_together_by_line() {
    let text = SOUND
        .replace("vendor: cpu", "vendor: gpu")
        .replace("nodes: 2", "nodes: two")
        .replace("uri: file:///models/m", "uri: /models/m");
    let found = errors(&text);
    assert_eq!(found.len(), 3, "{found:?}");
    assert!(
        found[0].starts_with(
            "7:13: spec.accelerator.vendor: must be one of nvidia, ascend, cpu, not the text \"gpu\""
        ),
        "{found:?}"
    );
    assert!(found[1].starts_with("13:12: spec.model.source.uri: must begin with oci://"), "{found:?}");
    assert!(
        found[2]
            .starts_with("19:14: spec.decode.supernode.nodes: must be a whole number, not the text \"two\""),
        "{found:?}"
    );
}

#[test]
fn a_wrong_type_says_how_to_write_it() {
    for (from, to, wanted) in [
        ("name: m", "name: 41", "spec.model.name: must be a text, not the number 41: put it in quotes"),
        (
            "nodes: 2",
            "nodes: \"2\"",
            "spec.decode.supernode.nodes: must be a whole number, not the text \"2\": write it without quotes",
        ),
        ("nodes: 2", "nodes: 2.5", "spec.decode.supernode.nodes: must be a whole number, not the number 2.5"),
        (
            "nodes: 2",
            "nodes:",
            "spec.decode.supernode.nodes: must be a whole number, not empty: give it a value, or remove the line",
        ),
        ("nodes: 2", "nodes: 0", "spec.decode.supernode.nodes: must be from 1 to 128, not 0"),
        (
            "nodes: 2",
            "nodes: 99999999999999999999",
            "spec.decode.supernode.nodes: must be a whole number, not the number 1e+20",
        ),
        (
            "replicas: 1\n  decode",
            "replicas: -1\n  decode",
            "spec.prefill.replicas: must be from 0 to 1024, not -1",
        ),
        (
            "    image: registry.example/deepinfer:1",
            "    - image: x",
            "spec.engine: must be a group of fields, not a list: remove the \"- \" in front of its fields",
        ),
        ("image: registry.example/deepinfer:1", "image: \"\"", "spec.engine.image: must not be empty"),
        (
            "image: registry.example/deepinfer:1",
            "image: i\n    extraArgs: --x",
            "spec.engine.extraArgs: must be a list, not the text \"--x\": write a list, one \"- \" for each element",
        ),
    ] {
        let found = errors(&replaced(from, to));
        assert!(found.len() == 1 && found[0].ends_with(wanted), "{to:?}: {found:?}");
    }
}

#[test]
fn missing_fields_are_named_with_what_belongs_there() {
    let found = errors(
        "apiVersion: deepinfer.io/v1alpha1\nkind: DeepInferCluster\nmetadata: {}\nspec:\n  accelerator: {}\n",
    );
    for wanted in [
        "metadata.name: is required: a text",
        "spec.accelerator.vendor: is required: nvidia, ascend, cpu",
        "spec.engine: is required: a group of fields",
        "spec.model: is required: a group of fields",
        "spec.prefill: is required: a group of fields",
        "spec.decode: is required: a group of fields",
    ] {
        assert!(found.iter().any(|e| e.ends_with(wanted)), "{wanted}: {found:?}");
    }
    assert!(found.iter().all(|e| !e.contains("evaluated")), "{found:?}");
}

#[test]
fn rules_are_checked_at_the_field_that_they_blame() {
    let text = replaced(
        "supernode:\n      nodes: 2",
        "scaling: {mode: External, minReplicas: 3, maxReplicas: 2}\n    supernode:\n      nodes: 2",
    );
    let found = errors(&text);
    assert_eq!(
        found,
        [
            "16:3: spec.decode: needs exactly one of replicas and scaling",
            "18:44: spec.decode.scaling.minReplicas: must not be larger than maxReplicas",
        ]
    );
}

#[test]
fn list_elements_that_must_differ_do() {
    let text = replaced(
        "image: registry.example/deepinfer:1",
        "image: i\n    env:\n    - {name: A, value: x}\n    - {name: A, value: y}",
    );
    let found = errors(&text);
    assert_eq!(found, ["12:7: spec.engine.env[1]: name \"A\" is already in element [0]: remove one"]);
    let text = replaced("name: m\n", "name: m\n    aliases: [a, b, a]\n");
    let found = errors(&text);
    assert_eq!(found, ["12:21: spec.model.aliases[2]: \"a\" is already in element [0]: remove one"]);
}

#[test]
fn a_field_given_twice_is_refused_at_the_second() {
    let found = errors(&replaced("vendor: cpu", "vendor: cpu\n    vendor: nvidia"));
    assert_eq!(found, ["8:5: the field vendor is there twice (first in line 7): remove one"]);
}

#[test]
fn a_bare_off_is_accepted_with_the_warning_that_kubectl_reads_a_boolean() {
    let text = format!("{SOUND}  gateway:\n    defaultThinking: Off\n    activator:\n      enabled: yes\n");
    let accepted = manifest::parse(&text).unwrap();
    let gateway = accepted.cluster.spec.gateway.unwrap();
    assert_eq!(gateway.default_thinking, Some(deepinfer_crds::cluster::Thinking::Off));
    assert_eq!(gateway.activator.unwrap().enabled, Some(true), "kubectl reads yes as true");
    let warnings: Vec<String> = accepted.warnings.iter().map(ManifestError::to_string).collect();
    assert_eq!(
        warnings,
        ["21:22: spec.gateway.defaultThinking: kubectl reads a bare Off as a boolean: write \"Off\""]
    );
}

#[test]
fn numbers_that_readers_disagree_about_are_one_error() {
    let found = errors(&replaced("nodes: 2", "nodes: 0x10"));
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(
        found[0].starts_with("19:14: spec.decode.supernode.nodes: \"0x10\" is read differently"),
        "{found:?}"
    );
}

#[test]
fn other_documents_are_passed_over_and_said_so() {
    let text = format!("apiVersion: v1\nkind: Secret\nmetadata: {{name: s}}\n---\n{SOUND}---\n# nothing\n");
    let accepted = manifest::parse(&text).unwrap();
    let warnings: Vec<String> = accepted.warnings.iter().map(ManifestError::to_string).collect();
    assert_eq!(warnings, ["1:1: Secret is passed over: only DeepInferCluster is read here"]);
    assert_eq!(accepted.position("spec.decode.replicas").unwrap().line, 21);
}

#[test]
fn a_file_without_or_with_two_clusters_is_refused() {
    assert_eq!(errors(""), ["the file is empty: it must hold a DeepInferCluster"]);
    assert_eq!(errors("# only a comment\n---\n"), ["the file is empty: it must hold a DeepInferCluster"]);
    let found = errors("apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: d}\n");
    assert!(found[0].contains("no document of the file is a DeepInferCluster"), "{found:?}");
    let found = errors(&format!("{SOUND}---\n{SOUND}"));
    assert_eq!(found, ["21:1: a second DeepInferCluster in one file: keep each in a file of its own"]);
    let found = errors(&replaced("kind: DeepInferCluster", "kind: DeepInferCluser"));
    assert!(
        found[0].ends_with(
            "kind: must be DeepInferCluster, not the text \"DeepInferCluser\"; did you mean DeepInferCluster?"
        ),
        "{found:?}"
    );
    let found = errors(&replaced("v1alpha1", "v1"));
    assert!(found[0].starts_with("1:13: apiVersion: must be deepinfer.io/v1alpha1"), "{found:?}");
}

#[test]
fn what_kubectl_get_prints_can_be_given_back() {
    let text = replaced(
        "  name: quick\n",
        "  name: quick\n  namespace: default\n  uid: 0b5b\n  resourceVersion: \"12\"\n  generation: 3\n  \
         creationTimestamp: \"2026-05-01T10:00:00Z\"\n  labels: {a/b: c}\n",
    ) + "status:\n  phase: Serving\n";
    let accepted = manifest::parse(&text).unwrap();
    assert_eq!(accepted.cluster.status, None);
    let warnings: Vec<String> = accepted.warnings.iter().map(ManifestError::to_string).collect();
    assert_eq!(warnings, ["26:1: status: is passed over: it is written by the operator"]);
}

#[test]
fn broken_yaml_names_its_line() {
    let found = errors("apiVersion: deepinfer.io/v1alpha1\nkind: [DeepInferCluster\nspec: {\n");
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].contains("not YAML"), "{found:?}");
    let tab = manifest::parse("spec:\n\taccelerator: {}\n").unwrap_err();
    assert_eq!(tab[0].line, 2, "{tab:?}");
    let bytes = manifest::parse_bytes(b"kind: x\nname: \xff\n").unwrap_err();
    assert_eq!(
        (bytes[0].line, bytes[0].message.as_str()),
        (2, "the file is not UTF-8 text: save it as UTF-8")
    );
}

#[test]
fn deep_large_and_exploding_files_are_refused_quickly() {
    for deep in
        ["[".repeat(100), "- ".repeat(100), (0..100).map(|i| format!("{}a:\n", " ".repeat(i))).collect()]
    {
        assert!(errors(&deep)[0].contains("levels deep"), "{:?}", errors(&deep));
    }
    // The parser stops by itself a little further down.
    assert_eq!(errors(&"[".repeat(100_000)).len(), 1);
    let large = "#".repeat(manifest::FILE_MAX_BYTES + 1);
    assert!(errors(&large)[0].contains("at most 1048576"));
    let mut bomb = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for i in 1..30 {
        let list = format!("*a{}, ", i - 1).repeat(10);
        bomb += &format!("a{i}: &a{i} [{list}]\n");
    }
    assert!(errors(&bomb)[0].contains("once aliases are followed"), "a bomb");
    let cycle = errors("a: &a [*a]\n");
    assert!(cycle[0].contains("alias"), "{cycle:?}");
}

#[test]
fn many_of_anything_are_answered() {
    let pieces = [
        "- ",
        "? ",
        ": ",
        "a: 1\n",
        "- a\n",
        "&a ",
        "*a ",
        "{a: ",
        "'",
        "\"",
        "\\",
        "# x\n",
        "---\n",
        "!a ",
        "|\n",
        "a, ",
        "[], ",
        "\t",
        "\n",
        "{}: ",
        "<<: ",
        "%TAG ! a\n",
        "\u{feff}",
        "- - \n",
        "a:\n",
        ">\n ",
    ];
    for piece in pieces {
        for before in ["", "[", "a: "] {
            let text = format!("{before}{}", piece.repeat((1 << 17) / piece.len()));
            let found = manifest::parse(&text).expect_err("no cluster");
            assert!(!found.is_empty() && found.len() <= 101, "{piece:?}: {}", found.len());
        }
    }
}

#[test]
fn an_alias_is_its_value() {
    let text = SOUND.replace("  prefill:\n    replicas: 1", "  prefill: &pool\n    replicas: 1")
        + "  vision: *pool\n";
    let accepted = manifest::parse(&text).unwrap();
    assert_eq!(accepted.cluster.spec.vision, Some(accepted.cluster.spec.prefill));
}

#[test]
fn a_file_full_of_mistakes_gives_a_bounded_list() {
    let mut text = SOUND.to_owned();
    for i in 0..5_000 {
        text += &format!("  mistake{i}: 1\n");
    }
    let found = errors(&text);
    assert!(found.len() <= 101, "{}", found.len());
    assert!(found.iter().any(|e| e.contains("only the first 100 errors are shown")), "{found:?}");
}

#[test]
fn an_update_may_not_change_what_can_not_be_changed() {
    let running = manifest::parse(SOUND).unwrap().cluster;
    let scaled = manifest::parse(&replaced("nodes: 2", "nodes: 4")).unwrap();
    assert_eq!(scaled.check_update(&running), []);
    let moved =
        manifest::parse(&SOUND.replace("vendor: cpu", "vendor: nvidia").replace("nodes: 2", "nodes: 8"))
            .unwrap();
    let found: Vec<String> = moved.check_update(&running).iter().map(ManifestError::to_string).collect();
    assert_eq!(found, ["7:5: spec.accelerator.vendor: can not be changed: create another DeepInferCluster"]);
}

#[test]
fn positions_answer_for_fields_that_are_not_there_too() {
    let accepted = manifest::parse(SOUND).unwrap();
    let line = |path| accepted.position(path).map(|p| p.line);
    assert_eq!(line("spec.decode.supernode.nodes"), Some(19));
    assert_eq!(line("spec.decode.supernode.spareNodes"), Some(18));
    assert_eq!(line("spec.engine.env[3].name"), Some(8));
}
