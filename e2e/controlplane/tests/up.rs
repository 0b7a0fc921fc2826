//! `controlplane up` says what to type, and cleans up when it is asked to end.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use deepinfer_controlplane::children::{Signal, send};
use deepinfer_controlplane::{binaries, skipped};

/// A program that is ended with the test, whatever becomes of it.
struct Program(Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn up_prints_a_kubeconfig_that_works_and_a_signal_ends_everything() {
    if skipped() {
        return;
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_controlplane"));
    command.args(["up", "--nodes=2", "--domains=2", "--without-operator", "--unlisted"]);
    let mut up = Program(command.stdout(Stdio::piped()).spawn().unwrap());
    // Held to the end: it goes on printing.
    let mut lines = BufReader::new(up.0.stdout.take().unwrap()).lines().map_while(Result::ok);
    let kubeconfig = lines
        .find_map(|line| line.trim().strip_prefix("export KUBECONFIG=").map(PathBuf::from))
        .expect("a line with the kubeconfig");

    let mut kubectl = Command::new(binaries::kubectl_folder().unwrap().join("kubectl"));
    kubectl.args(["get", "nodes", "-L", "nvidia.com/gpu.clique"]).env("KUBECONFIG", &kubeconfig);
    let answer = kubectl.output().unwrap();
    let nodes = String::from_utf8_lossy(&answer.stdout).into_owned();
    assert!(nodes.contains("node-domain-0") && nodes.contains("node-domain-1"), "{nodes}");

    send(up.0.id(), Signal::Term).unwrap();
    let deadline = Instant::now() + Duration::from_secs(30);
    let status = loop {
        if let Some(status) = up.0.try_wait().unwrap() {
            break status;
        }
        assert!(Instant::now() < deadline, "it does not end");
        std::thread::sleep(Duration::from_millis(20));
    };
    assert!(status.success(), "{status}");
    assert_eq!(lines.last().as_deref(), Some("Ctrl-C here ends everything."));
    assert!(!kubeconfig.exists(), "its folder is still there");
}
