//! What users and GitOps tools do: apply, apply again, compare, misspell.

use std::path::Path;

use deepinfer_crds::crd::Kind;
use serde_json::{Value, json};

use crate::cases::{cluster, with};
use crate::kit::{refusal, server};

/// The DeepInferClusters of all examples, as text without a namespace.
fn examples() -> Vec<(String, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../examples/clusters");
    let entries = std::fs::read_dir(folder).expect("the examples");
    let mut found = Vec::new();
    for path in
        entries.map(|e| e.expect("an entry").path()).filter(|p| p.extension().is_some_and(|e| e == "yaml"))
    {
        let text = std::fs::read_to_string(&path).expect("an example");
        let documents = text.split("\n---\n").filter(|d| d.contains("kind: DeepInferCluster"));
        for document in documents {
            let lines = document.lines().filter(|line| !line.starts_with("  namespace:"));
            found.push((path.display().to_string(), lines.map(|line| format!("{line}\n")).collect()));
        }
    }
    assert!(found.len() >= 4);
    found
}

/// OP-101: nothing that users did not write appears in what they wrote, so a second apply has nothing to do and a
/// comparison shows nothing.
#[tokio::test]
async fn a_second_apply_of_an_example_changes_nothing_and_diff_is_empty() {
    let Some(server) = server().await else { return };
    for (name, text) in examples() {
        for server_side in [true, false] {
            let ns = server.namespace("examples").await;
            let how = format!("--server-side={server_side}");
            let apply = ["apply", &how, "-n", &ns, "-f", "-"];
            let first = server.kubectl_any(&apply, &text).await;
            assert!(first.good, "{name}: {}", first.err);
            let version = async || {
                server
                    .kubectl(&[
                        "get",
                        "dic",
                        "-n",
                        &ns,
                        "-o",
                        "jsonpath={.items[*].metadata.resourceVersion}",
                    ])
                    .await
            };
            let before = version().await;
            let second = server.kubectl_any(&apply, &text).await;
            assert!(second.good && second.err.is_empty(), "{name}: {}", second.err);
            assert_eq!(version().await, before, "{name} {how}");
            let diff = server.kubectl_any(&["diff", &how, "-n", &ns, "-f", "-"], &text).await;
            assert!(diff.good && diff.out.is_empty(), "{name} {how}: {}{}", diff.out, diff.err);
        }
    }
}

/// The spec comes back as it was written: no default is added.
#[tokio::test]
async fn the_server_stores_a_spec_as_it_was_written() {
    let Some(server) = server().await else { return };
    let ns = server.namespace("stored").await;
    for (name, text) in examples() {
        let written: Value = serde_yaml::from_str(&text).expect("YAML");
        let out = server.kubectl_any(&["create", "-n", &ns, "-o", "json", "-f", "-"], &text).await;
        assert!(out.good, "{name}: {}", out.err);
        let stored: Value = serde_json::from_str(&out.out).expect("JSON");
        assert_eq!(stored["spec"], written["spec"], "{name}");
        server.kubectl(&["delete", "dic", "-n", &ns, "--all"]).await;
    }
}

#[tokio::test]
async fn a_misspelt_field_is_refused_by_kubectl_and_dropped_with_a_warning_otherwise() {
    let Some(server) = server().await else { return };
    let ns = server.namespace("unknown").await;
    let misspelt = with(cluster(), &json!({"/spec/decode/replcas": 2})).to_string();
    let strict = server.kubectl_any(&["apply", "-n", &ns, "-f", "-"], &misspelt).await;
    assert!(!strict.good && strict.err.contains("unknown field \"spec.decode.replcas\""), "{}", strict.err);
    let warned = server.kubectl_any(&["apply", "-n", &ns, "--validate=warn", "-f", "-"], &misspelt).await;
    assert!(warned.good && warned.err.contains("unknown field \"spec.decode.replcas\""), "{}", warned.err);
    let stored = server.api(Kind::Cluster, &ns).await.get("v41-flash").await.expect("stored");
    assert_eq!(stored.data["spec"]["decode"].get("replcas"), None, "unknown fields are not kept");
}

/// OP-013: no webhook stands in the way of validation, and none is needed for it.
#[tokio::test]
async fn without_an_operator_clusters_are_validated_created_edited_and_deleted() {
    let Some(server) = server().await else { return };
    let webhooks = server
        .kubectl(&["get", "validatingwebhookconfigurations,mutatingwebhookconfigurations", "-o", "name"])
        .await;
    assert_eq!(webhooks, "");
    let ns = server.namespace("alone").await;
    let good = cluster().to_string();
    let bad = with(cluster(), &json!({"/spec/prefill/replicas": null})).to_string();
    let refused = server.kubectl_any(&["create", "-n", &ns, "-f", "-"], &bad).await;
    assert!(!refused.good, "{}", refused.out);
    let wanted = "spec.prefill: Invalid value: needs exactly one of replicas and scaling";
    let plain = refused.err.replace("\"object\": ", "");
    assert!(plain.contains(wanted), "{}", refused.err);
    assert!(server.kubectl_any(&["create", "-n", &ns, "-f", "-"], &good).await.good);
    let edit = r#"{"spec": {"accelerator": {"vendor": "cpu"}}}"#;
    let refused =
        server.kubectl_any(&["patch", "dic", "v41-flash", "-n", &ns, "--type=merge", "-p", edit], "").await;
    assert!(!refused.good && refused.err.contains("create another DeepInferCluster"), "{}", refused.err);
    server
        .kubectl(&[
            "patch",
            "dic",
            "v41-flash",
            "-n",
            &ns,
            "--type=merge",
            "-p",
            r#"{"spec": {"prefill": {"replicas": 2}}}"#,
        ])
        .await;
    server.kubectl(&["delete", "dic", "v41-flash", "-n", &ns]).await;
    let gone = refusal(server.api(Kind::Cluster, &ns).await.get("v41-flash").await);
    assert_eq!(gone.map(|r| r.code), Some(404));
}
