//! What is refused, with the reason: nothing is started.

use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::process::{Output, Stdio};

use serde_json::Value;

use crate::harness::{Spec, deepinfer, root};

/// Runs `up` of a text; it must end by itself.
fn up(yaml: &str, listen: &str) -> Output {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("c.yaml");
    fs::write(&file, yaml).expect("a file");
    let mut command = deepinfer();
    command.args(["up", "--listen", listen, "-f"]).arg(&file).arg("--state-dir").arg(folder.path());
    command.output().expect("the binary runs")
}

#[track_caller]
fn refused(output: &Output) -> String {
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!text.contains("panicked"), "{text}");
    text
}

#[test]
fn a_port_in_use_is_named_with_its_flag() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("bound").to_string();
    let error = refused(&up(&Spec::shipped().yaml(), &address));
    assert!(error.contains(&address) && error.contains("--listen"), "{error}");
}

#[test]
fn a_missing_checkpoint_is_named_with_its_path_and_field() {
    let error = refused(&up(&Spec { model: "nowhere/at-all", ..Spec::shipped() }.yaml(), "127.0.0.1:0"));
    assert!(error.contains("nowhere/at-all") && error.contains("spec.model.source.uri"), "{error}");
}

#[test]
fn two_errors_of_a_file_are_shown_at_once_with_their_lines() {
    let yaml = Spec::shipped().yaml().replace("vendor: cpu", "vendor: tpu").replace("nodes: 1", "nodez: 1");
    for output in [up(&yaml, "127.0.0.1:0"), validate(&yaml)] {
        assert_eq!(output.status.code(), Some(1));
        let text =
            [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        assert!(text.contains(":7:13: spec.accelerator.vendor"), "{text}");
        assert!(text.contains("spec.decode.supernode.nodez") && text.contains("nodes"), "{text}");
    }
}

fn validate(yaml: &str) -> Output {
    let mut command = deepinfer();
    command.args(["validate", "-f", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the binary runs");
    child.stdin.take().expect("piped").write_all(yaml.as_bytes()).expect("it reads");
    child.wait_with_output().expect("it ends")
}

#[test]
fn a_flag_of_the_engine_that_does_not_exist_is_named_with_its_field() {
    let error = refused(&up(&Spec { args: vec!["--numerics=f16"], ..Spec::shipped() }.yaml(), "127.0.0.1:0"));
    assert!(error.contains("spec.engine.extraArgs") && error.contains("f16"), "{error}");
    let args = vec!["--kv-tokens=256", "--context-limit=1024"];
    let error = refused(&up(&Spec { args, ..Spec::shipped() }.yaml(), "127.0.0.1:0"));
    assert!(error.contains("spec.engine.extraArgs") && error.contains("--kv-tokens"), "{error}");
}

#[test]
fn a_field_that_is_not_built_is_refused_by_name() {
    let yaml = Spec::shipped().yaml().replace("      nodes: 1\n", "      nodes: 1\n      spareNodes: 1\n");
    let error = refused(&up(&yaml, "127.0.0.1:0"));
    assert!(error.contains("spec.decode.supernode.spareNodes") && error.contains("NotSupported"), "{error}");
    let output = validate(&yaml);
    assert!(output.status.success(), "the file itself is valid");
    assert!(String::from_utf8_lossy(&output.stdout).contains("note: spec.decode.supernode.spareNodes"));
}

#[test]
fn a_plan_shows_what_would_run_and_where_each_value_comes_from() {
    let folder = tempfile::tempdir().expect("a folder");
    let plan = |extra: &[&str]| {
        let file = "examples/clusters/quickstart.yaml";
        let output =
            deepinfer().args(["plan", "-f", file, "--state-dir"]).arg(folder.path()).args(extra).output();
        let output = output.expect("the binary runs");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let text = plan(&[]);
    assert!(text.contains("+ Supernode/quickstart-decode-") && text.contains("--ranks=2"), "{text}");
    assert!(
        text.contains("+ Pod/quickstart-prefill-") && text.contains("+ Pod/quickstart-gateway-"),
        "{text}"
    );
    assert_eq!(text, plan(&[]), "the same file gives the same plan");
    let text = plan(&["--explain", "--ranks", "3"]);
    assert!(text.contains("ranks of a supernode = 3  (from --ranks)"), "{text}");
    assert!(text.contains("spec.prefill.chunkBudgetMs = 200  (default: "), "{text}");
    for document in plan(&["-o", "yaml"]).split("---\n").skip(1) {
        let object: Value = serde_yaml::from_str(document).expect("YAML");
        assert!(object["kind"].is_string() && object["metadata"]["name"].is_string(), "{document}");
    }
}

#[test]
fn a_large_fleet_is_scaled_down_to_the_machine_and_said_so() {
    let yaml = Spec { ranks: 64, prefill: 12, ..Spec::shipped() }.yaml();
    let output = validate(&yaml);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("ranks of a supernode = 8  (scaled down from 64"), "{text}");
    assert!(text.contains("spec.prefill.replicas = 4  (scaled down from 12"), "{text}");
}

#[test]
fn a_planning_story_prints_what_its_golden_file_says() {
    let output =
        deepinfer().args(["script", "e2e/scripts/first_apply.txt"]).output().expect("the binary runs");
    assert!(output.status.success(), "{output:?}");
    let expected = fs::read_to_string(root().join("e2e/expected/first_apply.txt")).expect("a golden file");
    assert_eq!(String::from_utf8_lossy(&output.stdout), expected);
}
