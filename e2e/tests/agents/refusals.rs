//! What cannot start says why: by its exit code, its log, its status.

use std::fs;
use std::os::unix::fs::symlink;

use deepinfer_protocol::agent_status::AgentPhase;

use crate::cluster::{Cluster, Spec};
use crate::pods::{Pod, address, model, until};

fn without(flags: &[String], flag: &str) -> Vec<String> {
    flags.iter().filter(|given| !given.starts_with(flag)).cloned().collect()
}

#[test]
fn wrong_flags_and_keys_end_the_process_with_a_code_and_a_reason() {
    let cluster = Cluster::empty(Spec::of(0, &[], 0));
    let flags = cluster.agent_flags("p-0", "prefill");
    let gateway = [cluster.common("g-0"), vec!["--model-name=tiny".to_owned()]].concat();
    fs::create_dir(cluster.path("none")).unwrap();
    fs::create_dir(cluster.path("bad")).unwrap();
    fs::write(cluster.path("bad/7"), "5ecret5ecret").unwrap();
    let keys = |name: &str| vec![format!("--key-dir={}", cluster.path(name).display())];
    let (missing, none, bad) = (keys("missing"), keys("none"), keys("bad"));
    let cases: [(&str, Vec<String>, i32, &[&str]); 5] = [
        ("--nonsense", vec!["--nonsense".to_owned()], 2, &["--nonsense"]),
        ("--fleet-path", vec![], 2, &["--fleet-path is missing"]),
        ("--key-dir", missing, 1, &["/missing", "mount the Secret"]),
        ("--key-dir", none, 1, &["/none", "holds no key"]),
        ("--key-dir", bad, 1, &["/bad/7", "64 hex digits"]),
    ];
    for (program, base) in [("deepinfer-agent", flags), ("deepinfer-gateway", gateway)] {
        for (flag, instead, code, words) in &cases {
            let flags = [without(&base, flag), instead.clone()].concat();
            let mut pod = Pod::start(program, program, address(), flags);
            assert_eq!(pod.end().code(), Some(*code), "{program} {flag}: {}", pod.log());
            until("the log is read", || words.iter().all(|word| pod.log().contains(word)).then_some(()));
            assert!(!pod.log().contains("5ecret5ecret"), "a key is never shown");
        }
    }
}

/// What a restart does not heal keeps the process: it says why, and serves once the model is there.
#[test]
fn a_model_that_is_missing_or_another_is_told_in_the_status_and_heals_by_itself() {
    let mut cluster = Cluster::empty(Spec::of(0, &[], 0));
    let place = cluster.path("model");
    let mut flags = without(&cluster.agent_flags("p-0", "prefill"), "--checkpoint");
    flags.push(format!("--checkpoint={}", place.display()));
    cluster.agent("p-0", flags);
    let wrong = format!("--model-digest=sha256:{}", "ab".repeat(32));
    let flags = [cluster.agent_flags("p-1", "prefill"), vec![wrong]].concat();
    cluster.agent("p-1", flags);
    let flags = [cluster.agent_flags("p-2", "prefill"), vec!["--nodes-per-worker=2".to_owned()]].concat();
    cluster.agent("p-2", flags);
    let cases = [
        ("p-0", "SourceUnreachable", "/model"),
        ("p-1", "ChecksumMismatch", "abababab"),
        ("p-2", "NotSupported", "nodesPerWorker"),
    ];
    for (agent, code, word) in cases {
        let port = cluster.find(agent).port(9810);
        until("it answers", || cluster.get(port, "/healthz").ok());
        let status = until(&format!("{agent} has failed"), || {
            Some(cluster.status(agent)).filter(|status| status.phase == AgentPhase::Failed)
        });
        assert_eq!(status.reason_code, code, "{}", status.reason);
        assert!(status.reason.contains(word) && !status.accepting, "{}", status.reason);
        assert_eq!(cluster.get(port, "/healthz").unwrap().status, 200, "a restart would not help");
        let ready = cluster.get(port, "/readyz").unwrap();
        assert!(ready.status == 503 && ready.body.contains(word), "{}", ready.body);
    }
    // The digest that the message names is the right one.
    let reason = cluster.status("p-1").reason;
    let digest = reason.split("has the digest ").nth(1).and_then(|rest| rest.split(',').next()).unwrap();
    let flags = [cluster.agent_flags("p-3", "prefill"), vec![format!("--model-digest={digest}")]].concat();
    cluster.agent("p-3", flags);
    symlink(model(), &place).unwrap();
    for agent in ["p-0", "p-3"] {
        cluster.wait_serving(agent);
        let status = cluster.status(agent);
        assert_eq!((status.model_digest.as_str(), status.reason_code.as_str()), (digest, ""));
    }
}
