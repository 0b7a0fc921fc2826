//! Verbs that read.

use deepinfer_controlplane::ControlPlane;
use serde_json::{Value, json};

use super::kit::{kubectl_plugin, make, plugin, server};
use super::objects;

async fn namespace(plane: &ControlPlane) -> String {
    let namespace = plane.namespace("plugin").await.expect("a namespace");
    objects::all(plane, &namespace).await;
    namespace
}

#[tokio::test]
async fn status_and_why_tell_what_is_missing_and_what_would_help() {
    let Some(plane) = server().await else { return };
    let ns = namespace(plane).await;
    let said = plugin(plane, &["status", "-n", &ns]).await;
    assert_eq!(said.code, Some(1), "it does not serve: {said:?}");
    for wanted in [
        "v41    Creating   False",
        "v41-decode-x4k2b   Placing",
        "NotEnoughFree: rack-b has 5 of 8 nodes free",
    ] {
        assert!(said.out.contains(wanted), "{}", said.out);
    }
    let said = plugin(plane, &["status", "v41", "-n", &ns, "-o", "json"]).await;
    let view: Value = serde_json::from_str(&said.out).expect("JSON");
    assert_eq!(view["supernodes"].as_array().map(Vec::len), Some(2));

    let said = plugin(plane, &["why", "v41-decode-x4k2b", "-n", &ns]).await;
    assert_eq!(said.code, Some(1));
    for wanted in [
        "waits for 8 nodes in one domain",
        "rack-b   9       5      4 Cordoned",
        "kubectl uncordon NODE",
        "node node-17 is avoided",
    ] {
        assert!(said.out.contains(wanted), "{wanted}: {}", said.out);
    }
    let said = plugin(plane, &["why", "-n", &ns, "-o", "json"]).await;
    let all: Value = serde_json::from_str(&said.out).expect("JSON");
    assert_eq!(all[0]["object"], "DeepInferCluster/v41");
    let said = plugin(plane, &["why", "nothing", "-n", &ns]).await;
    assert!(
        said.code == Some(1) && said.err.contains("no Supernode or DeepInferCluster nothing"),
        "{said:?}"
    );
}

#[tokio::test]
async fn kubectl_finds_the_plugin_and_passes_its_flags_on() {
    let Some(plane) = server().await else { return };
    let ns = namespace(plane).await;
    let said = kubectl_plugin(plane, &["experts", "show", "-n", &ns]).await;
    assert_eq!(said.code, Some(0), "{said:?}");
    assert!(said.out.contains("0123456789ab   Staging") && said.out.contains("7/12  0.08"), "{}", said.out);
    let said = kubectl_plugin(plane, &["experts", "show", "other", "-n", &ns]).await;
    assert!(said.code == Some(1) && said.err.contains("there is v41-decode-bcdfg"), "{said:?}");
    let said = kubectl_plugin(plane, &["fly"]).await;
    assert_eq!(said.code, Some(2), "{said:?}");
}

#[tokio::test]
async fn an_empty_namespace_and_a_wrong_server_are_told_apart() {
    let Some(plane) = server().await else { return };
    let ns = plane.namespace("plugin-empty").await.expect("a namespace");
    let said = plugin(plane, &["status", "-n", &ns]).await;
    assert!(
        said.code == Some(1) && said.err.contains(&format!("no DeepInferCluster in namespace {ns}")),
        "{said:?}"
    );
    let said = plugin(plane, &["experts", "show", "-n", &ns]).await;
    assert!(said.code == Some(0) && said.out.contains("uniform layout"), "{said:?}");
    let said = plugin(plane, &["status", "--context", "missing"]).await;
    assert!(said.code == Some(1) && said.err.contains("missing"), "{said:?}");
    let said = plugin(plane, &["status", "-n", &ns, "--as", "nobody"]).await;
    assert!(said.err.contains("forbidden") && said.err.contains("ask for this right"), "{said:?}");
    let said = plugin(plane, &["status", "--as-group", "g"]).await;
    assert!(said.err.contains("--as-group needs --as"), "{said:?}");
}

#[tokio::test]
async fn topology_counts_nodes_by_the_labels_of_the_profile() {
    let Some(plane) = server().await else { return };
    let node = |name: &str, clique: &str| {
        json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": name, "labels": {"nvidia.com/gpu.clique": clique}},
            "status": {
                "allocatable": {"nvidia.com/gpu": "4", "pods": "10"}, "capacity": {"nvidia.com/gpu": "4", "pods": "10"},
                "conditions": [{"type": "Ready", "status": "True", "lastHeartbeatTime": null}],
            },
        })
    };
    for (name, clique) in [("plugin-n1", "plugin-rack"), ("plugin-n2", "plugin-rack")] {
        make(plane, "", node(name, clique)).await;
    }
    let said = plugin(plane, &["topology", "--profile", "nvl72", "-o", "json"]).await;
    let map: Value = serde_json::from_str(&said.out).unwrap_or_else(|e| panic!("{e}: {said:?}"));
    let domains = map["domains"].as_array().expect("domains");
    let ours = domains.iter().find(|d| d["name"] == "plugin-rack").expect("our domain");
    assert_eq!((&ours["nodes"], &ours["accelerators"]), (&json!(2), &json!(8)));
    let said = plugin(plane, &["topology", "--profile", "none"]).await;
    assert!(said.out.contains("all nodes are one domain"), "{said:?}");
    let said = plugin(plane, &["topology", "--profile", "ring"]).await;
    assert!(said.code == Some(1) && said.err.contains("nvl72"), "{said:?}");
    for name in ["plugin-n1", "plugin-n2"] {
        plane.kubectl_ok(&["delete", "node", name]).await.expect("the node goes");
    }
}

#[tokio::test]
async fn a_bundle_holds_what_explains_and_no_secret() {
    let Some(plane) = server().await else { return };
    let ns = namespace(plane).await;
    let folder = tempfile::tempdir().expect("a folder");
    let archive = folder.path().join("b.tar");
    let path = archive.display().to_string();
    let said = plugin(plane, &["support-bundle", "-n", &ns, "-o", &path]).await;
    assert_eq!(said.code, Some(0), "{said:?}");
    let said = plugin(plane, &["support-bundle", "-n", &ns, "-o", &path]).await;
    assert!(said.code == Some(1) && said.err.contains("never written over"), "{said:?}");
    let said = plugin(plane, &["support-bundle", "-n", &ns, "-o", "x.tar.gz"]).await;
    assert!(said.code == Some(1) && said.err.contains("| gzip"), "{said:?}");
    let mut tar = tokio::process::Command::new("tar");
    tar.arg("-xf").arg(&archive).arg("-C").arg(folder.path());
    assert!(tar.status().await.expect("tar is installed").success());
    let read = |name: &str| std::fs::read_to_string(folder.path().join("deepinfer-v41").join(name));
    for name in [
        "README.txt",
        "cluster.yaml",
        "supernodes/v41-decode-x4k2b.yaml",
        "pods/v41-prefill-a81f03-1.yaml",
        "expertplacements/v41-decode-bcdfg.yaml",
        "events.txt",
        "nodes.yaml",
        "why.txt",
        "not-read.txt",
    ] {
        assert!(read(name).is_ok(), "{name} is missing");
    }
    assert!(read("pods/v41-prefill-a81f03-1.yaml").expect("the pod").contains("--token=REDACTED"));
    let bytes = std::fs::read(&archive).expect("the archive");
    assert!(!String::from_utf8_lossy(&bytes).contains("hunter2"), "a value that should have been taken out");
    assert!(read("why.txt").expect("why").contains("kubectl uncordon NODE"));
}

#[tokio::test]
async fn installed_definitions_are_compared_with_this_release() {
    let Some(plane) = server().await else { return };
    let said = plugin(plane, &["crds", "check"]).await;
    assert!(said.code == Some(0) && said.out.contains("as this release"), "{said:?}");
    let said = plugin(plane, &["crds", "print"]).await;
    let applied = plane
        .kubectl_with(
            &["apply", "--server-side", "--dry-run=server", "--force-conflicts", "-f", "-"],
            &said.out,
        )
        .await;
    let applied = applied.expect("kubectl");
    assert!(applied.status.success(), "{}", String::from_utf8_lossy(&applied.stderr));
    assert_eq!(
        String::from_utf8_lossy(&applied.stdout).lines().count(),
        8,
        "four kinds, two policies, two bindings"
    );
}

#[tokio::test]
async fn validate_needs_no_server() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("c.yaml");
    let text = "apiVersion: deepinfer.io/v1alpha1\nkind: DeepInferCluster\nmetadata:\n  name: a\nspec: {}\n";
    std::fs::write(&path, text).expect("written");
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_kubectl-deepinfer"));
    command.args(["validate", "-f"]).arg(&path).env("KUBECONFIG", "/does/not/exist").env_remove("HOME");
    let output = command.output().await.expect("the plugin starts");
    let out = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.code() == Some(1) && out.contains("spec.engine: is required"), "{out}");
}
