//! Nothing of a control plane outlives the process that started it, and a given cluster is left as it was.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use deepinfer_controlplane::{ControlPlane, Options, shared, skipped};

/// What the holder prints before the folder of its control plane.
const FOLDER: &str = "folder of the control plane: ";

/// Not a test: the process that [`a_killed_process_leaves_no_program_and_no_file`] kills.
#[tokio::test]
#[ignore = "runs until it is killed; another test starts it"]
async fn hold_a_control_plane() {
    let plane = ControlPlane::start(Options::default()).await.unwrap();
    println!("\n{FOLDER}{}", plane.folder().display());
    std::future::pending::<()>().await;
}

#[test]
fn a_killed_process_leaves_no_program_and_no_file() {
    if skipped() {
        return;
    }
    let mut holder = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "hold_a_control_plane", "--nocapture"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(holder.stdout.take().unwrap()).lines();
    let found = lines.map_while(Result::ok).find_map(|l| l.strip_prefix(FOLDER).map(PathBuf::from));
    let folder = found.expect("the holder starts its control plane");
    let programs = pids(&folder);
    assert_eq!(programs.len(), 4, "{programs:?}");

    holder.kill().unwrap();
    holder.wait().unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while folder.exists() || programs.iter().any(|pid| runs(*pid)) {
        assert!(Instant::now() < deadline, "{} or one of {programs:?} is still there", folder.display());
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The processes of a control plane, by the files that it keeps for whoever cleans up.
fn pids(folder: &Path) -> Vec<u32> {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|e| e == "pid"));
    files.map(|path| std::fs::read_to_string(path).unwrap().parse().unwrap()).collect()
}

/// Whether a process runs; a dead one that nobody has asked for yet does not.
fn runs(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

#[tokio::test]
async fn a_given_cluster_serves_the_tests_and_keeps_its_programs() {
    let Some(plane) = shared().await else { return };
    let kubeconfig = plane.kubeconfig().unwrap();
    let given = ControlPlane::given(&kubeconfig).await.unwrap();
    let namespace = given.namespace("given").await.unwrap();
    let account = ["-n", &namespace, "get", "serviceaccount", "default", "-o", "name"];
    assert_eq!(given.kubectl_ok(&account).await.unwrap().trim(), "serviceaccount/default");
    let refused = given.kill_api_server().unwrap_err();
    assert!(refused.to_string().contains("not ours"), "{refused}");
    given.stop();
    plane.kubectl_ok(&["get", "namespaces"]).await.unwrap();
}

#[tokio::test]
async fn a_missing_kubeconfig_is_named() {
    let error = ControlPlane::given(Path::new("/nowhere/kubeconfig")).await.unwrap_err();
    assert!(format!("{error:#}").contains("/nowhere/kubeconfig"), "{error:#}");
}
